// Products in bfloat16 and in float32 with AVX-512.
//
// Both walk K in words of four bytes: a pair of bfloat16 (vdpbf16ps adds the two products of a pair) or one float32.
// A word of K of one panel is 32 of them, two registers; a tile of activations is [words of K][rows], so that the
// kernel reads both from front to back. Rows and panels are template arguments: all sums stay in registers.

#include "avx512.inc.h"
#include "products/leaves.inc.h"

namespace penstock {

namespace {

constexpr int TILE_ROWS = 12;                      // 12 rows x 2 registers of sums leave 8 for weights and addresses
constexpr int LANES = 16;                          // words per register
constexpr std::int64_t WORD_BYTES = 4 * PANEL;     // one word of K of a panel
constexpr std::int64_t AHEAD_BYTES = 2048;         // prefetch distance of a stream from memory
constexpr std::int64_t BLOCK_BYTES = 128 << 10;    // of a panel, so that every tile finds it in the cache

// A leaf of the rows of x as words [padded / ELEMENTS][rows] at `tile`.
template <class Type>
void pack_leaf(const OperandArgs& a, const LeafRange& leaf, std::int32_t* tile) {
    const __mmask16 rows = static_cast<__mmask16>((1u << a.rows) - 1);
    for (std::int64_t at = 0; at < leaf.padded; at += LANES * Type::ELEMENTS) {
        const std::int64_t left = leaf.count - at;
        __m512i words[LANES] = {};
        for (int r = 0; r < a.rows && left > 0; ++r)
            words[r] = Type::load(row_address(a, r, leaf.first + at), left, a.x_type);
        if (a.rows == 1) {
            _mm512_storeu_si512(tile, words[0]);
        } else {
            transpose(words);
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

// A piece of K of one tile and some panels. Sums are [rows][panels * 32].
struct Piece {
    const std::int32_t* operands;  // [words][rows]
    const char* weights;           // of the first panel
    std::int64_t panel_bytes;      // per panel
    std::int64_t words;
    const char* ahead;             // weights to prefetch
    std::int64_t ahead_step;       // bytes prefetched per word
    bool continues;                // start from the sums of the previous piece at `sums`
    const float* tree;             // sums of earlier leaves
    std::int64_t tree_stride;      // per level
    unsigned levels;               // of the tree, to be added at the end
    float* sums;                   // out
};

template <class Type, int ROWS, int PANELS>
void multiply_piece(const Piece& piece) {
    constexpr int WIDTH = 2 * PANELS;  // registers of a row
    static_assert(ROWS * WIDTH <= 2 * TILE_ROWS, "all sums stay in registers");
    __m512 acc[ROWS][WIDTH];
    float* sums = piece.sums;
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i)
        acc[i / WIDTH][i % WIDTH] = piece.continues ? _mm512_load_ps(sums + i * LANES) : _mm512_setzero_ps();
    const std::int32_t* operands = piece.operands;
    const char* weights = piece.weights;
    const char* ahead = piece.ahead;
    for (std::int64_t word = 0; word < piece.words; ++word) {
        __m512i panel[WIDTH];
#pragma GCC unroll 8
        for (int j = 0; j < WIDTH; ++j) {
            const std::int64_t offset = j / 2 * piece.panel_bytes + j % 2 * 64;
            panel[j] = _mm512_load_si512(weights + offset);
            _mm_prefetch(ahead + offset, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const __m512i row = _mm512_set1_epi32(operands[r]);
#pragma GCC unroll 8
            for (int j = 0; j < WIDTH; ++j) Type::multiply_add(acc[r][j], panel[j], row);
        }
        operands += ROWS;
        weights += WORD_BYTES;
        ahead += piece.ahead_step;
    }
    for (unsigned levels = piece.levels; levels != 0; levels &= levels - 1) {
        const float* earlier = piece.tree + __builtin_ctz(levels) * piece.tree_stride;
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * WIDTH; ++i)
            acc[i / WIDTH][i % WIDTH] = _mm512_add_ps(_mm512_load_ps(earlier + i * LANES), acc[i / WIDTH][i % WIDTH]);
    }
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i) _mm512_store_ps(sums + i * LANES, acc[i / WIDTH][i % WIDTH]);
}

using PieceKernel = void (*)(const Piece&);

constexpr int max_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// The kernel for 1 .. 12 rows and 1 .. max_panels(rows) panels.
template <class Type>
PieceKernel choose(int rows, int panels) {
    return with_constant<TILE_ROWS>(rows, [=](auto of_rows) {
        return with_constant<max_panels(of_rows.value)>(panels, [](auto of_panels) -> PieceKernel {
            return multiply_piece<Type, decltype(of_rows)::value, of_panels.value>;
        });
    });
}

// One piece of K for all tiles, one after the other; `piece` is that of the first tile. Several tiles prefetch the next
// piece, each its part; a single tile prefetches a fixed distance ahead.
void multiply_tiles(const MultiplyArgs& a, PieceKernel kernel, Piece piece, std::int64_t sums_stride) {
    const std::int64_t piece_bytes = piece.words * WORD_BYTES;
    piece.ahead_step = WORD_BYTES / a.tiles;
    for (int tile = 0; tile < a.tiles; ++tile) {
        piece.ahead = piece.weights + (a.tiles > 1 ? piece_bytes + piece_bytes * tile / a.tiles : AHEAD_BYTES);
        kernel(piece);
        piece.operands += a.tile_stride / 4;
        piece.tree += TREE_LEVELS * piece.tree_stride;
        piece.sums += sums_stride;
    }
}

// K is split at the leaves and, if there are several tiles, into blocks that stay in the cache. A block continues with
// the sums of the previous one, so that splitting changes no bit.
template <class Type>
void multiply(const MultiplyArgs& a) {
    const PenstockWeight& weight = *a.weight;
    const PieceKernel kernel = choose<Type>(a.rows, a.panels);
    const std::int64_t block = a.tiles > 1 ? BLOCK_BYTES / WORD_BYTES : weight.padded_k;
    Piece piece = {};
    piece.panel_bytes = weight.padded_k / Type::ELEMENTS * WORD_BYTES;
    piece.weights = static_cast<const char*>(weight.values) + a.first_panel * piece.panel_bytes;
    piece.operands = static_cast<const std::int32_t*>(a.tile);
    piece.tree = a.tree;
    piece.tree_stride = MAX_TILE_ROWS * a.panels * PANEL;
    std::int64_t word = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        const std::int64_t end = weight.padded_leaf_ends[leaf] / Type::ELEMENTS;
        const bool last_leaf = leaf + 1 == weight.leaves;
        const std::int64_t sums_stride = last_leaf ? a.rows * a.panels * PANEL : TREE_LEVELS * piece.tree_stride;
        piece.sums = last_leaf ? a.out : a.tree + level_to_keep(leaf) * piece.tree_stride;
        piece.continues = false;
        for (bool whole = false; !whole; piece.continues = true) {
            whole = end - word <= block;
            piece.words = whole ? end - word : block;
            piece.levels = whole ? levels_to_add(leaf, weight.leaves) : 0;
            multiply_tiles(a, kernel, piece, sums_stride);
            word += piece.words;
            piece.weights += piece.words * WORD_BYTES;
            piece.operands += piece.words * a.rows;
        }
    }
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_F32>() {
    return {TILE_ROWS, max_panels, pack<F32Words>, multiply<F32Words>};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_BF16>() {
    return {TILE_ROWS, max_panels, pack<Bf16Words>, multiply<Bf16Words>};
}

}  // namespace penstock
