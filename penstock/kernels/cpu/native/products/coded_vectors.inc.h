// Products with coded weights for levels with vectors of bytes: AVX2, and AVX-512 with VNNI. Compiled once for each.
//
// A piece of a block is multiplied with some rows and the columns of two registers at a time. Few rows read the codes
// from memory; for many rows they are unpacked once, and stay in the L1 for all tiles.
#include "avx2.inc.h"
#if defined(__AVX512F__)
#include "avx512.inc.h"
#else
#include <immintrin.h>
#endif

#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/coded.inc.h"

constexpr int WIDTH = LANES * 4;                // bytes of a register
constexpr int HALVES = PANEL / LANES / 2;       // pairs of registers that hold the columns of a panel
constexpr int PAIR = 2;
constexpr int NIBBLE_BYTES = 64;                // of a quad
constexpr int FEW_ROWS = 3;                     // most operand rows, of one tile, that read codes from memory
constexpr int LINE = 64;
constexpr int AHEAD_BYTES = 2048;               // of a panel: how far few rows prefetch

constexpr int max_panels(int operand_rows) { return operand_rows <= FEW_ROWS ? MAX_PANELS : 1; }

// The register of a panel's columns that is register c of those from pair `half` on: a pair has columns of the low,
// then of the high nibbles.
constexpr int register_of(int half, int c) { return half + c / PAIR + c % PAIR * HALVES; }

inline Ints load_register(const void* from) {
    Ints result;
    __builtin_memcpy(&result, from, sizeof result);
    return result;
}

PENSTOCK_INLINE Ints all(std::int32_t word) { return Ints{} + word; }

constexpr std::int32_t ONE_WORDS = 0x00010001;

// ---- Dot products of bytes

#if defined(__AVX512F__)

// Four products are added to an int32.
struct Dot {
    static PENSTOCK_INLINE void add(Ints& sum, const Ints& codes, const Ints& x) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    }
    static PENSTOCK_INLINE Ints load_steps(const std::int8_t* from) {
        return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    // Add the sums of a run, times the step of its group.
    static PENSTOCK_INLINE Ints flush(const Ints& sums, const Ints& run, const Ints& steps, bool has_steps) {
        return sums + (has_steps ? run * steps : run);
    }
    // Add the sums of a run of both slices.
    static PENSTOCK_INLINE Ints join(const Ints& sums, const Ints& first, const Ints& second) {
        return sums + first * JOINED_SLICE + second;
    }
    static PENSTOCK_INLINE Ints lookup(const Ints& table, const Ints& codes) {
        return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
    }
    static PENSTOCK_INLINE Ints table_of(__m128i sixteen) { return (Ints)_mm512_broadcast_i32x4(sixteen); }
    // The sums of two products of bytes, unsigned and signed, as words.
    static PENSTOCK_INLINE Ints byte_products(const Ints& unsigned_bytes, const Ints& signed_bytes) {
        return (Ints)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
    }
    // Products of pairs of bytes, unsigned, and words.
    static PENSTOCK_INLINE Ints pair_products(const std::uint8_t* bytes, std::int32_t words) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
        return (Ints)_mm512_madd_epi16(_mm512_cvtepu8_epi16(pairs), _mm512_set1_epi32(words));
    }
};

#else

// Two products each are added to two words, which are multiplied by the step and added to an int32. The words of a code
// that is stored + zero begin with -zero times the sums of their operands, and may wrap around before the end: with
// d = the greatest |code - zero|, so many quads give a word of at most 2 * 127 * d each: 129 / d quads fit. packed.py
// lets d be at most 32 for such codes, and groups have 4 quads if d is above 16 and codes have a zero.
struct Dot {
    static constexpr int MAX_DISTANCE = 129;

