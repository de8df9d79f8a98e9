// Sixteen lanes of float32 and int32 on the compiler's vector types.
//
// Included by files that are compiled once per instruction level. Everything is inline in an anonymous namespace, so
// that no level can end up with the code of another. Multiplications and additions are never fused, and sums have one
// order, so every level gives the same bits. Levels differ only in the number of registers that hold the sixteen lanes.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include "avx512.inc.h"
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "elements.inc.h"

namespace penstock {
namespace {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int PARTS = 1;  // registers that hold the lanes
#elif defined(__AVX2__)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 4;
#endif
constexpr int PART_LANES = LANES / PARTS;

typedef float FloatPart __attribute__((vector_size(4 * PART_LANES)));
typedef std::int32_t IntPart __attribute__((vector_size(4 * PART_LANES)));
typedef std::uint32_t UintPart __attribute__((vector_size(4 * PART_LANES)));
typedef std::uint16_t ShortPart __attribute__((vector_size(2 * PART_LANES)));

// Sixteen scalars in PARTS registers. A scalar converts to sixteen equal lanes.
template <class Part, class Scalar>
struct Lanes {
    Part part[PARTS];

    Lanes() = default;
    PENSTOCK_INLINE Lanes(Scalar value) {
        for (int i = 0; i < PARTS; ++i) part[i] = value - Part{};  // not value + 0, which would lose the sign of -0
    }

#define PENSTOCK_LANEWISE(op)                                                                  \
    friend PENSTOCK_INLINE Lanes operator op(Lanes a, Lanes b) {                               \
        Lanes result;                                                                          \
        for (int i = 0; i < PARTS; ++i) result.part[i] = a.part[i] op b.part[i];               \
        return result;                                                                         \
    }
    PENSTOCK_LANEWISE(+)
    PENSTOCK_LANEWISE(-)
    PENSTOCK_LANEWISE(*)
    PENSTOCK_LANEWISE(/)
    PENSTOCK_LANEWISE(&)
    PENSTOCK_LANEWISE(|)
    PENSTOCK_LANEWISE(^)
    PENSTOCK_LANEWISE(<<)
    PENSTOCK_LANEWISE(>>)
#undef PENSTOCK_LANEWISE

