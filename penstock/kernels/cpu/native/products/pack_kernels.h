// What an instruction level provides for packing weights: rows of any type become stored values, and stored values of
// sixteen rows are woven into a panel. pack.cpp is their only caller.
//
// quant/int8.py and quant/int4.py say which values; pack_kernels.inc.h is compiled once for each level and gives the
// same ones on all.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

constexpr float TOO_GREAT = 0x1p100f;  // a weight of this size or more is not quantised, nor one that is not finite
constexpr int UNIT_BYTES = 4;  // what stands together of one column: 1 float, 2 bfloat16, 4 int8 or 4 nibbles

// Elements of one row; all but `abs_max` read `count` of them from x, of type `type`.
struct PackKernels {
    // The greatest size, NaN or infinity if one is among them.
    float (*abs_max)(const void* x, std::int32_t type, std::int64_t count);
    void (*to_f32)(const void* x, std::int32_t type, std::int64_t count, float* out);
    void (*to_bf16)(const void* x, std::int32_t type, std::int64_t count, std::uint16_t* out);
    // x * inverse, rounded, + 128.
    void (*to_int8)(const void* x, std::int32_t type, std::int64_t count, float inverse, std::uint8_t* out);
    // One group, or what a leaf has left for one: value + 8 in each byte. Returns the scale as bfloat16 bits;
    // `quantisable` becomes false where a weight is not.
    std::uint16_t (*to_int4)(const void* x, std::int32_t type, int count, std::uint8_t* out, bool& quantisable);

    // rows [columns] of `units` units each, `stride` units apart -> out[unit][column], 32 columns apart.
    void (*weave)(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, std::uint32_t* out);
    // The same for nibbles in bytes: into the low or the high halves of out[unit][column], 16 columns apart, whose
    // other halves stay.
    void (*weave_nibbles)(const std::uint32_t* rows, std::int64_t stride, int columns, std::int64_t units, int high,
                          std::uint32_t* out);
};

PackKernels portable_pack();
PackKernels avx2_pack();
PackKernels avx512_pack();

}  // namespace penstock