    static PENSTOCK_INLINE void add(Ints& words, const Ints& codes, const Ints& x) {
        words = add_byte_products(words, codes, x);
    }
    static PENSTOCK_INLINE Ints load_steps(const std::int8_t* from) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
        const __m256i twice = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0, 1, 4, 5, 4,
                                               5, 8, 9, 8, 9, 12, 13, 12, 13);
        return (Ints)_mm256_shuffle_epi8(wide, twice);
    }
    static PENSTOCK_INLINE Ints flush(const Ints& sums, const Ints& run, const Ints& steps, bool) {
        return add_word_products(sums, run, steps);
    }
    static PENSTOCK_INLINE Ints join(const Ints& sums, const Ints& first, const Ints& second) {
        return add_word_products(add_word_products(sums, first, all(JOINED_SLICE * ONE_WORDS)), second, all(ONE_WORDS));
    }
    static PENSTOCK_INLINE Ints lookup(const Ints& table, const Ints& codes) {
        return (Ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
    }
    static PENSTOCK_INLINE Ints table_of(__m128i sixteen) { return (Ints)_mm256_broadcastsi128_si256(sixteen); }
    static PENSTOCK_INLINE Ints byte_products(const Ints& unsigned_bytes, const Ints& signed_bytes) {
        return (Ints)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
    }
    static PENSTOCK_INLINE Ints pair_products(const std::uint8_t* bytes, std::int32_t words) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        return (Ints)_mm256_madd_epi16(_mm256_cvtepu8_epi16(pairs), _mm256_set1_epi32(words));
    }
};

#endif

constexpr int MAX_RUN = 8;  // quads

// Quads whose products are added before they are flushed: 4 or 8.
inline int run_of(const PenstockWeight& w) {
    int quads = MAX_RUN;
#if !defined(__AVX512F__)
    const int above = largest_code(w) - w.zero;
    if (quads * (above > w.zero ? above : w.zero) > Dot::MAX_DISTANCE) quads /= 2;
#endif
    return quads * QUAD < w.group_size ? quads : w.group_size / QUAD;
}

// ---- The raw codes of a quad: each is a byte, in the two registers of pair HALF. Most functions have some PAIRS, of
// which HALF is the first, and COLUMNS registers.

constexpr int quad_bytes(int bits) { return PANEL * QUAD * bits / 8; }

// How far the two high bits of a code of 6 bits are from bits 4 and 5 of its byte.
template <int HALF>
PENSTOCK_INLINE Ints column_shift() {
    Ints shift;
    for (int lane = 0; lane < LANES; ++lane) shift[lane] = (HALF * LANES + lane) / 8 * 2;
    return shift;
}

template <int BITS, int HALF>
PENSTOCK_INLINE void load_codes(const std::uint8_t* quad, Ints* codes) {
    if constexpr (BITS == 8) {
        for (int c = 0; c < PAIR; ++c) codes[c] = load_register(quad + register_of(HALF, c) * WIDTH);
        return;
    }
    const Ints bytes = load_register(quad + HALF * WIDTH);
    codes[0] = bytes & 0x0f0f0f0f;
    codes[1] = bytes >> 4 & 0x0f0f0f0f;
    if constexpr (BITS == 6) {
#if defined(__AVX512F__)
        const __m256i plane = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quad + NIBBLE_BYTES));
        const Ints high = (Ints)_mm512_broadcast_i64x4(plane);
#else
        const Ints high = load_register(quad + NIBBLE_BYTES);
#endif
        codes[0] |= high << (4 - column_shift<HALF>()) & 0x30303030;
        codes[1] |= high >> column_shift<HALF>() & 0x30303030;
    }
}

// ---- What is multiplied

inline int group_shift(const PenstockWeight& w) { return w.group_size == GRANULE ? 4 : 5; }

// A piece of one panel and one tile.
struct Work {
    const PenstockWeight& weight;
    Piece piece;
    PanelArrays panel;
    const char* operands;    // of the tile
    OperandSums sums;        // of the tile
    int rows;                // of the sums; each is of one or two operand rows
    float* totals;           // [rows][stride]
    float* partial;          // [rows][stride]: the sums of a block between its pieces
    int stride;
    int group_shift;         // a group has 1 << group_shift elements

    const std::uint8_t* quads(int bits) const { return panel.values + piece.k / QUAD * quad_bytes(bits); }
};

