// The common parts of products with coded weights on all levels: the pieces in which a leaf is multiplied, scales, and
// the packing of activations. Included by the files of each level within their anonymous namespaces, after
// quantize_rows.inc.h.
//
// kernels/coding.py defines the arithmetic. All integers are exact, because packed.py allows a block only if its sum
// stays below 2^31 with the greatest codes, steps and operands (127). Its largest: 256 elements of a Q6_K block give at
// most 256 * 127 * 32 * 128, which is below 2^28.

#include "products/end_leaf.inc.h"

constexpr int QUAD = 4;            // elements of K that codes store together
constexpr int MAX_GROUP = 32;
constexpr int GRANULE = 16;        // elements: every group is a multiple
constexpr int MAX_TOTALS = MAX_TILES * TILE_ROWS * PANEL;

// Elements of padded K that are multiplied together: some blocks, the last of which may be short, or a part of one.
struct Piece {
    std::int64_t begin;  // the first element of the first block
    std::int64_t k;      // the piece's first element
    int size;
    std::int64_t block;  // index of the first block in a panel
    bool first, last;    // whether the piece begins and ends with its block
};

inline std::int64_t blocks_of(const PenstockWeight& w, std::int64_t padded) {
    return w.block_size > 0 ? (padded + w.block_size - 1) / w.block_size : 1;
}

// Blocks of a panel.
inline std::int64_t blocks_of(const PenstockWeight& w) {
    std::int64_t blocks = 0;
    each_leaf(w, [&](const LeafRange& leaf) { blocks += blocks_of(w, leaf.padded); });
    return blocks;
}

// Call body(Piece) for the pieces of a leaf, of up to `most` elements.
template <class Body>
PENSTOCK_INLINE void each_piece(
    const PenstockWeight& w, const LeafRange& leaf, std::int64_t first_block, int most, const Body& body) {
    const std::int64_t end = leaf.padded_first + leaf.padded;
    const std::int64_t size = w.block_size > 0 ? w.block_size : leaf.padded;
    const std::int64_t together = 0 < size && size < most ? most / size : 1;  // a leaf may be empty
    std::int64_t block = first_block;
    for (std::int64_t begin = leaf.padded_first; begin < end; begin += together * size, block += together) {
        const std::int64_t stop = begin + together * size < end ? begin + together * size : end;
        for (std::int64_t k = begin; k < stop; k += most) {
            const std::int64_t left = stop - k;
            body(Piece{begin, k, static_cast<int>(left < most ? left : most), block, k == begin, left <= most});
        }
    }
}

constexpr int scale_bytes(std::int32_t type) { return type == SCALE_F32 ? 4 : 2; }

// The arrays of one panel.
struct PanelArrays {
    const std::uint8_t* values;
    const char* scales;  // null if the weight has no blocks
    const char* mins;
    const std::int8_t* steps;
    const std::uint8_t* step_mins;
};

inline PanelArrays panel_of(const PenstockWeight& w, std::int64_t panel, std::int64_t blocks) {
    const std::int64_t groups = w.padded_k / w.group_size;
    const std::int64_t of_blocks = panel * blocks * PANEL * scale_bytes(w.scale_type);
    return {static_cast<const std::uint8_t*>(w.values) + panel * w.padded_k * PANEL * w.code_bits / 8,
            w.scales == nullptr ? nullptr : static_cast<const char*>(w.scales) + of_blocks,
            w.mins == nullptr ? nullptr : static_cast<const char*>(w.mins) + of_blocks,
            w.steps == nullptr ? nullptr : w.steps + panel * groups * PANEL,
            w.step_mins == nullptr ? nullptr : w.step_mins + panel * groups * PANEL};
}

// LANES scales (or mins) of a block, from column `column` on.
inline Floats load_scales(const char* array, std::int32_t type, std::int64_t block, int column) {
    const char* from = array + (block * PANEL + column) * scale_bytes(type);
    if (type == SCALE_F32) return same_bits<Floats>(load_bits(reinterpret_cast<const float*>(from)));
    const Ints high = load_bits(reinterpret_cast<const std::uint16_t*>(from));  // a half in the upper 16 bits
    if (type == SCALE_BF16) return same_bits<Floats>(high);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    const Ints magnitude = (high & MAGNITUDE_BITS) >> 3;  // its exponent is less than that of float32 by 127 - 15
    const Floats value = same_bits<Floats>(magnitude) * 0x1p112f;
    return same_bits<Floats>(same_bits<Ints>(value) | (high & ~MAGNITUDE_BITS));
}

