// Activation rows as int8 slices, defined in products.h. Included by the integer kernels of each level within their
// anonymous namespace, after leaves.inc.h, slices.inc.h and, for AVX-512, avx512.inc.h.
//
// All levels give the same bytes: every lane does the same IEEE operations, and maxima and sums are of integers.

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using Floats __attribute__((vector_size(LANES * 4))) = float;
using Ints __attribute__((vector_size(LANES * 4))) = std::int32_t;
using HalfWords __attribute__((vector_size(LANES * 2))) = std::uint16_t;
using Bytes __attribute__((vector_size(LANES))) = std::int8_t;

constexpr int CHUNK = 64;  // elements of K quantised at a time; the chunks of all rows of a tile stay in the L1
static_assert(CHUNK == K_UNIT && CHUNK % LANES == 0);

constexpr std::int32_t MAGNITUDE_BITS = 0x7fffffff;

// LANES elements as bits of float32.
inline Ints load_bits(const float* x) {
    Ints bits;
    __builtin_memcpy(&bits, x, sizeof bits);
    return bits;
}

inline Ints load_bits(const std::uint16_t* x) {
    HalfWords bits;
    __builtin_memcpy(&bits, x, sizeof bits);
#if defined(__AVX512F__)
    // GCC 12 compiles the conversion below to four instructions, and warns about the intrinsic without a mask.
    return same_bits<Ints>(_mm512_maskz_cvtepu16_epi32(0xffff, same_bits<__m256i>(bits))) << 16;
#else
    return __builtin_convertvector(bits, Ints) << 16;
#endif
}

// The first `count` elements followed by zeros: x itself if it has `length` elements, else a copy in `padded`.
template <class Element>
inline const Element* pad(const Element* x, std::int64_t count, int length, Element* padded) {
    if (count >= length) return x;
    __builtin_memset(padded, 0, static_cast<std::size_t>(length) * sizeof(Element));
    if (count > 0) __builtin_memcpy(padded, x, static_cast<std::size_t>(count) * sizeof(Element));
    return padded;
}

inline std::int32_t reduce_max(const Ints& values) {
    Ints left = values;
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            if (left[lane + half] > left[lane]) left[lane] = left[lane + half];
    return left[0];
}

#if defined(__AVX512F__)

// The sum of the lanes of each of `count` vectors.
inline void reduce_sums(const Ints* values, int count, std::int32_t* to) {
    if (count == 1) {
        *to = _mm512_reduce_add_epi32((__m512i)*values);
        return;
    }
    for (int first = 0; first < count; first += REGISTER_WORDS) {
        const int some = count - first < REGISTER_WORDS ? count - first : REGISTER_WORDS;
        __m512i words[REGISTER_WORDS];
#pragma GCC unroll 16
        for (int i = 0; i < REGISTER_WORDS; ++i) words[i] = (__m512i)values[first + (i < some ? i : 0)];
        transpose(words);
        for (int half = REGISTER_WORDS / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) words[i] = _mm512_add_epi32(words[i], words[i + half]);
        _mm512_mask_storeu_epi32(to + first, static_cast<__mmask16>((1u << some) - 1), words[0]);
    }
}

#else

inline std::int32_t reduce_sum(const Ints& values) {
    Ints left = values;
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) left[lane] += left[lane + half];
    return left[0];
}

inline void reduce_sums(const Ints* values, int count, std::int32_t* to) {
    for (int i = 0; i < count; ++i) to[i] = reduce_sum(values[i]);
}

#endif

// Bits of max |x|. As integers they have the order of the values, with infinity and then NaN as the largest. Several
// maxima are computed at a time, because each step waits for the one before it.
template <class Element>
std::int32_t max_magnitude_bits(const Element* x, std::int64_t count) {
    constexpr int AT_ONCE = 4;
    Ints results[AT_ONCE] = {};
    std::int64_t k = 0;
    const auto take = [](Ints& result, const Element* from) {
        const Ints magnitude = load_bits(from) & MAGNITUDE_BITS;
        result = magnitude > result ? magnitude : result;
    };
    for (; k + AT_ONCE * LANES <= count; k += AT_ONCE * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; ++i) take(results[i], x + k + i * LANES);
    for (; k + LANES <= count; k += LANES) take(results[0], x + k);
    Element tail[LANES];
    take(results[0], pad(x + k, count - k, LANES, tail));
    for (int i = 1; i < AT_ONCE; ++i) results[0] = results[i] > results[0] ? results[i] : results[0];
    return reduce_max(results[0]);
}

// The scale of the operands, and the factor by which elements are multiplied. If the factor is 0, all slices are zeros.
struct LeafScale {
    float scale;
    float factor;
};