    // All bits of a lane are set where the comparison holds.
#define PENSTOCK_COMPARISON(op)                                                                \
    friend PENSTOCK_INLINE Lanes<IntPart, std::int32_t> operator op(Lanes a, Lanes b) {        \
        Lanes<IntPart, std::int32_t> result;                                                   \
        for (int i = 0; i < PARTS; ++i) result.part[i] = a.part[i] op b.part[i];               \
        return result;                                                                         \
    }
    PENSTOCK_COMPARISON(==)
    PENSTOCK_COMPARISON(!=)
    PENSTOCK_COMPARISON(<)
    PENSTOCK_COMPARISON(<=)
    PENSTOCK_COMPARISON(>)
    PENSTOCK_COMPARISON(>=)
#undef PENSTOCK_COMPARISON
};

using F32x16 = Lanes<FloatPart, float>;
using I32x16 = Lanes<IntPart, std::int32_t>;
using U32x16 = Lanes<UintPart, std::uint32_t>;

// ---- Lanes from lanes

// The same bits, as another type of lanes.
template <class To, class From>
PENSTOCK_INLINE To bits_as(From a) {
    To result;
    for (int i = 0; i < PARTS; ++i) result.part[i] = reinterpret_cast<decltype(result.part[i] + 0)>(a.part[i]);
    return result;
}

PENSTOCK_INLINE F32x16 to_float(I32x16 a) {
    F32x16 result;
    for (int i = 0; i < PARTS; ++i) result.part[i] = __builtin_convertvector(a.part[i], FloatPart);
    return result;
}

// a in lanes whose mask is set, else b.
template <class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> select(I32x16 mask, Lanes<Part, Scalar> a, Lanes<Part, Scalar> b) {
    Lanes<Part, Scalar> result;
    for (int i = 0; i < PARTS; ++i) result.part[i] = mask.part[i] ? a.part[i] : b.part[i];
    return result;
}

// The smaller and the larger of a and b; b if either is NaN. GCC does not find the x86 instructions that do this.
#if defined(__AVX512F__)
PENSTOCK_INLINE FloatPart min_part(FloatPart a, FloatPart b) { return _mm512_maskz_min_ps(0xFFFF, a, b); }
PENSTOCK_INLINE FloatPart max_part(FloatPart a, FloatPart b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
#elif defined(__AVX2__)
PENSTOCK_INLINE FloatPart min_part(FloatPart a, FloatPart b) { return _mm256_min_ps(a, b); }
PENSTOCK_INLINE FloatPart max_part(FloatPart a, FloatPart b) { return _mm256_max_ps(a, b); }
#else
PENSTOCK_INLINE FloatPart min_part(FloatPart a, FloatPart b) { return a < b ? a : b; }
PENSTOCK_INLINE FloatPart max_part(FloatPart a, FloatPart b) { return a > b ? a : b; }
#endif

PENSTOCK_INLINE F32x16 min(F32x16 a, F32x16 b) {
    for (int i = 0; i < PARTS; ++i) a.part[i] = min_part(a.part[i], b.part[i]);
    return a;
}

PENSTOCK_INLINE F32x16 max(F32x16 a, F32x16 b) {
    for (int i = 0; i < PARTS; ++i) a.part[i] = max_part(a.part[i], b.part[i]);
    return a;
}

PENSTOCK_INLINE F32x16 abs(F32x16 a) { return bits_as<F32x16>(bits_as<U32x16>(a) & 0x7FFFFFFFu); }

// -|a|.
PENSTOCK_INLINE F32x16 minus_abs(F32x16 a) { return bits_as<F32x16>(bits_as<U32x16>(a) | 0x80000000u); }

// The magnitude of one with the sign of the other.
PENSTOCK_INLINE F32x16 copysign(F32x16 magnitude, F32x16 sign) {
    return bits_as<F32x16>(bits_as<U32x16>(abs(magnitude)) | (bits_as<U32x16>(sign) & 0x80000000u));
}

// 0, 1, .. 15.
PENSTOCK_INLINE I32x16 lane_index() {
    I32x16 result;
    for (int i = 0; i < LANES; ++i) result.part[i / PART_LANES][i % PART_LANES] = i;
    return result;
}

// ---- Memory. Addresses need only the alignment of their elements.

PENSTOCK_INLINE F32x16 load(const float* from) {
    typedef FloatPart Unaligned __attribute__((aligned(4), may_alias));
    F32x16 result;
    for (int i = 0; i < PARTS; ++i) result.part[i] = *reinterpret_cast<const Unaligned*>(from + i * PART_LANES);
    return result;
}

PENSTOCK_INLINE void store(float* to, F32x16 a) {
    typedef FloatPart Unaligned __attribute__((aligned(4), may_alias));
    for (int i = 0; i < PARTS; ++i) *reinterpret_cast<Unaligned*>(to + i * PART_LANES) = a.part[i];
}

PENSTOCK_INLINE void store(std::int32_t* to, I32x16 a) {
    typedef IntPart Unaligned __attribute__((aligned(4), may_alias));
    for (int i = 0; i < PARTS; ++i) *reinterpret_cast<Unaligned*>(to + i * PART_LANES) = a.part[i];
}

// PART_LANES words. GCC does not find the instruction that widens them all.
PENSTOCK_INLINE UintPart widened(const std::uint16_t* from) {
    typedef ShortPart Unaligned __attribute__((aligned(2), may_alias));
    const ShortPart half = *reinterpret_cast<const Unaligned*>(from);
#if defined(__AVX512F__)
    return reinterpret_cast<UintPart>(_mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(half)));
#elif defined(__AVX2__)
    return reinterpret_cast<UintPart>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(half)));
#else
    return __builtin_convertvector(half, UintPart);
#endif
}

// From bfloat16.
PENSTOCK_INLINE F32x16 load(const std::uint16_t* from) {
    U32x16 bits;
    for (int i = 0; i < PARTS; ++i) bits.part[i] = widened(from + i * PART_LANES);
    return bits_as<F32x16>(bits << 16u);
}