// The largest code of a weight, as it is multiplied: the bytes of a table are levels + zero.
inline int largest_code(const PenstockWeight& w) {
    if (w.has_levels == 0) return w.largest_code;
    float largest = w.levels[0];
    for (const float level : w.levels) largest = level > largest ? level : largest;
    return static_cast<int>(largest) + w.zero;
}

// Whether operands are words: levels that add products of bytes in words of 16 bits multiply large codes as words. Two
// products of codes up to 129 and operands fit into a word.
inline bool has_word_operands(const PenstockWeight& w) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return largest_code(w) > 129;
#else
    (void)w;
    return false;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int OPERAND_BYTES = 2;
#else
constexpr int OPERAND_BYTES = 1;
#endif

// Rows of the sums of a tile with so many activation rows.
inline int sum_rows(const PenstockWeight& w, int rows) {
    return w.joined != 0 || w.slices == 0 ? rows : rows * w.slices;
}

// ---- Activations

// Two words: the sums of the first two operands and of the last two operands of each quad.
struct WordSums {
    std::int16_t first, last;

    WordSums operator+(const WordSums& other) const {
        return {static_cast<std::int16_t>(first + other.first), static_cast<std::int16_t>(last + other.last)};
    }
    WordSums operator*(int factor) const {
        return {static_cast<std::int16_t>(first * factor), static_cast<std::int16_t>(last * factor)};
    }
    int sum() const { return first + last; }
};

// Of GRANULE operands.
inline WordSums word_sums(const std::int8_t* from) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i words = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
    const __m128i four = _mm_add_epi16(words, _mm_unpackhi_epi64(words, words));
    return same_bits<WordSums>(_mm_cvtsi128_si32(_mm_add_epi16(four, _mm_srli_si128(four, 4))));
#else
    WordSums sums{};
    for (int i = 0; i < GRANULE; i += QUAD)
        sums = sums + WordSums{static_cast<std::int16_t>(from[i] + from[i + 1]),
                               static_cast<std::int16_t>(from[i + 2] + from[i + 3])};
    return sums;
#endif
}

// What packing leaves in OperandArgs::sums: what the sums of a group begin with, because codes are stored + zero,
// [groups][operand rows], or [groups][rows of sums] for words; then what mins are multiplied with: for step_mins, the
// sums of two groups as two words, [groups / 2][rows of sums], else the sums of blocks as float32,
// [blocks][rows of sums].
struct OperandSums {
    std::int32_t* starts;
    std::int32_t* mins;
};

inline OperandSums operand_sums(const PenstockWeight& w, std::int32_t* sums, int rows) {
    return {sums, sums + w.padded_k / w.group_size * rows};
}

// What the sum of a group begins with, for operands that are bytes.
inline std::int32_t group_start(const PenstockWeight& w, WordSums sums) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return same_bits<std::int32_t>(sums * -w.zero);
#else
    return -w.zero * sums.sum();
#endif
}

// slices [rows * slices][CHUNK] -> [length / 4][rows of sums][2][2] words: elements 0 and 2, then 1 and 3 of each quad.
inline void interleave_words(
    const PenstockWeight& w, const std::int8_t* slices, int rows, int length, std::int8_t* to) {
    const int sums = sum_rows(w, rows);
    for (int row = 0; row < sums; ++row, slices += w.joined != 0 ? 2 * CHUNK : CHUNK)
        for (int k = 0; k < length; k += QUAD) {
            std::int16_t words[QUAD];
            for (int i = 0; i < QUAD; ++i) {
                const int word = w.joined != 0 ? JOINED_SLICE * slices[k + i] + slices[CHUNK + k + i] : slices[k + i];
                words[i % 2 * 2 + i / 2] = static_cast<std::int16_t>(word);
            }
            __builtin_memcpy(to + (k / QUAD * sums + row) * static_cast<int>(sizeof words), words, sizeof words);
        }
}