// From 2^-118 on, the scale is normal and the factor finite. Leaves of smaller magnitude are treated as zeros.
inline LeafScale leaf_scale(std::int32_t magnitude_bits) {
    if (magnitude_bits >= INFINITY_BITS) return {__builtin_nanf(""), 0.0f};
    if (magnitude_bits < SMALLEST_BITS) return {0.0f, 0.0f};
    const float magnitude = same_bits<float>(magnitude_bits);
    return {magnitude / LARGEST_SLICE, LARGEST_SLICE / magnitude};
}

#if defined(__AVX512F__)

// COUNT * 16 integers, each from -127 to 127, as bytes; zeros follow.
template <int COUNT>
inline __m512i to_bytes(const Ints (&values)[COUNT]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_packs_epi32((__m512i)values[0], (__m512i)values[1]);
    __m512i high = _mm512_setzero_si512();
    if constexpr (COUNT > 2) high = _mm512_packs_epi32((__m512i)values[2], (__m512i)values[3]);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

// x [LENGTH] -> slices [SLICES][CHUNK]; also adds them to sums [SLICES].
template <int SLICES, int LENGTH, class Element>
inline void quantize_chunk(const Element* x, float factor, std::int8_t* slices, Ints* sums) {
    Ints values[SLICES][LENGTH / LANES];
#pragma GCC unroll 4
    for (int v = 0; v < LENGTH / LANES; ++v) {
        Floats rest = same_bits<Floats>(load_bits(x + v * LANES)) * factor;
#pragma GCC unroll 3
        for (int s = 0; s < SLICES; ++s) {
            values[s][v] = (Ints)_mm512_cvtps_epi32((__m512)rest);
            rest = (rest - __builtin_convertvector(values[s][v], Floats)) * SLICE_RATIO;
        }
    }
#pragma GCC unroll 3
    for (int s = 0; s < SLICES; ++s) {
        const __m512i bytes = to_bytes(values[s]);
        _mm512_store_si512(slices + s * CHUNK, bytes);
        // In assembly, because the level avx512f is compiled without VNNI.
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[s]) : "v"(_mm512_set1_epi8(1)), "v"(bytes));
    }
}

#else

// x [LENGTH] -> slices [SLICES][CHUNK]; also adds them to sums [SLICES].
template <int SLICES, int LENGTH, class Element>
inline void quantize_chunk(const Element* x, float factor, std::int8_t* slices, Ints* sums) {
    Ints added[SLICES] = {};
    for (int k = 0; k < LENGTH; k += LANES) {
        Floats rest = same_bits<Floats>(load_bits(x + k)) * factor;
        for (int s = 0; s < SLICES; ++s) {
            const Floats rounded = rest + ROUNDER;
            const Ints slice = same_bits<Ints>(rounded) - ROUNDER_BITS;
            const Bytes bytes = __builtin_convertvector(slice, Bytes);
            __builtin_memcpy(slices + s * CHUNK + k, &bytes, sizeof bytes);
            added[s] += slice;
            rest = (rest - (rounded - ROUNDER)) * SLICE_RATIO;
        }
    }
    for (int s = 0; s < SLICES; ++s) sums[s] += added[s];
}

#endif

// The rows of a tile within one leaf.
template <class Element>
struct LeafRows {
    const Element* x[MAX_TILE_ROWS];
    float factors[MAX_TILE_ROWS];
    int rows;
    std::int64_t count;  // elements per row, without the padding of the leaf
};

// Locate the rows of a leaf, `count` elements from `first` on, and write their scales [rows].
template <class Element>
LeafRows<Element> find_leaf(const OperandArgs& args, std::int64_t first, std::int64_t count, float* scales) {
    LeafRows<Element> leaf;
    leaf.rows = args.rows;
    leaf.count = count;
    for (int r = 0; r < args.rows; ++r) {
        leaf.x[r] = reinterpret_cast<const Element*>(row_address(args, r, first));
        const LeafScale found = leaf_scale(max_magnitude_bits(leaf.x[r], leaf.count));
        scales[r] = found.scale;
        leaf.factors[r] = found.factor;
    }
    return leaf;
}

// Elements k .. k + LENGTH - 1 of a padded leaf -> slices [rows * SLICES][CHUNK]; also added to sums [rows * SLICES].
template <int SLICES, int LENGTH, class Element>
void quantize_chunks(const LeafRows<Element>& leaf, std::int64_t k, std::int8_t* slices, Ints* sums) {
    Element padded[LENGTH];
    for (int r = 0; r < leaf.rows; ++r, slices += SLICES * CHUNK, sums += SLICES) {
        if (leaf.factors[r] == 0.0f)
            __builtin_memset(slices, 0, SLICES * CHUNK);
        else
            quantize_chunk<SLICES, LENGTH>(
                pad(leaf.x[r] + k, leaf.count - k, LENGTH, padded), leaf.factors[r], slices, sums);
    }
}

