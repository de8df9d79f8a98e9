// int8 products with AVX2. vpmaddubsw multiplies bytes but saturates; vpmaddwd, on words, is exact.

#include <immintrin.h>

#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int8.inc.h"
#include "products/int8_words.inc.h"

inline Ints dot(const WordPairs& weights, const WordPairs& operands) {
    return same_bits<Ints>(_mm256_madd_epi16(same_bits<__m256i>(weights.even), same_bits<__m256i>(operands.even))) +
           same_bits<Ints>(_mm256_madd_epi16(same_bits<__m256i>(weights.odd), same_bits<__m256i>(operands.odd)));
}

}  // namespace

ProductKernel avx2_int8() { return table(); }

}  // namespace penstock
