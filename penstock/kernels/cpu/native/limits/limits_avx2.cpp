// The limits of a core with AVX2: fused multiply-adds of float32, to which bfloat16 is widened, and products of pairs
// of 16-bit integers, to which int8 is widened (products of bytes saturate).

#include <immintrin.h>

#include "limits/limits.h"

namespace penstock {

namespace {

constexpr int NUM_CHAINS = 12;  // that begin apart, or the compiler computes one for all

float multiply_floats(std::int64_t iterations) {
    const __m256 factor = _mm256_set1_ps(0.5f), addend = _mm256_set1_ps(1);
    __m256 sums[NUM_CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 12
        for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, factor, addend);
#pragma GCC unroll 12
    for (int i = 1; i < NUM_CHAINS; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    return _mm256_cvtss_f32(sums[0]);
}

float multiply_integers(std::int64_t iterations) {
    const __m256i factor = _mm256_set1_epi16(3);
    __m256i operand = factor, sums[NUM_CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = _mm256_set1_epi32(i);
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 12
        for (__m256i& sum : sums) {
            __asm__("" : "+x"(operand));  // as if it changed: or its product is computed once
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(operand, factor));
            __asm__("" : "+x"(sum));
        }
#pragma GCC unroll 12
    for (int i = 1; i < NUM_CHAINS; ++i) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
    return static_cast<float>(_mm256_cvtsi256_si32(sums[0]));
}

}  // namespace

void avx2_limits(LimitLoops& loops) {
    loops[KIND_F32] = loops[KIND_BF16] = {multiply_floats, NUM_CHAINS * 8 * 2};
    loops[KIND_INT8] = {multiply_integers, NUM_CHAINS * 16 * 2};
}

}  // namespace penstock
