// What an instruction level provides for packing weights: converting rows to stored values and interleaving sixteen
// rows into a panel. pack.cpp is the only caller.
//
// reference/quantized_weights.py specifies the values. pack_kernels.inc.h, which is compiled once per level, gives the
// same values on all levels.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

constexpr float MAGNITUDE_LIMIT = 0x1p100f;  // weights of this magnitude or more are not quantisable
constexpr int UNIT_BYTES = 4;                // consecutive bytes of a column: 1 float, 2 bfloat16, 4 int8 or 4 nibbles

// x: `count` elements of one row, of type `type`.
struct PackKernels {
    // The largest magnitude; NaN or infinity if x contains NaN or infinity.
    float (*abs_max)(const void* x, std::int32_t type, std::int64_t count);
    void (*to_f32)(const void* x, std::int32_t type, std::int64_t count, float* out);
    void (*to_bf16)(const void* x, std::int32_t type, std::int64_t count, std::uint16_t* out);
    // Writes x * inverse, rounded, + 128.
    void (*to_int8)(const void* x, std::int32_t type, std::int64_t count, float inverse, std::uint8_t* out);
    // For one group, or the shorter rest of a leaf: writes value + 8 to each byte, and returns the scale as bfloat16
    // bits. Sets `quantisable` to false if a weight is not quantisable.
    std::uint16_t (*to_int4)(const void* x, std::int32_t type, int count, std::uint8_t* out, bool& quantisable);

    // rows [columns] of `units` units each, `stride` units apart -> out[unit][column], 32 columns apart.
    void (*interleave)(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units,
                       std::uint32_t* out);
    // The same for the low four bits of bytes: writes the low or high halves of the bytes of out[unit][column], whose
    // units are out_stride words apart, and leaves the other halves unchanged.
    void (*interleave_nibbles)(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units,
                               int high, std::uint32_t* out, std::int64_t out_stride);
    // The same for bits 4 and 5 of bytes, of columns from first_column (0 or 16) + first on: column c is bits
    // 2 (c / 8) and 2 (c / 8) + 1 of the bytes of out[unit][c % 8].
    void (*interleave_high_bits)(const std::uint32_t* rows, std::int64_t stride, int first, int columns,
                                 std::int64_t units, int first_column, std::uint32_t* out, std::int64_t out_stride);
};

template <Level LEVEL> PackKernels pack_kernels();

}  // namespace penstock
