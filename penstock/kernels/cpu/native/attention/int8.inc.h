// Attention with an int8 cache, without turning a stored integer back into a float: the few rows on the other side, of
// queries and of probabilities, are written as int8 slices instead, and the products are of integers, exact on every
// level (the antiquantisation of Huawei's IncreFlashAttention operator). quant/kv.py specifies integers and slices.
//
// A stored integer B stands for (B + offset) * scale. With x = scale * (q0 + q1 / 254 + q2 / 254^2) a sliced row, and
// d0, d1, d2 the dot products of its slices with B, v = (d0 + d1 * (1/254) + d2 * (1/254^2)) * scale. Then
//
//            scales of tokens                                   scales of channels
//   score    (v + (key offset * sum of the slices)) * key scale  v + sum of (x * key offset), x = query * key scales
//   o        v + sum of (x * value offset), x = p * value scale  (v + (value offset * sum of x)) * value scale, x = p
//
// with every operation rounded by itself and none fused. (Tokens' sum of the slices is what all of them stand for.)
//
// Included by a file for each level, which brings a Dot:
//     static constexpr int EXCESS;  // how much multiply() takes a stored byte for too much: 128, or 0
//     template <int OPERANDS, int QUADS, class Find>
//     static void multiply(int runs, std::int64_t step, const Find& find, const std::int32_t* start,
//                          I32x16 (*sums)[2]);
// multiply adds, to the start of each of OPERANDS int8 rows, its products with two vectors of stored integers. A vector
// holds 16 lanes of 4 bytes, each multiplied with the same 4 of the row; there are QUADS of them, `step` bytes apart,
// in each of so many runs. find(run) says where one lies.
#pragma once

#include "attention/tile.inc.h"

