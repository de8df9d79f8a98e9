// The intrinsics, without the warnings of GCC 12 about its own header, and what several kernels make of them. Internal
// linkage, for files compiled with AVX-512.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "elements.inc.h"

namespace penstock {
namespace {

// ---- Elements in words of four bytes: a pair of bfloat16 or one float32

// A mask of the first `count` lanes, at most 32.
inline __mmask32 first_lanes(std::int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// The first `count` (at least 1) of 32 elements as bfloat16, the others zero.
inline __m512i load_bf16(const char* from, std::int64_t count, std::int32_t type) {
    const __mmask32 mask = first_lanes(count);
    if (type == TYPE_BF16) return _mm512_maskz_loadu_epi16(mask, from);
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 64);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// The same for 16 elements as float32.
inline __m512i load_f32(const char* from, std::int64_t count, std::int32_t type) {
    const __mmask16 mask = static_cast<__mmask16>(first_lanes(count));
    if (type == TYPE_F32) return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, from));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
}

// acc += vector * word, both elements of a pair. The word is one in memory, or the same in all lanes. In assembly,
// because compilers load the broadcast word into an extra register and then spill, and GCC 12 copies the sums.
struct Bf16Words {
    using Element = std::uint16_t;
    static constexpr int ELEMENTS = 2;  // per word

    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i vector, __m512i word) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(vector), "v"(word));
    }
    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i vector, const std::int32_t* word) {
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(vector), "m"(*word));
    }
    static constexpr auto load = load_bf16;
};

struct F32Words {
    using Element = float;
    static constexpr int ELEMENTS = 1;

    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i vector, __m512i word) {
        __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(vector), "v"(word));
    }
    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i vector, const std::int32_t* word) {
        __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(vector), "m"(*word));
    }
    static constexpr auto load = load_f32;
};

// ---- Sixteen registers of sixteen words, transposed

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
