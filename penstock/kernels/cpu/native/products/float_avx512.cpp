// Products in bfloat16 and in float32 with AVX-512.
//
// Both walk K in words of four bytes: a pair of bfloat16, or one float32. For one word of K, a panel has 32 words,
// which are two registers. A tile of activations is [words of K][rows], so that the kernel reads both from front to
// back. vdpbf16ps adds the two products of a pair; if it is missing or slow, pairs are widened, and a tile is float32
// [K][rows]. Rows and panels are template arguments, so that all sums stay in registers.

#include "avx512.inc.h"
#include "products/leaves.inc.h"

namespace penstock {

namespace {

// Rows x 2 registers of sums leave 8 for weights and operands, or 4 if pairs are widened, where more rows pay off.
template <class Type> constexpr int TILE_ROWS = Type::TERMS > 1 ? 14 : 12;
constexpr int LANES = 16;                          // words per register
constexpr std::int64_t WORD_BYTES = 4 * PANEL;     // one word of K of a panel
constexpr std::int64_t AHEAD_BYTES = 8192;         // prefetch distance of a single panel from memory
constexpr std::int64_t OPERANDS_AHEAD = 2048;      // prefetch distance of operands, which many tiles read from the L3
constexpr std::int64_t BLOCK_BYTES = 128 << 10;    // bytes of a panel that stay in the cache for every tile
constexpr std::int64_t PASS_BYTES = 8 << 20;       // of operands; with 16 MiB, an L3 of 32 MiB would lose some of them

// Write a leaf of the rows of x to `tile`, as words [padded / ELEMENTS][rows] of Type's operands.
template <class Type>
void pack_leaf(const OperandArgs& a, const LeafRange& leaf, std::int32_t* tile) {
    constexpr int STEP = LANES * Type::ELEMENTS;  // elements of K at a time
    const __mmask16 rows = static_cast<__mmask16>((1u << a.rows) - 1);
    const char* x[LANES] = {};
    for (int r = 0; r < a.rows; ++r) x[r] = row_address(a, r, leaf.first);
    std::int64_t offset = 0;
    for (std::int64_t at = 0; at < leaf.padded; at += STEP, offset += STEP * type_bytes(a.x_type)) {
        const std::int64_t left = leaf.count - at;
        __m512i words[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; ++r) {
            words[r] = _mm512_setzero_si512();
            if (r < a.rows && left > 0) words[r] = Type::load(x[r] + offset, left, a.x_type);
        }
        if (a.rows == 1) {
            _mm512_storeu_si512(tile, words[0]);
        } else {
            transpose(words);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; ++j) _mm512_mask_storeu_epi32(tile + j * a.rows, rows, words[j]);
        }
        tile += LANES * a.rows;
    }
}

template <class Type>
void pack(const OperandArgs& a) {
    each_leaf(*a.weight, [&a](const LeafRange& leaf) {
        pack_leaf<Type>(a, leaf, static_cast<std::int32_t*>(a.tile) + leaf.padded_first / Type::ELEMENTS * a.rows);
    });
}

// A piece of K of one tile and some panels: whole leaves, or a part of one. Sums are [rows][panels * 32].
struct Piece {
    const std::int32_t* operands;     // [words][TERMS][rows]
    const char* weights;              // weights of the first panel
    std::int64_t panel_bytes;         // per panel
    std::int64_t first, end;          // words
    const std::int64_t* leaf_ends;    // in elements of K
    int first_leaf, last_leaf;
    int leaves;                       // number of leaves of the weight
    bool continues;                   // start from the sums of the previous piece, in the same leaf
    const char* ahead;                // weights to prefetch
    std::int64_t ahead_step;          // bytes prefetched per word
    float* tree;                      // sums of earlier leaves
    std::int64_t tree_stride;         // per level
    float* out;                       // sums of the last leaf and the tree
    std::int64_t out_stride;          // elements between its rows

    bool is_last(int leaf) const { return leaf + 1 == leaves; }
    // Where the sums of a leaf are kept.
    float* sums(int leaf) const { return is_last(leaf) ? out : tree + level_to_keep(leaf) * tree_stride; }
};

// The sums of one tile in registers.
template <class Type, int ROWS, int PANELS>
struct Sums {
    static constexpr int WIDTH = 2 * PANELS;  // registers of a row
    static constexpr int COUNT = ROWS * WIDTH;
    static_assert(COUNT <= 2 * TILE_ROWS<Type>, "all sums stay in registers");
    __m512 acc[COUNT];