namespace penstock {
namespace {

constexpr int QUAD = 4;             // elements that are multiplied and added in one lane
constexpr int LINE = LANES * QUAD;  // bytes of a vector of stored integers
constexpr int STORED_EXCESS = 128;  // bytes are stored unsigned
constexpr int STRIP_ROWS = 4;
constexpr int MAX_SLICES = 3;

constexpr float LARGEST = 127.0f;
constexpr float SLICE_RATIO = 254.0f;  // what rounding leaves is at most 1/2, that is 127 of the next slice
constexpr float SECOND_SLICE = 1.0f / 254.0f;
constexpr float THIRD_SLICE = 1.0f / (254.0f * 254.0f);

// Added to a float below 2^22 it pushes the fraction out, to nearest even; what remains in the low bits is the integer.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23
constexpr std::int32_t ROUNDER_BITS = 0x4B400000;

constexpr std::int32_t INFINITY_BITS = 0x7F800000;
constexpr std::int32_t SMALLEST_ROW_BITS = (127 - 118) << 23;  // 2^-118
constexpr std::int32_t TOO_GREAT_BITS = (127 + 100) << 23;     // 2^100
constexpr float SMALLEST_HALF = 7.888609052210118e-31f;        // 2^-100

// ---- Lanes

// To nearest, ties to even; for |x| up to 2^22.
PENSTOCK_INLINE I32x16 round(F32x16 x) {
#if defined(__AVX512F__)
    I32x16 result;
    result.part[0] = (IntPart)_mm512_maskz_cvtps_epi32(0xFFFF, x.part[0]);
    return result;
#else
    return bits_as<I32x16>(x + ROUNDER) - ROUNDER_BITS;
#endif
}

PENSTOCK_INLINE I32x16 max(I32x16 a, I32x16 b) { return select(a > b, a, b); }

PENSTOCK_INLINE I32x16 magnitude_bits(F32x16 x) { return bits_as<I32x16>(abs(x)); }

// 16 small integers as bytes.
PENSTOCK_INLINE void store_bytes(std::int8_t* to, I32x16 a) {
    typedef std::int8_t BytePart __attribute__((vector_size(PART_LANES)));
    for (int i = 0; i < PARTS; ++i) {
        const BytePart bytes = __builtin_convertvector(a.part[i], BytePart);
        __builtin_memcpy(to + i * PART_LANES, &bytes, sizeof bytes);
    }
}

// 64 of them, 32 here and 32 there.
PENSTOCK_INLINE void store_tile_bytes(std::int8_t* first, std::int8_t* last, const I32x16 (&a)[TILE_LANES]) {
#if defined(__AVX512F__)
    constexpr __mmask16 ALL = 0xFFFF;
    const __m512i low = _mm512_packs_epi32((__m512i)a[0].part[0], (__m512i)a[1].part[0]);
    const __m512i high = _mm512_packs_epi32((__m512i)a[2].part[0], (__m512i)a[3].part[0]);
    const __m512i quads = _mm512_packs_epi16(low, high);  // each quarter has four bytes of each
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_maskz_permutexvar_epi32(ALL, order, quads);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_maskz_extracti64x4_epi64(0xFF, bytes, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(last), _mm512_maskz_extracti64x4_epi64(0xFF, bytes, 1));
#else
    for (int i = 0; i < TILE_LANES; ++i) store_bytes((i < 2 ? first : last) + i % 2 * LANES, a[i]);
#endif
}

struct AddLanes {
    template <class T>
    PENSTOCK_INLINE T operator()(T a, T b) const { return a + b; }
};

struct GreaterLanes {
    PENSTOCK_INLINE IntPart operator()(IntPart a, IntPart b) const { return a > b ? a : b; }
};

template <int DISTANCE, class Part>
PENSTOCK_INLINE Part turned(Part a) {
    IntPart from;
    for (int i = 0; i < PART_LANES; ++i) from[i] = (i + DISTANCE) % PART_LANES;
    return __builtin_shuffle(a, from);
}

// All lanes taken together, in every lane: lane i with lane i + 8, then i + 4, i + 2, i + 1.
template <class Op, class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> over_lanes(Lanes<Part, Scalar> a) {
    const Op op;
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.part[i] = op(a.part[i], a.part[i + half]);
    Part all = a.part[0];
    if constexpr (PART_LANES > 8) all = op(all, turned<8>(all));
    if constexpr (PART_LANES > 4) all = op(all, turned<4>(all));
    all = op(all, turned<2>(all));
    all = op(all, turned<1>(all));
    for (int i = 0; i < PARTS; ++i) a.part[i] = all;
    return a;
}

// The same for four rows at once: row r's in lanes 4 r .. 4 r + 3.
template <class Op, class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> over_rows(const Lanes<Part, Scalar> (&row)[STRIP_ROWS]) {
#if defined(__AVX512F__)
    const Op op;
    constexpr int FIRST = 0x44, LAST = 0xEE, EVEN = 0x88, ODD = 0xDD;  // quarters of two registers
#define PENSTOCK_QUARTERS(a, b, which) (Part) _mm512_maskz_shuffle_i32x4(0xFFFF, (__m512i)(a), (__m512i)(b), which)
    const Part r0 = row[0].part[0], r1 = row[1].part[0], r2 = row[2].part[0], r3 = row[3].part[0];
    const Part low = op(PENSTOCK_QUARTERS(r0, r1, FIRST), PENSTOCK_QUARTERS(r0, r1, LAST));
    const Part high = op(PENSTOCK_QUARTERS(r2, r3, FIRST), PENSTOCK_QUARTERS(r2, r3, LAST));
    const Part four = op(PENSTOCK_QUARTERS(low, high, EVEN), PENSTOCK_QUARTERS(low, high, ODD));
#undef PENSTOCK_QUARTERS
    const IntPart by_two = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
    const IntPart by_one = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const Part two = op(four, __builtin_shuffle(four, by_two));
    Lanes<Part, Scalar> result;
    result.part[0] = op(two, __builtin_shuffle(two, by_one));
    return result;
#else
    Lanes<Part, Scalar> result = over_lanes<Op>(row[0]);
    for (int r = 1; r < STRIP_ROWS; ++r) result = select((lane_index() >> 2) == r, over_lanes<Op>(row[r]), result);
    return result;
#endif
}

// ---- Slices

// An operand: int8 rows in chunks of 32 elements, [chunks][operand rows][32]; slice s of row r is operand row
// r * slices + s.
constexpr int CHUNK = 32;

// What slices count for, and what an element is multiplied with; a factor of 0 says that all slices are zeros.
struct RowScales {
    F32x16 scale, factor;
};

// From the bits of rows' greatest |x|: as integers they are in the order of the values, with infinity and NaN on top.
PENSTOCK_INLINE RowScales row_scales(I32x16 greatest_bits) {
    const F32x16 a = bits_as<F32x16>(greatest_bits), none = 0.0f;
    const I32x16 finite = greatest_bits < INFINITY_BITS, usable = finite & (greatest_bits >= SMALLEST_ROW_BITS);
    return {select(usable, a / LARGEST, select(finite, none, F32x16(__builtin_nanf("")))),
            select(usable, LARGEST / a, none)};
}

// The first slice of elements; what it leaves becomes `rest`, in units of the next one.
PENSTOCK_INLINE I32x16 take_slice(F32x16& rest) {
    const I32x16 slice = round(rest);
    rest = (rest - to_float(slice)) * SLICE_RATIO;
    return slice;
}

PENSTOCK_INLINE F32x16 first_rest(F32x16 x, F32x16 factor) { return select(factor != 0.0f, x * factor, F32x16(0.0f)); }

// What integers of all slices come to.
template <int SLICES>
PENSTOCK_INLINE F32x16 combine(const I32x16* of_slice, F32x16 scale) {
    F32x16 value = to_float(of_slice[0]);
    if (SLICES > 1) value = value + to_float(of_slice[1]) * SECOND_SLICE;
    if (SLICES > 2) value = value + to_float(of_slice[2]) * THIRD_SLICE;
    return value * scale;
}

// ---- Query rows

struct QueryRow {
    float scale;
    float sum;                      // of what the slices stand for
    float shift;                    // scales of channels: what key offsets add to every score
    std::int32_t sums[MAX_SLICES];  // of the slices
};

// Of a strip: an operand of ROWS * slices rows, then a QueryRow of 64 bytes for each row.
constexpr std::int64_t QUERY_ROW_BYTES = 64;

template <int ROWS>
struct QueryStrip {
    std::int8_t* slices;
    char* rows;

