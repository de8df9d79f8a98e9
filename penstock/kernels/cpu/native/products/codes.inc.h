// Single codes of coded weights and what they stand for, for plain C++. Internal linkage.
#pragma once

#include "elements.inc.h"

namespace penstock {
namespace {

// The code of element k of padded K in column c of a panel.
inline int code_at(const PenstockWeight& w, const std::uint8_t* panel, std::int64_t k, int c) {
    const std::uint8_t* quad = panel + k / 4 * 16 * w.code_bits;
    const int i = static_cast<int>(k % 4);
    if (w.code_bits == 8) return quad[c * 4 + i];
    const int low = quad[c % 16 * 4 + i] >> (c < 16 ? 0 : 4) & 15;
    if (w.code_bits == 4) return low;
    return low | (quad[64 + c % 8 * 4 + i] >> c / 8 * 2 & 3) << 4;
}

inline int integer_level(const PenstockWeight& w, int code) {
    return w.has_levels != 0 ? static_cast<int>(w.levels[code]) : code - w.zero;
}

// The bits of a float of 8 bits at the top of those of a float32: its value less the factor (abi.h).
inline float float_bits(const PenstockWeight& w, int code) {
    return same_bits<float>((code & 127u) << (23 - w.mantissa_bits) | (code & 128u) << 24);
}

inline float float_level(const PenstockWeight& w, int code) {
    return w.code_bits == 4 ? w.levels[code] : float_bits(w, code) * w.factor;
}

// A scale or min as float32. It is finite.
inline float scale_at(const void* array, std::int32_t type, std::int64_t at) {
    if (type == SCALE_F32) return static_cast<const float*>(array)[at];
    const std::uint32_t bits = static_cast<const std::uint16_t*>(array)[at];
    if (type == SCALE_BF16) return same_bits<float>(bits << 16);
    return same_bits<float>((bits & 0x7fffu) << 13) * same_bits<float>(0x77800000u | (bits & 0x8000u) << 16);
}

}  // namespace
}  // namespace penstock
