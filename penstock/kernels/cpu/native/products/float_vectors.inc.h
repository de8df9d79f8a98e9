// Products of float32 and bfloat16 weights in vectors of float32, for levels without bfloat16 arithmetic.
//
// A tile is [padded_k][rows] float32. For bfloat16 weights it is rounded to bfloat16, and widened once, when it is
// packed. A pair of weights is widened to two float32 values, and each output adds the even element of K first, then
// the odd one: one chain over ascending K.
#include "products/leaves.inc.h"

#if defined(__AVX2__)
#include "avx2.inc.h"
#endif

namespace penstock {
namespace {

#if defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
using Vector = float __attribute__((vector_size(4 * LANES), may_alias));
using Words = std::uint32_t __attribute__((vector_size(4 * LANES), may_alias));

inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX2__)
    return add_float_products(c, a, b);
#else
    return a * b + c;
#endif
}

constexpr int TILE_ROWS = 6;  // 6 rows x 2 vectors of columns: 12 of 16 registers hold sums
constexpr int VECTORS = PANEL / LANES;
constexpr int STEP_BYTES = PANEL * 4;       // of a step through a panel
constexpr int LINE = 64;
constexpr int STREAM_ROWS = 2;              // maximum number of rows for which panels are read as streams
constexpr std::int64_t AHEAD_BYTES = 1024;  // prefetch distance of a single pass
constexpr std::int64_t STREAM_AHEAD = 640;  // prefetch distance of a stream, in each of its panels
constexpr std::int64_t BLOCK_STEPS = 128;   // of a block that is read in several passes, so that it stays in the L1
constexpr std::int64_t LONG_STEPS = 512;    // of a block for MAX_TILES tiles, whose operands are better read at length

// The operand of one activation row: position `at` of padded K goes to tile[at * rows].
template <bool ROUNDS, class From>
void pack_row(const PenstockWeight& weight, const From* x, int rows, float* tile) {
    each_leaf(weight, [=](const LeafRange& leaf) {
        for (std::int64_t i = 0; i < leaf.padded; ++i) {
            float value = 0.0f;
            if (i < leaf.count) value = ROUNDS ? to_float(to_bf16(x[leaf.first + i])) : to_float(x[leaf.first + i]);
            tile[(leaf.padded_first + i) * rows] = value;
        }
    });
}

template <bool ROUNDS>
void pack(const OperandArgs& args) {
    for (int r = 0; r < args.rows; ++r) {
        const char* x = row_address(args, r, 0);
        float* tile = static_cast<float*>(args.tile) + r;
        if (args.x_type == TYPE_F32)
            pack_row<ROUNDS>(*args.weight, reinterpret_cast<const float*>(x), args.rows, tile);
        else
            pack_row<ROUNDS>(*args.weight, reinterpret_cast<const std::uint16_t*>(x), args.rows, tile);
    }
}

// How weights are stored: an `Element` has UNIT elements of K of one column. term() is one of these elements, for a
// vector of columns.
struct F32Weights {
    using Element = float;
    static constexpr int UNIT = 1;
    static Vector term(const float* from, int) { return *reinterpret_cast<const Vector*>(from); }
};

struct Bf16Weights {
    using Element = std::uint32_t;  // a pair, the even element of K in the low half
    static constexpr int UNIT = 2;
    static Vector term(const std::uint32_t* from, int i) {
        const Words pairs = *reinterpret_cast<const Words*>(from);
        return reinterpret_cast<Vector>(i == 0 ? pairs << 16 : pairs & 0xffff0000u);
    }
};

// Add the products of UNIT elements of K. operands: [UNIT][ROWS].
template <class Weights, int ROWS, int WIDTH>
PENSTOCK_INLINE void add_products(
    const float* operands, const typename Weights::Element* weights, Vector (&sums)[ROWS][WIDTH]) {
#pragma GCC unroll 2
    for (int i = 0; i < Weights::UNIT; ++i) {
        Vector columns[WIDTH];
#pragma GCC unroll 8
        for (int v = 0; v < WIDTH; ++v) columns[v] = Weights::term(weights + v * LANES, i);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const Vector row = operands[i * ROWS + r] - Vector{};  // in all lanes
#pragma GCC unroll 8
            for (int v = 0; v < WIDTH; ++v) sums[r][v] = multiply_add(row, columns[v], sums[r][v]);
        }
    }
}

// The destination of the sums of one tile and one panel: `out`, or the tree until later leaves are finished.
struct Tree {
    float* levels;            // [TREE_LEVELS][level_stride]
    std::int64_t level_stride;
    float* out;
    std::int64_t row_stride;  // of levels and of out