// Quantise a tile and sum every `span` elements of padded K, or every leaf if span is 0. place(k, length, slices)
// writes slices [rows * SLICES][CHUNK], the operands k .. k + length - 1 of padded K, in the layout of the level.
// length is LENGTH, the smaller of CHUNK and span.
template <int SLICES, int LENGTH, class Element, class Place>
void quantize_tile(const OperandArgs& args, int span, const Place& place) {
    alignas(64) std::int8_t slices[MAX_TILE_ROWS * CHUNK];
    Ints sums[MAX_TILE_ROWS];
    std::int32_t* sums_out = args.sums;
    const int operand_rows = args.rows * SLICES;
    each_leaf(*args.weight, [&](const LeafRange& range) {
        const LeafRows<Element> leaf =
            find_leaf<Element>(args, range.first, range.count, args.scales + range.index * args.rows);
        const std::int64_t spans = span > 0 ? range.padded / span : 1;
        const std::int64_t elements = span > 0 ? span : range.padded;
        for (std::int64_t i = 0; i < spans; ++i) {
            const std::int64_t first = i * elements;
            for (int o = 0; o < operand_rows; ++o) sums[o] = Ints{};
            for (std::int64_t k = first; k < first + elements; k += LENGTH) {
                quantize_chunks<SLICES, LENGTH>(leaf, k, slices, sums);
                place(range.padded_first + k, LENGTH, slices);
            }
            reduce_sums(sums, operand_rows, sums_out);
            sums_out += operand_rows;
        }
    });
}

template <int SLICES, class Place>
void quantize_tile(const OperandArgs& args, int span, const Place& place) {
    const bool bf16 = args.x_type == TYPE_BF16;
    if (span > 0 && span < CHUNK)
        return (bf16 ? quantize_tile<SLICES, CHUNK / 2, std::uint16_t, Place>
                     : quantize_tile<SLICES, CHUNK / 2, float, Place>)(args, span, place);
    (bf16 ? quantize_tile<SLICES, CHUNK, std::uint16_t, Place>
          : quantize_tile<SLICES, CHUNK, float, Place>)(args, span, place);
}

template <class Place>
void quantize_tile(const OperandArgs& args, int span, const Place& place) {
    with_constant<3>(args.weight->slices, [&](auto slices) { quantize_tile<slices.value>(args, span, place); });
}

#if defined(__AVX512F__)

// slices [rows][CHUNK] -> [length / 4][rows][4]: the four operands of one instruction, row after row.
inline void interleave(const std::int8_t* slices, int rows, int length, std::int8_t* to) {
    if (rows == 1) {
        __builtin_memcpy(to, slices, static_cast<std::size_t>(length));
        return;
    }
    __m512i words[REGISTER_WORDS];
#pragma GCC unroll 16
    for (int r = 0; r < REGISTER_WORDS; ++r) words[r] = _mm512_loadu_si512(slices + (r < rows ? r : 0) * CHUNK);
    transpose(words);
    const __mmask16 mask = static_cast<__mmask16>((1u << rows) - 1);
    for (int quad = 0; quad < length / 4; ++quad) _mm512_mask_storeu_epi32(to + quad * rows * 4, mask, words[quad]);
}

#else

using Quads __attribute__((vector_size(16))) = std::int32_t;  // four times four operands

inline Quads load_quads(const std::int8_t* from) {
    Quads quads;
    __builtin_memcpy(&quads, from, sizeof quads);
    return quads;
}

// Four rows of 16 operands -> [4][rows][4].
inline void interleave_four(const std::int8_t* slices, int rows, std::int8_t* to) {
    const Quads a = load_quads(slices), b = load_quads(slices + CHUNK);
    const Quads c = load_quads(slices + 2 * CHUNK), d = load_quads(slices + 3 * CHUNK);
    const Quads ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Quads cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Quads columns[4] = {
        __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5), __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
        __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
    for (int quad = 0; quad < 4; ++quad) __builtin_memcpy(to + quad * rows * 4, &columns[quad], sizeof(Quads));
}

// slices [rows][CHUNK] -> [length / 4][rows][4]: the four operands of one instruction, row after row.
inline void interleave(const std::int8_t* slices, int rows, int length, std::int8_t* to) {
    int r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int k = 0; k < length; k += 16) interleave_four(slices + r * CHUNK + k, rows, to + k * rows + r * 4);
    for (; r < rows; ++r)
        for (int k = 0; k < length; k += 4) __builtin_memcpy(to + k * rows + r * 4, slices + r * CHUNK + k, 4);
}

#endif

// A tile laid out as [padded_k / 4][operand rows][4].
inline void quantize_interleaved(const OperandArgs& args, int span) {
    const int rows = args.rows * args.weight->slices;
    std::int8_t* tile = static_cast<std::int8_t*>(args.tile);
    quantize_tile(args, span, [=](std::int64_t k, int length, const std::int8_t* slices) {
        interleave(slices, rows, length, tile + k * rows);
    });
}
