// The common parts of int8 products on all levels: the loops over leaves and tiles, and the end of a leaf. Included by
// the int8 file of each level within its anonymous namespace, after quantize_rows.inc.h.
//
// The integer sums of a leaf are exact: packing allows at most 65536 elements, and 65536 * 128 * 127 is below 2^31.

constexpr int STEP = 4;                   // elements of K that are stored together
constexpr int STEP_BYTES = PANEL * STEP;  // bytes of a step of a panel

// One leaf of one tile, for neighbouring panels.
struct LeafArgs {
    const std::uint8_t* weights;   // weights of the leaf in the first panel
    std::int64_t panel_stride;     // bytes per panel
    std::int64_t steps;
    const std::uint8_t* prefetch;  // weights to prefetch, in every panel
    std::int64_t prefetch_step;    // bytes prefetched per step
    const std::int8_t* operands;   // of the tile, in the layout of the level
    int operand_rows;
    int slices;
    const std::int32_t* sums;      // [operand rows]
    const float* scales;           // [operand rows / slices]
    unsigned add;                  // bit l: level l of the tree is added
    const float* tree;             // [TREE_LEVELS][MAX_TILE_ROWS * PANEL * panels]
    float* to;                     // [rows][panels * PANEL], a level of the tree or the result
};

// The value of a row in a leaf, from the sums of its slices.
template <int SLICES>
inline Floats leaf_value(const Ints& d0, const Ints& d1, const Ints& d2, float scale) {
    Floats value = __builtin_convertvector(d0, Floats);
    if constexpr (SLICES > 1) value += __builtin_convertvector(d1, Floats) * SECOND_SLICE;
    if constexpr (SLICES > 2) value += __builtin_convertvector(d2, Floats) * THIRD_SLICE;
    return value * scale;
}

inline Floats load_floats(const float* from) { return same_bits<Floats>(load_bits(from)); }

// Turn the sums of operand rows, [ROWS][COLUMNS], into values of this leaf and add levels of the tree.
template <int SLICES, int ROWS, int COLUMNS>
inline void finish_leaf(const LeafArgs& leaf, const Ints (*sums)[COLUMNS]) {
    const float *scales = leaf.scales, *tree = leaf.tree;
    float* to = leaf.to;
    const unsigned add = leaf.add;
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row += SLICES, to += COLUMNS * LANES, tree += COLUMNS * LANES) {
        Floats values[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c)
            values[c] = leaf_value<SLICES>(
                sums[row][c], sums[row + (SLICES > 1)][c], sums[row + SLICES - 1][c], scales[row / SLICES]);
#pragma GCC unroll 3
        for (int level = 0; level < TREE_LEVELS; ++level) {
            if ((add >> level & 1) == 0) continue;
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c)
                values[c] = load_floats(tree + (level * MAX_TILE_ROWS * COLUMNS + c) * LANES) + values[c];
        }
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) __builtin_memcpy(to + c * LANES, &values[c], sizeof(Floats));
    }
}

// A leaf of one tile, whose operands have elements of so many bytes. What to prefetch is left out.
inline LeafArgs leaf_of_tile(const MultiplyArgs& args, const LeafRange& range, std::int64_t tile, int element_bytes) {
    const PenstockWeight& weight = *args.weight;
    const std::int64_t panel_bytes = weight.padded_k * PANEL;
    const std::int64_t level = std::int64_t{MAX_TILE_ROWS} * PANEL * args.panels;
    const int l = range.index, rows = args.rows * weight.slices;
    float* tree = args.tree + tile * TREE_LEVELS * level;
    LeafArgs leaf{};
    leaf.weights = static_cast<const std::uint8_t*>(weight.values) + args.first_panel * panel_bytes +
                   range.padded_first * PANEL;
    leaf.panel_stride = panel_bytes;
    leaf.steps = range.padded / STEP;
    leaf.operands = static_cast<const std::int8_t*>(args.tile) + tile * args.tile_stride +
                    range.padded_first * rows * element_bytes;
    leaf.operand_rows = rows;
    leaf.slices = weight.slices;
    leaf.sums = args.sums + tile * args.sums_stride + l * rows;
    leaf.scales = args.scales + tile * args.scales_stride + l * args.rows;
    leaf.add = levels_to_add(l, weight.leaves);
    leaf.tree = tree;
    leaf.to = l + 1 == weight.leaves ? args.out + tile * args.rows * args.panels * PANEL
                                     : tree + level_to_keep(l) * level;
    return leaf;
}

// Call multiply_leaf(LeafArgs) for every leaf of every tile.
//
// A single tile prefetches its own weights a little ahead. Several tiles each prefetch a part of the next leaf;
// otherwise only the first tile would wait for memory, and the other tiles would leave memory idle.
template <class MultiplyLeaf>
void multiply_leaves(const MultiplyArgs& args, std::int64_t ahead_steps, MultiplyLeaf multiply_leaf) {
    const PenstockWeight& weight = *args.weight;
    const std::int64_t panel_bytes = weight.padded_k * PANEL;
    const std::uint8_t* panel = static_cast<const std::uint8_t*>(weight.values) + args.first_panel * panel_bytes;
    each_leaf(weight, [&](const LeafRange& range) {
        const std::int64_t end = range.padded_first + range.padded;
        const bool last = range.index + 1 == weight.leaves;
        const std::uint8_t* next = last ? panel + args.panels * panel_bytes : panel + end * PANEL;
        for (std::int64_t t = 0; t < args.tiles; ++t) {
            LeafArgs leaf = leaf_of_tile(args, range, t, 1);
            leaf.prefetch_step = STEP_BYTES / args.tiles;
            leaf.prefetch = args.tiles == 1 ? leaf.weights + ahead_steps * STEP_BYTES
                                            : next + t * leaf.steps * leaf.prefetch_step;
            multiply_leaf(leaf);
        }
    });
}
