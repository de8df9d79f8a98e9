// int8 products, computed in words of 16 bits, for levels without an exact dot product of bytes.
#include "products/leaves.inc.h"
#include "word_pairs.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int8.inc.h"

constexpr int TILE_ROWS = 12;
constexpr int BLOCK_COLUMNS = 4;  // registers of columns that are summed at once
constexpr int BLOCK_ROWS = 3;     // the sums of more rows would not fit into 16 registers

// Multiply ROWS operand rows of operands [steps][operand rows][4] with BLOCK_COLUMNS registers of one panel's columns.
template <int ROWS>
void sum_block(const LeafArgs& leaf, int row, int column, Ints (*sums)[PANEL / LANES]) {
    Ints block[ROWS][BLOCK_COLUMNS] = {};
    const std::uint8_t* weights = leaf.weights + column * LANES * STEP;
    const std::int8_t* operands = leaf.operands + row * STEP;
    for (std::int64_t step = 0; step < leaf.steps; ++step) {
        WordPairs of_row[ROWS];
        for (int r = 0; r < ROWS; ++r) of_row[r] = split_row(operands + r * STEP);
#pragma GCC unroll 4
        for (int c = 0; c < BLOCK_COLUMNS; ++c) {
            const WordPairs of_columns = split_stored<ZERO_POINT>(weights + c * LANES * STEP);
            for (int r = 0; r < ROWS; ++r) block[r][c] += dot(of_columns, of_row[r]);
        }
        weights += STEP_BYTES;
        operands += leaf.operand_rows * STEP;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < BLOCK_COLUMNS; ++c) sums[row + r][column + c] = block[r][c];
}

template <int SLICES>
void finish_rows(LeafArgs leaf, const Ints (*sums)[PANEL / LANES]) {
    for (int row = 0; row < leaf.operand_rows; row += SLICES) {
        finish_leaf<SLICES, SLICES>(leaf, sums + row);
        ++leaf.scales;
        leaf.tree += PANEL;
        leaf.to += PANEL;
    }
}

void multiply_leaf(const LeafArgs& leaf) {
    Ints sums[TILE_ROWS][PANEL / LANES];
    for (int column = 0; column < PANEL / LANES; column += BLOCK_COLUMNS) {
        int row = 0;
        for (; row + BLOCK_ROWS <= leaf.operand_rows; row += BLOCK_ROWS) sum_block<BLOCK_ROWS>(leaf, row, column, sums);
        if (row + 2 == leaf.operand_rows) sum_block<2>(leaf, row, column, sums);
        if (row + 1 == leaf.operand_rows) sum_block<1>(leaf, row, column, sums);
    }
    with_constant<3>(leaf.slices, [&](auto slices) { finish_rows<slices.value>(leaf, sums); });
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT8>() {
    return {
        TILE_ROWS,
        [](int) { return 1; },
        [](const OperandArgs& args) { quantize_interleaved(args, 0); },
        [](const MultiplyArgs& args) { multiply_leaves(args, 0, multiply_leaf); },
    };
}

}  // namespace penstock
