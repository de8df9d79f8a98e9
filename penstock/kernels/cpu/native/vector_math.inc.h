// Sixteen lanes of float32 and int32 on the compiler's vector types, and elementary functions of them.
//
// Included by files that are compiled once per instruction level. Everything is inline in an anonymous namespace, so
// that no level can end up with the code of another. Multiplications and additions are never fused and sums have one
// order, so every level gives the same bits; levels differ in the number of registers that hold the sixteen lanes.
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

// The same bits as another type of lanes.
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

// The smaller and the larger; b if either is NaN. GCC does not find the x86 instructions that do this.
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

// From bfloat16.
PENSTOCK_INLINE F32x16 load(const std::uint16_t* from) {
    typedef ShortPart Unaligned __attribute__((aligned(2), may_alias));
    U32x16 bits;
    for (int i = 0; i < PARTS; ++i) {
        const ShortPart half = *reinterpret_cast<const Unaligned*>(from + i * PART_LANES);
        bits.part[i] = __builtin_convertvector(half, UintPart);
    }
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

// The first `count` lanes, 0 .. 16, from memory that may end there; the others are `rest`.
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

// ---- Reductions of sixteen lanes as a binary tree: lane i with lane i + 8, then i + 4, i + 2, i + 1.

PENSTOCK_INLINE float reduce_sum(F32x16 a) {
    alignas(64) float lane[LANES];
    store(lane, a);
    for (int i = 0; i < 8; ++i) lane[i] += lane[i + 8];
    for (int i = 0; i < 4; ++i) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

PENSTOCK_INLINE float max(float a, float b) { return a > b ? a : b; }

// Not for NaN.
PENSTOCK_INLINE float reduce_max(F32x16 a) {
    alignas(64) float lane[LANES];
    store(lane, a);
    for (int i = 0; i < 8; ++i) lane[i] = max(lane[i], lane[i + 8]);
    for (int i = 0; i < 4; ++i) lane[i] = max(lane[i], lane[i + 4]);
    return max(max(lane[0], lane[2]), max(lane[1], lane[3]));
}

// ---- Elementary functions. Polynomials are minimax fits of the relative error; an ulp is that of the exact result.

// c[0] + c[1] x + .. by Horner's rule.
template <int COUNT>
PENSTOCK_INLINE F32x16 polynomial(F32x16 x, const float (&c)[COUNT]) {
    F32x16 result = c[COUNT - 1];
    for (int i = COUNT - 2; i >= 0; --i) result = result * x + c[i];
    return result;
}

constexpr float LN2_HIGH = 0.693359375f;      // 355/512: the product with an exponent is exact
constexpr float LN2_LOW = -2.12194440e-4f;    // ln 2 - LN2_HIGH

// e^x as power * 2^n, with n an integer from -2^22 to 2^22 and power from about 0.7 to 1.4.
struct Exponential {
    F32x16 power;
    I32x16 n;
};

PENSTOCK_INLINE Exponential exponential(F32x16 x) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer in the lowest bits
    constexpr std::int32_t ROUNDER_BITS = 0x4B400000;
    constexpr float TAIL[] = {4.999999404e-01f, 1.666652113e-01f, 4.166838899e-02f, 8.368745446e-03f, 1.381453942e-03f};
    const F32x16 shifted = x * LOG2_E + ROUNDER;
    const F32x16 n = shifted - ROUNDER;
    const F32x16 r = (x - n * LN2_HIGH) - n * LN2_LOW;  // |r| <= ln 2 / 2
    return {1.0f + (r + r * r * polynomial(r, TAIL)), bits_as<I32x16>(shifted) - ROUNDER_BITS};
}

// e^x within 1 ulp, also where it is subnormal. -inf gives 0, +inf gives +inf, NaN gives NaN.
PENSTOCK_INLINE F32x16 exp(F32x16 x) {
    constexpr float LOWEST = -104.0f, HIGHEST = 89.0f;  // beyond them: 0 and infinity
    const Exponential e = exponential(max(LOWEST, min(HIGHEST, x)));
    // 2^n as two factors: float32 has no exponent for 2^128 and 2^-150.
    const I32x16 first = e.n >> 1;
    return e.power * bits_as<F32x16>((first + 127) << 23) * bits_as<F32x16>((e.n - first + 127) << 23);
}

// e^x for x <= 0 within 1 ulp, cheaper than exp: 0 below -87, near the subnormal numbers. NaN gives NaN.
PENSTOCK_INLINE F32x16 exp_to_zero(F32x16 x) {
    const Exponential e = exponential(x);
    return select(x < -87.0f, F32x16(0.0f), e.power * bits_as<F32x16>((e.n + 127) << 23));
}

// Natural logarithm within 1 ulp. 0 gives -inf, +inf gives +inf, negative numbers and NaN give NaN.
PENSTOCK_INLINE F32x16 log(F32x16 x) {
    constexpr float SMALLEST_NORMAL = 1.17549435e-38f, TWO_23 = 8388608.0f, INFINITE = __builtin_inff();
    constexpr std::int32_t SQRT_HALF_BITS = 0x3F3504F3;
    constexpr float TAIL[] = {3.333331347e-01f,  -2.500000894e-01f, 2.000211924e-01f,
                              -1.666799635e-01f, 1.421955228e-01f,  -1.240558922e-01f,
                              1.188816279e-01f,  -1.167565137e-01f, 6.746638566e-02f};
    const I32x16 subnormal = x < SMALLEST_NORMAL;
    const I32x16 bits = bits_as<I32x16>(select(subnormal, x * TWO_23, x)) - SQRT_HALF_BITS;
    // x = 2^e (1 + f), with 1 + f between the roots of 1/2 and of 2.
    const F32x16 e = to_float((bits >> 23) - (subnormal & 23));
    const F32x16 f = bits_as<F32x16>((bits & 0x007FFFFF) + SQRT_HALF_BITS) - 1.0f;
    const F32x16 square = f * f;
    const F32x16 tail = square * f * polynomial(f, TAIL) + e * LN2_LOW;
    F32x16 result = e * LN2_HIGH + (f + (tail - square * 0.5f));
    result = select(x == 0.0f, F32x16(-INFINITE), result);
    result = select(x == INFINITE, x, result);
    return select(x >= 0.0f, result, F32x16(__builtin_nanf("")));
}

// Hyperbolic tangent within 2 ulp.
PENSTOCK_INLINE F32x16 tanh(F32x16 x) {
    constexpr float NEAR = 0.55f;
    constexpr float CURVE[] = {-3.333331645e-01f, 1.333258599e-01f, -5.385230854e-02f, 2.107167989e-02f,
                               -6.274240091e-03f};
    const F32x16 square = x * x;
    const F32x16 near = x + x * square * polynomial(square, CURVE);
    const F32x16 far = 1.0f - 2.0f / (exp(abs(x) * 2.0f) + 1.0f);
    return select(abs(x) < NEAR, near, copysign(far, x));
}

// 1 - erf(x) for x >= 0 within 8 + x^2 ulp; 0 if that is less than 2e-39.
PENSTOCK_INLINE F32x16 erfc_positive(F32x16 x) {
    constexpr float SCALED[] = {2.257049084e-01f,  2.249909490e-01f,  2.145949602e-01f, 1.311951131e-01f,
                                2.676755488e-01f,  -2.761764824e-01f, 5.375779867e-01f, -4.914137125e-01f,
                                1.948651671e-01f,  -2.901438065e-02f};
    const F32x16 s = 1.0f / (1.0f + x * 0.4f);
    return exp_to_zero(-1.0f * (x * x)) * (s * polynomial(s, SCALED));  // the last two factors are e^(x^2) erfc(x)
}

// The error function within 2 ulp.
PENSTOCK_INLINE F32x16 erf(F32x16 x) {
    constexpr float NEAR = 1.0f;
    constexpr float CURVE[] = {1.283791661e-01f, -3.761262596e-01f, 1.128358543e-01f, -2.685381286e-02f,
                               5.188329611e-03f, -8.010208840e-04f, 7.853907300e-05f};
    const F32x16 near = x + x * polynomial(x * x, CURVE);
    return select(abs(x) < NEAR, near, copysign(1.0f - erfc_positive(abs(x)), x));
}

}  // namespace
}  // namespace penstock
