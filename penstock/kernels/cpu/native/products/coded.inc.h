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

// The parts of which codes consist: at levels that multiply bytes in words of 16 bits, a large code is its low four
// bits and its high four bits. Two products of codes up to 129 and operands fit into a word.
inline int parts_of(const PenstockWeight& w) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return largest_code(w) > 129 ? 2 : 1;
#else
    (void)w;
    return 1;
#endif
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

// What packing leaves in OperandArgs::sums, for `rows` operand rows: what the sums of a group begin with, because codes
// are stored + zero, [groups][parts][rows]; then what mins are multiplied with: for step_mins, the sums of two groups
// as two words, [groups / 2][rows], else the sums of blocks as float32, [blocks][rows].
struct OperandSums {
    std::int32_t* starts;
    std::int32_t* mins;
};

inline OperandSums operand_sums(const PenstockWeight& w, std::int32_t* sums, int rows) {
    return {sums, sums + w.padded_k / w.group_size * parts_of(w) * rows};
}

// What the sum of a group begins with, part by part.
inline void group_starts(const PenstockWeight& w, WordSums sums, int parts, int rows, std::int32_t* starts) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    for (int part = 0; part < parts; ++part) {
        const int zero = parts == 1 ? w.zero : part == 0 ? w.zero & 15 : w.zero >> 4;
        starts[part * rows] = same_bits<std::int32_t>(sums * -zero);
    }
#else
    (void)parts, (void)rows;
    *starts = -w.zero * sums.sum();
#endif
}

// A tile laid out as [padded_k / 4][operand rows][4], and its sums.
inline void pack_integers(const OperandArgs& args) {
    const PenstockWeight& w = *args.weight;
    const int rows = args.rows * w.slices, group = w.group_size, parts = parts_of(w);
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
            for (int o = 0; o < rows; ++o) {
                group_starts(w, group_sums[o], parts, rows, sums.starts + index * parts * rows + o);
                const int sum = group_sums[o].sum();
                if (w.step_mins != nullptr) {
                    std::int32_t& pair = sums.mins[index / 2 * rows + o];
                    const auto word = static_cast<std::uint32_t>(sum) & 0xffff;
                    pair = static_cast<std::int32_t>(index % 2 == 0 ? word : word << 16) | (index % 2 == 0 ? 0 : pair);
                } else if (w.mins != nullptr) {
                    block_sums[o] += static_cast<float>(sum);  // exact: below 2^24, as packed.py requires
                    sums.mins[block * rows + o] = same_bits<std::int32_t>(block_sums[o]);
                }
            }
        }
    });
}

// A tile laid out as [padded_k][rows], in float32.
template <class Element>
inline void widen_rows(const OperandArgs& args) {
    auto* const tile = static_cast<float*>(args.tile);
    each_leaf(*args.weight, [&](const LeafRange& leaf) {
        for (int r = 0; r < args.rows; ++r) {
            const auto* x = reinterpret_cast<const Element*>(row_address(args, r, leaf.first));
            float* to = tile + leaf.padded_first * args.rows + r;
            for (std::int64_t k = 0; k < leaf.padded; ++k)
                to[k * args.rows] = k < leaf.count ? to_float(x[k]) : 0.0f;
        }
    });
}

inline void pack_floats(const OperandArgs& args) {
    (args.x_type == TYPE_F32 ? widen_rows<float> : widen_rows<std::uint16_t>)(args);
}