// To bfloat16, to nearest even. Every NaN becomes 0x7FC0.
PENSTOCK_INLINE void store(std::uint16_t* to, F32x16 a) {
    typedef ShortPart Unaligned __attribute__((aligned(2), may_alias));
    const U32x16 bits = bits_as<U32x16>(a);
    const U32x16 result = select(a == a, round_to_bf16(bits), U32x16(0x7FC0u));
    for (int i = 0; i < PARTS; ++i) {
        *reinterpret_cast<Unaligned*>(to + i * PART_LANES) = __builtin_convertvector(result.part[i], ShortPart);
    }
}

// The first `count` lanes (0 .. 16), from memory that may end after them; the other lanes are `rest`.
template <class Element>
PENSTOCK_INLINE F32x16 load_first(const Element* from, int count, float rest = 0.0f) {
    alignas(64) Element padded[LANES] = {};
    __builtin_memcpy(padded, from, count * sizeof(Element));
    return select(lane_index() < count, load(padded), F32x16(rest));
}

template <class Element>
PENSTOCK_INLINE void store_first(Element* to, F32x16 a, int count) {
    alignas(64) Element padded[LANES];
    store(padded, a);
    __builtin_memcpy(to, padded, count * sizeof(Element));
}

// Call body(i, count) for each vector of n elements. count is the constant 16, except for the rest at the end.
template <class Body>
PENSTOCK_INLINE void each_vector(std::int64_t n, const Body& body) {
    std::int64_t i = 0;
    for (; i + LANES <= n; i += LANES) body(i, LANES);
    if (i < n) body(i, static_cast<int>(n - i));
}

#define PENSTOCK_BODY [&](std::int64_t i, int count) __attribute__((always_inline))

template <class Element>
PENSTOCK_INLINE F32x16 load_some(const Element* from, int count) {
    return count == LANES ? load(from) : load_first(from, count);
}

template <class Element>
PENSTOCK_INLINE void store_some(Element* to, F32x16 a, int count) {
    if (count == LANES) return store(to, a);
    store_first(to, a, count);
}

// ---- Reductions of sixteen lanes as a binary tree: lane i with lane i + 8, then i + 4, i + 2, i + 1.

struct AddLanes {
    template <class T>
    PENSTOCK_INLINE T operator()(T a, T b) const { return a + b; }
};

struct MaxLanes {
    PENSTOCK_INLINE IntPart operator()(IntPart a, IntPart b) const { return a > b ? a : b; }
    PENSTOCK_INLINE FloatPart operator()(FloatPart a, FloatPart b) const { return max_part(a, b); }
};

// Lane i of the result is lane i ^ DISTANCE.
template <int DISTANCE, class Part>
PENSTOCK_INLINE Part swapped(Part a) {
    IntPart from;
    for (int i = 0; i < PART_LANES; ++i) from[i] = i ^ DISTANCE;
    return __builtin_shuffle(a, from);
}

// The reduction of each 4 neighbouring lanes, in every one of them.
template <class Op, class Part>
PENSTOCK_INLINE Part reduce_quads(Part a) {
    const Op op;
    a = op(a, swapped<2>(a));
    return op(a, swapped<1>(a));
}

// The reduction of all lanes, in every lane.
template <class Op, class Part, class Scalar>
PENSTOCK_INLINE Lanes<Part, Scalar> reduce_lanes(Lanes<Part, Scalar> a) {
    const Op op;
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.part[i] = op(a.part[i], a.part[i + half]);
    Part all = a.part[0];
    if constexpr (PART_LANES > 8) all = op(all, swapped<8>(all));
    if constexpr (PART_LANES > 4) all = op(all, swapped<4>(all));
    all = reduce_quads<Op>(all);
    for (int i = 0; i < PARTS; ++i) a.part[i] = all;
    return a;
}

PENSTOCK_INLINE float reduce_sum(F32x16 a) { return reduce_lanes<AddLanes>(a).part[0][0]; }

// No lane may be NaN.
PENSTOCK_INLINE float reduce_max(F32x16 a) { return reduce_lanes<MaxLanes>(a).part[0][0]; }

}  // namespace
}  // namespace penstock