    // Add every level at which the leaf number has a one bit. The first level with a zero bit keeps the sum.
    void add(Vector sum, std::int64_t at, int leaf, bool last) const {
        for (int level = 0; level < TREE_LEVELS; ++level) {
            Vector* held = reinterpret_cast<Vector*>(levels + level * level_stride + at);
            if (leaf >> level & 1) {
                sum = *held + sum;
            } else if (!last) {
                *held = sum;
                return;
            }
        }
        *reinterpret_cast<Vector*>(out + at) = sum;
    }
};

constexpr int stream_panels(int rows) { return rows <= STREAM_ROWS ? MAX_PANELS : 1; }

// One leaf of one panel.
template <class Element>
struct PanelLeaf {
    const Element* weights;
    std::int64_t first;  // unit of K, as in a tile
    std::int64_t steps;  // without padding, whose products add_to_tree() adds

    PanelLeaf(const PenstockWeight& weight, std::int64_t panel, int leaf, int unit) {
        const std::int64_t begin = leaf > 0 ? weight.leaf_ends[leaf - 1] : 0;
        first = leaf > 0 ? weight.padded_leaf_ends[leaf - 1] / unit : 0;
        steps = (weight.leaf_ends[leaf] - begin + unit - 1) / unit;
        weights = static_cast<const Element*>(weight.values) + (panel * (weight.padded_k / unit) + first) * PANEL;
    }
};

// Multiply one leaf of neighbouring panels with the few rows of one tile, one step of each panel in turn: a core keeps
// more lines from memory in flight if they belong to several streams.
template <class Weights, int ROWS, int PANELS>
void stream_leaf(const MultiplyArgs& args, int leaf, Vector (*sums)[ROWS][VECTORS]) {
    constexpr int UNIT = Weights::UNIT;
    const PanelLeaf<typename Weights::Element> panel(*args.weight, args.first_panel, leaf, UNIT);
    const std::int64_t stride = args.weight->padded_k / UNIT * PANEL;
    const auto* weights = panel.weights;
    const float* operands = static_cast<const float*>(args.tile) + panel.first * UNIT * ROWS;
    Vector added[PANELS][ROWS][VECTORS] = {};
    for (std::int64_t step = 0; step < panel.steps; ++step) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            const auto* of_panel = weights + p * stride;
            for (int byte = 0; byte < STEP_BYTES; byte += LINE)
                prefetch_to_l2(reinterpret_cast<const char*>(of_panel) + STREAM_AHEAD + byte);
            add_products<Weights>(operands, of_panel, added[p]);
        }
        weights += PANEL;
        operands += UNIT * ROWS;
    }
    __builtin_memcpy(sums, added, sizeof added);
}

// One pass over a block of weights, for some columns and the rows of one tile.
template <class Element>
struct Pass {
    const Element* weights;  // of the first column
    const float* operands;   // of the tile
    std::int64_t steps;
    const char* prefetch;    // weights to prefetch
    int prefetch_step;       // bytes prefetched per step
};

// Add the products of ROWS rows and WIDTH vectors of columns, from vector `first` on.
template <class Weights, int ROWS, int WIDTH>
void add_block(Pass<typename Weights::Element> pass, int first, Vector (*sums)[VECTORS]) {
    Vector added[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) added[r][v] = sums[r][first + v];
    const float* const end = pass.operands + pass.steps * Weights::UNIT * ROWS;
    for (; pass.operands != end; pass.operands += Weights::UNIT * ROWS) {
        for (int byte = 0; byte < STEP_BYTES * WIDTH / VECTORS; byte += LINE) prefetch_to_l2(pass.prefetch + byte);
        pass.prefetch += pass.prefetch_step;
        add_products<Weights>(pass.operands, pass.weights, added);
        pass.weights += PANEL;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) sums[r][first + v] = added[r][v];
}

