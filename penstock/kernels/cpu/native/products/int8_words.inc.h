// int8 products for levels without an exact dot product of bytes, in words of 16 bits.
//
// Operands are stored as words. Weights stay bytes in memory. Where few rows share them they are split into words in
// registers; otherwise a block of them is split once and stays in the L1 for all rows.
#include "products/leaves.inc.h"
#include "word_pairs.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int8.inc.h"

constexpr int TILE_ROWS = 12;
constexpr int COLUMNS = PANEL / LANES;  // registers of columns in a panel
constexpr int FEW_ROWS = 3;             // most operand rows whose weights are split in registers
constexpr int AHEAD_BYTES = 640;        // prefetch distance of sum_few() in each of several panels
constexpr int AHEAD_OF_ONE = 2048;      // the same if there is only one panel
constexpr int BLOCK_ROWS = 6;           // most rows of a pass over a block of split weights
constexpr int BLOCK_COLUMNS = 2;        // registers of columns of a pass: the sums take 12 of 16 registers
constexpr int BLOCK_STEPS = 32;         // steps of K in a block
constexpr int ROW_STEP = 4;             // words of an operand row per step: two of even elements, two of odd ones
constexpr int LINE = 64;

// As many panels as have sums in registers, or a few more: the loop waits for memory.
constexpr int max_panels(int operand_rows) { return operand_rows == 1 ? MAX_PANELS : operand_rows == 2 ? 2 : 1; }

using Sums = Ints[TILE_ROWS][COLUMNS];
using Block = Words[2 * BLOCK_STEPS][COLUMNS];  // of each step the weights of even, then of odd elements of K

// A tile laid out as [padded_k / 4][even, odd][operand rows][2].
void pack(const OperandArgs& args) {
    const int rows = args.rows * args.weight->slices;
    auto* tile = static_cast<std::int16_t*>(args.tile);
    quantize_tile(args, 0, [=](std::int64_t k, int length, const std::int8_t* slices) {
        for (int step = 0; step < length / STEP; ++step) {
            std::int16_t* even = tile + (k / STEP + step) * rows * ROW_STEP;
            std::int16_t* odd = even + rows * 2;
            for (int r = 0; r < rows; ++r) {
                const std::int8_t* four = slices + r * CHUNK + step * STEP;
                even[2 * r] = four[0];
                even[2 * r + 1] = four[2];
                odd[2 * r] = four[1];
                odd[2 * r + 1] = four[3];
            }
        }
    });
}

inline const std::int16_t* operands_of(const LeafArgs& leaf, std::int64_t step) {
    return reinterpret_cast<const std::int16_t*>(leaf.operands) + step * leaf.operand_rows * ROW_STEP;
}

// Sum all rows of a tile that has few, one step of each panel in turn: a core keeps more lines from memory in flight if
// they belong to several streams.
template <int ROWS, int PANELS>
void sum_few(const LeafArgs& leaf, Ints (&sums)[ROWS][PANELS * COLUMNS]) {
    constexpr int AHEAD = PANELS > 1 ? AHEAD_BYTES : AHEAD_OF_ONE;
    Ints added[ROWS][PANELS * COLUMNS] = {};
    const std::uint8_t* weights = leaf.weights;
    const std::int16_t* operands = operands_of(leaf, 0);
    for (std::int64_t step = 0; step < leaf.steps; ++step) {
        WordPairs of_row[ROWS];
        for (int r = 0; r < ROWS; ++r) of_row[r] = {pair_of(operands + 2 * r), pair_of(operands + 2 * (ROWS + r))};
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            const std::uint8_t* of_panel = weights + p * leaf.panel_stride;
            for (int byte = 0; byte < STEP_BYTES; byte += LINE) {
                if constexpr (PANELS > 1)
                    prefetch_to_l2(of_panel + AHEAD + byte);
                else
                    __builtin_prefetch(of_panel + AHEAD + byte);  // a single stream waits for the L2: 0.7 times as fast
            }
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) {
                const WordPairs of_columns = split_stored<ZERO_POINT>(of_panel + c * LANES * STEP);
                const int column = p * COLUMNS + c;
                for (int r = 0; r < ROWS; ++r) added[r][column] = add_products(added[r][column], of_columns, of_row[r]);
            }
        }
        weights += STEP_BYTES;
        operands += ROWS * ROW_STEP;
    }
    __builtin_memcpy(sums, added, sizeof added);
}

void split_block(const std::uint8_t* weights, std::int64_t steps, Block& block) {
    for (std::int64_t step = 0; step < steps; ++step, weights += STEP_BYTES)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
            const WordPairs pairs = split_stored<ZERO_POINT>(weights + c * LANES * STEP);
            block[2 * step][c] = pairs.even;
            block[2 * step + 1][c] = pairs.odd;
        }
}

// Weights that are prefetched, some bytes at a time, while others are multiplied.
struct Prefetch {
    const std::uint8_t* next;
    std::int64_t bytes;

    void fetch_some() {
        for (std::int64_t byte = 0; byte < bytes; byte += LINE) prefetch_to_l2(next + byte);
        next += bytes;
    }
};

