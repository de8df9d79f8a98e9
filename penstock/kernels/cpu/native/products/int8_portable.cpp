// int8 products in plain C++ with compiler vectors of 16 bytes.

#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int8.inc.h"
#include "products/int8_words.inc.h"

// The sum of two products fits into a word: 2 * 128 * 127 is below 2^15.
inline Ints dot(const WordPairs& weights, const WordPairs& operands) {
    const Ints two_sums = same_bits<Ints>(weights.even * operands.even + weights.odd * operands.odd);
    return (two_sums << 16 >> 16) + (two_sums >> 16);
}

}  // namespace

ProductKernel portable_int8() { return table(); }

}  // namespace penstock