    PENSTOCK_INLINE QueryStrip(void* operand, const PenstockCache& cache, std::int64_t first) {
        const std::int64_t row_bytes = cache.padded_dim * cache.slices;
        slices = static_cast<std::int8_t*>(operand) + first * (row_bytes + QUERY_ROW_BYTES);
        rows = reinterpret_cast<char*>(slices) + ROWS * row_bytes;
    }

    PENSTOCK_INLINE QueryRow& row(int r) const { return *reinterpret_cast<QueryRow*>(rows + r * QUERY_ROW_BYTES); }
};

PENSTOCK_INLINE F32x16 load_elements(std::int32_t type, const void* x, std::int64_t first, std::int64_t end) {
    const int count = static_cast<int>(end - first < LANES ? end - first : LANES);
    if (type == TYPE_F32) return load_first(static_cast<const float*>(x) + first, count);
    return load_first(static_cast<const std::uint16_t*>(x) + first, count);
}

// Into chunks of so many elements.
template <int SLICES, int ROWS>
void pack_row(
    const QueryArgs& a, std::int64_t row, const QueryStrip<ROWS>& strip, int r, std::int64_t chunk) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t group = a.heads / cache.kv_heads, dim = cache.head_dim, channels = a.kv_head * cache.padded_dim;
    const std::int64_t head = row / group * a.heads + a.kv_head * group + row % group;
    const char* q = static_cast<const char*>(a.q) + head * dim * type_bytes(a.type);
    alignas(64) float x[MAX_HEAD_DIM];
    I32x16 greatest_bits = 0;
    F32x16 shift = 0.0f;
    for (std::int64_t d = 0; d < cache.padded_dim; d += LANES) {
        F32x16 lanes = 0.0f;
        if (d < dim) lanes = load_elements(a.type, q, d, dim);
        if (d < dim && cache.key_scales != nullptr) {
            lanes = lanes * load_elements(TYPE_F32, cache.key_scales + channels, d, dim);
            shift = shift + lanes * load_elements(TYPE_F32, cache.key_offsets + channels, d, dim);
        }
        store(x + d, lanes);
        greatest_bits = max(greatest_bits, magnitude_bits(lanes));
    }
    const RowScales found = row_scales(over_lanes<GreaterLanes>(greatest_bits));
    I32x16 sums[SLICES];
    for (int s = 0; s < SLICES; ++s) sums[s] = 0;
    for (std::int64_t d = 0; d < cache.padded_dim; d += LANES) {
        std::int8_t* to = strip.slices + (d / chunk * ROWS + r) * SLICES * chunk + d % chunk;
        F32x16 rest = first_rest(load(x + d), found.factor);
        for (int s = 0; s < SLICES; ++s) {
            const I32x16 slice = take_slice(rest);
            store_bytes(to + s * chunk, slice);
            sums[s] = sums[s] + slice;
        }
    }
    QueryRow& out = strip.row(r);
    for (int s = 0; s < SLICES; ++s) {
        sums[s] = over_lanes<AddLanes>(sums[s]);
        out.sums[s] = sums[s].part[0][0];
    }
    out.scale = found.scale.part[0][0];
    out.sum = combine<SLICES>(sums, found.scale).part[0][0];
    out.shift = over_lanes<AddLanes>(shift).part[0][0];
}

template <int ROWS>
void pack_strips(const QueryArgs& a, std::int64_t chunk) {
    for (int r = 0; r < a.rows; ++r) {
        const QueryStrip<ROWS> strip(a.operand, *a.cache, r / ROWS * ROWS);
        (a.cache->slices == 2 ? pack_row<2, ROWS> : pack_row<3, ROWS>)(a, a.first_row + r, strip, r % ROWS, chunk);
    }
}

// ---- A granule

struct Granule {
    std::uint8_t* keys;
    std::uint8_t* values;
    float* scales;  // where they belong to tokens: [4][16]

