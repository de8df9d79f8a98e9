// int8 products with the dot product instruction of AVX-512 VNNI: 4 unsigned times 4 signed bytes, added to int32.
//
// A micro-kernel keeps all sums of its rows and panels in registers over a whole leaf. The operands come straight from
// memory as a broadcast operand, row beside row ([K / 4][operand rows][4]), and each weight is loaded once for all rows.

#include <immintrin.h>

#include <cstring>

#include "products.h"

namespace penstock {
namespace {

#include "quantize_rows.inc.h"

constexpr int TILE_ROWS = 12;  // times 2 vectors of columns: 24 of the 32 registers
constexpr int VECTORS = PANEL / LANES;
constexpr int LINE = 64;
constexpr int STEP_BYTES = PANEL * 4;  // weights of a panel for 4 of K
constexpr int WEIGHT_OFFSET = 128;     // weights are stored unsigned
constexpr int PREFETCH_AHEAD = 16 * STEP_BYTES;

constexpr float SECOND_SLICE = 1.0f / 254.0f;
constexpr float THIRD_SLICE = 1.0f / 64516.0f;

int max_panels(int operand_rows) { return operand_rows <= 2 ? 4 : operand_rows <= 6 ? 2 : 1; }

void pack(const OperandArgs& args) { quantize_interleaved(args, 0); }

// One leaf of one tile, for neighbouring panels.
struct LeafArgs {
    const std::uint8_t* weights;    // the leaf within the first panel
    std::int64_t panel_stride;      // bytes from one panel to the next
    std::int64_t steps;             // of 4 in K
    const std::uint8_t* prefetch;   // what to fetch into the caches meanwhile, from here on
    std::int64_t prefetch_step;     // and how far that goes on with each step
    const std::int8_t* operands;    // [steps][operand rows][4]
    const std::int32_t* sums;       // [operand rows]
    const float* scales;            // [operand rows / slices]
    int slices;
    unsigned pending;               // bit b: entry b of the tree is to be added
    const float* tree;              // [TREE_LEVELS][MAX_TILE_ROWS * PANEL * panels]
    float* to;                      // [rows][panels * PANEL], an entry of the tree or the result
};

inline Ints load_weights(const std::uint8_t* from) { return same_bits<Ints>(_mm512_load_si512(from)); }

inline Ints broadcast(const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    return Ints{} + bits;
}

// Adds 4 weights (unsigned) times 4 operands (signed) to each sum. As an intrinsic GCC 12 copies and spills the sums.
inline void add_products(Ints& sums, const Ints& weights, const Ints& operands) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(operands));
}

// A row's value of a leaf, of the sums of its slices.
template <int SLICES>
inline Floats leaf_value(const Ints& d0, const Ints& d1, const Ints& d2, float scale) {
    Floats value = __builtin_convertvector(d0, Floats);
    if constexpr (SLICES > 1) value += __builtin_convertvector(d1, Floats) * SECOND_SLICE;
    if constexpr (SLICES > 2) value += __builtin_convertvector(d2, Floats) * THIRD_SLICE;
    return value * scale;
}

// Turns sums into values of this leaf and folds them with those that wait in the tree.
template <int SLICES, int ROWS, int COLUMNS>
inline void finish_leaf(const LeafArgs& leaf, const Ints (&sums)[ROWS][COLUMNS]) {
    const float *scales = leaf.scales, *tree = leaf.tree;
    float* to = leaf.to;
    const unsigned pending = leaf.pending;
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row += SLICES, to += COLUMNS * LANES, tree += COLUMNS * LANES) {
        Floats values[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c)
            values[c] = leaf_value<SLICES>(
                sums[row][c], sums[row + (SLICES > 1)][c], sums[row + SLICES - 1][c], scales[row / SLICES]);
#pragma GCC unroll 3
        for (int level = 0; level < TREE_LEVELS; ++level) {
            if ((pending >> level & 1) == 0) continue;
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c)
                values[c] = _mm512_load_ps(tree + (level * MAX_TILE_ROWS * COLUMNS + c) * LANES) + values[c];
        }
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) _mm512_store_ps(to + c * LANES, values[c]);
    }
}

