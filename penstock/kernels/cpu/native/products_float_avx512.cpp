// Products in bfloat16 and in float32 with AVX-512.
//
// Both walk K in words of four bytes: a pair of bfloat16 (vdpbf16ps adds the two products of a pair) or one float32.
// A word of K of one panel is 32 of them, two registers; a tile of activations is [words of K][rows], so that the
// kernel reads both from front to back. Rows and panels are template arguments: all sums stay in registers.

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says so of its own header
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "leaf_tree.h"
#include "products.h"

namespace penstock {

namespace {

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

constexpr int TILE_ROWS = 12;                      // 12 rows x 2 registers leave 8 for weights and addresses
constexpr int LANES = 16;                          // words of a register
constexpr std::int64_t WORD_BYTES = 4 * PANEL;     // one word of K of a panel
constexpr std::int64_t AHEAD_BYTES = 2048;         // prefetched ahead of a stream from memory
constexpr std::int64_t BLOCK_BYTES = 128 << 10;    // of a panel, to be met in the cache by every tile

// A mask of the first `count` lanes, of 32 at most.
inline __mmask32 first_lanes(std::int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

struct Bf16 {
    static constexpr int ELEMENTS = 2;  // of K in a word

    // acc += weights * *word, both elements; as inline assembly, because compilers load the broadcast word into a
    // register of its own and then have too few.
    PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i weights, const std::int32_t* word) {
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*word));
    }

    // 32 elements of a row as 16 words, `count` of them real and the others zero.
    static __m512i load(const void* row, std::int64_t at, std::int64_t count, bool is_f32) {
        const __mmask32 mask = first_lanes(count);
        if (!is_f32) return _mm512_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(row) + at);
        const float* from = static_cast<const float*>(row) + at;
        const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
        const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16);
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
};

struct F32 {
    static constexpr int ELEMENTS = 1;

    PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i weights, const std::int32_t* word) {
        __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*word));
    }

    static __m512i load(const void* row, std::int64_t at, std::int64_t count, bool is_f32) {
        const __mmask16 mask = static_cast<__mmask16>(first_lanes(count));
        if (is_f32) return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, static_cast<const float*>(row) + at));
        const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(row) + at);
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    }
};

// Word j of register i becomes word i of register j.
inline void transpose(__m512i (&words)[LANES]) {
    __m512i pairs[LANES], quads[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(words[i], words[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(words[i], words[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Quarter q of quads[4 g + j] now holds word 4 q + j of rows 4 g .. 4 g + 3: what is left is to gather quarters.
    constexpr int EVEN = 0x88, ODD = 0xdd;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i even_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], EVEN);
        const __m512i even_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], EVEN);
        const __m512i odd_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], ODD);
        const __m512i odd_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], ODD);
        words[j] = _mm512_shuffle_i32x4(even_low, even_high, EVEN);
        words[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, EVEN);
        words[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, ODD);
        words[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, ODD);
    }
}

// The elements first .. last-1 of the rows of x, padded with zeros, as words [padded / ELEMENTS][rows] at `tile`.
template <class Type>
void pack_leaf(const OperandArgs& a, std::int64_t first, std::int64_t last, std::int64_t padded, std::int32_t* tile) {
    const bool is_f32 = a.x_type == TYPE_F32;
    const std::int64_t row_bytes = a.x_stride * (is_f32 ? 4 : 2);
    const __mmask16 rows = static_cast<__mmask16>((1u << a.rows) - 1);
    for (std::int64_t at = 0; at < padded; at += LANES * Type::ELEMENTS) {
        const std::int64_t left = last - first - at;
        __m512i words[LANES] = {};
        for (int r = 0; r < a.rows && left > 0; ++r) {
            const std::int64_t row = a.row_index ? a.row_index[r] : a.first_row + r;
            words[r] = Type::load(static_cast<const char*>(a.x) + row * row_bytes, first + at, left, is_f32);
        }
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
    const PenstockWeight& weight = *a.weight;
    std::int64_t first = 0, padded_first = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        std::int32_t* tile = static_cast<std::int32_t*>(a.tile) + padded_first / Type::ELEMENTS * a.rows;
        pack_leaf<Type>(a, first, weight.leaf_ends[leaf], weight.padded_leaf_ends[leaf] - padded_first, tile);
        first = weight.leaf_ends[leaf];
        padded_first = weight.padded_leaf_ends[leaf];
    }
}

// A piece of K of one tile and some panels. Sums are [rows][panels * 32].
struct Piece {
    const std::int32_t* operands;  // [words][rows]
    const char* weights;           // of the first panel
    std::int64_t panel_bytes;      // from one panel to the next
    std::int64_t words;
    const char* ahead;             // weights to fetch meanwhile, and
    std::int64_t ahead_step;       // how far to go on at every word
    const float* start;            // the sums so far, or null: zero
    const float* tree;             // where earlier leaves wait,
    std::int64_t tree_stride;      // from one level to the next, and
    unsigned levels;               // which of them to add at the end
    float* sums;                   // out
};