    PENSTOCK_INLINE void clear() {
#pragma GCC unroll 28
        for (int i = 0; i < COUNT; ++i) acc[i] = _mm512_setzero_ps();
    }
    PENSTOCK_INLINE void load(const float* from, std::int64_t stride) {
#pragma GCC unroll 28
        for (int i = 0; i < COUNT; ++i) acc[i] = _mm512_load_ps(from + i / WIDTH * stride + i % WIDTH * LANES);
    }
    PENSTOCK_INLINE void store(float* to, std::int64_t stride) const {
#pragma GCC unroll 28
        for (int i = 0; i < COUNT; ++i) _mm512_store_ps(to + i / WIDTH * stride + i % WIDTH * LANES, acc[i]);
    }

    PENSTOCK_INLINE void hold_all() {
#pragma GCC unroll 28
        for (int i = 0; i < COUNT; ++i) hold<typename Type::Mode>(acc[i]);
    }

    // Add the levels of the tree that a finished leaf completes, lowest first.
    PENSTOCK_INLINE void add_tree(const Piece& piece, int leaf) {
        for (unsigned levels = levels_to_add(leaf, piece.leaves); levels != 0; levels &= levels - 1) {
            const float* earlier = piece.tree + __builtin_ctz(levels) * piece.tree_stride;
#pragma GCC unroll 28
            for (int i = 0; i < COUNT; ++i) acc[i] = _mm512_add_ps(_mm512_load_ps(earlier + i * LANES), acc[i]);
        }
    }

    // The offset in bytes of register j of a word of K.
    static PENSTOCK_INLINE std::int64_t offset(const Piece& piece, int j) {
        return j / 2 * piece.panel_bytes + j % 2 * 64;
    }