    PENSTOCK_INLINE Granule(const PenstockCache& cache, const char* memory) {
        const std::int64_t half = half_granule_bytes(CACHE_INT8, cache.padded_dim);
        keys = reinterpret_cast<std::uint8_t*>(const_cast<char*>(memory));
        values = keys + half;
        scales = reinterpret_cast<float*>(values + half);
    }

    PENSTOCK_INLINE float* key_scales() const { return scales; }
    PENSTOCK_INLINE float* key_offsets() const { return scales + GRANULE; }
    PENSTOCK_INLINE float* value_scales() const { return scales + 2 * GRANULE; }
    PENSTOCK_INLINE float* value_offsets() const { return scales + 3 * GRANULE; }
};

// ---- Around the two products of a tile

// Scores of a granule, of the integers of a row's slices.
template <int SLICES>
PENSTOCK_INLINE F32x16 scores_of(
    const PenstockCache& cache, const QueryRow& row, const Granule& granule, const I32x16 (&of_slice)[SLICES]) {
    const F32x16 value = combine<SLICES>(of_slice, row.scale);
    if (cache.key_scales != nullptr) return value + row.shift;
    return (value + load(granule.key_offsets()) * row.sum) * load(granule.key_scales());
}

// What the probabilities of four rows come to as slices. Numbers of row r are in lane 4 r.
template <int SLICES>
struct ProbabilityRows {
    alignas(64) float scale[LANES];
    alignas(64) float sum[LANES];  // scales of tokens: of x * value offset; of channels: of x
    alignas(64) std::int32_t sums[SLICES][LANES];  // of the slices
};

// p [TILE] of a row becomes x. Where p is 0 the position may be hidden and its scale and offset anything.
PENSTOCK_INLINE void weigh(const TileArgs& a, float* p, F32x16& sum, I32x16& greatest_bits) {
    F32x16 part[TILE_GRANULES];
    greatest_bits = 0;
    for (int g = 0; g < TILE_GRANULES; ++g) {
        F32x16 x = load(p + g * GRANULE);
        part[g] = x;
        if (a.cache->value_scales == nullptr) {
            const Granule granule(*a.cache, a.granules[g]);
            const I32x16 present = x != 0.0f;
            x = select(present, x * load(granule.value_scales()), F32x16(0.0f));
            part[g] = select(present, x * load(granule.value_offsets()), F32x16(0.0f));
            store(p + g * GRANULE, x);
        }
        greatest_bits = max(greatest_bits, magnitude_bits(x));
    }
    sum = (part[0] + part[1]) + (part[2] + part[3]);
}

// p [ROWS][TILE] as an operand: slice s of row r in 32 bytes at (r * SLICES + s) * row_bytes, and in 32 at half_bytes
// from there.
template <int ROWS, int SLICES>
PENSTOCK_INLINE void slice_probabilities(
    const TileArgs& a, float* p, std::int8_t* slices, int row_bytes, int half_bytes, ProbabilityRows<SLICES>& out) {
    F32x16 sum[STRIP_ROWS];
    I32x16 greatest_bits[STRIP_ROWS], sums[SLICES][STRIP_ROWS];
    for (int r = 0; r < STRIP_ROWS; ++r)
        if (r < ROWS)
            weigh(a, p + r * TILE, sum[r], greatest_bits[r]);
        else
            sum[r] = sum[0], greatest_bits[r] = greatest_bits[0];
    const RowScales found = row_scales(over_rows<GreaterLanes>(greatest_bits));
    alignas(64) float factor[LANES];
    store(factor, found.factor);
    store(out.scale, found.scale);
    store(out.sum, over_rows<AddLanes>(sum));
    for (int r = 0; r < ROWS; ++r) {
        F32x16 rest[TILE_LANES];
        for (int i = 0; i < TILE_LANES; ++i) rest[i] = first_rest(load(p + r * TILE + i * LANES), factor[4 * r]);
        for (int s = 0; s < SLICES; ++s) {
            I32x16 slice[TILE_LANES];
            for (int i = 0; i < TILE_LANES; ++i) slice[i] = take_slice(rest[i]);
            std::int8_t* to = slices + (r * SLICES + s) * row_bytes;
            store_tile_bytes(to, to + half_bytes, slice);
            sums[s][r] = (slice[0] + slice[1]) + (slice[2] + slice[3]);
        }
    }
    for (int s = 0; s < SLICES; ++s) {
        for (int r = ROWS; r < STRIP_ROWS; ++r) sums[s][r] = sums[s][0];
        store(out.sums[s], over_rows<AddLanes>(sums[s]));
    }
}

// Elements of o from `channel` on, of the integers of a row's slices; scale and sum as in ProbabilityRows.
template <int SLICES>
PENSTOCK_INLINE F32x16 mixed_of(
    const PenstockCache& cache, float scale, float sum, std::int64_t channel, const I32x16 (&of_slice)[SLICES]) {
    const F32x16 value = combine<SLICES>(of_slice, scale);
    if (cache.value_scales == nullptr) return value + sum;
    return (value + load(cache.value_offsets + channel) * sum) * load(cache.value_scales + channel);
}

// ---- The two products of a tile

// Where a run of quads begins: in both vectors of stored integers, and in the operand; and what is worth prefetching,
// as far from these vectors as theirs is from it.
struct Run {
    const std::uint8_t* stored[2];
    const std::uint8_t* next[2];
    const std::int8_t* operand;
};

// The granule of the next tile that lies where this one does. The first strip prefetches it; the others, and the last
// tile, name what is in the cache already.
PENSTOCK_INLINE Granule next_granule(const TileArgs& a, int first, int g) {
    return Granule(*a.cache, first == 0 && a.next[g] != nullptr ? a.next[g] : a.granules[g]);
}

template <class Dot>
struct Int8Kind {
    static constexpr int STRIP = STRIP_ROWS;

