// The row kernels, compiled once for each instruction level. row_kernels.h says what each does.
#pragma once

#include "rows/row_kernels.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

// Calls body(i, count) for each vector of n elements: count is 16 (a constant there), and what is left at the end.
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
    if (count == LANES) {
        store(to, a);
    } else {
        store_first(to, a, count);
    }
}

// ---- Products

constexpr float LOWEST = -3.40282347e38f;  // the least float that is finite, for -inf where that would meet 0

// Activations: of results smaller than 2e-36 some are 0; the bounds below are for the others.

// x / (1 + e^-t) for x and t of one sign. Large |t| and infinite x give the limit: e^-|t| cannot overflow.
PENSTOCK_INLINE F32x16 times_sigmoid(F32x16 x, F32x16 t) {
    const F32x16 decay = exp_to_zero(minus_abs(t));
    return select(t < 0.0f, max(LOWEST, x) * decay, x) / (decay + 1.0f);
}

// Within 4 ulp.
PENSTOCK_INLINE F32x16 silu(F32x16 x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), where (1 + tanh(t)) / 2 is the sigmoid of 2 t.
// Within 10 + 2 x^2 ulp: far below zero, where results vanish, the rounding of the exponent is what counts.
PENSTOCK_INLINE F32x16 gelu_tanh(F32x16 x) {
    constexpr float LINEAR = 1.59576912f, CUBIC = 0.0713548163f;  // 2 sqrt(2 / pi), and that times 0.044715
    return times_sigmoid(x, x * (x * x * CUBIC + LINEAR));
}

// x times the normal distribution's probability of less than x, within 10 + 2 x^2 ulp. Below zero the probability is a
// tail, which keeps its digits.
PENSTOCK_INLINE F32x16 gelu(F32x16 x) {
    constexpr float SQRT_HALF = 0.707106781f;
    const F32x16 tail = erfc_positive(abs(x) * SQRT_HALF) * 0.5f;
    return select(x < 0.0f, max(LOWEST, x) * tail, x * (1.0f - tail));
}

template <int ACTIVATION>
PENSTOCK_INLINE F32x16 activate(F32x16 x) {
    if constexpr (ACTIVATION == ACT_SILU) return silu(x);
    if constexpr (ACTIVATION == ACT_GELU) return gelu(x);
    if constexpr (ACTIVATION == ACT_GELU_TANH) return gelu_tanh(x);
    return x;
}

// Sums of sixteen columns, scaled and with their bias.
PENSTOCK_INLINE F32x16 scaled(const PenstockWeight& weight, F32x16 sums, std::int64_t column) {
    if (weight.column_scales != nullptr) sums = sums * load(weight.column_scales + column);
    if (weight.bias != nullptr) sums = sums + load(weight.bias + column);
    return sums;
}

PENSTOCK_INLINE int columns_left(std::int64_t end, std::int64_t column) {
    return static_cast<int>(end - column < LANES ? end - column : LANES);
}

template <class Out, int ACTIVATION>
void finish_plain(const FinishArgs& a) {
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
void finish_gated(const FinishArgs& a) {
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
            store_some(out + to, activate<ACTIVATION>(gate) * up, columns_left(weight.n / 2, to));
        }
    }
}

template <class Out, int ACTIVATION>
void finish_with(const FinishArgs& a) {
    if (a.weight->gated) return finish_gated<Out, ACTIVATION>(a);
    finish_plain<Out, ACTIVATION>(a);
}

template <class Out>
void finish_as(const FinishArgs& a) {
    if (a.activation == ACT_SILU) return finish_with<Out, ACT_SILU>(a);
    if (a.activation == ACT_GELU) return finish_with<Out, ACT_GELU>(a);
    if (a.activation == ACT_GELU_TANH) return finish_with<Out, ACT_GELU_TANH>(a);
    finish_with<Out, ACT_NONE>(a);
}

void finish(const FinishArgs& a) {
    if (a.out_type == TYPE_BF16) return finish_as<std::uint16_t>(a);
    finish_as<float>(a);
}

// ---- Norms

// 1 / sqrt(mean of the squares + eps), from their sum.
PENSTOCK_INLINE float norm_scale(F32x16 squares, std::int64_t n, float eps) {
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

// The row that is normed, x or x + branch, which is written on the way. visit(value) gets each vector of it, zeros
// behind the end.
template <class Visit>
PENSTOCK_INLINE const float* normed_row(const NormArgs& a, std::int64_t row, const Visit& visit) {
    const float* x = a.x + row * a.n;
    if (a.branch == nullptr) {
        each_vector(a.n, PENSTOCK_BODY { visit(load_some(x + i, count)); });
        return x;
    }
    const float* branch = a.branch + row * a.n;
    float* total = a.sum + row * a.n;
    each_vector(a.n, PENSTOCK_BODY {
        const F32x16 value = load_some(x + i, count) + load_some(branch + i, count);
        store_some(total + i, value, count);
        visit(value);
    });
    return total;
}

#define PENSTOCK_VISIT [&](F32x16 value) __attribute__((always_inline))

template <class Out>
void rms_norm_as(const NormArgs& a, std::int64_t first, std::int64_t rows) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        F32x16 squares = 0.0f;
        const float* x = normed_row(a, row, PENSTOCK_VISIT { squares = squares + value * value; });
        const F32x16 scale = norm_scale(squares, a.n, a.eps);
        Out* out = static_cast<Out*>(a.out) + row * a.n;
        each_vector(a.n, PENSTOCK_BODY {
            store_some(out + i, load_some(x + i, count) * scale * load_some(a.weight + i, count), count);
        });
    }
}