template <class Type, int ROWS, int PANELS>
void multiply_piece(const Piece& piece) {
    constexpr int WIDTH = 2 * PANELS;  // registers of a row
    static_assert(ROWS * WIDTH <= 2 * TILE_ROWS, "all sums stay in registers");
    __m512 acc[ROWS][WIDTH];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i)
        acc[i / WIDTH][i % WIDTH] = piece.start ? _mm512_load_ps(piece.start + i * LANES) : _mm512_setzero_ps();
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
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < WIDTH; ++j) Type::multiply_add(acc[r][j], panel[j], operands + r);
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
    float* sums = piece.sums;
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i) _mm512_store_ps(sums + i * LANES, acc[i / WIDTH][i % WIDTH]);
}

using PieceKernel = void (*)(const Piece&);

int max_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// The kernel for 1 .. 12 rows and 1 .. max_panels(rows) panels.
template <class Type>
PieceKernel choose(int rows, int panels) {
    static constexpr PieceKernel ONE_ROW[] = {
        multiply_piece<Type, 1, 1>, multiply_piece<Type, 1, 2>, multiply_piece<Type, 1, 3>, multiply_piece<Type, 1, 4>};
    static constexpr PieceKernel TWO_PANELS[] = {multiply_piece<Type, 2, 2>, multiply_piece<Type, 3, 2>};
    static constexpr PieceKernel ONE_PANEL[] = {
        multiply_piece<Type, 2, 1>,  multiply_piece<Type, 3, 1>,  multiply_piece<Type, 4, 1>, multiply_piece<Type, 5, 1>,
        multiply_piece<Type, 6, 1>,  multiply_piece<Type, 7, 1>,  multiply_piece<Type, 8, 1>, multiply_piece<Type, 9, 1>,
        multiply_piece<Type, 10, 1>, multiply_piece<Type, 11, 1>, multiply_piece<Type, 12, 1>};
    if (rows == 1) return ONE_ROW[panels - 1];
    return panels == 2 ? TWO_PANELS[rows - 2] : ONE_PANEL[rows - 2];
}

// One piece of K, for all tiles one after the other. While several tiles pass over it they fetch the next piece, each
// its share; a single one fetches a little ahead of itself.
void multiply_tiles(const MultiplyArgs& a, PieceKernel kernel, Piece piece, std::int64_t first_word, float* tree_sums) {
    const std::int64_t tile_floats = a.rows * a.panels * PANEL;
    const std::int64_t tree_floats = TREE_LEVELS * piece.tree_stride;
    const std::int64_t piece_bytes = piece.words * WORD_BYTES;
    const bool continues = piece.start != nullptr;
    piece.ahead_step = WORD_BYTES / a.tiles;
    for (int tile = 0; tile < a.tiles; ++tile) {
        const char* operands = static_cast<const char*>(a.tile) + tile * a.tile_stride;
        float* out = a.out + tile * tile_floats;
        piece.operands = reinterpret_cast<const std::int32_t*>(operands) + first_word * a.rows;
        piece.ahead = piece.weights + (a.tiles > 1 ? piece_bytes + piece_bytes * tile / a.tiles : AHEAD_BYTES);
        piece.start = continues ? out : nullptr;
        piece.tree = a.tree + tile * tree_floats;
        piece.sums = tree_sums ? tree_sums + tile * tree_floats : out;
        kernel(piece);
    }
}

// K is cut at the leaves and, where several tiles pass, into blocks that stay in the cache. A block goes on with the
// sums of the one before, so that cutting changes no bit.
template <class Type>
void multiply(const MultiplyArgs& a) {
    const PenstockWeight& weight = *a.weight;
    const PieceKernel kernel = choose<Type>(a.rows, a.panels);
    const std::int64_t block = a.tiles > 1 ? BLOCK_BYTES / WORD_BYTES : weight.padded_k;
    Piece piece = {};
    piece.panel_bytes = weight.padded_k / Type::ELEMENTS * WORD_BYTES;
    piece.tree_stride = MAX_TILE_ROWS * a.panels * PANEL;
    piece.weights = static_cast<const char*>(weight.values) + a.first_panel * piece.panel_bytes;
    std::int64_t word = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        const std::int64_t end = weight.padded_leaf_ends[leaf] / Type::ELEMENTS;
        piece.start = nullptr;
        for (bool whole = false; !whole; piece.start = a.out) {
            whole = end - word <= block;
            piece.words = whole ? end - word : block;
            piece.levels = whole ? levels_to_add(leaf, weight.leaves) : 0;
            const bool waits = whole && leaf + 1 < weight.leaves;
            multiply_tiles(a, kernel, piece, word, waits ? a.tree + level_to_keep(leaf) * piece.tree_stride : nullptr);
            piece.weights += piece.words * WORD_BYTES;
            word += piece.words;
        }
    }
}

}  // namespace

ProductKernel avx512_f32() { return {TILE_ROWS, max_panels, pack<F32>, multiply<F32>}; }
ProductKernel avx512_bf16() { return {TILE_ROWS, max_panels, pack<Bf16>, multiply<Bf16>}; }

}  // namespace penstock
