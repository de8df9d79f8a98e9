// Attention with an int8 cache in plain C++ with compiler vectors of 16 bytes.

#include "attention/int8_words.inc.h"

namespace penstock {
namespace {

// The sum of two products fits into a word: 2 * 128 * 127 is below 2^15.
struct TwoProducts {
    static constexpr int ZERO_POINT = 0;

    static PENSTOCK_INLINE IntPart dot(const WordPairs& stored, const WordPairs& row) {
        const IntPart two_sums = reinterpret_cast<IntPart>(stored.even * row.even + stored.odd * row.odd);
        return (two_sums << 16 >> 16) + (two_sums >> 16);
    }
};

}  // namespace

CacheKernel portable_cache_int8() { return int8_kernel<WordsDot<TwoProducts>>(); }

}  // namespace penstock
