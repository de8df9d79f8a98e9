// Packing queries and storing keys and values in the words of float_avx512.cpp and bf16_amx.cpp, for one of their
// types: a row of a head is read as registers of 16 words, and transposed 16 x 16 into word-by-word layouts.
#pragma once

#include "attention/layout.inc.h"
#include "attention/tile.inc.h"

namespace penstock {
namespace {

constexpr int MAX_ROW_REGISTERS = MAX_HEAD_DIM / LANES;  // registers of float32 words

// The first `count` of 16 elements as float32; the others are 0.
PENSTOCK_INLINE F32x16 load_elements(const float* from, int count) { return load_rows(from, count); }

PENSTOCK_INLINE F32x16 load_elements(const std::uint16_t* from, int count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first_rows(count), from);
    F32x16 result;
    result.part[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    return result;
}

// Convert a row of a head to elements of the cache, padded with zeros; if `from` is null, write zeros.
template <class Element, class From>
PENSTOCK_INLINE void convert_row(const From* from, std::int64_t head_dim, std::int64_t padded_dim, Element* to) {
    for (std::int64_t d = 0; d < padded_dim; d += LANES) {
        const std::int64_t left = from == nullptr || head_dim <= d ? 0 : head_dim - d;
        store(to + d, load_elements(from + (left > 0 ? d : 0), left < LANES ? static_cast<int>(left) : LANES));
    }
}

// The same from the elements of an array from `at` on; the array is of `type`.
template <class Element>
PENSTOCK_INLINE void convert_row(
    const void* x, std::int32_t type, std::int64_t at, const PenstockCache& cache, Element* to) {
    const float* const floats = static_cast<const float*>(x);
    const std::uint16_t* const halves = static_cast<const std::uint16_t*>(x);
    if (type == TYPE_F32)
        convert_row(x == nullptr ? floats : floats + at, cache.head_dim, cache.padded_dim, to);
    else
        convert_row(x == nullptr ? halves : halves + at, cache.head_dim, cache.padded_dim, to);
}

template <class Type>
struct Row {
    alignas(64) typename Type::Element element[MAX_HEAD_DIM];
};

// Write word w of row r to to[w * stride + r], for the rows in the mask.
template <class Type>
void transpose_rows(const Row<Type>* rows, __mmask16 mask, std::int64_t words, std::int32_t* to, std::int64_t stride) {
    for (std::int64_t first = 0; first < words; first += REGISTER_WORDS) {
        __m512i word[REGISTER_WORDS];
#pragma GCC unroll 16
        for (int r = 0; r < REGISTER_WORDS; ++r) {
            word[r] = _mm512_setzero_si512();
            if (mask >> r & 1) word[r] = _mm512_load_si512(rows[r].element + first * Type::ELEMENTS);
        }
        transpose(word);
        for (int j = 0; j < REGISTER_WORDS; ++j) _mm512_mask_storeu_epi32(to + (first + j) * stride, mask, word[j]);
    }
}

// Write the rows as operands. bfloat16 is widened if its words are multiplied in two terms.
template <class Type, int STRIP>
PENSTOCK_INLINE void transpose_operands(
    const Row<Type> (&rows)[STRIP], int count, std::int64_t dim, std::int32_t* to) {
    if constexpr (Type::TERMS == 1) {
        transpose_rows(rows, first_rows(count), dim / Type::ELEMENTS, to, STRIP);
    } else {
        Row<F32Words> wide[STRIP];
        for (int r = 0; r < count; ++r)
            for (std::int64_t d = 0; d < dim; d += LANES) store(wide[r].element + d, load(rows[r].element + d));
        transpose_rows(wide, first_rows(count), dim, to, STRIP);
    }
}

// The operand is [strips][words of a head][TERMS][STRIP rows]; missing rows of a strip are not written.
template <class Type, int STRIP>
void pack_query_words(const QueryArgs& a) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t dim = cache.padded_dim, words = dim / Type::ELEMENTS * Type::TERMS;
    for (int first = 0; first < a.rows; first += STRIP) {
        const int count = a.rows - first < STRIP ? a.rows - first : STRIP;
        Row<Type> rows[STRIP];
        for (int r = 0; r < count; ++r) {
            const std::int64_t head = query_head(a, a.first_row + first + r);
            convert_row(a.q, a.type, head * cache.head_dim, cache, rows[r].element);
        }
        transpose_operands(rows, count, dim, static_cast<std::int32_t*>(a.operand) + first * words);
    }
}

// Write 16 elements of the value at a position. Each element is a word, or half a word.
PENSTOCK_INLINE void store_values(const float* from, int, char* to) {
    __builtin_memcpy(to, from, LANES * sizeof *from);
}

PENSTOCK_INLINE void store_values(const std::uint16_t* from, int position, char* to) {
    const int half = position % 2;
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
    _mm512_mask_storeu_epi16(to, half == 0 ? 0x55555555 : 0xAAAAAAAA, half == 0 ? words : _mm512_slli_epi32(words, 16));
}

// VALUE_DIMS: how many elements of values lie together; 0: all.
template <class Type, int VALUE_DIMS = 0>
void store_granule_words(const StoreArgs& a) {
    using Element = typename Type::Element;
    const PenstockCache& cache = *a.cache;
    const std::int64_t dim = cache.padded_dim, words = dim / Type::ELEMENTS;
    Row<Type> rows[GRANULE];
    for (int i = a.start; i < a.start + a.count; ++i)
        convert_row(a.keys, a.type, (i - a.start) * a.stride, cache, rows[i].element);
    const __mmask16 mask = static_cast<__mmask16>(((1u << a.count) - 1) << a.start);
    transpose_rows(rows, mask, words, reinterpret_cast<std::int32_t*>(a.granule), GRANULE);
    for (int i = a.start; i < a.start + a.count; ++i) {
        convert_row(a.values, a.type, (i - a.start) * a.stride, cache, rows[i].element);
        for (std::int64_t d = 0; d < dim; d += LANES) {
            const int first = i / Type::ELEMENTS * Type::ELEMENTS;
            const std::int64_t at = GranuleLayout<Element>::value(first, d, VALUE_DIMS == 0 ? dim : VALUE_DIMS);
            store_values(rows[i].element + d, i, a.granule + (GRANULE * dim + at) * sizeof(Element));
        }
    }
}

}  // namespace
}  // namespace penstock
