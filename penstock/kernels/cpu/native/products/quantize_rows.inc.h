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

constexpr int CHUNK = 64;  // elements of K quantised at a time: those of all rows of a tile stay in the L1
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
    // GCC 12 compiles the conversion below to four instructions, and warns of the intrinsic without a mask.
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

inline std::int32_t reduce_sum(const Ints& values) {
    Ints left = values;
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) left[lane] += left[lane + half];
    return left[0];
}

// Bits of max |x|. As integers they have the order of the values, with infinity and then NaN at the top.
template <class Element>
std::int32_t max_magnitude_bits(const Element* x, std::int64_t count) {
    Ints result{};
    std::int64_t k = 0;
    const auto take = [&](const Element* from) {
        const Ints magnitude = load_bits(from) & MAGNITUDE_BITS;
        result = magnitude > result ? magnitude : result;
    };
    for (; k + LANES <= count; k += LANES) take(x + k);
    Element tail[LANES];
    take(pad(x + k, count - k, LANES, tail));
    return reduce_max(result);
}

// The scale of the operands and the factor that elements are multiplied by; with a factor of 0 all slices are zeros.
struct LeafScale {
    float scale;
    float factor;
};

// From 2^-118 on the scale is normal and the factor finite; smaller leaves are treated as zeros.
inline LeafScale leaf_scale(std::int32_t magnitude_bits) {
    if (magnitude_bits >= INFINITY_BITS) return {__builtin_nanf(""), 0.0f};
    if (magnitude_bits < SMALLEST_BITS) return {0.0f, 0.0f};
    const float magnitude = same_bits<float>(magnitude_bits);
    return {magnitude / LARGEST_SLICE, LARGEST_SLICE / magnitude};
}

// x [length] -> slices [SLICES][CHUNK]; also adds them to sums [SLICES].
template <int SLICES, class Element>
inline void quantize_chunk(const Element* x, int length, float factor, std::int8_t* slices, Ints* sums) {
    Ints added[SLICES] = {};
    for (int k = 0; k < length; k += LANES) {
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

// The rows of a tile within one leaf.
template <class Element>
struct LeafRows {
    const Element* x[MAX_TILE_ROWS];
    float factors[MAX_TILE_ROWS];
    int rows;
    std::int64_t count;  // elements per row, without the padding of the leaf
};

// Locate the rows of a leaf, count elements from `first` on, and write their scales [rows].
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

// Elements k .. k + length - 1 of a padded leaf -> slices [rows * SLICES][CHUNK]; also added to sums [rows * SLICES].
template <int SLICES, class Element>
void quantize_chunks(const LeafRows<Element>& leaf, std::int64_t k, int length, std::int8_t* slices, Ints* sums) {
    Element padded[CHUNK];
    for (int r = 0; r < leaf.rows; ++r, slices += SLICES * CHUNK, sums += SLICES) {
        if (leaf.factors[r] == 0.0f)
            __builtin_memset(slices, 0, SLICES * CHUNK);
        else
            quantize_chunk<SLICES>(
                pad(leaf.x[r] + k, leaf.count - k, length, padded), length, leaf.factors[r], slices, sums);
    }
}

// Quantise a tile and sum every `span` elements of padded K, or every leaf if span is 0. place(k, length, slices)
// writes the operands k .. k + length - 1 of padded K, slices [rows * SLICES][CHUNK], in the layout of the level;
// length is the smaller of CHUNK and span.
template <int SLICES, class Element, class Place>
void quantize_tile(const OperandArgs& args, int span, const Place& place) {
    alignas(64) std::int8_t slices[MAX_TILE_ROWS * CHUNK];
    Ints sums[MAX_TILE_ROWS];
    std::int32_t* sums_out = args.sums;
    each_leaf(*args.weight, [&](const LeafRange& range) {
        const LeafRows<Element> leaf =
            find_leaf<Element>(args, range.first, range.count, args.scales + range.index * args.rows);
        const std::int64_t spans = span > 0 ? range.padded / span : 1;
        const std::int64_t elements = span > 0 ? span : range.padded;
        const int length = elements < CHUNK ? static_cast<int>(elements) : CHUNK;
        for (std::int64_t i = 0; i < spans; ++i) {
            const std::int64_t first = i * elements;
            for (int o = 0; o < args.rows * SLICES; ++o) sums[o] = Ints{};
            for (std::int64_t k = first; k < first + elements; k += length) {
                quantize_chunks<SLICES>(leaf, k, length, slices, sums);
                place(range.padded_first + k, length, slices);
            }
            for (int o = 0; o < args.rows * SLICES; ++o) *sums_out++ = reduce_sum(sums[o]);
        }
    });
}

template <class Place>
void quantize_tile(const OperandArgs& args, int span, const Place& place) {
    with_constant<3>(args.weight->slices, [&](auto slices) {
        if (args.x_type == TYPE_F32) return quantize_tile<slices.value, float>(args, span, place);
        quantize_tile<slices.value, std::uint16_t>(args, span, place);
    });
}

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

// A tile laid out as [padded_k / 4][operand rows][4].
inline void quantize_interleaved(const OperandArgs& args, int span) {
    const int rows = args.rows * args.weight->slices;
    std::int8_t* tile = static_cast<std::int8_t*>(args.tile);
    quantize_tile(args, span, [=](std::int64_t k, int length, const std::int8_t* slices) {
        interleave(slices, rows, length, tile + k * rows);
    });
}