template <int ROWS, int PANELS>
void multiply_leaf(const LeafArgs& leaf) {
    constexpr int COLUMNS = PANELS * VECTORS;
    Ints sums[ROWS][COLUMNS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) sums[row][c] = Ints{} - WEIGHT_OFFSET * leaf.sums[row];
    const std::uint8_t *weights = leaf.weights, *prefetch = leaf.prefetch;
    const bool two_lines = leaf.prefetch_step > LINE;
    const std::int8_t* operands = leaf.operands;
    for (std::int64_t step = 0; step < leaf.steps; ++step) {
        Ints columns[COLUMNS];
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; ++panel) {
            _mm_prefetch(prefetch + panel * leaf.panel_stride, _MM_HINT_T0);
            if (two_lines) _mm_prefetch(prefetch + panel * leaf.panel_stride + LINE, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v)
                columns[panel * VECTORS + v] = load_weights(weights + panel * leaf.panel_stride + v * LINE);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const Ints four = broadcast(operands + row * 4);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) add_products(sums[row][c], columns[c], four);
        }
        weights += STEP_BYTES;
        prefetch += leaf.prefetch_step;
        operands += ROWS * 4;
    }
    if constexpr (ROWS % 3 == 0)
        if (leaf.slices == 3) return finish_leaf<3>(leaf, sums);
    if constexpr (ROWS % 2 == 0)
        if (leaf.slices == 2) return finish_leaf<2>(leaf, sums);
    finish_leaf<1>(leaf, sums);
}

using LeafKernel = void (*)(const LeafArgs&);

// By operand rows less one and panels less one.
constexpr LeafKernel LEAF_KERNELS[TILE_ROWS][MAX_PANELS] = {
    {multiply_leaf<1, 1>, multiply_leaf<1, 2>, multiply_leaf<1, 3>, multiply_leaf<1, 4>},
    {multiply_leaf<2, 1>, multiply_leaf<2, 2>, multiply_leaf<2, 3>, multiply_leaf<2, 4>},
    {multiply_leaf<3, 1>, multiply_leaf<3, 2>},
    {multiply_leaf<4, 1>, multiply_leaf<4, 2>},
    {multiply_leaf<5, 1>, multiply_leaf<5, 2>},
    {multiply_leaf<6, 1>, multiply_leaf<6, 2>},
    {multiply_leaf<7, 1>},
    {multiply_leaf<8, 1>},
    {multiply_leaf<9, 1>},
    {multiply_leaf<10, 1>},
    {multiply_leaf<11, 1>},
    {multiply_leaf<12, 1>},
};

// A single tile fetches its own weights a little ahead. Of several tiles each fetches its share of those that come
// next, for the first one would wait for memory while the others have enough to do.
void multiply(const MultiplyArgs& args) {
    const PenstockWeight& weight = *args.weight;
    const int operand_rows = args.rows * weight.slices;
    const LeafKernel kernel = LEAF_KERNELS[operand_rows - 1][args.panels - 1];
    const std::int64_t panel_bytes = weight.padded_k * PANEL;
    const std::int64_t tree_entry = std::int64_t{MAX_TILE_ROWS} * PANEL * args.panels;
    const std::uint8_t* panel = static_cast<const std::uint8_t*>(weight.values) + args.first_panel * panel_bytes;
    std::int64_t start = 0;
    for (int l = 0; l < weight.leaves; ++l) {
        const std::int64_t end = weight.padded_leaf_ends[l];
        const bool last = l + 1 == weight.leaves;
        const unsigned full_pairs = l & ~(l + 1);  // the trailing ones of a counter: what this leaf completes
        LeafArgs leaf{};
        leaf.weights = panel + start * PANEL;
        leaf.panel_stride = panel_bytes;
        leaf.steps = (end - start) / 4;
        leaf.slices = weight.slices;
        leaf.pending = last ? l : full_pairs;
        const std::uint8_t* next = last ? panel + args.panels * panel_bytes : panel + end * PANEL;
        leaf.prefetch_step = STEP_BYTES / args.tiles;
        for (int t = 0; t < args.tiles; ++t) {
            float* tree = args.tree + t * TREE_LEVELS * tree_entry;
            leaf.prefetch = args.tiles == 1 ? leaf.weights + PREFETCH_AHEAD : next + t * leaf.steps * leaf.prefetch_step;
            leaf.operands = static_cast<const std::int8_t*>(args.tile) + t * args.tile_stride + start * operand_rows;
            leaf.sums = args.sums + t * args.sums_stride + l * operand_rows;
            leaf.scales = args.scales + t * args.scales_stride + l * args.rows;
            leaf.tree = tree;
            leaf.to = last ? args.out + t * args.rows * args.panels * PANEL
                           : tree + __builtin_popcount(full_pairs) * tree_entry;
            kernel(leaf);
        }
        start = end;
    }
}

}  // namespace

ProductKernel avx512_int8() { return {TILE_ROWS, max_panels, pack, multiply}; }

}  // namespace penstock