// Which rows and columns of a panel are multiplied: ROWS from `row` on, with COLUMNS registers from pair HALF on.
template <int ROWS, int HALF, int COLUMNS>
struct Part {
    const Work& work;
    const int row;

    PENSTOCK_INLINE Floats& at(float* array, int r, int c) const {
        return floats(array + (row + r) * work.stride + register_of(HALF, c) * LANES);
    }

    // Call add(k, stop, sums) for each block of the piece, or for the part of its block, which adds the elements
    // k .. stop - 1 to sums [ROWS][COLUMNS].
    template <class Sums, class Add>
    PENSTOCK_INLINE void each_block(const Add& add) const {
        const Piece& piece = work.piece;
        const std::int64_t end = piece.k + piece.size, size = work.weight.block_size;
        std::int64_t k = piece.k, begin = piece.begin, block = piece.block;
        do {
            const std::int64_t stop = size > 0 && begin + size < end ? begin + size : end;
            Sums sums[ROWS][COLUMNS];
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < COLUMNS; ++c)
                    sums[r][c] = piece.first ? Sums{} : same_bits<Sums>(at(work.partial, r, c));
            add(k, stop, sums);
            if (piece.last) {
                finish(block, begin, stop, [&](int r, int c) { return sums[r][c]; });
            } else {
                for (int r = 0; r < ROWS; ++r)
                    for (int c = 0; c < COLUMNS; ++c) at(work.partial, r, c) = same_bits<Floats>(sums[r][c]);
            }
            k = begin = stop;
            ++block;
        } while (k < end);
    }

    // Add sum(r, c), the sums of a block of the elements begin .. stop - 1, to the totals.
    template <class Sum>
    PENSTOCK_INLINE void finish(std::int64_t block, std::int64_t begin, std::int64_t stop, const Sum& sum) const {
        for (int c = 0; c < COLUMNS; ++c) {
            Floats scales = Floats{} + 1.0f;
            if (work.panel.scales != nullptr)
                scales = load_scales(work.panel.scales, work.weight.scale_type, block, register_of(HALF, c) * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                Floats& total = at(work.totals, r, c);
                total = total + __builtin_convertvector(sum(r, c), Floats) * scales;
            }
        }
        if (work.panel.mins != nullptr) add_mins(block, begin, stop);
    }

  private:
    PENSTOCK_INLINE void add_mins(std::int64_t block, std::int64_t begin, std::int64_t stop) const {
        const PenstockWeight& w = work.weight;
        const std::int32_t* of_rows = work.sums.mins + row;
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = register_of(HALF, c) * LANES;
            const Floats mins = load_scales(work.panel.mins, w.scale_type, block, column);
            Floats factors[ROWS];
            if (work.panel.step_mins == nullptr) {
                for (int r = 0; r < ROWS; ++r)
                    factors[r] = Floats{} + same_bits<float>(of_rows[block * work.rows + r]);
            } else {
                const std::int64_t first = begin / 2 >> work.group_shift, last = (stop / 2) >> work.group_shift;
                Ints products[ROWS] = {};
                for (std::int64_t pair = first; pair < last; ++pair)
                    for (int r = 0; r < ROWS; ++r)
                        products[r] += Dot::pair_products(
                            work.panel.step_mins + (pair * PANEL + column) * 2, of_rows[pair * work.rows + r]);
                for (int r = 0; r < ROWS; ++r) factors[r] = __builtin_convertvector(products[r], Floats);
            }
            for (int r = 0; r < ROWS; ++r) {
                Floats& total = at(work.totals, r, c);
                total = total + factors[r] * mins;
            }
        }
    }
};

