// Products with int4 weights in AVX2: a group is unpacked, then multiplied by two rows at a time.

#include <immintrin.h>

#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int4.inc.h"

constexpr int VECTORS = PANEL / LANES;  // registers per row of a panel

inline Floats load_scales(const std::uint16_t* scales) { return same_bits<Floats>(load_bits(scales)); }

// Half of the packed bytes of a quad. Low nibbles are the columns from 8 half on, high nibbles those from 16 + 8 half.
inline Ints load_packed(const std::uint8_t* values, int quad, int half) {
    Ints bytes;
    __builtin_memcpy(&bytes, values + quad * QUAD_BYTES + half * sizeof bytes, sizeof bytes);
    return bytes;
}

// Activations in int8, a tile [padded_k / 4][rows][4].
struct Int8Rows {
    static constexpr int AT_ONCE = 2;
    static constexpr int ELEMENT = 1;
    static constexpr int QUADS_AT_ONCE = 8;  // sums of two products fit in 16 bits: 8 * 2 * 15 * 127 < 2^15

    using Unpacked = Ints[MAX_GROUP / QUAD][VECTORS];  // weight + 8 in every byte

    static inline void unpack(const Group& g, int, Unpacked& weights) {
        for (int quad = 0; quad < g.size / QUAD; ++quad)
            for (int half = 0; half < 2; ++half) {
                const Ints bytes = load_packed(g.values, quad, half);
                weights[quad][half] = bytes & 0x0f0f0f0f;
                weights[quad][2 + half] = bytes >> 4 & 0x0f0f0f0f;
            }
    }

    template <int R>
    static inline void add_rows(const Group& g, const Unpacked& weights, int first_row, int rows) {
        const auto* quads = static_cast<const std::int32_t*>(g.operands) + first_row;
        __m256i sums[R][VECTORS];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_set1_epi32(-8 * g.sums[first_row + r]);
        for (int quad = 0; quad < g.size / QUAD; quad += QUADS_AT_ONCE) {
            __m256i shorts[R][VECTORS];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v) shorts[r][v] = _mm256_setzero_si256();
            for (int q = quad; q < quad + QUADS_AT_ONCE; ++q)
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                    const __m256i x = _mm256_set1_epi32(quads[q * rows + r]);
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; ++v)
                        shorts[r][v] = _mm256_add_epi16(shorts[r][v], _mm256_maddubs_epi16((__m256i)weights[q][v], x));
                }
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] =
                        _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(shorts[r][v], _mm256_set1_epi16(1)));
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                auto* total = reinterpret_cast<Floats*>(g.totals + (first_row + r) * PANEL) + v;
                *total = *total + __builtin_convertvector((Ints)sums[r][v], Floats) * load_scales(g.scales + v * LANES);
            }
    }
};

// Activations in bfloat16, a tile [padded_k][rows]; both operands are converted to float32.
struct Bf16Rows {
    static constexpr int AT_ONCE = 2;
    static constexpr int ELEMENT = 2;

    struct Unpacked {
        Floats weights[MAX_GROUP][VECTORS];
        float x[MAX_GROUP * TILE_ROWS];
    };

    static inline void unpack(const Group& g, int rows, Unpacked& to) {
        for (int quad = 0; quad < g.size / QUAD; ++quad)
            for (int half = 0; half < 2; ++half) {
                const Ints nibbles = load_packed(g.values, quad, half) ^ (Ints{} + static_cast<int>(0x88888888));
#pragma GCC unroll 4
                for (int i = 0; i < QUAD; ++i) {  // the highest bit of the nibble is now its sign
                    Floats* weights = to.weights[quad * QUAD + i];
                    weights[half] = __builtin_convertvector(nibbles << (28 - 8 * i) >> 28, Floats);
                    weights[2 + half] = __builtin_convertvector(nibbles << (24 - 8 * i) >> 28, Floats);
                }
            }
        const auto* halves = static_cast<const std::uint16_t*>(g.operands);
        for (int i = 0; i < g.size * rows; ++i) to.x[i] = to_float(halves[i]);
    }

    template <int R>
    static inline void add_rows(const Group& g, const Unpacked& from, int first_row, int rows) {
        __m256 sums[R][VECTORS];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_setzero_ps();
        for (int k = 0; k < g.size; ++k)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                const __m256 x = _mm256_set1_ps(from.x[k * rows + first_row + r]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] = _mm256_fmadd_ps((__m256)from.weights[k][v], x, sums[r][v]);
            }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                auto* total = reinterpret_cast<Floats*>(g.totals + (first_row + r) * PANEL) + v;
                *total = *total + (Floats)sums[r][v] * load_scales(g.scales + v * LANES);
            }
    }
};

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4>() { return unpacking_kernel<Int8Rows>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4_A16>() { return unpacking_kernel<Bf16Rows>(); }

}  // namespace penstock
