// Attention with an int8 cache and AVX2. vpmaddubsw multiplies bytes but saturates; vpmaddwd, on words, is exact.

#include <immintrin.h>

#include "attention/int8_words.inc.h"

namespace penstock {
namespace {

struct MultiplyAddWords {
    static constexpr int ZERO_POINT = penstock::ZERO_POINT;

    static PENSTOCK_INLINE IntPart dot(const WordPairs& stored, const WordPairs& row) {
        return (IntPart)_mm256_madd_epi16((__m256i)stored.even, (__m256i)row.even) +
               (IntPart)_mm256_madd_epi16((__m256i)stored.odd, (__m256i)row.odd);
    }
};

}  // namespace

CacheKernel avx2_cache_int8() { return int8_kernel<WordsDot<MultiplyAddWords>>(); }

}  // namespace penstock
