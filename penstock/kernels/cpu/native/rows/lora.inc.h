// The kernels of LoRA that row_kernels.h specifies. Compiled once per instruction level, without fused multiply-add, so
// that all levels give the same bits.
#pragma once

#include "rows/epilogue.inc.h"

namespace penstock {
namespace {

// Rows and columns that are computed together, so that what one of them loads serves the others.
constexpr int LORA_ROWS = 4, LORA_COLUMNS = PARTS == 1 ? 4 : 2, LORA_PANELS = 2, PANELS_AHEAD = 16;

// The sums over leaves first .. first + count - 1 of a K that LoraArgs::leaf_ends cuts, added as a binary tree.
PENSTOCK_INLINE float leaf_tree(float* leaves, int count) {
    for (int half = count / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) leaves[i] = leaves[2 * i] + leaves[2 * i + 1];
    return leaves[0];
}

// hidden of ROWS rows and COLUMNS neighbouring columns. Each lane adds every sixteenth product of a leaf, in ascending
// order; then the lanes are added as a tree.
template <class Element, int ROWS, int COLUMNS>
void shrink_tile(const PenstockLora& lora, const Element* const* x, const Element* a, float* const* hidden) {
    float sums[ROWS][COLUMNS][MAX_LEAVES];
    std::int64_t begin = 0;
    for (int leaf = 0; leaf < lora.leaves; ++leaf) {
        F32x16 total[ROWS][COLUMNS];
        for (auto& row : total)
            for (F32x16& lanes : row) lanes = 0.0f;
        const std::int64_t end = lora.leaf_ends[leaf];
        each_vector(end - begin, PENSTOCK_BODY {
            F32x16 from[COLUMNS];
            for (int column = 0; column < COLUMNS; ++column)
                from[column] = load_some(a + column * lora.k + begin + i, count);
            for (int row = 0; row < ROWS; ++row) {
                const F32x16 value = load_some(x[row] + begin + i, count);
                for (int column = 0; column < COLUMNS; ++column)
                    total[row][column] = total[row][column] + value * from[column];
            }
        });
        for (int row = 0; row < ROWS; ++row)
            for (int column = 0; column < COLUMNS; ++column) sums[row][column][leaf] = reduce_sum(total[row][column]);
        begin = end;
    }
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column)
            hidden[row][column] = leaf_tree(sums[row][column], lora.leaves);
}

template <class Element>
void lora_shrink(const LoraArgs& args) {
    const PenstockLora& lora = *args.lora;
    const std::int64_t rank = lora.ranks[args.slot];
    const Element* const all = static_cast<const Element*>(lora.a) + args.slot * lora.pieces * lora.max_rank * lora.k;
    for (std::int64_t first = 0; first < args.rows; first += LORA_ROWS) {
        const int rows = static_cast<int>(args.rows - first < LORA_ROWS ? args.rows - first : LORA_ROWS);
        for (std::int64_t at = args.begin; at < args.end;) {
            const std::int64_t piece = at / rank, column = at % rank;  // a tile does not cross the end of a piece
            const Element* const a = all + (piece * lora.max_rank + column) * lora.k;
            const Element* x[LORA_ROWS];
            float* hidden[LORA_ROWS];
            for (int row = 0; row < rows; ++row) {
                x[row] = static_cast<const Element*>(args.x) + args.row[first + row] * lora.k;
                hidden[row] = args.hidden + (args.row[first + row] * lora.pieces + piece) * lora.max_rank + column;
            }
            const std::int64_t left = args.end - at < rank - column ? args.end - at : rank - column;
            const bool single = left < LORA_COLUMNS;
            with_constant<LORA_ROWS>(rows, [&](auto number) {
                constexpr int ROWS = decltype(number)::value;
                if (single)
                    shrink_tile<Element, ROWS, 1>(lora, x, a, hidden);
                else
                    shrink_tile<Element, ROWS, LORA_COLUMNS>(lora, x, a, hidden);
            });
            at += single ? 1 : LORA_COLUMNS;
        }
    }
}

// Columns begin .. end - 1, inside one piece, of neighbouring panels. Products are added in ascending order of the
// rank.
struct ExpandTile {
    const PenstockLora* lora;
    std::int64_t slot, rank;
    const float* hidden[LORA_ROWS];
    float* out[LORA_ROWS];
    std::int64_t begin, end;
    std::int64_t ahead;  // elements of b from what is multiplied to what is prefetched
};

template <class Element, int ROWS, int PANELS>
PENSTOCK_INLINE void expand_tile(const ExpandTile& tile, std::int64_t panel) {
    const PenstockLora& lora = *tile.lora;
    const std::int64_t panels = (lora.n + LANES - 1) / LANES, stride = lora.max_rank * LANES;
    const Element* const b = static_cast<const Element*>(lora.b) + (tile.slot * panels + panel) * stride;
    F32x16 total[ROWS][PANELS];
    for (auto& row : total)
        for (F32x16& lanes : row) lanes = 0.0f;
    for (std::int64_t j = 0; j < tile.rank; ++j) {
        F32x16 from[PANELS];
        for (int i = 0; i < PANELS; ++i) {
            from[i] = load(b + i * stride + j * LANES);
            prefetch_to_l2(b + i * stride + j * LANES + tile.ahead);
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < PANELS; ++i) total[row][i] = total[row][i] + from[i] * F32x16(tile.hidden[row][j]);
    }
    const bool scaled = lora.scaled[tile.slot] != 0;
    const std::int64_t of_slot = tile.slot * lora.n;
    for (int i = 0; i < PANELS; ++i) {
        const std::int64_t first = (panel + i) * LANES;
        for (int row = 0; row < ROWS; ++row) {
            if (first >= tile.begin && first + LANES <= tile.end) {
                F32x16 value = load(tile.out[row] + first);
                if (scaled)
                    value = value * load(lora.factors + of_slot + first) + load(lora.offsets + of_slot + first);
                store(tile.out[row] + first, value + total[row][i]);
                continue;
            }
            float lanes[LANES];
            store(lanes, total[row][i]);
            for (int lane = 0; lane < LANES; ++lane) {
                const std::int64_t column = first + lane;
                if (column < tile.begin || column >= tile.end) continue;
                float value = tile.out[row][column];
                if (scaled) value = value * lora.factors[of_slot + column] + lora.offsets[of_slot + column];
                tile.out[row][column] = value + lanes[lane];
            }
        }
    }
}

template <class Element>
void lora_expand(const LoraArgs& args) {
    const PenstockLora& lora = *args.lora;
    ExpandTile tile = {&lora, args.slot, lora.ranks[args.slot], {}, {}, 0, 0, 0};
    for (std::int64_t first = 0; first < args.rows; first += LORA_ROWS) {
        const int rows = static_cast<int>(args.rows - first < LORA_ROWS ? args.rows - first : LORA_ROWS);
        tile.end = args.begin;
        tile.ahead = first == 0 ? PANELS_AHEAD * lora.max_rank * LANES : 0;  // the first rows read from memory
        for (std::int64_t piece = 0; piece < lora.pieces; ++piece) {
            tile.begin = tile.end;
            tile.end = lora.piece_ends[piece] < args.end ? lora.piece_ends[piece] : args.end;
            if (tile.end <= tile.begin) {
                tile.end = tile.begin;
                continue;
            }
            for (int row = 0; row < rows; ++row) {
                tile.hidden[row] = args.hidden + (args.row[first + row] * lora.pieces + piece) * lora.max_rank;
                tile.out[row] = args.out + args.row[first + row] * args.out_stride;
            }
            with_constant<LORA_ROWS>(rows, [&](auto number) {
                constexpr int ROWS = decltype(number)::value;
                const std::int64_t last = (tile.end + LANES - 1) / LANES;
                std::int64_t panel = tile.begin / LANES;
                for (; panel + LORA_PANELS <= last; panel += LORA_PANELS)
                    expand_tile<Element, ROWS, LORA_PANELS>(tile, panel);
                for (; panel < last; ++panel) expand_tile<Element, ROWS, 1>(tile, panel);
            });
        }
    }
}

// ---- What follows a product whose sums an adapter has changed

template <class Out, int ACTIVATION>
void activate_rows(const ActivateArgs& a, std::int64_t first, std::int64_t rows) {
    const std::int64_t columns = a.gated ? a.n / 2 : a.n;
    for (std::int64_t row = first; row < first + rows; ++row) {
        const float* x = a.x + row * a.n;
        Out* out = static_cast<Out*>(a.out) + row * columns;
        each_vector(columns, PENSTOCK_BODY {
            const F32x16 value = activate<ACTIVATION>(load_some(x + i, count));
            if (!a.gated) return store_some(out + i, value, count);
            store_some(out + i, value * multiplied<ACTIVATION>(load_some(x + columns + i, count)), count);
        });
    }
}

template <class Out>
void activated(const ActivateArgs& a, std::int64_t first, std::int64_t rows) {
    with_constant<ACTIVATIONS>(a.activation + 1, [&](auto number) {
        activate_rows<Out, decltype(number)::value - 1>(a, first, rows);
    });
}

}  // namespace
}  // namespace penstock