    static void scores(const TileArgs& a, int first, int rows, float* s) {
        constexpr decltype(&strip_scores<1, 2>) KERNELS[2][STRIP] = {
            {strip_scores<1, 2>, strip_scores<2, 2>, strip_scores<3, 2>, strip_scores<4, 2>},
            {strip_scores<1, 3>, strip_scores<2, 3>, strip_scores<3, 3>, strip_scores<4, 3>}};
        KERNELS[a.cache->slices - 2][rows - 1](a, first, s);
    }

    static void mix(const TileArgs& a, int first, int rows, float* p, float* o) {
        constexpr decltype(&strip_mix<1, 2>) KERNELS[2][STRIP] = {
            {strip_mix<1, 2>, strip_mix<2, 2>, strip_mix<3, 2>, strip_mix<4, 2>},
            {strip_mix<1, 3>, strip_mix<2, 3>, strip_mix<3, 3>, strip_mix<4, 3>}};
        KERNELS[a.cache->slices - 2][rows - 1](a, first, p, o);
    }

  private:
    // Two granules at a time.
    template <int ROWS, int SLICES>
    static void strip_scores(const TileArgs& a, int first, float* s) {
        constexpr int OPERANDS = ROWS * SLICES, CHUNK_QUADS = CHUNK / QUAD;
        const QueryStrip<STRIP> strip(const_cast<void*>(a.operand), *a.cache, first);
        std::int32_t start[OPERANDS];
        for (int i = 0; i < OPERANDS; ++i) start[i] = -Dot::EXCESS * strip.row(i / SLICES).sums[i % SLICES];
        const int chunks = static_cast<int>(a.cache->padded_dim / CHUNK);
        for (int g = 0; g < TILE_GRANULES; g += 2) {
            const Granule left(*a.cache, a.granules[g]), right(*a.cache, a.granules[g + 1]);
            const Granule next_left = next_granule(a, first, g), next_right = next_granule(a, first, g + 1);
            I32x16 sums[OPERANDS][2];
            Dot::template multiply<OPERANDS, CHUNK_QUADS>(
                chunks, LINE,
                [&](int chunk) {
                    const std::int64_t at = chunk * CHUNK_QUADS * LINE;
                    return Run{{left.keys + at, right.keys + at},
                               {next_left.keys + at, next_right.keys + at},
                               strip.slices + chunk * STRIP * SLICES * CHUNK};
                },
                start, sums);
            finish_scores<ROWS, SLICES>(*a.cache, strip, sums, 0, left, s + g * GRANULE);
            finish_scores<ROWS, SLICES>(*a.cache, strip, sums, 1, right, s + (g + 1) * GRANULE);
        }
    }