    // Add the products of one word of K. An operand is broadcast into a register once. As a memory operand of every
    // product it would be loaded each time, and a core that multiplies two vectors per cycle loads only two.
    PENSTOCK_INLINE void multiply_word(const Piece& piece, const std::int32_t* operands, const char* weights,
                                       const char* ahead) {
#pragma GCC unroll 8
        for (int j = 0; j < WIDTH; ++j) prefetch_to_l2(ahead + offset(piece, j));
#pragma GCC unroll 2
        for (int step = 0; step < Type::TERMS; ++step) {
            const int term = Type::of_step(step);
            if constexpr (ROWS > 8)  // the operands of one or two smaller tiles stay in the L2
                _mm_prefetch(reinterpret_cast<const char*>(operands + term * ROWS) + OPERANDS_AHEAD, _MM_HINT_T0);
            __m512i panel[WIDTH];
#pragma GCC unroll 8
            for (int j = 0; j < WIDTH; ++j) panel[j] = Type::term(weights + offset(piece, j), term);
#pragma GCC unroll 14
            for (int r = 0; r < ROWS; ++r) {
                const __m512i row = _mm512_set1_epi32(operands[term * ROWS + r]);
#pragma GCC unroll 8
                for (int j = 0; j < WIDTH; ++j) Type::multiply_add(acc[r * WIDTH + j], panel[j], row);
            }
        }
    }
};

// Multiply all leaves of a short piece in one call, so that the tile's tree stays in the L1 and its operands are one
// stream.
template <class Type, int ROWS, int PANELS>
void multiply_piece(const Piece& piece) {
    Sums<Type, ROWS, PANELS> sums;
    sums.clear();
    const auto stride = [&](int leaf) { return piece.is_last(leaf) ? piece.out_stride : PANELS * PANEL; };
    if (piece.continues) sums.load(piece.sums(piece.first_leaf), stride(piece.first_leaf));
    const std::int32_t* operands = piece.operands;
    const char *weights = piece.weights, *ahead = piece.ahead;
    std::int64_t word = piece.first;
    for (int leaf = piece.first_leaf; leaf <= piece.last_leaf; ++leaf) {
        const std::int64_t leaf_end = piece.leaf_ends[leaf] / Type::ELEMENTS;
        const std::int64_t end = leaf_end < piece.end ? leaf_end : piece.end;
        {
            const typename Type::Mode mode;
            sums.hold_all();
            for (; word < end; ++word) {
                sums.multiply_word(piece, operands, weights, ahead);
                operands += Type::TERMS * ROWS;
                weights += WORD_BYTES;
                ahead += piece.ahead_step;
            }
            sums.hold_all();
        }
        if (end == leaf_end) sums.add_tree(piece, leaf);
        sums.store(piece.sums(leaf), stride(leaf));
        sums.clear();
    }
}

using PieceKernel = void (*)(const Piece&);

// The kernel for 1 .. TILE_ROWS rows and 1 .. panels_at_once(rows) panels.
template <class Type>
PieceKernel choose(int rows, int panels) {
    return with_constant<TILE_ROWS<Type>>(rows, [=](auto of_rows) {
        return with_constant<panels_at_once(of_rows.value)>(panels, [](auto of_panels) -> PieceKernel {
            return multiply_piece<Type, decltype(of_rows)::value, of_panels.value>;
        });
    });
}

// Multiply one piece of K for all tiles in turn; `piece` is that of the first tile. Several tiles prefetch the next
// piece, each a part of it; a single tile prefetches a fixed distance ahead.
void multiply_tiles(const MultiplyArgs& a, PieceKernel kernel, Piece piece) {
    const std::int64_t piece_bytes = (piece.end - piece.first) * WORD_BYTES;
    piece.ahead_step = WORD_BYTES / a.tiles;
    for (int tile = 0; tile < a.tiles; ++tile) {
        const std::int64_t part = piece_bytes * tile / a.tiles;
        piece.ahead = piece.weights + (a.tiles > 1 ? piece_bytes + part : a.panels > 1 ? STREAM_AHEAD : AHEAD_BYTES);
        kernel(piece);
        piece.operands += a.tile_stride / 4;
        piece.tree += TREE_LEVELS * piece.tree_stride;
        piece.out += a.rows * a.out_stride;
    }
}

// A single tile walks all of K at once. Several tiles walk it in pieces that stay in the cache: as many leaves as fit,
// or blocks of a long leaf. A block continues with the sums of the previous block, so that splitting changes no bit.
template <class Type>
void multiply(const MultiplyArgs& a) {
    const PenstockWeight& weight = *a.weight;
    const PieceKernel kernel = choose<Type>(a.rows, a.panels);
    const std::int64_t block = a.tiles > 1 ? BLOCK_BYTES / WORD_BYTES : weight.padded_k;
    const auto leaf_end = [&](int leaf) { return weight.padded_leaf_ends[leaf] / Type::ELEMENTS; };
    Piece piece = {};
    piece.panel_bytes = weight.padded_k / Type::ELEMENTS * WORD_BYTES;
    piece.weights = static_cast<const char*>(weight.values) + a.first_panel * piece.panel_bytes;
    piece.operands = static_cast<const std::int32_t*>(a.tile);
    piece.leaf_ends = weight.padded_leaf_ends;
    piece.leaves = weight.leaves;
    piece.tree = a.tree;
    piece.tree_stride = MAX_TILE_ROWS * a.panels * PANEL;
    piece.out = a.out;
    piece.out_stride = a.out_stride;
    while (piece.first_leaf < weight.leaves) {
        piece.last_leaf = piece.first_leaf;
        while (piece.last_leaf + 1 < weight.leaves && leaf_end(piece.last_leaf + 1) - piece.first <= block)
            ++piece.last_leaf;
        const std::int64_t whole = leaf_end(piece.last_leaf);
        piece.end = whole - piece.first <= block ? whole : piece.first + block;
        multiply_tiles(a, kernel, piece);
        piece.weights += (piece.end - piece.first) * WORD_BYTES;
        piece.operands += (piece.end - piece.first) * Type::TERMS * a.rows;
        piece.continues = piece.end < whole;
        piece.first_leaf = piece.last_leaf + !piece.continues;
        piece.first = piece.end;
    }
}

template <class Type>
ProductKernel kernel() {
    using Operand = typename Type::Operand;
    constexpr int ELEMENT = sizeof(typename Operand::Element);
    return {TILE_ROWS<Type>, ELEMENT, panels_at_once, pack<Operand>, multiply<Type>, true, true, PASS_BYTES};
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_F32>() { return kernel<F32Words>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_BF16>() { return kernel<Bf16Words>(); }
#if defined(__AVX512BF16__)
template <> ProductKernel product_kernel<LEVEL_AVX512FMA, KIND_BF16>() { return kernel<WideBf16Words>(); }
#endif

}  // namespace penstock