// The 16 levels of codes of 4 bits, as bytes: level + zero.
inline Ints byte_table(const PenstockWeight& w) {
    alignas(16) std::uint8_t bytes[MAX_LEVELS];
    for (int i = 0; i < MAX_LEVELS; ++i)
        bytes[i] = static_cast<std::uint8_t>(static_cast<int>(w.levels[i]) + w.zero);
    return Dot::table_of(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Codes whose levels are integers, as bytes that are multiplied with bytes. RUN: as run_of() says. JOINED: whether the
// two slices of a row are joined (coding.py).
template <int CODE_BITS, bool TABLE, int RUN, bool JOINED>
struct ByteCodes {
    static constexpr int BITS = CODE_BITS;
    static constexpr int PIECE = 256;
    static constexpr int SLICES = JOINED ? 2 : 1;  // operand rows of a row of sums
    static constexpr int WHOLE_ROWS = 2 / SLICES;  // most rows that are multiplied with a whole panel at once
    static constexpr int BLOCK_ROWS = 6 / SLICES;  // most rows whose sums stay in registers with the columns of a pair
    template <int COLUMNS>
    using Quad = Ints[COLUMNS][1];

    Ints table;

    explicit ByteCodes(const PenstockWeight& w) : table(byte_table(w)) {}

    template <int HALF, int COLUMNS>
    PENSTOCK_INLINE void unpack(const std::uint8_t* quad, Quad<COLUMNS>& to) const {
        load_codes<BITS, HALF>(quad, to[0]);
        if constexpr (COLUMNS > PAIR) load_codes<BITS, HALF + 1>(quad, to[PAIR]);
        if constexpr (TABLE)
            for (int c = 0; c < COLUMNS; ++c) to[c][0] = Dot::lookup(table, to[c][0]);
    }

    // Multiply RUN quads. load(i, Quad&) gives the codes of quad i.
    template <int ROWS, int COLUMNS, class Load>
    static PENSTOCK_INLINE void multiply_run(const std::int32_t* start, const std::int32_t* x, int operands,
                                             const Load& load, Ints (&run)[ROWS * SLICES][COLUMNS]) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS * SLICES; ++r)
            for (int c = 0; c < COLUMNS; ++c) run[r][c] = all(start[r]);
#pragma GCC unroll 8
        for (int i = 0; i < RUN; ++i, x += operands) {
            Quad<COLUMNS> codes;
            load(i, codes);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS * SLICES; ++r) {
                const Ints of_row = all(x[r]);
                for (int c = 0; c < COLUMNS; ++c) Dot::add(run[r][c], codes[c][0], of_row);
            }
        }
    }

    // load(quad, Quad&) gives the codes of a quad of the piece.
    template <int ROWS, int HALF, int COLUMNS, class Load>
    PENSTOCK_INLINE void add_rows(const Work& work, int row, const Load& load) const {
        static constexpr std::int32_t ZEROS[ROWS * SLICES] = {};
        const PenstockWeight& w = work.weight;
        const Piece& piece = work.piece;
        const int operands = work.rows * SLICES;
        const std::int64_t first_group = piece.k >> work.group_shift;
        const auto* x = reinterpret_cast<const std::int32_t*>(work.operands + piece.k * operands) + row * SLICES;
        const std::int32_t* starts = work.sums.starts + first_group * operands + row * SLICES;
        const std::int8_t* steps = w.steps == nullptr ? nullptr : work.panel.steps + first_group * PANEL;
        int quad = 0;
        Ints run[ROWS * SLICES][COLUMNS];
        const auto multiply = [&](const std::int32_t* start) __attribute__((always_inline)) {
            multiply_run<ROWS, COLUMNS>(
                start, x, operands,
                [&](int i, auto& to) __attribute__((always_inline)) { load(quad + i, to); }, run);
            x += RUN * operands;
            quad += RUN;
        };
        // The sums of a run, times the step of the columns of register c, added to `sum`.
        const auto flushed = [&](const Ints& sum, int r, int c, const Ints& step) __attribute__((always_inline)) {
            if constexpr (JOINED) return Dot::join(sum, run[2 * r][c], run[2 * r + 1][c]);
            return Dot::flush(sum, run[r][c], step, steps != nullptr);
        };
        const Part<ROWS, HALF, COLUMNS> part{work, row};
        if (w.block_size == RUN * QUAD && steps == nullptr) {
            std::int64_t block = piece.block;
            for (std::int64_t k = piece.k; k < piece.k + piece.size; k += RUN * QUAD, starts += operands, ++block) {
                multiply(starts);
                part.finish(block, k, k + RUN * QUAD, [&](int r, int c) __attribute__((always_inline)) {
                    return flushed(Ints{}, r, c, all(ONE_WORDS));
                });
            }
            return;
        }
        part.template each_block<Ints>([&](std::int64_t k, std::int64_t stop, Ints (&sums)[ROWS][COLUMNS])
                                           __attribute__((always_inline)) {
            for (; k < stop; k += w.group_size, starts += operands) {
                const std::int32_t* start = starts;
                for (const int end = quad + w.group_size / QUAD; quad < end; start = ZEROS) {
                    multiply(start);
                    for (int c = 0; c < COLUMNS; ++c) {
                        Ints step = all(ONE_WORDS);
                        if (steps != nullptr) step = Dot::load_steps(steps + register_of(HALF, c) * LANES);
#pragma GCC unroll 6
                        for (int r = 0; r < ROWS; ++r) sums[r][c] = flushed(sums[r][c], r, c, step);
                    }
                }
                if (steps != nullptr) steps += PANEL;
            }
        });
    }
};

