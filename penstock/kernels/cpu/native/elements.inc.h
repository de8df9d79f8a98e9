// What all kernels of all levels share: levels, prefetches, and the elements of rows, float32 or bfloat16, with the
// conversions between them.
// Internal linkage: every level has its own copy.
#pragma once

#include <cstdint>

#include "abi.h"

#define PENSTOCK_INLINE inline __attribute__((always_inline))

namespace penstock {
namespace {

// The level for which the including file is compiled.
#if defined(__AMX_TILE__)
constexpr Level THIS_LEVEL = LEVEL_AMX;
#elif defined(__AVX512BF16__)
constexpr Level THIS_LEVEL = LEVEL_AVX512;
#elif defined(__AVX512F__)
constexpr Level THIS_LEVEL = LEVEL_AVX512F;
#elif defined(__AVX2__)
constexpr Level THIS_LEVEL = LEVEL_AVX2;
#else
constexpr Level THIS_LEVEL = LEVEL_PORTABLE;
#endif

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Call body(Constant<n>()), for n in 1 .. MAX.
template <int MAX, class Body>
PENSTOCK_INLINE auto with_constant(int n, const Body& body) {
    if constexpr (MAX > 1)
        if (n < MAX) return with_constant<MAX - 1>(n, body);
    return body(Constant<MAX>());
}

// Prefetch a line of weights, keys or values that is multiplied later. Zen 4 multiplies up to 1.3 times as fast beside
// prefetches into its L2 as beside prefetches into its L1; on Zen 5 they are alike.
//
// PENSTOCK_INLINE, because GCC drops a call that it does not inline early, as having no effect.
PENSTOCK_INLINE void prefetch_to_l2(const void* line) {
    constexpr int READ = 0, INTO_L2 = 2;
    __builtin_prefetch(line, READ, INTO_L2);
}

constexpr int type_bytes(std::int32_t type) { return type == TYPE_F32 ? 4 : 2; }

template <class To, class From>
PENSTOCK_INLINE To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// Turn bits of float32, not of NaN, into bits of bfloat16, rounded to nearest even. Words: std::uint32_t or a vector of
// std::uint32_t.
template <class Words>
PENSTOCK_INLINE Words round_to_bf16(Words bits) {
    return (bits + 0x7FFFu + (bits >> 16u & 1u)) >> 16u;
}

// Rounds to nearest even; a NaN stays a NaN.
PENSTOCK_INLINE std::uint16_t to_bf16(float value) {
    const std::uint32_t bits = same_bits<std::uint32_t>(value);
    return static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40 : round_to_bf16(bits));
}

PENSTOCK_INLINE std::uint16_t to_bf16(std::uint16_t bits) { return bits; }

PENSTOCK_INLINE float to_float(std::uint16_t bits) { return same_bits<float>(std::uint32_t{bits} << 16); }

PENSTOCK_INLINE float to_float(float value) { return value; }

}  // namespace
}  // namespace penstock