    // Scores of one granule, column 0 or 1 of the sums.
    template <int ROWS, int SLICES>
    static PENSTOCK_INLINE void finish_scores(const PenstockCache& cache, const QueryStrip<STRIP>& strip,
                                              const I32x16 (*sums)[2], int column, const Granule& granule, float* s) {
        for (int r = 0; r < ROWS; ++r) {
            I32x16 of_slice[SLICES];
            for (int i = 0; i < SLICES; ++i) of_slice[i] = sums[r * SLICES + i][column];
            store(s + r * TILE, scores_of<SLICES>(cache, strip.row(r), granule, of_slice));
        }
    }

    // 32 elements of a head at a time.
    template <int ROWS, int SLICES>
    static void strip_mix(const TileArgs& a, int first, float* p, float* o) {
        constexpr int OPERANDS = ROWS * SLICES, GRANULE_QUADS = GRANULE / QUAD;
        const std::int64_t dim = a.cache->padded_dim;
        constexpr int CHUNK_BYTES = OPERANDS * CHUNK;
        alignas(64) std::int8_t slices[TILE / CHUNK * CHUNK_BYTES];
        ProbabilityRows<SLICES> numbers;
        slice_probabilities<ROWS>(a, p, slices, CHUNK, CHUNK_BYTES, numbers);
        std::int32_t start[OPERANDS];
        for (int i = 0; i < OPERANDS; ++i) start[i] = -Dot::EXCESS * numbers.sums[i % SLICES][4 * (i / SLICES)];
        const std::uint8_t *values[TILE_GRANULES], *next[TILE_GRANULES];
        for (int g = 0; g < TILE_GRANULES; ++g) {
            values[g] = Granule(*a.cache, a.granules[g]).values;
            next[g] = next_granule(a, first, g).values;
        }
        for (std::int64_t d = 0; d < dim; d += 2 * LANES) {
            I32x16 sums[OPERANDS][2];
            Dot::template multiply<OPERANDS, GRANULE_QUADS>(
                TILE_GRANULES, dim * QUAD,
                [&](int g) {
                    const std::uint8_t *here = values[g] + d * QUAD, *there = next[g] + d * QUAD;
                    constexpr int IN_CHUNK = CHUNK / GRANULE;
                    return Run{{here, here + LINE},
                               {there, there + LINE},
                               slices + g / IN_CHUNK * CHUNK_BYTES + g % IN_CHUNK * GRANULE};
                },
                start, sums);
            finish_mix<ROWS, SLICES>(a, numbers, sums, 0, d, o);
            finish_mix<ROWS, SLICES>(a, numbers, sums, 1, d + LANES, o);
        }
    }

