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

#if defined(__AVX2__) && !defined(__AVX512F__)
PENSTOCK_INLINE __m256i words_of(I32x16 a) {
    const __m256i halves = _mm256_packs_epi32((__m256i)a.part[0], (__m256i)a.part[1]);  // quarters 0, 2, 1, 3
    return _mm256_permute4x64_epi64(halves, 0xD8);
}
#endif

// Store 16 small integers as bytes.
PENSTOCK_INLINE void store_slice(std::int8_t* to, I32x16 a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i words = words_of(a);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
    typedef std::int8_t BytePart __attribute__((vector_size(PART_LANES)));
    for (int i = 0; i < PARTS; ++i) {
        const BytePart bytes = __builtin_convertvector(a.part[i], BytePart);
        __builtin_memcpy(to + i * PART_LANES, &bytes, sizeof bytes);
    }
#endif
}

// Store 16 small integers as words: of each quad, first the even, then the odd elements (word_pairs.inc.h).
PENSTOCK_INLINE void store_slice(std::int16_t* to, I32x16 a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i even_first = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                                0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(words_of(a), even_first));
#else
    constexpr int FROM[QUAD] = {0, 2, 1, 3};
    for (int i = 0; i < LANES; ++i) {
        const int lane = i / QUAD * QUAD + FROM[i % QUAD];
        to[i] = static_cast<std::int16_t>(a.part[lane / PART_LANES][lane % PART_LANES]);
    }
#endif
}

// Store 64 small integers: 32 to `first` and 32 to `last`.
template <class Operand>
PENSTOCK_INLINE void store_tile(Operand* first, Operand* last, const I32x16 (&a)[TILE_LANES]) {
    for (int i = 0; i < TILE_LANES; ++i) store_slice((i < 2 ? first : last) + i % 2 * LANES, a[i]);
}

#if defined(__AVX512F__)
PENSTOCK_INLINE void store_tile(std::int8_t* first, std::int8_t* last, const I32x16 (&a)[TILE_LANES]) {
    constexpr __mmask16 ALL = 0xFFFF;
    const __m512i low = _mm512_packs_epi32((__m512i)a[0].part[0], (__m512i)a[1].part[0]);
    const __m512i high = _mm512_packs_epi32((__m512i)a[2].part[0], (__m512i)a[3].part[0]);
    const __m512i quads = _mm512_packs_epi16(low, high);  // each quarter has four bytes of every input
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_maskz_permutexvar_epi32(ALL, order, quads);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_maskz_extracti64x4_epi64(0xFF, bytes, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(last), _mm512_maskz_extracti64x4_epi64(0xFF, bytes, 1));
}
#endif

// The reductions of four rows: that of row r is in lanes 4 r .. 4 r + 3.
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
    Lanes<Part, Scalar> result;
    result.part[0] = reduce_quads<Op>(four);
    return result;
#elif defined(__AVX2__)
    const Op op;
    const auto pair = [&](const auto& first, const auto& second) {  // half a register for each of two rows
        const Part a = op(first.part[0], first.part[1]), b = op(second.part[0], second.part[1]);
        return op(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11),
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
    };
    Lanes<Part, Scalar> result;
    for (int i = 0; i < PARTS; ++i) result.part[i] = reduce_quads<Op>(pair(row[2 * i], row[2 * i + 1]));
    return result;
#else
    Lanes<Part, Scalar> result;
    for (int r = 0; r < STRIP_ROWS; ++r) result.part[r] = reduce_lanes<Op>(row[r]).part[0];
    return result;
#endif
}

}  // namespace
}  // namespace penstock