#if !defined(__AVX512F__)

// Codes whose levels are integers and may be as large as a byte, as words that are multiplied with words.
template <int CODE_BITS, bool TABLE>
struct WordCodes {
    static constexpr int BITS = CODE_BITS;
    static constexpr int PIECE = 256;
    static constexpr int SLICES = 1, WHOLE_ROWS = 2, BLOCK_ROWS = 6;
    static constexpr int PARTS = 2;  // elements 0 and 2, and elements 1 and 3 of a quad
    template <int COLUMNS>
    using Quad = Ints[COLUMNS][PARTS];

    Ints table;

    explicit WordCodes(const PenstockWeight& w) : table(byte_table(w)) {}

    template <int HALF, int COLUMNS>
    PENSTOCK_INLINE void unpack(const std::uint8_t* quad, Quad<COLUMNS>& to) const {
        Ints codes[COLUMNS];
        load_codes<BITS, HALF>(quad, codes);
        if constexpr (COLUMNS > PAIR) load_codes<BITS, HALF + 1>(quad, codes + PAIR);
        for (int c = 0; c < COLUMNS; ++c) {
            if constexpr (TABLE) codes[c] = Dot::lookup(table, codes[c]);
            to[c][0] = codes[c] & 0x00ff00ff;
            to[c][1] = (Ints)_mm256_srli_epi16((__m256i)codes[c], 8);
        }
    }

    template <int ROWS, int HALF, int COLUMNS, class Load>
    PENSTOCK_INLINE void add_rows(const Work& work, int row, const Load& load) const {
        const PenstockWeight& w = work.weight;
        const int rows = work.rows;
        const std::int64_t first_group = work.piece.k >> work.group_shift;
        const char* const operands = work.operands + work.piece.k * rows * PARTS;
        const auto* x = reinterpret_cast<const std::int32_t*>(operands) + row * PARTS;
        const std::int32_t* starts = work.sums.starts + first_group * rows + row;
        const std::int8_t* steps = w.steps == nullptr ? nullptr : work.panel.steps + first_group * PANEL;
        constexpr int UNROLLED = 4;
        int quad = 0;
        const Part<ROWS, HALF, COLUMNS> part{work, row};
        part.template each_block<Ints>([&](std::int64_t k, std::int64_t stop, Ints (&sums)[ROWS][COLUMNS])
                                           __attribute__((always_inline)) {
            for (; k < stop; k += w.group_size, starts += rows) {
                Ints group[ROWS][COLUMNS];
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r)
                    for (int c = 0; c < COLUMNS; ++c) group[r][c] = all(starts[r]);
                for (const int end = quad + w.group_size / QUAD; quad < end; quad += UNROLLED) {
#pragma GCC unroll 4
                    for (int i = 0; i < UNROLLED; ++i, x += rows * PARTS) {
                        Quad<COLUMNS> codes;
                        load(quad + i, codes);
#pragma GCC unroll 2
                        for (int p = 0; p < PARTS; ++p)
#pragma GCC unroll 6
                            for (int r = 0; r < ROWS; ++r) {
                                const Ints of_row = all(x[r * PARTS + p]);
                                for (int c = 0; c < COLUMNS; ++c)
                                    group[r][c] = add_word_products(group[r][c], codes[c][p], of_row);
                            }
                    }
                }
                for (int c = 0; c < COLUMNS; ++c) {
                    Ints step = all(1);
                    if (steps != nullptr)
                        step = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(
                            reinterpret_cast<const __m128i*>(steps + register_of(HALF, c) * LANES)));
                    for (int r = 0; r < ROWS; ++r)
                        sums[r][c] += steps != nullptr ? group[r][c] * step : group[r][c];
                }
                if (steps != nullptr) steps += PANEL;
            }
        });
    }
};

