// Elementary functions of sixteen lanes. Polynomials are minimax fits of the relative error. An ulp is an ulp of the
// exact result.
#pragma once

#include "lanes.inc.h"

namespace penstock {
namespace {

// c[0] + c[1] x + .. by Horner's rule.
template <int COUNT>
PENSTOCK_INLINE F32x16 polynomial(F32x16 x, const float (&c)[COUNT]) {
    F32x16 result = c[COUNT - 1];
    for (int i = COUNT - 2; i >= 0; --i) result = result * x + c[i];
    return result;
}

constexpr float LN2_HIGH = 0.693359375f;      // 355/512: the product with an exponent is exact
constexpr float LN2_LOW = -2.12194440e-4f;    // ln 2 - LN2_HIGH
constexpr float EXPONENTIAL_TAIL[] = {  // (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2
    4.999999404e-01f, 1.666652113e-01f, 4.166838899e-02f, 8.368745446e-03f, 1.381453942e-03f};

// e^x as power * 2^n, with n an integer from -2^22 to 2^22 and power from about 0.7 to 1.4. Of an x beyond that, both
// mean nothing: n is unsigned, so that it may wrap around.
struct Exponential {
    F32x16 power;
    U32x16 n;
};

PENSTOCK_INLINE Exponential exponential(F32x16 x) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer in the lowest bits
    constexpr std::uint32_t ROUNDER_BITS = 0x4B400000;
    const F32x16 shifted = x * LOG2_E + ROUNDER;
    const F32x16 n = shifted - ROUNDER;
    const F32x16 r = (x - n * LN2_HIGH) - n * LN2_LOW;  // |r| <= ln 2 / 2
    return {1.0f + (r + r * r * polynomial(r, EXPONENTIAL_TAIL)), bits_as<U32x16>(shifted) - ROUNDER_BITS};
}

// e^x within 1 ulp, even where it is subnormal. -inf gives 0, +inf gives +inf, NaN gives NaN.
PENSTOCK_INLINE F32x16 exp(F32x16 x) {
    constexpr float LOWEST = -104.0f, HIGHEST = 89.0f;  // beyond them: 0 and infinity
    const Exponential e = exponential(max(LOWEST, min(HIGHEST, x)));
    // 2^n is two factors, because float32 has no exponent for 2^128 and 2^-150.
    const U32x16 first = bits_as<U32x16>(bits_as<I32x16>(e.n) >> 1);
    return e.power * bits_as<F32x16>((first + 127u) << 23u) * bits_as<F32x16>((e.n - first + 127u) << 23u);
}

// e^x for x <= 0 within 1 ulp, cheaper than exp: 0 below -87, near the subnormal numbers. NaN gives NaN.
PENSTOCK_INLINE F32x16 exp_to_zero(F32x16 x) {
    const Exponential e = exponential(x);
    return select(x < -87.0f, F32x16(0.0f), e.power * bits_as<F32x16>((e.n + 127u) << 23u));
}

// e^x - 1 - x for x <= 0: within 4 ulp down to -0.34, and within 1e-6 of its value below.
PENSTOCK_INLINE F32x16 exp_minus_line(F32x16 x) {
    constexpr float NEAR = -0.34f;
    const F32x16 near = x * x * polynomial(x, EXPONENTIAL_TAIL);
    return select(x < NEAR, (exp(x) - 1.0f) - x, near);
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

// 1 - erf(x) for x >= 0, within 8 + x^2 ulp; 0 if the result is less than 2e-39.
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
