// int8 products with the dot product of AVX-512 VNNI: 4 unsigned times 4 signed bytes, added to int32.
//
// A micro-kernel keeps the sums of all its rows and panels in registers over a whole leaf, so every weight and every
// four operands are loaded once per step. The sums start at -128 times the sum of the operands, because weights are
// stored + 128.

#include "avx512.inc.h"
#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int8.inc.h"

constexpr int TILE_ROWS = 12;  // times 2 registers of columns: 24 of the 32 registers
constexpr int VECTORS = PANEL / LANES;
constexpr int LINE = 64;
constexpr int AHEAD_BYTES = 4096;  // prefetch distance of a single panel

inline Ints load_weights(const std::uint8_t* from) { return same_bits<Ints>(_mm512_load_si512(from)); }

inline Ints broadcast(const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    return Ints{} + bits;
}

// Add 4 unsigned weights times 4 signed operands to each sum. In assembly, because GCC 12 copies and spills the sums of
// the intrinsic.
inline void add_products(Ints& sums, const Ints& weights, const Ints& operands) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(operands));
}

template <int ROWS, int PANELS>
void multiply_leaf(const LeafArgs& leaf) {
    constexpr int COLUMNS = PANELS * VECTORS;
    Ints sums[ROWS][COLUMNS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) sums[row][c] = Ints{} - ZERO_POINT * leaf.sums[row];
    const std::uint8_t *weights = leaf.weights, *prefetch = leaf.prefetch;
    const bool two_lines = leaf.prefetch_step > LINE;
    const std::int8_t* operands = leaf.operands;
    for (std::int64_t step = 0; step < leaf.steps; ++step) {
        Ints columns[COLUMNS];
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; ++panel) {
            prefetch_to_l2(prefetch + panel * leaf.panel_stride);
            if (two_lines) prefetch_to_l2(prefetch + panel * leaf.panel_stride + LINE);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v)
                columns[panel * VECTORS + v] = load_weights(weights + panel * leaf.panel_stride + v * LINE);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const Ints four = broadcast(operands + row * STEP);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) add_products(sums[row][c], columns[c], four);
        }
        weights += STEP_BYTES;
        prefetch += leaf.prefetch_step;
        operands += ROWS * STEP;
    }
    if constexpr (ROWS % 3 == 0)
        if (leaf.slices == 3) return finish_leaf<3, ROWS>(leaf, sums);
    if constexpr (ROWS % 2 == 0)
        if (leaf.slices == 2) return finish_leaf<2, ROWS>(leaf, sums);
    finish_leaf<1, ROWS>(leaf, sums);
}

void pack(const OperandArgs& args) { quantize_interleaved(args, 0); }

void multiply(const MultiplyArgs& args) {
    using LeafKernel = void (*)(const LeafArgs&);
    const LeafKernel kernel = with_constant<TILE_ROWS>(args.rows * args.weight->slices, [&](auto rows) {
        return with_constant<panels_at_once(rows.value)>(args.panels, [](auto panels) -> LeafKernel {
            return multiply_leaf<decltype(rows)::value, panels.value>;
        });
    });
    multiply_leaves(args, (args.panels > 1 ? STREAM_AHEAD : AHEAD_BYTES) / STEP_BYTES, kernel);
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT8>() {
    return {TILE_ROWS, 1, panels_at_once, pack, multiply, false, true, INTEGER_PASS_BYTES};
}

}  // namespace penstock
