// Products with int4 weights in AVX2: blocks of rows and columns whose sums stay in registers.

#include <immintrin.h>

#include "avx2.inc.h"
#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int4.inc.h"

constexpr int HALVES = 2;               // of the packed bytes of a quad: each has two registers of columns
constexpr int BLOCK_ROWS = 6;           // rows whose sums stay in registers with the columns of one half
constexpr int FEW_ROWS = 2;             // the same with the columns of both halves

inline Floats load_scales(const std::uint16_t* scales) { return same_bits<Floats>(load_bits(scales)); }

// Half of the packed bytes of a quad. Low nibbles are the columns from 8 half on, high nibbles those from 16 + 8 half.
inline Ints load_packed(const std::uint8_t* values, int quad, int half) {
    Ints bytes;
    __builtin_memcpy(&bytes, values + quad * QUAD_BYTES + half * sizeof bytes, sizeof bytes);
    return bytes;
}

// The register of a panel's row that is column c of a block that begins with `half`.
constexpr int vector_of(int half, int c) { return half + c / 2 + c % 2 * HALVES; }

// Add the sums of a group of one panel, [ROWS][COLUMNS], to its totals. A panel that is not the first has one row.
template <int ROWS, int COLUMNS, class Sums>
inline void add_totals(const Group& g, int half, int row, const Sums (&sums)[ROWS][COLUMNS], int panel = 0) {
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) {
        const int v = vector_of(half, c);
        const Floats scales = load_scales(g.scales + panel * g.scales_stride + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Floats& total = floats(g.totals + (panel + row + r) * PANEL + v * LANES);
            total = total + __builtin_convertvector(sums[r][c], Floats) * scales;
        }
    }
}

// Activations in int8, a tile [padded_k / 4][rows][4].
struct Int8Rows {
    static constexpr int ELEMENT = 1, STREAMS = MAX_PANELS;
    static constexpr int STREAM_AHEAD = 320;  // prefetch distance in each of several panels, bytes
    static constexpr int QUADS_AT_ONCE = 8;  // sums of two products fit in 16 bits: 8 * 2 * 15 * 127 < 2^15

    // Some rows of a group, with the columns of SOME halves.
    template <int ROWS, int SOME>
    static void add_rows(const Group& g, int half, int row, int rows) {
        constexpr int COLUMNS = 2 * SOME;
        const auto* quads = static_cast<const std::int32_t*>(g.operands) + row;
        Ints sums[ROWS][COLUMNS];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Ints{} - 8 * g.sums[row + r];  // stored: weight + 8
        for (int first = 0; first < g.size / QUAD; first += QUADS_AT_ONCE) {
            Ints shorts[ROWS][COLUMNS] = {};  // sixteen of 16 bits
            for (int quad = first; quad < first + QUADS_AT_ONCE; ++quad) {
                Ints weights[COLUMNS];
                for (int i = 0; i < SOME; ++i) {
                    const Ints bytes = load_packed(g.values, quad, half + i);
                    weights[2 * i] = bytes & 0x0f0f0f0f;
                    weights[2 * i + 1] = bytes >> 4 & 0x0f0f0f0f;
                }
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r) {
                    const Ints x = Ints{} + quads[quad * rows + r];
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; ++c) shorts[r][c] = add_byte_products(shorts[r][c], weights[c], x);
                }
            }
            const Ints ones = (Ints)_mm256_set1_epi16(1);
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < COLUMNS; ++c) sums[r][c] = add_word_products(sums[r][c], shorts[r][c], ones);
        }
        add_totals(g, half, row, sums);
    }

    // A single row, one quad of each panel in turn: a core keeps more lines from memory in flight if they belong to
    // several streams.
    template <int PANELS>
    static void add_streams(const Group& g) {
        constexpr int COLUMNS = 2 * HALVES;
        const auto* quads = static_cast<const std::int32_t*>(g.operands);
        Ints sums[PANELS][1][COLUMNS];
        for (int p = 0; p < PANELS; ++p)
            for (int c = 0; c < COLUMNS; ++c) sums[p][0][c] = Ints{} - 8 * g.sums[0];
        for (int first = 0; first < g.size / QUAD; first += QUADS_AT_ONCE) {
            Ints shorts[PANELS][COLUMNS] = {};
            for (int quad = first; quad < first + QUADS_AT_ONCE; ++quad) {
                const Ints x = Ints{} + quads[quad];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; ++p) {
                    const std::uint8_t* values = g.values + p * g.values_stride;
                    prefetch_to_l2(values + quad * QUAD_BYTES + STREAM_AHEAD);
#pragma GCC unroll 2
                    for (int half = 0; half < HALVES; ++half) {
                        const Ints bytes = load_packed(values, quad, half);
                        Ints& low = shorts[p][2 * half];
                        Ints& high = shorts[p][2 * half + 1];
                        low = add_byte_products(low, bytes & 0x0f0f0f0f, x);
                        high = add_byte_products(high, bytes >> 4 & 0x0f0f0f0f, x);
                    }
                }
            }
            for (int p = 0; p < PANELS; ++p)
                for (int c = 0; c < COLUMNS; ++c)
                    sums[p][0][c] = add_word_products(sums[p][0][c], shorts[p][c], (Ints)_mm256_set1_epi16(1));
        }
        for (int p = 0; p < PANELS; ++p) add_totals(g, 0, 0, sums[p], p);
    }

    static void add_group(const Group& g, int rows) {
        if (rows <= FEW_ROWS)
            return with_constant<FEW_ROWS>(rows, [&](auto some) { add_rows<some.value, HALVES>(g, 0, 0, rows); });
        for (int half = 0; half < HALVES; ++half)
            for (int row = 0; row < rows; row += BLOCK_ROWS)
                with_constant<BLOCK_ROWS>(
                    rows - row, [&](auto some) { add_rows<some.value, 1>(g, half, row, rows); });
    }
};

