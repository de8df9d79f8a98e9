// Products with int4 weights in plain C++: a group is unpacked, then multiplied row by row.

#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int4.inc.h"

// The weights of a group as numbers -8 .. 7.
template <class Number>
void unpack_group(const Group& g, Number (&weights)[MAX_GROUP][PANEL]) {
    for (int k = 0; k < g.size; ++k) {
        const std::uint8_t* bytes = g.values + k / QUAD * QUAD_BYTES + k % QUAD;
        for (int c = 0; c < PANEL / 2; ++c) {
            weights[k][c] = static_cast<Number>((bytes[QUAD * c] & 15) - 8);
            weights[k][c + PANEL / 2] = static_cast<Number>((bytes[QUAD * c] >> 4) - 8);
        }
    }
}

// Activations in int8, a tile [padded_k / 4][rows][4].
struct Int8Rows {
    static constexpr int ELEMENT = 1, STREAMS = 1;
    static constexpr int SHORT_SUM = 16;  // products whose sum fits in 16 bits: 16 * 8 * 127 < 2^15

    // The weights are signed here, so the sums of the operands are not needed; the integers are the same.
    static void add_group(const Group& g, int rows) {
        std::int16_t weights[MAX_GROUP][PANEL];
        unpack_group(g, weights);
        for (int row = 0; row < rows; ++row) {
            const auto* x = static_cast<const std::int8_t*>(g.operands) + row * QUAD;
            std::int32_t sums[PANEL] = {};
            for (int first = 0; first < g.size; first += SHORT_SUM) {
                std::int16_t part[PANEL] = {};
                for (int k = first; k < first + SHORT_SUM; ++k) {
                    const std::int16_t factor = x[k / QUAD * rows * QUAD + k % QUAD];
                    for (int c = 0; c < PANEL; ++c)
                        part[c] = static_cast<std::int16_t>(part[c] + weights[k][c] * factor);
                }
                for (int c = 0; c < PANEL; ++c) sums[c] += part[c];
            }
            for (int c = 0; c < PANEL; ++c)
                g.totals[row * PANEL + c] += static_cast<float>(sums[c]) * to_float(g.scales[c]);
        }
    }
};

// Activations in bfloat16, a tile [padded_k][rows] of float32.
struct Bf16Rows {
    static constexpr int ELEMENT = 4, STREAMS = 1;

    static void add_group(const Group& g, int rows) {
        float weights[MAX_GROUP][PANEL];
        unpack_group(g, weights);
        for (int row = 0; row < rows; ++row) {
            const auto* x = static_cast<const float*>(g.operands) + row;
            float sums[PANEL] = {};
            for (int k = 0; k < g.size; ++k)
                for (int c = 0; c < PANEL; ++c) sums[c] += weights[k][c] * x[k * rows];
            for (int c = 0; c < PANEL; ++c) g.totals[row * PANEL + c] += sums[c] * to_float(g.scales[c]);
        }
    }
};

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4>() { return group_kernel<Int8Rows>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4_A16>() { return group_kernel<Bf16Rows>(); }

}  // namespace penstock
