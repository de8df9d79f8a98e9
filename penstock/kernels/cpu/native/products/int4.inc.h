// The common parts of products with int4 weights on all levels: the loops over leaves, tiles and groups, the end of a
// leaf, and activations in bfloat16. Included by the int4 file of each level within its anonymous namespace.

#include "products/end_leaf.inc.h"

constexpr int MAX_BLOCK = TILE_ROWS * PANEL;  // operand rows * columns that are summed at once
constexpr int MAX_GROUP = 128;
constexpr int QUAD = 4;            // elements of K that packed values store together
constexpr int QUAD_BYTES = 64;     // bytes of four elements of K in a panel
constexpr int FETCH_AHEAD = 2048;  // prefetch distance: bytes of a panel, at least a group

// The groups of a leaf, for all operand rows of a tile and some neighbouring panels.
struct Groups {
    const std::uint8_t* values;    // values of the first panel, [size / 4][16][4] per group
    std::int64_t values_stride;    // bytes from one panel to the next
    const std::uint16_t* scales;   // scales of the first panel, bfloat16 [32] per group
    std::int64_t scales_stride;    // elements from one panel to the next
    const void* operands;          // operands of the tile, in the layout of the level
    const std::int32_t* sums;      // sums of the operands; unused for bfloat16 activations
    int rows;                      // operand rows
    int count;
    int size;                      // elements of K: 32, 64 or 128
    int last_size;                 // elements of the last group without padding, rounded up to 32s; may be 0
    float* totals;                 // out: [operand rows][panels * 32]
    int part, parts;               // the weights are read `parts` times in succession; this is number `part`
    std::int64_t ahead;            // distance in groups from those being multiplied to those being prefetched
    std::int64_t left;             // groups from the first group to the end of the panel
    std::int64_t skip;             // groups that prefetching skips at the end of the panel

    int elements(int group) const { return group + 1 < count ? size : last_size; }
    std::int64_t bytes() const { return std::int64_t{size} / QUAD * QUAD_BYTES; }
    // The group to be prefetched while a group is multiplied.
    std::int64_t next(int group) const { return group + ahead + (group + ahead < left ? 0 : skip); }
};

// How many elements of the last group of a leaf have to be multiplied if `left` elements of the leaf are left. The
// operands of all other elements are zeros.
inline int last_size(int group_size, std::int64_t left) {
    constexpr int UNIT = 32;  // on every level
    return left >= group_size ? group_size : left <= 0 ? 0 : static_cast<int>(left + UNIT - 1) / UNIT * UNIT;
}

// What multiply_panels() has to know about the operands of a level.
struct Operand {
    int element;  // bytes of an element
    int sums;     // how many numbers packing left in OperandArgs::sums for each operand row and group
    int parts;    // number of parts of a tile; each part reads all weights
};

// Multiply all tiles with `panels` panels from a.first_panel + panel on. multiply_groups(Groups) computes the totals of
// a tile.
//
// If the weights of a leaf are read once, they are prefetched some groups ahead. If they are read several times, each
// reading prefetches a part of the next leaf; otherwise only the first would wait for memory.
template <class MultiplyGroups>
inline __attribute__((always_inline)) void multiply_panels(
    const MultiplyArgs& a, int panel, int panels, Operand operand, MultiplyGroups multiply_groups) {
    const PenstockWeight& w = *a.weight;
    const int rows = operand_rows(a), columns = panels * PANEL;
    alignas(64) float totals[MAX_BLOCK];
    const std::int64_t in_panel = w.padded_k / w.group_size, begin = (a.first_panel + panel) * in_panel;
    Groups groups{};
    groups.rows = rows;
    groups.size = w.group_size;
    groups.totals = totals;
    groups.parts = a.tiles * operand.parts;
    groups.skip = (panels - 1) * in_panel;
    groups.values_stride = in_panel * groups.bytes();
    groups.scales_stride = in_panel * PANEL;
    each_leaf(w, [&](const LeafRange& leaf) __attribute__((always_inline)) {
        const std::int64_t first = leaf.padded_first / w.group_size;
        groups.count = static_cast<int>(leaf.padded / w.group_size);
        groups.last_size = last_size(w.group_size, leaf.count - (groups.count - 1) * std::int64_t{w.group_size});
        groups.values = static_cast<const std::uint8_t*>(w.values) + (begin + first) * groups.bytes();
        groups.scales = w.group_scales + (begin + first) * PANEL;
        groups.ahead = groups.parts > 1 ? groups.count : FETCH_AHEAD / groups.bytes();
        groups.left = in_panel - first;
        for (int tile = 0; tile < a.tiles; ++tile) {
            groups.operands = static_cast<const std::uint8_t*>(a.tile) + tile * a.tile_stride +
                              leaf.padded_first * rows * operand.element;
            groups.sums = a.sums + tile * a.sums_stride + first * rows * operand.sums;
            groups.part = tile * operand.parts;
            multiply_groups(groups);
            end_leaf(a, leaf.index, tile, panel, rows / a.rows, columns, totals);
        }
    });
}