    // Elements d .. d + 15 of a head, column 0 or 1 of the sums.
    template <int ROWS, int SLICES>
    static PENSTOCK_INLINE void finish_mix(const TileArgs& a, const ProbabilityRows<SLICES>& numbers,
                                           const I32x16 (*sums)[2], int column, std::int64_t d, float* o) {
        const PenstockCache& cache = *a.cache;
        const std::int64_t channel = a.kv_head * cache.padded_dim + d;
        for (int r = 0; r < ROWS; ++r) {
            I32x16 of_slice[SLICES];
            for (int i = 0; i < SLICES; ++i) of_slice[i] = sums[r * SLICES + i][column];
            store(o + r * cache.padded_dim + d,
                  mixed_of<SLICES>(cache, numbers.scale[4 * r], numbers.sum[4 * r], channel, of_slice));
        }
    }
};

// ---- Storing and loading

// How a token's elements are written: B = round((x - middle) * factor).
struct TokenCode {
    float middle, factor, scale, offset;
};

PENSTOCK_INLINE TokenCode token_code(float low, float high, bool usable) {
    if (!usable) return {0.0f, 0.0f, __builtin_nanf(""), 0.0f};
    const float middle = (low + high) * 0.5f;
    const float half = greater(high - middle, middle - low);
    if (half < SMALLEST_HALF) {
        const float sign = middle > 0.0f ? 1.0f : middle < 0.0f ? -1.0f : 0.0f;
        return {middle, 0.0f, middle * sign, sign};
    }
    const float scale = half / LARGEST;
    return {middle, LARGEST / half, scale, middle / scale};
}

// x [dim], or zeros where x is null, -> B [padded_dim], with the scale and the offset of the token.
PENSTOCK_INLINE void quantize_token(
    std::int32_t type, const void* x, std::int64_t dim, std::int64_t padded_dim, std::int8_t* to, float& scale,
    float& offset) {
    alignas(64) float copy[MAX_HEAD_DIM];
    F32x16 low = __builtin_inff(), high = -__builtin_inff();
    I32x16 greatest_bits = 0;
    for (std::int64_t d = 0; d < dim; d += LANES) {
        const F32x16 lanes = x == nullptr ? F32x16(0.0f) : load_elements(type, x, d, dim);
        const I32x16 inside = lane_index() < static_cast<std::int32_t>(dim - d);
        low = min(select(inside, lanes, low), low);
        high = max(select(inside, lanes, high), high);
        greatest_bits = max(greatest_bits, magnitude_bits(lanes));
        store(copy + d, lanes);
    }
    const float least = -greatest(low * -1.0f), most = greatest(high);
    const TokenCode code = token_code(least, most, over_lanes<GreaterLanes>(greatest_bits).part[0][0] < TOO_GREAT_BITS);
    for (std::int64_t d = 0; d < padded_dim; d += LANES) {
        I32x16 values = 0;
        if (d < dim && code.factor != 0.0f) {
            const I32x16 inside = lane_index() < static_cast<std::int32_t>(dim - d);
            values = round((load(copy + d) - code.middle) * code.factor) & inside;
        }
        store_bytes(to + d, values);
    }
    scale = code.scale;
    offset = code.offset;
}

// The same with scales and offsets of channels, [dim].
PENSTOCK_INLINE void quantize_channels(
    std::int32_t type, const void* x, const float* scales, const float* offsets, std::int64_t dim,
    std::int64_t padded_dim, std::int8_t* to) {
    for (std::int64_t d = 0; d < padded_dim; d += LANES) {
        I32x16 values = 0;
        if (d < dim) {
            const F32x16 lanes = x == nullptr ? F32x16(0.0f) : load_elements(type, x, d, dim);
            const F32x16 steps = lanes / load_elements(TYPE_F32, scales, d, dim) -
                                 load_elements(TYPE_F32, offsets, d, dim);
            const F32x16 number = select(steps == steps, steps, F32x16(0.0f));
            const F32x16 held = max(F32x16(-LARGEST), min(F32x16(LARGEST), number));
            values = round(held) & (lane_index() < static_cast<std::int32_t>(dim - d));
        }
        store_bytes(to + d, values);
    }
}

// Keys: quad after quad of elements, [Dp / 4][16][4].
PENSTOCK_INLINE void store_key(const std::int8_t* from, std::int64_t padded_dim, int position, std::uint8_t* keys) {
    for (std::int64_t d = 0; d < padded_dim; ++d)
        keys[d / QUAD * LINE + position * QUAD + d % QUAD] = static_cast<std::uint8_t>(from[d] + STORED_EXCESS);
}

// Values: quad after quad of positions, [4][Dp][4].
PENSTOCK_INLINE void store_value(const std::int8_t* from, std::int64_t padded_dim, int position, std::uint8_t* values) {
    values += position / QUAD * padded_dim * QUAD + position % QUAD;
    for (std::int64_t d = 0; d < padded_dim; ++d) values[d * QUAD] = static_cast<std::uint8_t>(from[d] + STORED_EXCESS);
}

void store_tokens(const StoreArgs& a) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t dim = cache.head_dim, padded = cache.padded_dim, channels = a.kv_head * padded;
    const Granule granule(cache, a.granule);
    alignas(64) std::int8_t values[MAX_HEAD_DIM];
    for (int i = 0; i < a.count; ++i) {
        const int at = a.start + i;
        const std::int64_t from = i * a.stride * type_bytes(a.type);
        const void* key = a.keys == nullptr ? nullptr : static_cast<const char*>(a.keys) + from;
        const void* value = a.values == nullptr ? nullptr : static_cast<const char*>(a.values) + from;
        if (cache.key_scales == nullptr)
            quantize_token(a.type, key, dim, padded, values, granule.key_scales()[at], granule.key_offsets()[at]);
        else
            quantize_channels(
                a.type, key, cache.key_scales + channels, cache.key_offsets + channels, dim, padded, values);
        store_key(values, padded, at, granule.keys);
        if (cache.value_scales == nullptr)
            quantize_token(a.type, value, dim, padded, values, granule.value_scales()[at], granule.value_offsets()[at]);
        else
            quantize_channels(
                a.type, value, cache.value_scales + channels, cache.value_offsets + channels, dim, padded, values);
        store_value(values, padded, at, granule.values);
    }
}

