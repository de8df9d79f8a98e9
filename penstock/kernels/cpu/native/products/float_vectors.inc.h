// Products of float32 and bfloat16 weights in vectors of float32, for levels without bfloat16 arithmetic.
//
// A tile is [padded_k][rows] float32 or [padded_k / 2][rows][2] bfloat16. A bfloat16 pair is widened to two float32
// values, and each output adds the even element of K first, then the odd one: one chain over ascending K.
#include "products/leaves.inc.h"

#if defined(__AVX2__)
#include <immintrin.h>
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
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

constexpr int TILE_ROWS = 6;  // 6 rows x 2 vectors of columns: 12 of 16 registers hold sums
constexpr int VECTORS = PANEL / LANES;

template <class From>
void convert(From from, float* to) { *to = to_float(from); }
template <class From>
void convert(From from, std::uint16_t* to) { *to = to_bf16(from); }

// The operand of one activation row: position `at` of padded K goes to tile[at / UNIT * rows * UNIT + at % UNIT].
template <int UNIT, class From, class To>
void pack_row(const PenstockWeight& weight, const From* x, int rows, To* tile) {
    each_leaf(weight, [=](const LeafRange& leaf) {
        for (std::int64_t i = 0; i < leaf.padded; ++i) {
            const std::int64_t at = leaf.padded_first + i;
            To* to = &tile[at / UNIT * rows * UNIT + at % UNIT];
            if (i < leaf.count)
                convert(x[leaf.first + i], to);
            else
                *to = 0;
        }
    });
}

template <int UNIT, class From, class To>
void pack_rows(const OperandArgs& args) {
    for (int r = 0; r < args.rows; ++r)
        pack_row<UNIT>(*args.weight, reinterpret_cast<const From*>(row_address(args, r, 0)), args.rows,
                       static_cast<To*>(args.tile) + r * UNIT);
}

template <int UNIT, class To>
void pack(const OperandArgs& args) {
    if (args.x_type == TYPE_F32) return pack_rows<UNIT, float, To>(args);
    pack_rows<UNIT, std::uint16_t, To>(args);
}

// A step through K: `Element` is the part of a tile or panel for one row or column and one step.
struct F32Step {
    using Element = float;
    static constexpr int UNIT = 1;

    template <int ROWS, int WIDTH>
    static void add(const float* operands, const float* weights, Vector (&sums)[ROWS][WIDTH]) {
        Vector columns[WIDTH];
        for (int v = 0; v < WIDTH; ++v) columns[v] = reinterpret_cast<const Vector*>(weights)[v];
        for (int r = 0; r < ROWS; ++r) {
            const Vector row = operands[r] - Vector{};  // in all lanes
            for (int v = 0; v < WIDTH; ++v) sums[r][v] = multiply_add(row, columns[v], sums[r][v]);
        }
    }
};

struct Bf16Step {
    using Element = std::uint32_t;  // a pair, the even element of K in the low half
    static constexpr int UNIT = 2;

    static Vector even(Words pairs) { return reinterpret_cast<Vector>(pairs << 16); }
    static Vector odd(Words pairs) { return reinterpret_cast<Vector>(pairs & 0xffff0000u); }

    template <int ROWS, int WIDTH>
    static void add(const std::uint32_t* operands, const std::uint32_t* weights, Vector (&sums)[ROWS][WIDTH]) {
        Vector evens[WIDTH], odds[WIDTH];
        for (int v = 0; v < WIDTH; ++v) {
            const Words pairs = reinterpret_cast<const Words*>(weights)[v];
            evens[v] = even(pairs);
            odds[v] = odd(pairs);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Words pair = operands[r] + Words{};  // in all lanes
            for (int v = 0; v < WIDTH; ++v) sums[r][v] = multiply_add(even(pair), evens[v], sums[r][v]);
            for (int v = 0; v < WIDTH; ++v) sums[r][v] = multiply_add(odd(pair), odds[v], sums[r][v]);
        }
    }
};

// The destination of the sums of one tile and one panel: `out`, or the tree until later leaves are done.
struct Tree {
    float* levels;            // [TREE_LEVELS][level_stride]
    std::int64_t level_stride;
    float* out;
    std::int64_t row_stride;  // of both

    // Add every level at which the leaf number has a one; the first level with a zero keeps the sum.
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

// One leaf of ROWS rows and one panel, WIDTH vectors of columns at a time.
template <class Step, int ROWS, int WIDTH>
void add_leaf(const MultiplyArgs& args, const void* tile, std::int64_t panel, int leaf, const Tree& tree) {
    using Element = typename Step::Element;
    const PenstockWeight& weight = *args.weight;
    const std::int64_t begin = leaf > 0 ? weight.padded_leaf_ends[leaf - 1] / Step::UNIT : 0;
    const std::int64_t end = weight.padded_leaf_ends[leaf] / Step::UNIT;
    const Element* operands = static_cast<const Element*>(tile);
    const Element* values = static_cast<const Element*>(weight.values) + panel * (weight.padded_k / Step::UNIT) * PANEL;
    for (int first = 0; first < VECTORS; first += WIDTH) {
        Vector sums[ROWS][WIDTH] = {};
        for (std::int64_t at = begin; at < end; ++at)
            Step::template add<ROWS, WIDTH>(operands + at * ROWS, values + at * PANEL + first * LANES, sums);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < WIDTH; ++v)
                tree.add(sums[r][v], r * tree.row_stride + (first + v) * LANES, leaf, leaf + 1 == weight.leaves);
    }
}

template <class Step, int ROWS>
void multiply_rows(const MultiplyArgs& args) {
    // With few rows, more columns at a time give enough independent sums.
    constexpr int WIDTH = ROWS * VECTORS <= 12 ? VECTORS : ROWS <= 3 ? 4 : 2;
    const std::int64_t row_stride = std::int64_t{args.panels} * PANEL;
    const std::int64_t level_stride = MAX_TILE_ROWS * row_stride;
    for (int panel = 0; panel < args.panels; ++panel)
        for (int leaf = 0; leaf < args.weight->leaves; ++leaf)
            for (int t = 0; t < args.tiles; ++t) {
                const Tree tree{args.tree + t * TREE_LEVELS * level_stride + panel * PANEL, level_stride,
                                args.out + t * ROWS * row_stride + panel * PANEL, row_stride};
                const void* tile = static_cast<const char*>(args.tile) + t * args.tile_stride;
                add_leaf<Step, ROWS, WIDTH>(args, tile, args.first_panel + panel, leaf, tree);
            }
}

template <class Step>
void multiply(const MultiplyArgs& args) {
    with_constant<TILE_ROWS>(args.rows, [&](auto rows) { multiply_rows<Step, rows.value>(args); });
}

int one_panel(int) { return 1; }

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_F32>() {
    return {TILE_ROWS, one_panel, pack<1, float>, multiply<F32Step>};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_BF16>() {
    return {TILE_ROWS, one_panel, pack<2, std::uint16_t>, multiply<Bf16Step>};
}

}  // namespace penstock
