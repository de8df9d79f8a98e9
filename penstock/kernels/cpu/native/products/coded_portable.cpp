// Products with coded weights in plain C++: a group is unpacked, then multiplied row by row.

#include <type_traits>

#include "products/codes.inc.h"
#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/coded.inc.h"

// One tile, and the arrays of one panel.
struct Tile {
    const PenstockWeight& weight;
    PanelArrays panel;
    const void* operands;
    OperandSums sums;
    int rows;  // of the sums
};

// The sums of a block: Number is int32, or float if the levels are not integers.
template <class Number>
struct BlockSums {
    using Level = std::conditional_t<std::is_same_v<Number, float>, float, std::int16_t>;
    static constexpr bool INTEGER = std::is_same_v<Number, std::int32_t>;

    Number products[TILE_ROWS][PANEL];
    std::int32_t mins[TILE_ROWS][PANEL];

    static Number operand(const Tile& tile, std::int64_t k, int row) {
        if constexpr (INTEGER) {
            const auto* quads = static_cast<const std::int8_t*>(tile.operands);
            const std::int64_t quad = k / QUAD * tile.rows + row;
            if (tile.weight.joined == 0) return quads[quad * QUAD + k % QUAD];
            return quads[2 * quad * QUAD + k % QUAD] * JOINED_SLICE + quads[(2 * quad + 1) * QUAD + k % QUAD];
        } else {
            return static_cast<const float*>(tile.operands)[k * tile.rows + row];
        }
    }

    // Add the group from element k on.
    void add(const Tile& tile, std::int64_t k) {
        const PenstockWeight& w = tile.weight;
        const int group = w.group_size;
        Level levels[MAX_GROUP][PANEL];
        for (int i = 0; i < group; ++i)
            for (int c = 0; c < PANEL; ++c) {
                const int code = code_at(w, tile.panel.values, k + i, c);
                if constexpr (INTEGER)
                    levels[i][c] = static_cast<Level>(integer_level(w, code));
                else
                    levels[i][c] = w.code_bits == 8 ? float_bits(w, code) : w.levels[code];
            }
        const std::int64_t index = k / group;
        for (int row = 0; row < tile.rows; ++row) {
            if constexpr (!INTEGER) {
                for (int i = 0; i < group; ++i)
                    for (int c = 0; c < PANEL; ++c) products[row][c] += levels[i][c] * operand(tile, k + i, row);
                continue;
            }
            Number of_group[PANEL] = {};
            for (int i = 0; i < group; ++i)
                for (int c = 0; c < PANEL; ++c) of_group[c] += levels[i][c] * operand(tile, k + i, row);
            const std::int8_t* steps = tile.panel.steps;
            for (int c = 0; c < PANEL; ++c)
                products[row][c] += of_group[c] * (steps != nullptr ? steps[index * PANEL + c] : 1);
            if (w.step_mins == nullptr) continue;
            const auto both = same_bits<WordSums>(tile.sums.mins[index / 2 * tile.rows + row]);
            for (int c = 0; c < PANEL; ++c)
                mins[row][c] += (index % 2 == 0 ? both.first : both.last) *
                                tile.panel.step_mins[(index / 2 * PANEL + c) * 2 + index % 2];
        }
    }

    // Add the block to totals [rows][PANEL].
    void end(const Tile& tile, std::int64_t block, float* totals) const {
        using Numbers __attribute__((vector_size(LANES * 4))) = Number;
        const std::int32_t type = tile.weight.scale_type;
        const float factor = !INTEGER && tile.weight.code_bits == 8 ? sum_factor(tile.weight) : 1.0f;
        for (int c = 0; c < PANEL; c += LANES) {
            Floats scales = Floats{} + 1.0f;
            if (tile.panel.scales != nullptr) scales = load_scales(tile.panel.scales, type, block, c);
            for (int row = 0; row < tile.rows; ++row) {
                Floats& total = floats(totals + row * PANEL + c);
                Numbers product;
                __builtin_memcpy(&product, &products[row][c], sizeof product);
                total = total + __builtin_convertvector(product, Floats) * factor * scales;
                if (tile.panel.mins == nullptr) continue;
                Ints min;
                __builtin_memcpy(&min, &mins[row][c], sizeof min);
                Floats factor = __builtin_convertvector(min, Floats);
                if (tile.panel.step_mins == nullptr)
                    factor = Floats{} + same_bits<float>(tile.sums.mins[block * tile.rows + row]);
                total = total + factor * load_scales(tile.panel.mins, type, block, c);
            }
        }
    }
};

template <class Number>
void multiply(const MultiplyArgs& a) {
    const PenstockWeight& w = *a.weight;
    const int rows = sum_rows(w, a.rows);
    const std::int64_t blocks = blocks_of(w);
    const OperandSums sums = operand_sums(w, const_cast<std::int32_t*>(a.sums), operand_rows(a));
    for (int t = 0; t < a.tiles; ++t) {
        const Tile tile{w, panel_of(w, a.first_panel, blocks), static_cast<const char*>(a.tile) + t * a.tile_stride,
                        {sums.starts + t * a.sums_stride, sums.mins + t * a.sums_stride}, rows};
        std::int64_t first_block = 0;
        each_leaf(w, [&](const LeafRange& leaf) {
            alignas(64) float totals[TILE_ROWS * PANEL] = {};
            BlockSums<Number> of_block;
            each_piece(w, leaf, first_block, w.group_size, [&](const Piece& piece) {
                if (piece.first) of_block = {};
                of_block.add(tile, piece.k);
                if (piece.last) of_block.end(tile, piece.block, totals);
            });
            end_leaf(a, leaf.index, t, 0, rows / a.rows, PANEL, totals);
            first_block += blocks_of(w, leaf.padded);
        });
    }
}

int one_panel(int) { return 1; }

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_CODED>() {
    return {TILE_ROWS, OPERAND_BYTES, one_panel, pack_integers, multiply<std::int32_t>};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_CODED_FLOAT>() {
    return {TILE_ROWS, sizeof(float), one_panel, pack_floats, multiply<float>};
}

}  // namespace penstock