#endif

#include "products/coded_floats.inc.h"

// ---- The loops

// Prefetches of the weights that follow, a part at a time.
struct Prefetch {
    const std::uint8_t* next;
    std::int64_t bytes;  // per part

    void fetch_some() {
        for (std::int64_t byte = 0; byte < bytes; byte += LINE) prefetch_to_l2(next + byte);
        next += bytes;
    }
};

// Prefetch the scales, mins and steps of a piece as long as `piece` that begins with element k and block `block`.
inline void prefetch_arrays(
    const PenstockWeight& w, const PanelArrays& panel, const Piece& piece, std::int64_t k, std::int64_t block) {
    const auto fetch = [](const void* array, std::int64_t from, std::int64_t bytes) {
        const char* at = static_cast<const char*>(array) + from;
        for (std::int64_t byte = 0; byte < bytes; byte += LINE) prefetch_to_l2(at + byte);
    };
    const std::int64_t of_block = PANEL * scale_bytes(w.scale_type);
    const std::int64_t blocks = panel.scales == nullptr ? 0 : piece.size / w.block_size;
    const std::int64_t bytes = (blocks > 0 ? blocks : 1) * of_block;
    if (panel.scales != nullptr) fetch(panel.scales, block * of_block, bytes);
    if (panel.mins != nullptr) fetch(panel.mins, block * of_block, bytes);
    const std::int64_t group = k / w.group_size, of_steps = piece.size / w.group_size * PANEL;
    if (panel.steps != nullptr) fetch(panel.steps, group * PANEL, of_steps);
    if (panel.step_mins != nullptr) fetch(panel.step_mins, group * PANEL, of_steps);
}

// Multiply all rows of a tile that has few with the columns from pair HALF on, and prefetch the codes from `ahead` on.
template <int ROWS, int HALF, class Codes>
PENSTOCK_INLINE void multiply_few(const Work& work, const Codes& codes, const std::uint8_t* ahead) {
    constexpr int COLUMNS = ROWS <= Codes::WHOLE_ROWS ? PANEL / LANES : PAIR;
    const std::uint8_t* const quads = work.quads(Codes::BITS);
    codes.template add_rows<ROWS, HALF, COLUMNS>(work, 0, [&](int quad, auto& to) __attribute__((always_inline)) {
        const int at = quad * quad_bytes(Codes::BITS);
        if constexpr (HALF == 0)
            for (int byte = 0; byte < quad_bytes(Codes::BITS); byte += LINE) prefetch_to_l2(ahead + at + byte);
        codes.template unpack<HALF, COLUMNS>(quads + at, to);
    });
    if constexpr (HALF + COLUMNS / PAIR < HALVES) multiply_few<ROWS, HALF + 1>(work, codes, ahead);
}