// Activations in bfloat16, widened: a tile [padded_k][rows] of float32.
struct Bf16Rows {
    static constexpr int ELEMENT = 4, STREAMS = 1;  // more panels do not help: it waits for arithmetic, not for memory

    // The weights of one element of K, [2 * SOME], from packed bytes whose nibbles have their sign in the highest bit.
    template <int SOME>
    static PENSTOCK_INLINE void unpack(const Ints (&nibbles)[SOME], int i, Floats* weights) {
        for (int h = 0; h < SOME; ++h) {
            weights[2 * h] = __builtin_convertvector(nibbles[h] << (28 - 8 * i) >> 28, Floats);
            weights[2 * h + 1] = __builtin_convertvector(nibbles[h] << (24 - 8 * i) >> 28, Floats);
        }
    }

    template <int SOME>
    static PENSTOCK_INLINE void load_nibbles(const Group& g, int quad, int half, Ints (&nibbles)[SOME]) {
        for (int h = 0; h < SOME; ++h)
            nibbles[h] = load_packed(g.values, quad, half + h) ^ (Ints{} + static_cast<int>(0x88888888));
    }

    template <int ROWS, int COLUMNS>
    static PENSTOCK_INLINE void add_element(const float* x, const Floats* weights, Floats (&sums)[ROWS][COLUMNS]) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const Floats row = x[r] - Floats{};
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = add_float_products(sums[r][c], weights[c], row);
        }
    }

    // All rows with the columns of SOME halves: weights are unpacked in registers.
    template <int ROWS, int SOME>
    static void add_block(const Group& g, int half) {
        const auto* x = static_cast<const float*>(g.operands);
        Floats sums[ROWS][2 * SOME] = {};
        for (int quad = 0; quad < g.size / QUAD; ++quad) {
            Ints nibbles[SOME];
            load_nibbles(g, quad, half, nibbles);
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; ++i, x += ROWS) {
                Floats weights[2 * SOME];
                unpack(nibbles, i, weights);
                add_element(x, weights, sums);
            }
        }
        add_totals(g, half, 0, sums);
    }

    template <int ROWS>
    static void add_rows(const Group& g, const Floats (*weights)[2], int half, int row, int rows) {
        const auto* x = static_cast<const float*>(g.operands) + row;
        Floats sums[ROWS][2] = {};
        for (int k = 0; k < g.size; ++k, x += rows) add_element(x, weights[k], sums);
        add_totals(g, half, row, sums);
    }

    static void add_group(const Group& g, int rows) {
        if (rows <= FEW_ROWS)
            return with_constant<FEW_ROWS>(rows, [&](auto some) { add_block<some.value, HALVES>(g, 0); });
        for (int half = 0; half < HALVES; ++half) {
            if (rows <= BLOCK_ROWS) {
                with_constant<BLOCK_ROWS>(rows, [&](auto some) { add_block<some.value, 1>(g, half); });
                continue;
            }
            Floats weights[MAX_GROUP][2];
            for (int quad = 0; quad < g.size / QUAD; ++quad) {
                Ints nibbles[1];
                load_nibbles(g, quad, half, nibbles);
#pragma GCC unroll 4
                for (int i = 0; i < QUAD; ++i) unpack(nibbles, i, weights[quad * QUAD + i]);
            }
            for (int row = 0; row < rows; row += BLOCK_ROWS)
                with_constant<BLOCK_ROWS>(rows - row, [&](auto some) {
                    add_rows<some.value>(g, weights, half, row, rows);
                });
        }
    }
};

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4>() { return group_kernel<Int8Rows>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4_A16>() { return group_kernel<Bf16Rows>(); }

}  // namespace penstock
