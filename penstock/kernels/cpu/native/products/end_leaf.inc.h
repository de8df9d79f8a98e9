// The end of a leaf in products whose totals are float32, per operand row and column. Included by the files of int4 and
// coded weights within their anonymous namespaces, after quantize_rows.inc.h.

constexpr int TILE_ROWS = 12;  // operand rows per tile, on every level

// Aligned floats as a vector.
inline Floats& floats(float* at) { return *reinterpret_cast<Floats*>(at); }
inline const Floats& floats(const float* at) { return *reinterpret_cast<const Floats*>(at); }

inline int operand_rows(const MultiplyArgs& a) {
    return a.weight->slices > 0 ? a.rows * a.weight->slices : a.rows;
}

// The end of a leaf: move the totals of a tile, [rows][slices][columns], to the tree of partial sums or, after the last
// leaf, to out.
inline void end_leaf(
    const MultiplyArgs& a, int leaf, int tile, int panel, int slices, int columns, const float* totals) {
    const PenstockWeight& w = *a.weight;
    const bool last = leaf + 1 == w.leaves;
    const unsigned levels = levels_to_add(leaf, w.leaves);
    const std::int64_t width = a.panels * PANEL, level_stride = a.rows * width;
    for (int row = 0; row < a.rows; ++row, totals += slices * columns) {
        const float scale = w.slices > 0 ? a.scales[tile * a.scales_stride + leaf * a.rows + row] : 1.0f;
        const std::int64_t at = row * width + panel * PANEL;
        float* tree = a.tree + tile * TREE_LEVELS * level_stride + at;
        float* to = last ? a.out + tile * a.rows * width + at : tree + level_to_keep(leaf) * level_stride;
        for (int c = 0; c < columns; c += LANES) {
            Floats sum = floats(totals + c);
            if (slices > 1) sum = sum + floats(totals + columns + c) * SECOND_SLICE;
            if (slices > 2) sum = sum + floats(totals + 2 * columns + c) * THIRD_SLICE;
            if (w.joined != 0) sum = sum * SECOND_SLICE;  // products with 254 times the operand
            sum = sum * scale;
            for (int level = 0; levels >> level; ++level)
                if (levels >> level & 1) sum = floats(tree + level * level_stride + c) + sum;
            floats(to + c) = sum;
        }
    }
}
