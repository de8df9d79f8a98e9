// The epilogue of products: scales, bias and activation. row_kernels.h specifies it. Compiled once per instruction
// level.
#pragma once

#include "rows/row_kernels.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr float LOWEST = -3.40282347e38f;  // the lowest finite float, used in place of -inf in a product with 0

// Activations. Some results below 2e-36 are 0; the error bounds hold for all other results.

// x / (1 + e^-t) for x and t of the same sign. Large |t| and infinite x give the limit: e^-|t| cannot overflow.
PENSTOCK_INLINE F32x16 times_sigmoid(F32x16 x, F32x16 t) {
    const F32x16 decay = exp_to_zero(minus_abs(t));
    return select(t < 0.0f, max(LOWEST, x) * decay, x) / (decay + 1.0f);
}

// Within 4 ulp.
PENSTOCK_INLINE F32x16 silu(F32x16 x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), where (1 + tanh(t)) / 2 is the sigmoid of 2 t.
// Within 10 + 2 x^2 ulp: far below zero, the rounding of the exponent dominates.
PENSTOCK_INLINE F32x16 gelu_tanh(F32x16 x) {
    constexpr float LINEAR = 1.59576912f, CUBIC = 0.0713548163f;  // 2 sqrt(2 / pi), and that times 0.044715
    return times_sigmoid(x, x * (x * x * CUBIC + LINEAR));
}

// x times the cumulative normal distribution of x, within 10 + 2 x^2 ulp. Below zero, the distribution is computed as a
// tail, which keeps its precision.
PENSTOCK_INLINE F32x16 gelu(F32x16 x) {
    constexpr float SQRT_HALF = 0.707106781f;
    const F32x16 tail = erfc_positive(abs(x) * SQRT_HALF) * 0.5f;
    return select(x < 0.0f, max(LOWEST, x) * tail, x * (1.0f - tail));
}

// x / (1 + e^(-1.702 x)), an approximation of gelu, of x or CLAMP if that is less. Within 10 + 2 x^2 ulp.
constexpr float CLAMP = 7.0f;

PENSTOCK_INLINE F32x16 clamped_silu(F32x16 x) {
    const F32x16 clamped = min(CLAMP, x);
    return times_sigmoid(clamped, clamped * 1.702f);
}

// The square of x above 0, exactly rounded.
PENSTOCK_INLINE F32x16 relu2(F32x16 x) { return select(x < 0.0f, F32x16(0.0f), x * x); }

constexpr int ACTIVATIONS = ACT_TANH + 1;

template <int ACTIVATION>
PENSTOCK_INLINE F32x16 activate(F32x16 x) {
    if constexpr (ACTIVATION == ACT_SILU) return silu(x);
    if constexpr (ACTIVATION == ACT_GELU) return gelu(x);
    if constexpr (ACTIVATION == ACT_GELU_TANH) return gelu_tanh(x);
    if constexpr (ACTIVATION == ACT_CLAMPED_SILU) return clamped_silu(x);
    if constexpr (ACTIVATION == ACT_RELU2) return relu2(x);
    if constexpr (ACTIVATION == ACT_RELU) return select(x < 0.0f, F32x16(0.0f), x);
    if constexpr (ACTIVATION == ACT_TANH) return tanh(x);
    return x;
}

// What the activation of a gate multiplies.
template <int ACTIVATION>
PENSTOCK_INLINE F32x16 multiplied(F32x16 up) {
    if constexpr (ACTIVATION == ACT_CLAMPED_SILU) return max(-CLAMP, min(CLAMP, up)) + 1.0f;
    return up;
}

// Sums of sixteen columns, times their scales, plus their bias.
PENSTOCK_INLINE F32x16 scaled(const PenstockWeight& weight, F32x16 sums, std::int64_t column) {
    if (weight.column_scales != nullptr) sums = sums * load(weight.column_scales + column);
    if (weight.bias != nullptr) sums = sums + load(weight.bias + column);
    return sums;
}

PENSTOCK_INLINE int columns_left(std::int64_t end, std::int64_t column) {
    return static_cast<int>(end - column < LANES ? end - column : LANES);
}

template <class Out, int ACTIVATION>
void epilogue_plain(const EpilogueArgs& a) {
    const PenstockWeight weight = *a.weight;
    const std::int64_t first = a.first_panel * PANEL;
    const std::int64_t width = std::int64_t{a.panels} * PANEL;
    const std::int64_t columns = weight.n - first < width ? weight.n - first : width;
    for (std::int64_t row = 0; row < a.rows; ++row) {
        const float* sums = a.sums + row * width;
        Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first;
        each_vector(columns, PENSTOCK_BODY {
            store_some(out + i, activate<ACTIVATION>(scaled(weight, load(sums + i), first + i)), count);
        });
    }
}

template <class Out, int ACTIVATION>
void epilogue_gated(const EpilogueArgs& a) {
    const PenstockWeight weight = *a.weight;
    const std::int64_t width = std::int64_t{a.panels} * PANEL;
    for (std::int64_t row = 0; row < a.rows; ++row) {
        Out* out = static_cast<Out*>(a.out) + row * a.out_stride;
        for (int panel = 0; panel < a.panels; ++panel) {
            const float* sums = a.sums + row * width + panel * PANEL;
            const std::int64_t column = (a.first_panel + panel) * PANEL;
            const F32x16 gate = scaled(weight, load(sums), column);
            const F32x16 up = scaled(weight, load(sums + LANES), column + LANES);
            const std::int64_t to = column / 2;
            const int count = columns_left(weight.n / 2, to);
            if constexpr (ACTIVATION == ACT_NONE) {
                store_some(out + to, gate, count);
                store_some(out + weight.n / 2 + to, up, count);
            } else {
                store_some(out + to, activate<ACTIVATION>(gate) * multiplied<ACTIVATION>(up), count);
            }
        }
    }
}

template <class Out>
void epilogue(const EpilogueArgs& a) {
    with_constant<ACTIVATIONS>(a.activation + 1, [&](auto number) {
        constexpr int ACTIVATION = decltype(number)::value - 1;
        (a.weight->gated ? epilogue_gated<Out, ACTIVATION> : epilogue_plain<Out, ACTIVATION>)(a);
    });
}

}  // namespace
}  // namespace penstock