void rms_norm(const NormArgs& a, std::int64_t first, std::int64_t rows) {
    if (a.out_type == TYPE_BF16) return rms_norm_as<std::uint16_t>(a, first, rows);
    rms_norm_as<float>(a, first, rows);
}

// The sum of the squared distances from the mean. Lanes behind the end count nothing.
PENSTOCK_INLINE F32x16 squared_deviations(const float* x, std::int64_t n, F32x16 mean) {
    F32x16 squares = 0.0f;
    each_vector(n, PENSTOCK_BODY {
        const F32x16 all = load_some(x + i, count) - mean;
        const F32x16 deviation = count == LANES ? all : select(lane_index() < count, all, F32x16(0.0f));
        squares = squares + deviation * deviation;
    });
    return squares;
}

template <class Out>
void layer_norm_as(const NormArgs& a, std::int64_t first, std::int64_t rows) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        F32x16 total = 0.0f;
        const float* x = normed_row(a, row, PENSTOCK_VISIT { total = total + value; });
        const F32x16 mean = sum(total) / static_cast<float>(a.n);
        const F32x16 scale = norm_scale(squared_deviations(x, a.n, mean), a.n, a.eps);
        Out* out = static_cast<Out*>(a.out) + row * a.n;
        each_vector(a.n, PENSTOCK_BODY {
            const F32x16 normed = (load_some(x + i, count) - mean) * scale * load_some(a.weight + i, count);
            store_some(out + i, a.bias == nullptr ? normed : normed + load_some(a.bias + i, count), count);
        });
    }
}

void layer_norm(const NormArgs& a, std::int64_t first, std::int64_t rows) {
    if (a.out_type == TYPE_BF16) return layer_norm_as<std::uint16_t>(a, first, rows);
    layer_norm_as<float>(a, first, rows);
}

// ---- Rotary

// A head as it is, or normed on the way.
struct Head {
    const float* x;
    const float* weight;  // null: as it is
    F32x16 scale;

    PENSTOCK_INLINE F32x16 at(std::int64_t i, int count) const {
        const F32x16 value = load_some(x + i, count);
        return weight == nullptr ? value : value * scale * load_some(weight + i, count);
    }
};

// The scale of a norm over n elements.
PENSTOCK_INLINE float scale_of(const float* x, std::int64_t n, float eps) {
    F32x16 squares = 0.0f;
    each_vector(n, PENSTOCK_BODY {
        const F32x16 value = load_some(x + i, count);
        squares = squares + value * value;
    });
    return norm_scale(squares, n, eps);
}

// Turns element i against element i + half, for i < half. Elements from 2 half on stay as they are.
template <class Out>
PENSTOCK_INLINE void turn(const Head& head, const float* cosines, std::int64_t half, std::int64_t n, Out* out) {
    const float* sines = cosines + half;
    each_vector(half, PENSTOCK_BODY {
        const F32x16 c = load_some(cosines + i, count), s = load_some(sines + i, count);
        const F32x16 a = head.at(i, count), b = head.at(i + half, count);
        store_some(out + i, a * c - b * s, count);
        store_some(out + i + half, b * c + a * s, count);
    });
    const std::int64_t rest = 2 * half;
    each_vector(n - rest, PENSTOCK_BODY { store_some(out + rest + i, head.at(rest + i, count), count); });
}

// The heads [heads, n] of q, or of k, normed and turned.
template <class Out>
PENSTOCK_INLINE void turn_heads(const float* x, std::int64_t heads, std::int64_t n, const HeadNorm& norm, float eps,
                                const float* cosines, std::int64_t half, Out* out) {
    const bool together = norm.size != n;
    Head head{x, norm.weight, 1.0f};
    if (norm.weight != nullptr && together) head.scale = scale_of(x, norm.size, eps);
    for (std::int64_t at = 0; at < heads; ++at, head.x += n, out += n) {
        if (norm.weight != nullptr && !together) head.scale = scale_of(head.x, n, eps);
        turn(head, cosines, half, n, out);
        if (together && norm.weight != nullptr) head.weight += n;
    }
}

