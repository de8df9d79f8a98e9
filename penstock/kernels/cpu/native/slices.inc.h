// Constants of int8 slices (products/products.h): products and attention write rows as slices to multiply them with
// stored integers. Internal linkage.
#pragma once

#include <cstdint>

namespace penstock {
namespace {

constexpr float LARGEST_SLICE = 127.0f;
constexpr float SLICE_RATIO = 254.0f;  // the rest after rounding is at most 1/2, which is 127 in the next slice
constexpr float SECOND_SLICE = 1.0f / 254.0f;
constexpr int JOINED_SLICE = 254;      // two slices are joined as 254 q0 + q1, which fits in 16 bits
constexpr float THIRD_SLICE = 1.0f / (254.0f * 254.0f);
constexpr int ZERO_POINT = 128;        // stored int8 values are unsigned: value + 128

// Adding ROUNDER to a float below 2^22 rounds to nearest even and leaves the integer in the low bits.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23
constexpr std::int32_t ROUNDER_BITS = 0x4B400000;

constexpr std::int32_t INFINITY_BITS = 0x7F800000;
constexpr std::int32_t SMALLEST_BITS = (127 - 118) << 23;  // 2^-118: rows or leaves below it count as zeros

}  // namespace
}  // namespace penstock
