// What the levels share of products with int4 weights: the walk over leaves, tiles and groups, the end of a leaf, and
// activations in bfloat16. The products_int4 files compile it for themselves, within their anonymous namespace.

constexpr int TILE_ROWS = 12;                 // operand rows of a tile, on every level
constexpr int MAX_BLOCK = TILE_ROWS * PANEL;  // operand rows * columns that are summed up at once
constexpr int MAX_GROUP = 128;
constexpr int QUAD = 4;            // elements of K that packed values keep together
constexpr int QUAD_BYTES = 64;     // what they take in a panel
constexpr int FETCH_AHEAD = 2048;  // bytes of a panel, at least a group

// One group of K: all operand rows of a tile, some neighbouring panels.
struct Group {
    const std::uint8_t* values;        // of the first panel, [size / 4][16][4]
    std::int64_t values_stride;        // bytes from one panel to the next
    const std::uint16_t* scales;       // of the first panel, bfloat16 [32]
    std::int64_t scales_stride;        // elements from one panel to the next
    const void* operands;              // of the tile, in the level's layout
    const std::int32_t* sums;          // of the operands, [operand rows]; nothing where activations are bfloat16
    int size;                          // 32, 64 or 128
    float* totals;                     // [operand rows][panels * 32], to be added to
    const std::uint8_t* next_values;   // what may be fetched into the caches meanwhile, of the first panel,
    int next_step;                     // and how many bytes that goes on with every 4 of K
    const std::uint16_t* next_scales;
};

// Aligned floats as a vector.
inline Floats& floats(float* at) { return *reinterpret_cast<Floats*>(at); }
inline const Floats& floats(const float* at) { return *reinterpret_cast<const Floats*>(at); }

inline int operand_rows(const MultiplyArgs& a) {
    return a.weight->slices > 0 ? a.rows * a.weight->slices : a.rows;
}

// The end of a leaf: from the totals of a tile, [rows][slices][columns], into the tree of partial sums or, the last
// leaf, out.
inline void end_leaf(
    const MultiplyArgs& a, int leaf, int tile, int panel, int slices, int columns, const float* totals) {
    constexpr float SECOND = 1.0f / 254.0f, THIRD = 1.0f / (254.0f * 254.0f);
    const PenstockWeight& w = *a.weight;
    const bool last = leaf + 1 == w.leaves;
    const unsigned levels = levels_to_add(leaf, w.leaves);
    const std::int64_t width = a.panels * PANEL, level_stride = MAX_TILE_ROWS * width;
    for (int row = 0; row < a.rows; ++row, totals += slices * columns) {
        const float scale = w.kind == KIND_INT4 ? a.scales[tile * a.scales_stride + leaf * a.rows + row] : 1.0f;
        const std::int64_t at = row * width + panel * PANEL;
        float* tree = a.tree + tile * TREE_LEVELS * level_stride + at;
        float* to = last ? a.out + tile * a.rows * width + at : tree + level_to_keep(leaf) * level_stride;
        for (int c = 0; c < columns; c += LANES) {
            Floats sum = floats(totals + c);
            if (slices > 1) sum = sum + floats(totals + columns + c) * SECOND;
            if (slices > 2) sum = sum + floats(totals + 2 * columns + c) * THIRD;
            sum = sum * scale;
            for (int level = 0; levels >> level; ++level)
                if (levels >> level & 1) sum = floats(tree + level * level_stride + c) + sum;
            floats(to + c) = sum;
        }
    }
}

// All tiles times `panels` panels, the first of which is args.first_panel + panel. The operands of a group are
// `element` bytes each, group after group. rows is operand_rows(a), as a constant if it can be; add_group(Group) sums
// up one group.
//
// A single tile fetches its own weights some groups ahead. Of several tiles each fetches its share of the next leaf,
// for the first one would wait for memory while the others have enough to do.
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
            for (int i = 0; i < rows * columns; i += LANES) {
                floats(totals + i) = Floats{};
                asm volatile("" ::: "memory");  // or GCC makes the loop a slow instruction for long strings
            }
            const auto* operands = static_cast<const std::uint8_t*>(a.tile) + tile * a.tile_stride;
            const std::int32_t* sums = a.sums + tile * a.sums_stride;
            const std::int64_t ahead = a.tiles > 1 ? end - first : FETCH_AHEAD / group_bytes;
            for (std::int64_t g = first; g < end; ++g) {
                const std::int64_t next = g + ahead + (g + ahead < groups ? 0 : (panels - 1) * groups);
                add_group(Group{values + g * group_bytes, groups * group_bytes, scales + g * PANEL, groups * PANEL,
                                operands + g * w.group_size * rows * element, sums + g * rows, w.group_size, totals,
                                values + next * group_bytes + tile * group_bytes / a.tiles,
                                (QUAD_BYTES + a.tiles - 1) / a.tiles, scales + next * PANEL});
            }
            end_leaf(a, leaf, tile, panel, rows / a.rows, columns, totals);
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
