// Dot products of bytes, computed in words of 16 bits, for levels without an exact instruction for bytes. AVX2's
// vpmaddubsw multiplies bytes but saturates; its vpmaddwd multiplies words and is exact. Internal linkage.
#pragma once

#include "elements.inc.h"
#include "slices.inc.h"

#if defined(__AVX2__)
#include <immintrin.h>
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
    return {(words & 255) - std::int16_t{LESS}, (words >> 8 & 255) - std::int16_t{LESS}};
}

// The 4 signed bytes of one row in every lane.
PENSTOCK_INLINE WordPairs split_row(const std::int8_t* four) {
    std::int32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    const Words words = same_bits<Words>(WordSums{} + bits);
    return {words << 8 >> 8, words >> 8};
}

// The sum of four products in every lane.
PENSTOCK_INLINE WordSums dot(const WordPairs& stored, const WordPairs& row) {
#if defined(__AVX2__)
    return same_bits<WordSums>(_mm256_madd_epi16(same_bits<__m256i>(stored.even), same_bits<__m256i>(row.even))) +
           same_bits<WordSums>(_mm256_madd_epi16(same_bits<__m256i>(stored.odd), same_bits<__m256i>(row.odd)));
#else
    // The sum of two products fits into a word: 2 * 128 * 127 is below 2^15.
    const WordSums two_sums = same_bits<WordSums>(stored.even * row.even + stored.odd * row.odd);
    return (two_sums << 16 >> 16) + (two_sums >> 16);
#endif
}

}  // namespace
}  // namespace penstock
