// The limits of a core with AVX2: fused multiply-adds of float32, to which bfloat16 is widened, and products of pairs
// of 16-bit integers, to which int8 is widened because products of bytes saturate.

#include <immintrin.h>

#include "limits/chains.inc.h"
#include "limits/reads.inc.h"

namespace penstock {

namespace {

constexpr int NUM_CHAINS = 12;

float multiply_floats(std::int64_t iterations) {
    const __m256 factor = _mm256_set1_ps(0.5f), addend = _mm256_set1_ps(1);
    return run_chains<NUM_CHAINS>(
        iterations, [](int i) { return _mm256_set1_ps(static_cast<float>(i)); },
        PENSTOCK_STEP(__m256) { sum = _mm256_fmadd_ps(sum, factor, addend); });
}

float multiply_integers(std::int64_t iterations) {
    typedef std::int32_t Sums __attribute__((vector_size(32)));
    const __m256i factor = _mm256_set1_epi16(3);
    __m256i operand = factor;
    return run_chains<NUM_CHAINS>(
        iterations, [](int i) { return (Sums)_mm256_set1_epi32(i); },
        PENSTOCK_STEP(Sums) {
            __asm__("" : "+x"(operand));  // pretend that it changes; otherwise its product is computed only once
            sum += (Sums)_mm256_madd_epi16(operand, factor);
            __asm__("" : "+x"(sum));
        });
}

typedef std::int64_t Words __attribute__((vector_size(32)));

}  // namespace

template <> void set_limits<THIS_LEVEL>(LimitLoops& loops) {
    loops.multiply[KIND_F32] = loops.multiply[KIND_BF16] = {multiply_floats, NUM_CHAINS * 8 * 2};
    loops.multiply[KIND_INT8] = {multiply_integers, NUM_CHAINS * 16 * 2};
    set_reads<Words>(loops);
}

}  // namespace penstock
