// What the levels share of products with int4 weights: the walk over leaves, tiles and groups, the end of a leaf, and
// activations in bfloat16. The products_int4 files compile it for themselves, within their anonymous namespace.

constexpr int TILE_ROWS = 12;  // operand rows of a tile, on every level
constexpr int MAX_BLOCK = TILE_ROWS * PANEL;  // operand rows * columns that are summed up at once
constexpr int MAX_GROUP = 128;
constexpr int QUAD = 4;         // elements of K that packed values keep together
constexpr int QUAD_BYTES = 64;  // what they take in a panel

// One group of K: all operand rows of a tile, some neighbouring panels.
struct Group {
    const std::uint8_t* values;   // of the first panel, [size / 4][16][4]
    std::int64_t values_stride;   // bytes from one panel to the next
    const std::uint16_t* scales;  // of the first panel, bfloat16 [32]
    std::int64_t scales_stride;   // elements from one panel to the next
    const void* operands;         // of the tile, in the level's layout
    const std::int32_t* sums;     // of the operands, [operand rows]; nothing where activations are bfloat16
    int size;                     // 32, 64 or 128
    float* totals;                // [operand rows][panels * 32], to be added to
};

inline int operand_rows(const MultiplyArgs& a) {
    return a.weight->slices > 0 ? a.rows * a.weight->slices : a.rows;
}

// Takes the next leaf of some results of one row, values [columns], into the binary tree of partial sums.
//
// Level l of the tree holds the sum of 2^l leaves that waits for as many more; the bits of the leaf's number say where
// something waits. The last leaf collects all that does, the latest first, and goes out.
inline void add_to_tree(const MultiplyArgs& a, int leaf, int tile, int row, int column, int columns, float* values) {
    const bool last = leaf + 1 == a.weight->leaves;
    const int width = a.panels * PANEL;
    const std::int64_t level_stride = std::int64_t{MAX_TILE_ROWS} * width;
    float* waiting = a.tree + tile * TREE_LEVELS * level_stride + std::int64_t{row} * width + column;
    for (int level = 0; level < TREE_LEVELS; ++level, waiting += level_stride) {
        const bool waits = leaf >> level & 1;
        if (!waits && !last) break;
        for (int c = 0; waits && c < columns; ++c) values[c] = waiting[c] + values[c];
    }
    float* to = last ? a.out + (std::int64_t{tile} * a.rows + row) * width + column : waiting;
    for (int c = 0; c < columns; ++c) to[c] = values[c];
}

// One row's leaf from the totals of its slices, [slices][columns]; it replaces the first.
inline void combine_slices(int slices, float scale, int columns, float* totals) {
    constexpr float WEIGHT[] = {1.0f, 1.0f / 254.0f, 1.0f / (254.0f * 254.0f)};
    for (int s = 1; s < slices; ++s)
        for (int c = 0; c < columns; ++c) totals[c] += totals[s * columns + c] * WEIGHT[s];
    for (int c = 0; c < columns; ++c) totals[c] *= scale;
}

// All tiles times `panels` panels, the first of which is args.first_panel + panel. The operands of a group are
// `element` bytes each, group after group. rows is operand_rows(a), as a constant if it can be; add_group(Group) sums
// up one group.
template <class AddGroup>
inline __attribute__((always_inline)) void multiply_panels(
    const MultiplyArgs& a, int panel, int panels, int rows, int element, AddGroup add_group) {
    const PenstockWeight& w = *a.weight;
    const int columns = panels * PANEL;
    const std::int64_t groups = w.padded_k / w.group_size;
    const std::int64_t group_bytes = w.group_size / QUAD * QUAD_BYTES;
    const std::int64_t begin = (a.first_panel + panel) * groups;
    const auto* values = static_cast<const std::uint8_t*>(w.values) + begin * group_bytes;
    const std::uint16_t* scales = w.group_scales + begin * PANEL;
    std::int64_t first = 0;
    for (int leaf = 0; leaf < w.leaves; ++leaf) {
        const std::int64_t end = w.padded_leaf_ends[leaf] / w.group_size;
        for (int tile = 0; tile < a.tiles; ++tile) {
            alignas(64) float totals[MAX_BLOCK];
            for (int i = 0; i < rows * columns; ++i) totals[i] = 0.0f;
            const auto* operands = static_cast<const std::uint8_t*>(a.tile) + tile * a.tile_stride;
            const std::int32_t* sums = a.sums + tile * a.sums_stride;
            for (std::int64_t g = first; g < end; ++g)
                add_group(Group{values + g * group_bytes, groups * group_bytes, scales + g * PANEL, groups * PANEL,
                                operands + g * w.group_size * rows * element, sums + g * rows, w.group_size, totals});
            const int slices = rows / a.rows;
            for (int row = 0; row < a.rows; ++row) {
                float* result = totals + row * slices * columns;
                if (w.kind == KIND_INT4)
                    combine_slices(slices, a.scales[tile * a.scales_stride + leaf * a.rows + row], columns, result);
                add_to_tree(a, leaf, tile, row, panel * PANEL, columns, result);
            }
        }
        first = end;
    }
}

// float32 -> bfloat16, to nearest even; a NaN stays one.
inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40 : rounded);
}

inline std::uint16_t to_bf16(std::uint16_t bits) { return bits; }

inline float from_bf16(std::uint16_t half) {
    const std::uint32_t bits = std::uint32_t{half} << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds a tile to bfloat16. place(k, row, words) puts the elements k .. k + K_UNIT - 1 of padded K of a row, which
// are words [K_UNIT], where the level wants them.
template <class Element, class Place>
inline void pack_bf16(const OperandArgs& args, const Place& place) {
    const PenstockWeight& w = *args.weight;
    std::int64_t start = 0, padded_start = 0;
    for (int leaf = 0; leaf < w.leaves; ++leaf) {
        for (std::int64_t k = padded_start; k < w.padded_leaf_ends[leaf]; k += K_UNIT) {
            const std::int64_t from = start + k - padded_start, left = w.leaf_ends[leaf] - from;
            const int count = left >= K_UNIT ? K_UNIT : left > 0 ? static_cast<int>(left) : 0;
            for (int r = 0; r < args.rows; ++r) {
                const std::int64_t row = args.row_index != nullptr ? args.row_index[r] : args.first_row + r;
                const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride + from;
                alignas(64) std::uint16_t words[K_UNIT];
                for (int i = 0; i < count; ++i) words[i] = to_bf16(x[i]);
                for (int i = count; i < K_UNIT; ++i) words[i] = 0;
                place(k, r, words);
            }
        }
        start = w.leaf_ends[leaf];
        padded_start = w.padded_leaf_ends[leaf];
    }
}

template <class Place>
inline void pack_bf16(const OperandArgs& args, const Place& place) {
    if (args.x_type == TYPE_F32) return pack_bf16<float>(args, place);
    pack_bf16<std::uint16_t>(args, place);
}

// A tile laid out as bfloat16 [padded_k][rows].
inline void pack_bf16_columns(const OperandArgs& args) {
    auto* tile = static_cast<std::uint16_t*>(args.tile);
    pack_bf16(args, [=, &args](std::int64_t k, int row, const std::uint16_t* words) {
        for (int i = 0; i < K_UNIT; ++i) tile[(k + i) * args.rows + row] = words[i];
    });
}

// A tile laid out as int8 [padded_k / 4][operand rows][4], and its sums.
inline void pack_int8(const OperandArgs& args) { quantize_interleaved(args, args.weight->group_size); }
