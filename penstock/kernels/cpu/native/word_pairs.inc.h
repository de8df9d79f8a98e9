// Dot products of bytes, computed in words of 16 bits, for levels without an exact instruction for bytes. AVX2's
// vpmaddubsw multiplies bytes but saturates; its vpmaddwd multiplies words and is exact. Internal linkage.
#pragma once

#include "elements.inc.h"
#include "slices.inc.h"

#if defined(__AVX2__)
#include "avx2.inc.h"
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace penstock {
namespace {

#if defined(__AVX2__)
constexpr int WORD_REGISTER = 32;  // bytes
#else
constexpr int WORD_REGISTER = 16;
#endif
typedef std::int16_t Words __attribute__((vector_size(WORD_REGISTER)));
typedef std::int32_t WordSums __attribute__((vector_size(WORD_REGISTER)));

// The lanes of a register, 4 bytes each, as two pairs of words: the even and the odd elements.
struct WordPairs {
    Words even, odd;
};

// Stored bytes are unsigned; the words are the bytes minus LESS.
template <int LESS>
PENSTOCK_INLINE WordPairs split_stored(const std::uint8_t* from) {
    Words words;
    __builtin_memcpy(&words, from, sizeof words);
    typedef std::uint16_t Unsigned __attribute__((vector_size(WORD_REGISTER)));
    const Words high = same_bits<Words>(same_bits<Unsigned>(words) >> 8);
    return {(words & 255) - std::int16_t{LESS}, high - std::int16_t{LESS}};
}

// Two words of one row in every lane.
PENSTOCK_INLINE Words pair_of(const std::int16_t* two) {
    std::int32_t bits;
    __builtin_memcpy(&bits, two, sizeof bits);
    return same_bits<Words>(WordSums{} + bits);
}

// Add two products to every lane.
PENSTOCK_INLINE WordSums add_products(WordSums sums, const Words& stored, const Words& row) {
#if defined(__AVX2__)
    return add_word_products(sums, stored, row);
#elif defined(__SSE2__)
    return sums + same_bits<WordSums>(_mm_madd_epi16(same_bits<__m128i>(stored), same_bits<__m128i>(row)));
#else
    const WordSums products = same_bits<WordSums>(stored * row);  // each fits into a word: 255 * 127 is below 2^15
    return sums + (products << 16 >> 16) + (products >> 16);
#endif
}

// Add four products to every lane.
PENSTOCK_INLINE WordSums add_products(WordSums sums, const WordPairs& stored, const WordPairs& row) {
    return add_products(add_products(sums, stored.even, row.even), stored.odd, row.odd);
}

}  // namespace
}  // namespace penstock
