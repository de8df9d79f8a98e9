// Lane operations of attention with an int8 cache: rounding, bytes, and reductions over lanes.
#pragma once

#include "attention/tile.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

constexpr int QUAD = 4;            // elements that are multiplied and added in one lane
constexpr int LINE = LANES * QUAD;  // bytes of a vector of stored integers
constexpr int STRIP_ROWS = 4;
constexpr int MAX_SLICES = 3;

// Round to nearest, ties to even, for |x| up to 2^22.
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

// Store 16 small integers as bytes.
PENSTOCK_INLINE void store_bytes(std::int8_t* to, I32x16 a) {
    typedef std::int8_t BytePart __attribute__((vector_size(PART_LANES)));
    for (int i = 0; i < PARTS; ++i) {
        const BytePart bytes = __builtin_convertvector(a.part[i], BytePart);
        __builtin_memcpy(to + i * PART_LANES, &bytes, sizeof bytes);
    }
}

// Store 64 small integers as bytes: 32 to `first` and 32 to `last`.
PENSTOCK_INLINE void store_tile_bytes(std::int8_t* first, std::int8_t* last, const I32x16 (&a)[TILE_LANES]) {
#if defined(__AVX512F__)
    constexpr __mmask16 ALL = 0xFFFF;
    const __m512i low = _mm512_packs_epi32((__m512i)a[0].part[0], (__m512i)a[1].part[0]);
    const __m512i high = _mm512_packs_epi32((__m512i)a[2].part[0], (__m512i)a[3].part[0]);
    const __m512i quads = _mm512_packs_epi16(low, high);  // each quarter has four bytes of every input
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

struct MaxLanes {
    PENSTOCK_INLINE IntPart operator()(IntPart a, IntPart b) const { return a > b ? a : b; }
};

template <int DISTANCE, class Part>
PENSTOCK_INLINE Part rotated(Part a) {
    IntPart from;
    for (int i = 0; i < PART_LANES; ++i) from[i] = (i + DISTANCE) % PART_LANES;
    return __builtin_shuffle(a, from);
}

// The reduction of all lanes, in every lane: lane i with lane i + 8, then i + 4, i + 2, i + 1.
template <class Op, class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> reduce_lanes(Lanes<Part, Scalar> a) {
    const Op op;
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.part[i] = op(a.part[i], a.part[i + half]);
    Part all = a.part[0];
    if constexpr (PART_LANES > 8) all = op(all, rotated<8>(all));
    if constexpr (PART_LANES > 4) all = op(all, rotated<4>(all));
    all = op(all, rotated<2>(all));
    all = op(all, rotated<1>(all));
    for (int i = 0; i < PARTS; ++i) a.part[i] = all;
    return a;
}

// The same for four rows at once: the result of row r is in lanes 4 r .. 4 r + 3.
template <class Op, class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> reduce_rows(const Lanes<Part, Scalar> (&row)[STRIP_ROWS]) {
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
    Lanes<Part, Scalar> result = reduce_lanes<Op>(row[0]);
    for (int r = 1; r < STRIP_ROWS; ++r) result = select((lane_index() >> 2) == r, reduce_lanes<Op>(row[r]), result);
    return result;
#endif
}

}  // namespace
}  // namespace penstock
