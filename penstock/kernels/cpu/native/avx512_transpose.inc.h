// Sixteen registers of sixteen words, transposed. Internal linkage, for files compiled with AVX-512.
#pragma once

#include "avx512.inc.h"

namespace penstock {
namespace {

constexpr int REGISTER_WORDS = 16;

// Word j of register i becomes word i of register j.
inline void transpose(__m512i (&words)[REGISTER_WORDS]) {
    __m512i pairs[REGISTER_WORDS], quads[REGISTER_WORDS];
#pragma GCC unroll 8
    for (int i = 0; i < REGISTER_WORDS; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(words[i], words[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(words[i], words[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < REGISTER_WORDS; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Quarter q of quads[4 g + j] is now word 4 q + j of rows 4 g .. 4 g + 3; the quarters remain to be gathered.
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

}  // namespace
}  // namespace penstock