// Add the products of `halves` half steps of a block with ROWS rows of a tile, of which `operands` is the first.
template <int ROWS>
void add_rows(const Block& block, std::int64_t halves, const std::int16_t* operands, int tile_rows,
              Ints (*sums)[COLUMNS], Prefetch& prefetch) {
    for (int column = 0; column < COLUMNS; column += BLOCK_COLUMNS) {
        prefetch.fetch_some();
        Ints added[ROWS][BLOCK_COLUMNS];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < BLOCK_COLUMNS; ++c) added[r][c] = sums[r][column + c];
        const std::int16_t* row = operands;
        // One half step at a time: unrolled, the loop needs more registers than there are.
        for (std::int64_t half = 0; half < halves; ++half) {
            Words columns[BLOCK_COLUMNS];
            for (int c = 0; c < BLOCK_COLUMNS; ++c) columns[c] = block[half][column + c];
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const Words of_row = pair_of(row + 2 * r);
                for (int c = 0; c < BLOCK_COLUMNS; ++c) added[r][c] = add_products(added[r][c], columns[c], of_row);
            }
            row += tile_rows * 2;
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < BLOCK_COLUMNS; ++c) sums[r][column + c] = added[r][c];
    }
}

// Add the products of a block with all rows of a tile.
void add_block(const Block& block, std::int64_t steps, const std::int16_t* operands, int rows, Sums& sums,
               Prefetch& prefetch) {
    for (int row = 0; row < rows; row += BLOCK_ROWS)
        with_constant<BLOCK_ROWS>(rows - row, [&](auto some) {
            add_rows<some.value>(block, 2 * steps, operands + 2 * row, rows, sums + row, prefetch);
        });
}

// Finish a leaf of all rows of a tile. sums: [rows][panels * COLUMNS].
template <int SLICES, int SOME_COLUMNS>
void finish_rows(LeafArgs leaf, const Ints (*sums)[SOME_COLUMNS]) {
    for (int row = 0; row < leaf.operand_rows; row += SLICES) {
        finish_leaf<SLICES, SLICES>(leaf, sums + row);
        ++leaf.scales;
        leaf.tree += SOME_COLUMNS * LANES;
        leaf.to += SOME_COLUMNS * LANES;
    }
}

// MAX_SLICES: 3, or the rows of a tile that has fewer.
template <int MAX_SLICES = 3, int SOME_COLUMNS>
void finish(const LeafArgs& leaf, const Ints (*sums)[SOME_COLUMNS]) {
    with_constant<MAX_SLICES>(leaf.slices, [&](auto slices) { finish_rows<slices.value>(leaf, sums); });
}

template <int ROWS, int PANELS>
void multiply_few(const MultiplyArgs& args) {
    each_leaf(*args.weight, [&](const LeafRange& range) {
        const LeafArgs leaf = leaf_of_tile(args, range, 0, sizeof(std::int16_t));
        Ints sums[ROWS][PANELS * COLUMNS];
        sum_few<ROWS, PANELS>(leaf, sums);
        finish<ROWS>(leaf, sums);
    });
}

void multiply(const MultiplyArgs& args) {
    const int rows = args.rows * args.weight->slices;
    if (args.tiles == 1 && rows <= FEW_ROWS)
        return with_constant<FEW_ROWS>(rows, [&](auto few) {
            with_constant<max_panels(few.value)>(
                args.panels, [&](auto panels) { multiply_few<few.value, panels.value>(args); });
        });
    // The parts in which the next block is prefetched: one before each pass over this one.
    const int parts = args.tiles * ((rows + BLOCK_ROWS - 1) / BLOCK_ROWS) * (COLUMNS / BLOCK_COLUMNS);
    each_leaf(*args.weight, [&](const LeafRange& range) {
        Sums sums[MAX_TILES];
        for (int t = 0; t < args.tiles; ++t) __builtin_memset(sums[t], 0, rows * sizeof sums[t][0]);
        const LeafArgs leaf = leaf_of_tile(args, range, 0, sizeof(std::int16_t));
        Block block;
        for (std::int64_t step = 0; step < leaf.steps; step += BLOCK_STEPS) {
            const std::int64_t left = leaf.steps - step, steps = left < BLOCK_STEPS ? left : BLOCK_STEPS;
            const std::uint8_t* weights = leaf.weights + step * STEP_BYTES;
            split_block(weights, steps, block);
            Prefetch prefetch{weights + steps * STEP_BYTES, steps * STEP_BYTES / parts};
            for (int t = 0; t < args.tiles; ++t) {
                const LeafArgs of_tile = leaf_of_tile(args, range, t, sizeof(std::int16_t));
                add_block(block, steps, operands_of(of_tile, step), rows, sums[t], prefetch);
            }
        }
        for (int t = 0; t < args.tiles; ++t) finish(leaf_of_tile(args, range, t, sizeof(std::int16_t)), sums[t]);
    });
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT8>() {
    return {TILE_ROWS, sizeof(std::int16_t), max_panels, pack, multiply};
}

}  // namespace penstock