void load_tokens(const LoadArgs& a) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t padded = cache.padded_dim;
    const Granule granule(cache, a.granule);
    for (int i = 0; i < a.count; ++i) {
        const int at = a.start + i;
        const std::uint8_t* values = granule.values + at / QUAD * padded * QUAD + at % QUAD;
        for (std::int64_t d = 0; d < cache.head_dim; ++d) {
            const std::int64_t channel = a.kv_head * padded + d;
            const float key = static_cast<float>(granule.keys[d / QUAD * LINE + at * QUAD + d % QUAD] - STORED_EXCESS);
            const float value = static_cast<float>(values[d * QUAD] - STORED_EXCESS);
            a.keys[i * a.stride + d] =
                cache.key_scales == nullptr ? (key + granule.key_offsets()[at]) * granule.key_scales()[at]
                                            : (key + cache.key_offsets[channel]) * cache.key_scales[channel];
            a.values[i * a.stride + d] =
                cache.value_scales == nullptr ? (value + granule.value_offsets()[at]) * granule.value_scales()[at]
                                              : (value + cache.value_offsets[channel]) * cache.value_scales[channel];
        }
    }
}

template <class Dot>
CacheKernel int8_kernel() {
    const auto pack_queries = [](const QueryArgs& a) { pack_strips<STRIP_ROWS>(a, CHUNK); };
    return {pack_queries, attend_tile<Int8Kind<Dot>>, store_tokens, load_tokens};
}

}  // namespace
}  // namespace penstock