// A tile laid out as [padded_k / 4][operand rows][4], or as interleave_words() says, and its sums.
inline void pack_integers(const OperandArgs& args) {
    const PenstockWeight& w = *args.weight;
    const int rows = args.rows * w.slices, rows_of_sums = sum_rows(w, args.rows), slices_of_sum = rows / rows_of_sums;
    const int group = w.group_size;
    const bool words = has_word_operands(w);
    const OperandSums sums = operand_sums(w, args.sums, rows);
    std::int32_t of_leaves[MAX_LEAVES * MAX_TILE_ROWS];
    OperandArgs quantise = args;
    quantise.sums = of_leaves;
    auto* const tile = static_cast<std::int8_t*>(args.tile);
    WordSums group_sums[MAX_TILE_ROWS];
    float block_sums[MAX_TILE_ROWS];
    // The blocks, whose sums are needed for mins without steps: where the current one began, and how many there were.
    std::int64_t block = -1, block_end = 0;
    int leaf = -1;
    std::int64_t leaf_end = 0;
    quantize_tile(quantise, 0, [&](std::int64_t k, int length, const std::int8_t* slices) {
        if (words)
            interleave_words(w, slices, args.rows, length, tile + k * rows_of_sums * 2);
        else
            interleave(slices, rows, length, tile + k * rows);
        for (int at = 0; at < length; at += GRANULE) {
            const std::int64_t to = k + at;
            while (to >= leaf_end) {
                leaf_end = w.padded_leaf_ends[++leaf];
                block_end = to;
            }
            if (to >= block_end) {
                ++block;
                block_end = w.block_size > 0 && to + w.block_size < leaf_end ? to + w.block_size : leaf_end;
                for (int o = 0; o < rows; ++o) block_sums[o] = 0.0f;
            }
            for (int o = 0; o < rows; ++o) {
                const WordSums of_granule = word_sums(slices + o * CHUNK + at);
                group_sums[o] = to % group == 0 ? of_granule : group_sums[o] + of_granule;
            }
            if ((to + GRANULE) % group != 0) continue;
            const std::int64_t index = to / group;
            for (int o = 0; o < rows_of_sums; ++o) {
                int sum = group_sums[o * slices_of_sum].sum();
                if (slices_of_sum == 2) sum = sum * JOINED_SLICE + group_sums[2 * o + 1].sum();
                if (words) sums.starts[index * rows_of_sums + o] = -w.zero * sum;
                if (w.step_mins != nullptr) {
                    std::int32_t& pair = sums.mins[index / 2 * rows_of_sums + o];
                    const auto word = static_cast<std::uint32_t>(sum) & 0xffff;
                    pair = static_cast<std::int32_t>(index % 2 == 0 ? word : word << 16) | (index % 2 == 0 ? 0 : pair);
                } else if (w.mins != nullptr) {
                    block_sums[o] += static_cast<float>(sum);  // exact: below 2^24, as packed.py requires
                    sums.mins[block * rows_of_sums + o] = same_bits<std::int32_t>(block_sums[o]);
                }
            }
            if (!words)
                for (int o = 0; o < rows; ++o) sums.starts[index * rows + o] = group_start(w, group_sums[o]);
        }
    });
}

// Floats of 8 bits are multiplied as a float32 with their bits, which is their value without a factor of 2^120 or 2^112
// (abi.h). One part of the factor is in the operands, the rest in the sums. So the levels of such a code, its operand
// and their product are exact if the operand is of bfloat16, below 2^68, and 0 or at least 2^-73.
constexpr float OPERAND_FACTOR = 0x1p60f;
constexpr float SMALLEST_OPERAND = 0x1p-73f;

inline float sum_factor(const PenstockWeight& w) { return w.factor / OPERAND_FACTOR; }

// A tile laid out as [padded_k][rows], in float32.
template <class Element>
inline void widen_rows(const OperandArgs& args) {
    auto* const tile = static_cast<float*>(args.tile);
    const bool scaled = args.weight->code_bits == 8;
    const float factor = scaled ? OPERAND_FACTOR : 1.0f, smallest = scaled ? SMALLEST_OPERAND : 0.0f;
    each_leaf(*args.weight, [&](const LeafRange& leaf) {
        for (int r = 0; r < args.rows; ++r) {
            const auto* x = reinterpret_cast<const Element*>(row_address(args, r, leaf.first));
            float* to = tile + leaf.padded_first * args.rows + r;
            for (std::int64_t k = 0; k < leaf.padded; ++k) {
                const float value = k < leaf.count ? to_float(x[k]) : 0.0f;
                to[k * args.rows] = __builtin_fabsf(value) < smallest ? 0.0f : value * factor;
            }
        }
    });
}

inline void pack_floats(const OperandArgs& args) {
    (args.x_type == TYPE_F32 ? widen_rows<float> : widen_rows<std::uint16_t>)(args);
}
