// The limits of a core with AVX-512: fused multiply-adds of float32, vdpbf16ps and vpdpbusd. In assembly: GCC 12 moves
// and spills the sums of the last two, which costs more than the products.

#include <immintrin.h>

#include "limits/limits.h"

namespace penstock {

namespace {

constexpr int NUM_CHAINS = 24;  // that begin apart, or the compiler computes one for all

float multiply_floats(std::int64_t iterations) {
    const __m512 factor = _mm512_set1_ps(0.5f), addend = _mm512_set1_ps(1);
    __m512 sums[NUM_CHAINS];
#pragma GCC unroll 24
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
        for (__m512& sum : sums) __asm__("vfmadd132ps %1, %2, %0" : "+v"(sum) : "v"(factor), "v"(addend));
#pragma GCC unroll 24
    for (int i = 1; i < NUM_CHAINS; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return _mm512_cvtss_f32(sums[0]);
}

float multiply_bf16(std::int64_t iterations) {
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    __m512 sums[NUM_CHAINS];
#pragma GCC unroll 24
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
        for (__m512& sum : sums) __asm__("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(ones));
#pragma GCC unroll 24
    for (int i = 1; i < NUM_CHAINS; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return _mm512_cvtss_f32(sums[0]);
}

float multiply_int8(std::int64_t iterations) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sums[NUM_CHAINS];
#pragma GCC unroll 24
    for (int i = 0; i < NUM_CHAINS; ++i) sums[i] = _mm512_set1_epi32(i);
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
        for (__m512i& sum : sums) __asm__("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(ones));
#pragma GCC unroll 24
    for (int i = 1; i < NUM_CHAINS; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    return static_cast<float>(_mm512_cvtsi512_si32(sums[0]));
}

}  // namespace

void avx512_limits(LimitLoops& loops) {
    loops[KIND_F32] = {multiply_floats, NUM_CHAINS * 16 * 2};
    loops[KIND_BF16] = {multiply_bf16, NUM_CHAINS * 32 * 2};
    loops[KIND_INT8] = {multiply_int8, NUM_CHAINS * 64 * 2};
}

}  // namespace penstock