// Add one leaf of one panel to the sums of all tiles, [tiles].
//
// A single pass prefetches its own weights a little ahead. Several passes over a block each prefetch a part of the next
// block: otherwise only the first pass would wait for memory, and the others would leave it idle.
template <class Weights, int ROWS>
void multiply_leaf(const MultiplyArgs& args, std::int64_t panel, int leaf, Vector (*sums)[ROWS][VECTORS]) {
    constexpr int UNIT = Weights::UNIT;
    // With few rows, more columns at a time give enough independent sums, as far as there are registers.
    constexpr int MOST = UNIT == 1 ? 12 : 8;
    constexpr int WIDTH = ROWS * VECTORS <= MOST ? VECTORS : (ROWS <= 3 ? VECTORS / 2 : 2);
    const PanelLeaf<typename Weights::Element> of_panel(*args.weight, panel, leaf, UNIT);
    const int passes = args.tiles * VECTORS / WIDTH;
    const std::int64_t block = passes == 1 ? of_panel.steps : args.tiles < MAX_TILES ? BLOCK_STEPS : LONG_STEPS;
    for (std::int64_t at = 0; at < of_panel.steps; at += block) {
        const auto* weights = of_panel.weights + at * PANEL;
        Pass<typename Weights::Element> pass{};
        pass.steps = of_panel.steps - at < block ? of_panel.steps - at : block;
        pass.prefetch_step = STEP_BYTES / passes;
        pass.prefetch = reinterpret_cast<const char*>(weights) +
                        (passes == 1 ? AHEAD_BYTES : pass.steps * STEP_BYTES);
        for (int t = 0; t < args.tiles; ++t) {
            const char* tile = static_cast<const char*>(args.tile) + t * args.tile_stride;
            pass.operands = reinterpret_cast<const float*>(tile) + (of_panel.first + at) * UNIT * ROWS;
            for (int first = 0; first < VECTORS; first += WIDTH) {
                pass.weights = weights + first * LANES;
                add_block<Weights, ROWS, WIDTH>(pass, first, sums[t]);
                pass.prefetch += pass.steps * pass.prefetch_step;
            }
        }
    }
}

// Return what the products of a leaf's padding add to a sum: 0, which makes a sum that underflowed to -0 a 0, as on
// levels that multiply the padding. Without padding, return -0, which changes no sum.
inline float padding_products(const PenstockWeight& weight, int leaf) {
    const auto length = [leaf](const std::int64_t* ends) { return ends[leaf] - (leaf > 0 ? ends[leaf - 1] : 0); };
    return length(weight.padded_leaf_ends) > length(weight.leaf_ends) ? 0.0f : -0.0f;
}

// Add the sums of a leaf of one panel and one tile to the tree.
template <int ROWS>
void add_to_tree(const MultiplyArgs& args, int panel, int tile, int leaf, const Vector (&sums)[ROWS][VECTORS]) {
    const std::int64_t row_stride = std::int64_t{args.panels} * PANEL;
    const std::int64_t level_stride = MAX_TILE_ROWS * row_stride;
    const Tree tree{args.tree + tile * TREE_LEVELS * level_stride + panel * PANEL, level_stride,
                    args.out + tile * ROWS * row_stride + panel * PANEL, row_stride};
    const float padding = padding_products(*args.weight, leaf);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            tree.add(sums[r][v] + padding, r * row_stride + v * LANES, leaf, leaf + 1 == args.weight->leaves);
}

template <class Weights, int ROWS, int PANELS>
void stream(const MultiplyArgs& args) {
    for (int leaf = 0; leaf < args.weight->leaves; ++leaf) {
        Vector sums[PANELS][ROWS][VECTORS];
        stream_leaf<Weights, ROWS, PANELS>(args, leaf, sums);
        for (int panel = 0; panel < PANELS; ++panel) add_to_tree<ROWS>(args, panel, 0, leaf, sums[panel]);
    }
}

template <class Weights, int ROWS>
void multiply_rows(const MultiplyArgs& args) {
    if (args.panels > 1)
        return with_constant<stream_panels(ROWS)>(
            args.panels, [&](auto panels) { stream<Weights, ROWS, panels.value>(args); });
    for (int leaf = 0; leaf < args.weight->leaves; ++leaf) {
        Vector sums[MAX_TILES][ROWS][VECTORS];
        __builtin_memset(sums, 0, args.tiles * sizeof sums[0]);
        multiply_leaf<Weights, ROWS>(args, args.first_panel, leaf, sums);
        for (int tile = 0; tile < args.tiles; ++tile) add_to_tree<ROWS>(args, 0, tile, leaf, sums[tile]);
    }
}

template <class Weights>
void multiply(const MultiplyArgs& args) {
    with_constant<TILE_ROWS>(args.rows, [&](auto rows) { multiply_rows<Weights, rows.value>(args); });
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_F32>() {
    return {TILE_ROWS, sizeof(float), stream_panels, pack<false>, multiply<F32Weights>, false, true};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_BF16>() {
    return {TILE_ROWS, sizeof(float), stream_panels, pack<true>, multiply<Bf16Weights>, false, true};
}

}  // namespace penstock
