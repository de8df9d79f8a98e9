// What an instruction level provides for products with a weight: for each Kind, the packing of a tile of activation
// rows, and the micro-kernel that multiplies tiles with panels. linear.cpp is the only caller.
//
// Products are batch invariant because the order of every sum is the same for any number of rows, tiles, panels and
// threads: within a leaf, one chain over ascending K; leaves as a binary tree ((l0+l1)+(l2+l3))+((l4+l5)+(l6+l7)).
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

constexpr int MAX_TILE_ROWS = 32;  // operand rows of a tile, on any level
constexpr int MAX_PANELS = 4;      // neighbouring panels in one call of a micro-kernel
constexpr int MAX_TILES = 8;       // tiles in one call, so that a leaf of a panel is read from memory once for all
constexpr int TREE_LEVELS = 3;     // partial sums kept by the tree of 8 leaves

// Pack up to tile_rows / slices activation rows as the operand of a product.
//
// Integer kinds: with a = max |x| of the row within the leaf, scale = a / 127 and y = x * (127 / a), slice 0 is
// q0 = round(y), slice 1 q1 = round((y - q0) * 254), slice 2 q2 = round(((y - q0) * 254 - q1) * 254), to nearest even
// (the multi-step decomposition of Huawei's IncreFlashAttention operator). So x is scale * (q0 + q1/254 + q2/254^2).
// Operand row r * slices + s is slice s of row r. If a is below 2^-118 (where 127 / a would overflow), the leaf has
// scale 0 and slices of zeros. If a value is not finite, the leaf has scale NaN and slices of zeros, so that the
// results of its row, and of no other row, are NaN.
struct OperandArgs {
    const PenstockWeight* weight;
    const void* x;                  // [.., k] of x_type
    std::int32_t x_type;
    std::int64_t x_stride;          // elements between rows of x
    const std::int64_t* row_index;  // [rows] the rows of x to read; null: first_row, first_row + 1, ..
    std::int64_t first_row;
    int rows;                       // activation rows, 1 .. tile_rows / slices
    void* tile;                     // out: operands in the layout of the level, operand_bytes(), 64-aligned
    float* scales;                  // out, integer kinds: [leaves][rows]
    std::int32_t* sums;             // out: sums of operands; int8 [leaves][rows * slices], int4 [groups][rows * slices]
                                    // or up to twice as many numbers that a level computes from the sums
};

// Multiply `tiles` tiles of `rows` activation rows each with `panels` neighbouring panels.
//
// Leaves are the outer loop and tiles the inner loop, so that the part of a panel in a leaf stays in the cache. Results
// are float32 sums before column scales and bias. Integer kinds compute, per leaf and slice, the exact integer dot
// product d (less 128 or 8 times the operands' sum). From d they compute the following, with every operation rounded
// separately and none fused, so that all levels agree:
//   int8   leaf = (d0 + d1 * (1/254) + d2 * (1/254^2)) * scale
//   int4   f_s = sum over ascending groups of d_s * group scale (a multiplication, then an addition); leaf as above
struct MultiplyArgs {
    const PenstockWeight* weight;
    std::int64_t first_panel;
    int panels;                  // 1 .. max_panels(rows)
    int rows;                    // activation rows of every tile
    int tiles;                   // 1 .. MAX_TILES
    const void* tile;            // operands of the first tile
    std::int64_t tile_stride;    // bytes from one tile to the next
    const float* scales;         // from OperandArgs, of the first tile
    std::int64_t scales_stride;  // elements from one tile to the next
    const std::int32_t* sums;
    std::int64_t sums_stride;
    float* tree;                 // scratch, [tiles][TREE_LEVELS][at most MAX_TILE_ROWS * PANEL * panels], 64-aligned
    float* partial;              // scratch, [tiles * rows][panels * 32], 64-aligned; may be out
    float* out;                  // [tiles * rows][panels * 32], 64-aligned
    std::int64_t out_stride;     // elements between rows of out; panels * 32 unless the kernel is `strided`
};

// About the size of an L2, for the integer kernels of AVX-512, which read operands faster than the L3 delivers them.
// With 16 MiB, a product with a weight of 2048 x 5632 in 8 leaves takes 1.12 to 1.17 times as long in int8, and 1.22 to
// 1.59 times as long in int4 (M = 1024, Zen 5).
constexpr std::int64_t INTEGER_PASS_BYTES = 1 << 20;

struct ProductKernel {
    int tile_rows;                        // operand rows of a full tile
    int element_bytes;                    // bytes of an operand's element
    int (*max_panels)(int operand_rows);  // best number of panels per call
    void (*pack)(const OperandArgs&);
    void (*multiply)(const MultiplyArgs&);
    bool strided = false;                 // multiply supports any out_stride that is a multiple of 16
    bool even_tiles = false;              // a tile of fewer rows takes less time, so all get about as many
    std::int64_t pass_bytes = 16 << 20;   // operand tiles per pass over the weight: read again for every panel, they
                                          // should stay in the L3
};

// Bytes of the operands of one full tile, on any level.
std::int64_t operand_bytes(const PenstockWeight& weight, const ProductKernel& kernel);

// The kernel of a level for a kind. LEVEL_AMX has bfloat16 and int8; for other kinds it uses the AVX-512 kernels.
template <Level LEVEL, Kind KIND> ProductKernel product_kernel();

}  // namespace penstock