// Add the products of a leaf of one tile with few rows. The panels are read in turn, a group of each: a core keeps more
// lines from memory in flight if they belong to several streams.
template <int ROWS, class Codes>
void multiply_few(const MultiplyArgs& a, const LeafRange& leaf, std::int64_t first_block, const Codes& codes,
                  const PanelArrays* panels, const OperandSums& sums, float* totals, float* partial) {
    constexpr int AHEAD = AHEAD_BYTES / (Codes::BITS * PANEL / 8) / MAX_GROUP * MAX_GROUP;  // elements
    const PenstockWeight& w = *a.weight;
    const std::int64_t blocks = blocks_of(w), skipped = a.panels - 1;
    each_piece(w, leaf, first_block, MAX_GROUP, [&](const Piece& piece) {
        // What follows the end of the panel is the beginning of the panel that is read after it.
        std::int64_t k = piece.k + AHEAD, block = piece.block;
        if (w.block_size > 0) block += w.block_size < AHEAD ? AHEAD / w.block_size : 1;
        if (k >= w.padded_k) k += skipped * w.padded_k;
        if (block >= blocks) block += skipped * blocks;
        for (int p = 0; p < a.panels; ++p) {
            const Work work{w, piece, panels[p], static_cast<const char*>(a.tile), sums, ROWS, totals + p * PANEL,
                            partial + p * PANEL, a.panels * PANEL, group_shift(w)};
            prefetch_arrays(w, panels[p], piece, k, block);
            multiply_few<ROWS, 0>(work, codes, panels[p].values + k / QUAD * quad_bytes(Codes::BITS));
        }
    });
}

// Register by register: GCC copies larger memory through the stack in smaller parts, which stalls.
template <class Register, int ROWS, int COLUMNS>
PENSTOCK_INLINE void copy(const Register (&from)[ROWS][COLUMNS], Register (&to)[ROWS][COLUMNS]) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) to[i][c] = from[i][c];
}

// As FloatCodes::unpack() calls take.
template <int ROWS, int COLUMNS, class Take>
PENSTOCK_INLINE void copy(const Floats (&from)[ROWS][COLUMNS], const Take& take) {
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
        take(i, [&](int c) __attribute__((always_inline)) { return from[i][c]; });
}

template <int HALF, class Codes>
inline void multiply_half(
    const MultiplyArgs& a, Work work, const Codes& codes, std::int64_t totals_stride, Prefetch& prefetch) {
    typename Codes::template Quad<PAIR> unpacked[Codes::PIECE / QUAD];
    const std::uint8_t* const quads = work.quads(Codes::BITS);
    for (int quad = 0; quad < work.piece.size / QUAD; ++quad)
        codes.template unpack<HALF, PAIR>(quads + quad * quad_bytes(Codes::BITS), unpacked[quad]);
    const auto load = [&](int quad, auto& to) __attribute__((always_inline)) { copy(unpacked[quad], to); };
    for (int tile = 0; tile < a.tiles; ++tile) {
        for (int row = 0; row < work.rows; row += Codes::BLOCK_ROWS) {
            prefetch.fetch_some();
            with_constant<Codes::BLOCK_ROWS>(work.rows - row, [&](auto some) {
                codes.template add_rows<decltype(some)::value, HALF, PAIR>(work, row, load);
            });
        }
        work.operands += a.tile_stride;
        work.sums.starts += a.sums_stride;
        work.sums.mins += a.sums_stride;
        work.totals += totals_stride;
        work.partial += totals_stride;
    }
}

// Add the products of a leaf of all tiles with one panel.
template <class Codes>
void multiply_many(const MultiplyArgs& a, const LeafRange& leaf, std::int64_t first_block, const Codes& codes,
                   const PanelArrays* panels, const OperandSums& sums, float* totals, float* partial) {
    const PenstockWeight& w = *a.weight;
    const int rows = sum_rows(w, a.rows), blocks_of_rows = (rows + Codes::BLOCK_ROWS - 1) / Codes::BLOCK_ROWS;
    const int parts = HALVES * a.tiles * blocks_of_rows;
    each_piece(w, leaf, first_block, Codes::PIECE, [&](const Piece& piece) {
        // The piece that follows in the panel, or the first of the panel that follows, is prefetched.
        const std::int64_t k = piece.k + piece.size, bytes = piece.size / QUAD * std::int64_t{quad_bytes(Codes::BITS)};
        const std::int64_t blocks_done = w.block_size > 0 ? (k - piece.begin) / w.block_size : 0;
        const Work work{w, piece, *panels, static_cast<const char*>(a.tile), sums, rows, totals, partial, PANEL,
                        group_shift(w)};
        prefetch_arrays(w, *panels, piece, k, piece.block + blocks_done);
        Prefetch prefetch{work.quads(Codes::BITS) + bytes, (bytes / parts + LINE - 1) / LINE * LINE};
        multiply_half<0>(a, work, codes, rows * PANEL, prefetch);
        if constexpr (HALVES > 1) multiply_half<HALVES - 1>(a, work, codes, rows * PANEL, prefetch);
    });
}

