// What the levels share of products with int4 weights: the loops over leaves, tiles and groups, the end of a leaf, and
// activations in bfloat16. Included by the int4 file of each level within its anonymous namespace.

constexpr int TILE_ROWS = 12;                 // operand rows per tile, on every level
constexpr int MAX_BLOCK = TILE_ROWS * PANEL;  // operand rows * columns that are summed at once
constexpr int MAX_GROUP = 128;
constexpr int QUAD = 4;            // elements of K that packed values store together
constexpr int QUAD_BYTES = 64;     // of four elements of K in a panel
constexpr int FETCH_AHEAD = 2048;  // bytes of a panel, at least a group

// One group of K, for all operand rows of a tile and some neighbouring panels.
struct Group {
    const std::uint8_t* values;        // of the first panel, [size / 4][16][4]
    std::int64_t values_stride;        // bytes from one panel to the next
    const std::uint16_t* scales;       // of the first panel, bfloat16 [32]
    std::int64_t scales_stride;        // elements from one panel to the next
    const void* operands;              // of the tile, in the layout of the level
    const std::int32_t* sums;          // of the operands, [operand rows]; unused for bfloat16 activations
    int size;                          // 32, 64 or 128
    float* totals;                     // [operand rows][panels * 32], to be added to
    const std::uint8_t* next_values;   // to be prefetched, of the first panel
    int next_step;                     // bytes prefetched per 4 elements of K
    const std::uint16_t* next_scales;
};

// Aligned floats as a vector.
inline Floats& floats(float* at) { return *reinterpret_cast<Floats*>(at); }
inline const Floats& floats(const float* at) { return *reinterpret_cast<const Floats*>(at); }

inline int operand_rows(const MultiplyArgs& a) {
    return a.weight->slices > 0 ? a.rows * a.weight->slices : a.rows;
}

// The end of a leaf: from the totals of a tile, [rows][slices][columns], to the tree of partial sums or, after the last
// leaf, to out.
inline void end_leaf(
    const MultiplyArgs& a, int leaf, int tile, int panel, int slices, int columns, const float* totals) {
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
            if (slices > 1) sum = sum + floats(totals + columns + c) * SECOND_SLICE;
            if (slices > 2) sum = sum + floats(totals + 2 * columns + c) * THIRD_SLICE;
            sum = sum * scale;
            for (int level = 0; levels >> level; ++level)
                if (levels >> level & 1) sum = floats(tree + level * level_stride + c) + sum;
            floats(to + c) = sum;
        }
    }
}

// All tiles times `panels` panels from a.first_panel + panel on. Operands are `element` bytes each, group after group.
// rows: operand_rows(a), as a constant if possible. add_group(Group) adds one group to the totals.
//
// A single tile prefetches its own weights some groups ahead. Several tiles each prefetch a part of the next leaf;
// otherwise only the first one would wait for memory.
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
                asm volatile("" ::: "memory");  // otherwise GCC compiles the loop to a slow string instruction
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

// Round a tile to bfloat16. place(k, row, words) writes the elements k .. k + K_UNIT - 1 of padded K of a row, which
// are words [K_UNIT], in the layout of the level.
template <class Element, class Place>
inline void pack_bf16(const OperandArgs& args, const Place& place) {
    each_leaf(*args.weight, [&](const LeafRange& leaf) {
        for (std::int64_t k = 0; k < leaf.padded; k += K_UNIT) {
            const std::int64_t left = leaf.count - k;
            const int count = left >= K_UNIT ? K_UNIT : left > 0 ? static_cast<int>(left) : 0;
            for (int r = 0; r < args.rows; ++r) {
                const auto* x = reinterpret_cast<const Element*>(row_address(args, r, leaf.first + k));
                alignas(64) std::uint16_t words[K_UNIT];
                for (int i = 0; i < count; ++i) words[i] = to_bf16(x[i]);
                for (int i = count; i < K_UNIT; ++i) words[i] = 0;
                place(leaf.padded_first + k, r, words);
            }
        }
    });
}

template <class Place>
inline void pack_bf16(const OperandArgs& args, const Place& place) {
    if (args.x_type == TYPE_F32) return pack_bf16<float>(args, place);
    pack_bf16<std::uint16_t>(args, place);
}

// A tile laid out as int8 [padded_k / 4][operand rows][4], and its sums.
inline void pack_int8(const OperandArgs& args) { quantize_interleaved(args, args.weight->group_size); }

#if !defined(__AVX512F__)

// ---- Levels that unpack a group before they multiply it, one panel at a time

// A tile laid out as bfloat16 [padded_k][rows].
inline void pack_bf16_columns(const OperandArgs& args) {
    auto* tile = static_cast<std::uint16_t*>(args.tile);
    pack_bf16(args, [=, &args](std::int64_t k, int row, const std::uint16_t* words) {
        for (int i = 0; i < K_UNIT; ++i) tile[(k + i) * args.rows + row] = words[i];
    });
}

// Rows: the type Unpacked, unpack(Group, operand rows, Unpacked&), add_rows<R>(Group, Unpacked, first row, operand
// rows) for R = 1 and AT_ONCE, and the bytes of an operand ELEMENT.
template <class Rows>
void add_group(const Group& g, int rows) {
    constexpr int AT_ONCE = Rows::AT_ONCE;
    typename Rows::Unpacked unpacked;
    Rows::unpack(g, rows, unpacked);
    int row = 0;
    for (; row + AT_ONCE <= rows; row += AT_ONCE) Rows::template add_rows<AT_ONCE>(g, unpacked, row, rows);
    if (row < rows) Rows::template add_rows<1>(g, unpacked, row, rows);
}

template <class Rows>
ProductKernel unpacking_kernel() {
    const auto multiply = [](const MultiplyArgs& a) {
        const int rows = operand_rows(a);
        for (int panel = 0; panel < a.panels; ++panel)
            multiply_panels(a, panel, 1, rows, Rows::ELEMENT, [=](const Group& g) { add_group<Rows>(g, rows); });
    };
    return {TILE_ROWS, [](int) { return 1; }, Rows::ELEMENT == 1 ? pack_int8 : pack_bf16_columns, multiply};
}

#endif
