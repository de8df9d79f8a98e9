// The limits of a core with AVX-512: fused multiply-adds of float32 (to which bfloat16 is widened if vdpbf16ps is
// missing), vdpbf16ps, and vpdpbusd. They are in assembly, because GCC 12 moves and spills the sums of the last two,
// which takes longer than the products.

#include "avx512.inc.h"
#include "limits/chains.inc.h"
#include "limits/reads.inc.h"

namespace penstock {

namespace {

constexpr int NUM_CHAINS = 24;

__m512 float_start(int i) { return _mm512_set1_ps(static_cast<float>(i)); }

float multiply_floats(std::int64_t iterations) {
    const __m512 factor = _mm512_set1_ps(0.5f), addend = _mm512_set1_ps(1);
    return run_chains<NUM_CHAINS>(iterations, float_start, PENSTOCK_STEP(__m512) {
        __asm__("vfmadd132ps %1, %2, %0" : "+v"(sum) : "v"(factor), "v"(addend));
    });
}

#if defined(__AVX512BF16__)
float multiply_bf16(std::int64_t iterations) {
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    return run_chains<NUM_CHAINS>(iterations, float_start, PENSTOCK_STEP(__m512) {
        __asm__("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(ones));
    });
}
#endif

float multiply_int8(std::int64_t iterations) {
    typedef std::int32_t Sums __attribute__((vector_size(64)));
    const __m512i ones = _mm512_set1_epi8(1);
    return run_chains<NUM_CHAINS>(
        iterations, [](int i) { return (Sums)_mm512_set1_epi32(i); },
        PENSTOCK_STEP(Sums) { __asm__("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(ones)); });
}

typedef std::int64_t Words __attribute__((vector_size(64)));

}  // namespace

template <> void set_limits<THIS_LEVEL>(LimitLoops& loops) {
    loops.multiply[KIND_F32] = loops.multiply[KIND_BF16] = {multiply_floats, NUM_CHAINS * 16 * 2};
#if defined(__AVX512BF16__)
    loops.multiply[KIND_BF16] = {multiply_bf16, NUM_CHAINS * 32 * 2};
#endif
    loops.multiply[KIND_INT8] = {multiply_int8, NUM_CHAINS * 64 * 2};
    set_reads<Words>(loops);
}

}  // namespace penstock