template <class Codes>
void multiply_codes(const MultiplyArgs& a) {
    const PenstockWeight& w = *a.weight;
    const Codes codes(w);
    const int rows = sum_rows(w, a.rows), columns = a.panels * PANEL, totals_stride = rows * columns;
    const std::int64_t blocks = blocks_of(w);
    const bool few = operand_rows(a) <= FEW_ROWS;
    alignas(64) float totals[MAX_TOTALS], partial[MAX_TOTALS];
    const OperandSums sums = operand_sums(w, const_cast<std::int32_t*>(a.sums), operand_rows(a));
    PanelArrays panels[MAX_PANELS];
    for (int p = 0; p < a.panels; ++p) panels[p] = panel_of(w, a.first_panel + p, blocks);
    std::int64_t first_block = 0;
    each_leaf(w, [&](const LeafRange& leaf) {
        __builtin_memset(totals, 0, sizeof totals[0] * static_cast<std::size_t>(a.tiles * totals_stride));
        if (few)
            with_constant<FEW_ROWS / Codes::SLICES>(rows, [&](auto some) {
                multiply_few<decltype(some)::value>(a, leaf, first_block, codes, panels, sums, totals, partial);
            });
        else
            multiply_many(a, leaf, first_block, codes, panels, sums, totals, partial);
        for (int tile = 0; tile < a.tiles; ++tile)
            end_leaf(a, leaf.index, tile, 0, rows / a.rows, columns, totals + tile * totals_stride);
        first_block += blocks_of(w, leaf.padded);
    });
}

template <int BITS, bool TABLE>
void multiply_bytes(const MultiplyArgs& a) {
    const bool joined = a.weight->joined != 0;
    if (run_of(*a.weight) == MAX_RUN)
        return (joined ? multiply_codes<ByteCodes<BITS, TABLE, MAX_RUN, true>>
                       : multiply_codes<ByteCodes<BITS, TABLE, MAX_RUN, false>>)(a);
    return (joined ? multiply_codes<ByteCodes<BITS, TABLE, MAX_RUN / 2, true>>
                   : multiply_codes<ByteCodes<BITS, TABLE, MAX_RUN / 2, false>>)(a);
}

void multiply_integers(const MultiplyArgs& a) {
    const PenstockWeight& w = *a.weight;
#if defined(__AVX512F__)
    if (w.code_bits == 8) return multiply_bytes<8, false>(a);
#else
    if (w.code_bits == 8) return multiply_codes<WordCodes<8, false>>(a);
    if (has_word_operands(w)) return multiply_codes<WordCodes<4, true>>(a);
#endif
    if (w.code_bits == 6) return multiply_bytes<6, false>(a);
    if (w.has_levels != 0) return multiply_bytes<4, true>(a);
    multiply_bytes<4, false>(a);
}

void multiply_floats(const MultiplyArgs& a) {
    if (a.weight->code_bits == 4) return multiply_codes<FloatCodes<4, 0>>(a);
    if (a.weight->mantissa_bits == 3) return multiply_codes<FloatCodes<8, 3>>(a);
    multiply_codes<FloatCodes<8, 2>>(a);
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_CODED_FLOAT>() {
    return {TILE_ROWS, sizeof(float), max_panels, pack_floats, multiply_floats};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_CODED>() {
    return {TILE_ROWS, OPERAND_BYTES, max_panels, pack_integers, multiply_integers};
}

}  // namespace penstock