template <class Out>
void rotary_as(const RotaryArgs& a, std::int64_t first, std::int64_t rows) {
    const std::int64_t n = a.head_dim;
    const std::int64_t half = a.cos_sin == nullptr ? 0 : a.rotary_dim / 2;
    for (std::int64_t row = first; row < first + rows; ++row) {
        const float* from = a.qkv + row * (a.heads + 2 * a.kv_heads) * n;
        const float* cosines = half == 0 ? nullptr : a.cos_sin + a.positions[row] * a.rotary_dim;
        Out* q = static_cast<Out*>(a.q) + row * a.heads * n;
        Out* k = static_cast<Out*>(a.k) + row * a.kv_heads * n;
        Out* v = static_cast<Out*>(a.v) + row * a.kv_heads * n;
        turn_heads(from, a.heads, n, a.q_norm, a.eps, cosines, half, q);
        from += a.heads * n;
        turn_heads(from, a.kv_heads, n, a.k_norm, a.eps, cosines, half, k);
        from += a.kv_heads * n;
        each_vector(a.kv_heads * n, PENSTOCK_BODY { store_some(v + i, load_some(from + i, count), count); });
    }
}

void rotary(const RotaryArgs& a, std::int64_t first, std::int64_t rows) {
    if (a.out_type == TYPE_BF16) return rotary_as<std::uint16_t>(a, first, rows);
    rotary_as<float>(a, first, rows);
}

// ---- Embedding

template <class Element>
void embedding_from(const EmbeddingArgs& a, std::int64_t first, std::int64_t rows) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        const Element* from = static_cast<const Element*>(a.table) + a.ids[row] * a.n;
        float* to = a.out + row * a.n;
        each_vector(a.n, PENSTOCK_BODY { store_some(to + i, load_some(from + i, count) * a.scale, count); });
    }
}

void embedding(const EmbeddingArgs& a, std::int64_t first, std::int64_t rows) {
    if (a.table_type == TYPE_BF16) return embedding_from<std::uint16_t>(a, first, rows);
    embedding_from<float>(a, first, rows);
}

// ---- Routing

constexpr float TAKEN = -1.0f;  // in place of a probability: chosen already, or no expert

// The greatest of n numbers, none of them NaN, in whole vectors.
PENSTOCK_INLINE float greatest_of(const float* values, std::int64_t n) {
    F32x16 best = load(values);
    for (std::int64_t i = LANES; i < n; i += LANES) best = max(load(values + i), best);
    return greatest(best);
}

// The softmax of n logits, then TAKEN up to a whole vector. Returns whether it is made of numbers.
PENSTOCK_INLINE bool softmax(const float* logits, std::int64_t n, float* out) {
    constexpr float NOTHING = -__builtin_inff();
    F32x16 best = NOTHING;
    each_vector(n, PENSTOCK_BODY { best = max(load_first(logits + i, count, NOTHING), best); });
    const F32x16 top = greatest(best);
    F32x16 sums = 0.0f;
    each_vector(n, PENSTOCK_BODY {
        const F32x16 power = exp(load_first(logits + i, count, NOTHING) - top);
        store(out + i, power);
        sums = sums + power;
    });
    const float total = sum(sums);
    each_vector(n, PENSTOCK_BODY {
        store(out + i, select(lane_index() < count, load(out + i) / total, F32x16(TAKEN)));
    });
    return total >= 1.0f;  // the greatest logit alone gives 1
}

void route(const RouteArgs& a, std::int64_t first, std::int64_t rows, float* scratch) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        std::int64_t* ids = a.ids + row * a.top_k;
        float* weights = a.weights + row * a.top_k;
        const bool sound = softmax(a.logits + row * a.experts, a.experts, scratch);
        float total = 0.0f;
        for (std::int64_t at = 0; at < a.top_k; ++at) {
            std::int64_t id = 0;
            if (sound) {
                const float best = greatest_of(scratch, a.experts);
                while (scratch[id] != best) ++id;
            } else {
                id = at;
            }
            ids[at] = id;
            weights[at] = sound ? scratch[id] : __builtin_nanf("");
            total += weights[at];
            scratch[id] = TAKEN;
        }
        if (!a.renormalize) continue;
        for (std::int64_t at = 0; at < a.top_k; ++at) weights[at] /= total;
    }
}

// ---- Element by element

void add(float* x, const float* h, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(x + i, load_some(x + i, count) + load_some(h + i, count), count); });
}

void round(const float* x, std::uint16_t* out, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(out + i, load_some(x + i, count), count); });
}

void softcap(float* x, float cap, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(x + i, tanh(load_some(x + i, count) / cap) * cap, count); });
}

constexpr RowKernels ROW_KERNELS = {finish, rms_norm, layer_norm, rotary, embedding, route, add, round, softcap};

}  // namespace
}  // namespace penstock
