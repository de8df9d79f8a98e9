// Loading elements of activation rows, for files compiled with AVX-512. Internal linkage.
#pragma once

#include "avx512.inc.h"
#include "elements.inc.h"

namespace penstock {
namespace {

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

}  // namespace
}  // namespace penstock