// Round a tile to bfloat16. place(k, row, words) writes words [K_UNIT], the elements k .. k + K_UNIT - 1 of padded K of
// a row, in the layout of the level.
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

// A tile laid out as [padded_k][rows], bfloat16 widened to float32.
inline void pack_bf16_widened(const OperandArgs& args) {
    auto* tile = static_cast<float*>(args.tile);
    pack_bf16(args, [=, &args](std::int64_t k, int row, const std::uint16_t* words) {
        for (int i = 0; i < K_UNIT; ++i) tile[(k + i) * args.rows + row] = to_float(words[i]);
    });
}

#if !defined(__AVX512F__)

// ---- Levels that multiply one group after the other

// One group, of one panel or of neighbouring panels.
struct Group {
    const std::uint8_t* values;   // [size / 4][16][4]
    const std::uint16_t* scales;  // bfloat16 [32]
    std::int64_t values_stride;   // bytes from one panel to the next
    std::int64_t scales_stride;   // elements from one panel to the next
    const void* operands;
    const std::int32_t* sums;
    int size;
    float* totals;                // [operand rows][panels * 32], to be added to
};

// Multiply all groups of a leaf for one tile. Each tile prefetches a part of the weights that follow. Rows has
//   ELEMENT                   bytes of an operand's element
//   add_group(Group, rows)    adds a group of one panel
//   STREAMS                   how many panels are multiplied together with a single row
//   add_streams<PANELS>(Group)  adds a group of 2 .. STREAMS panels, and prefetches their values
template <class Rows, int PANELS>
void multiply_groups(const Groups& g) {
    constexpr int LINE = 64;
    const auto* operands = static_cast<const std::uint8_t*>(g.operands);
    const std::int64_t part = g.bytes() / g.parts;
    for (int i = 0; i < g.rows * PANELS * PANEL; ++i) g.totals[i] = 0.0f;
    for (int i = 0; i < g.count; ++i) {
        const Group group{g.values + i * g.bytes(), g.scales + i * PANEL, g.values_stride, g.scales_stride,
                          operands + i * g.size * g.rows * Rows::ELEMENT, g.sums + i * g.rows, g.elements(i), g.totals};
        if (g.part == 0)
            for (int p = 0; p < PANELS; ++p) prefetch_to_l2(g.scales + p * g.scales_stride + g.next(i) * PANEL);
        if constexpr (PANELS > 1) {
            Rows::template add_streams<PANELS>(group);
        } else {
            const std::uint8_t* next = g.values + g.next(i) * g.bytes() + g.part * part;
            for (std::int64_t byte = 0; byte < part; byte += LINE) prefetch_to_l2(next + byte);
            Rows::add_group(group, g.rows);
        }
    }
}

template <class Rows>
ProductKernel group_kernel() {
    const auto max_panels = [](int operand_rows) { return operand_rows == 1 ? Rows::STREAMS : 1; };
    const auto multiply = [](const MultiplyArgs& a) {
        with_constant<Rows::STREAMS>(a.panels, [&](auto panels) {
            multiply_panels(
                a, 0, panels.value, {Rows::ELEMENT, 1, 1}, multiply_groups<Rows, panels.value>);
        });
    };
    const auto pack = Rows::ELEMENT == 1 ? pack_int8 : pack_bf16_widened;
    return {TILE_ROWS, Rows::ELEMENT, max_panels, pack, multiply};
}

#endif
