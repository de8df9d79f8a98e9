// The row kernels that row_kernels.h specifies, compiled once per instruction level.
#pragma once

#include "rows/lora.inc.h"

namespace penstock {
namespace {

// ---- Norms

// 1 / sqrt(mean of the squares + eps), from their sum.
PENSTOCK_INLINE float norm_scale(F32x16 squares, std::int64_t n, float eps) {
    return 1.0f / __builtin_sqrtf(reduce_sum(squares) / static_cast<float>(n) + eps);
}

// The row to be normed: x, or x + branch, which is also written to sum. visit(value) is called with each vector of the
// row, with zeros after the end.
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
void rms_norm(const NormArgs& a, std::int64_t first, std::int64_t rows) {
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

// The sum of squared deviations from the mean. Lanes after the end add nothing.
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
void layer_norm(const NormArgs& a, std::int64_t first, std::int64_t rows) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        F32x16 total = 0.0f;
        const float* x = normed_row(a, row, PENSTOCK_VISIT { total = total + value; });
        const F32x16 mean = reduce_sum(total) / static_cast<float>(a.n);
        const F32x16 scale = norm_scale(squared_deviations(x, a.n, mean), a.n, a.eps);
        Out* out = static_cast<Out*>(a.out) + row * a.n;
        each_vector(a.n, PENSTOCK_BODY {
            const F32x16 normed = (load_some(x + i, count) - mean) * scale * load_some(a.weight + i, count);
            store_some(out + i, a.bias == nullptr ? normed : normed + load_some(a.bias + i, count), count);
        });
    }
}

// The same in place for each of the heads [heads, n] of a row, each with its own weight.
void norm_heads(float* x, const float* weight, float eps, std::int64_t heads, std::int64_t n) {
    for (std::int64_t head = 0; head < heads; ++head, x += n, weight += n) {
        F32x16 total = 0.0f;
        each_vector(n, PENSTOCK_BODY { total = total + load_some(x + i, count); });
        const F32x16 mean = reduce_sum(total) / static_cast<float>(n);
        const F32x16 scale = norm_scale(squared_deviations(x, n, mean), n, eps);
        each_vector(n, PENSTOCK_BODY {
            store_some(x + i, (load_some(x + i, count) - mean) * scale * load_some(weight + i, count), count);
        });
    }
}

// ---- Rotary

// A head, which is normed if it has a weight, and multiplied by a factor if it has one.
template <bool HAS_FACTOR>
struct Head {
    const float* x;
    const float* weight;  // null: not normed
    F32x16 factor;
    F32x16 scale = 1.0f;  // of the norm

    PENSTOCK_INLINE F32x16 at(std::int64_t i, int count) const {
        const F32x16 value = load_some(x + i, count);
        const F32x16 normed = weight == nullptr ? value : value * scale * load_some(weight + i, count);
        if constexpr (HAS_FACTOR) return normed * factor;
        return normed;
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

// Rotate element i against element i + half, for i < half. Elements from 2 * half on are copied.
template <bool HAS_FACTOR, class Out>
PENSTOCK_INLINE void rotate(
    const Head<HAS_FACTOR>& head, const float* cosines, std::int64_t half, std::int64_t n, Out* out) {
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

// Norm and rotate the heads [heads, n] of q or of k, and multiply them by a factor.
template <bool HAS_FACTOR, class Out>
PENSTOCK_INLINE void rotate_heads(const float* x, std::int64_t heads, std::int64_t n, const HeadNorm& norm, float eps,
                                  float factor, const float* cosines, std::int64_t half, Out* out) {
    const bool together = norm.size != n;
    Head<HAS_FACTOR> head{x, norm.weight, factor};
    if (norm.weight != nullptr && together) head.scale = scale_of(x, norm.size, eps);
    for (std::int64_t at = 0; at < heads; ++at, head.x += n, out += n) {
        if (norm.weight != nullptr && !together) head.scale = scale_of(head.x, n, eps);
        rotate(head, cosines, half, n, out);
        if (together && norm.weight != nullptr) head.weight += n;
    }
}

template <class Out>
void rotary(const RotaryArgs& a, std::int64_t first, std::int64_t rows) {
    const std::int64_t n = a.head_dim;
    const std::int64_t half = a.cos_sin == nullptr ? 0 : a.rotary_dim / 2;
    for (std::int64_t row = first; row < first + rows; ++row) {
        const float* from = a.qkv + row * (a.heads + (a.values_are_keys ? 1 : 2) * a.kv_heads) * n;
        const std::int64_t position = a.positions[row] < a.last_position ? a.positions[row] : a.last_position;
        const float* cosines = half == 0 ? nullptr : a.cos_sin + position * a.rotary_dim;
        Out* q = static_cast<Out*>(a.q) + row * a.heads * n;
        if (a.q_scale == nullptr)
            rotate_heads<false>(from, a.heads, n, a.q_norm, a.eps, 1.0f, cosines, half, q);
        else
            rotate_heads<true>(from, a.heads, n, a.q_norm, a.eps, a.q_scale[position], cosines, half, q);
        if (a.k == nullptr) continue;
        Out* k = static_cast<Out*>(a.k) + row * a.kv_heads * n;
        Out* v = static_cast<Out*>(a.v) + row * a.kv_heads * n;
        from += a.heads * n;
        rotate_heads<false>(from, a.kv_heads, n, a.k_norm, a.eps, 1.0f, cosines, half, k);
        if (!a.values_are_keys) from += a.kv_heads * n;
        if (a.v_norm.weight == nullptr)
            each_vector(a.kv_heads * n, PENSTOCK_BODY { store_some(v + i, load_some(from + i, count), count); });
        else
            rotate_heads<false>(from, a.kv_heads, n, a.v_norm, a.eps, 1.0f, nullptr, 0, v);
    }
}

// ---- Embedding

template <class Element>
void embedding(const EmbeddingArgs& a, std::int64_t first, std::int64_t rows) {
    for (std::int64_t row = first; row < first + rows; ++row) {
        const Element* from = static_cast<const Element*>(a.table) + a.ids[row] * a.n;
        float* to = a.out + row * a.n;
        each_vector(a.n, PENSTOCK_BODY { store_some(to + i, load_some(from + i, count) * a.scale, count); });
    }
}

// ---- Routing

constexpr float TAKEN = -__builtin_inff();  // of an expert that is already chosen, may not be chosen, or does not exist

// The maximum of n numbers, none of them NaN, in whole vectors.
PENSTOCK_INLINE float max_of(const float* values, std::int64_t n) {
    F32x16 best = load(values);
    for (std::int64_t i = LANES; i < n; i += LANES) best = max(load(values + i), best);
    return reduce_max(best);
}

// Write the softmax of n logits in whole vectors.
PENSTOCK_INLINE void softmax(const float* logits, std::int64_t n, float* out) {
    constexpr float MINUS_INFINITY = -__builtin_inff();
    F32x16 best = MINUS_INFINITY;
    each_vector(n, PENSTOCK_BODY { best = max(load_first(logits + i, count, MINUS_INFINITY), best); });
    const F32x16 top = reduce_max(best);
    F32x16 sums = 0.0f;
    each_vector(n, PENSTOCK_BODY {
        const F32x16 power = exp(load_first(logits + i, count, MINUS_INFINITY) - top);
        store(out + i, power);
        sums = sums + power;
    });
    const float total = reduce_sum(sums);
    for (std::int64_t i = 0; i < n; i += LANES) store(out + i, load(out + i) / total);
}

PENSTOCK_INLINE F32x16 sigmoid(F32x16 x) { return times_sigmoid(1.0f, x); }

// Write the scores of a row and what experts are chosen by, which may be the same array. Return false if there is NaN.
PENSTOCK_INLINE bool score(const RouteArgs& a, const float* logits, float* scores, float* choice) {
    if (a.scores == SCORES_SOFTMAX) {
        softmax(logits, a.experts, scores);
    } else {
        each_vector(a.experts, PENSTOCK_BODY {
            const F32x16 logit = load_some(logits + i, count);
            store(scores + i, a.scores == SCORES_SIGMOID ? sigmoid(logit) : logit);
        });
    }
    I32x16 numbers = -1;
    each_vector(a.experts, PENSTOCK_BODY {
        const F32x16 value = a.bias == nullptr ? load(scores + i) : load(scores + i) + load_some(a.bias + i, count);
        numbers = numbers & ((value == value) | (lane_index() >= count));
        store(choice + i, select(lane_index() < count, max(LOWEST, value), F32x16(TAKEN)));
    });
    std::int32_t lanes[LANES], all = -1;
    store(lanes, numbers);
    for (int i = 0; i < LANES; ++i) all &= lanes[i];
    return all != 0;
}

// Find the largest of n numbers, the first of equal ones.
PENSTOCK_INLINE std::int64_t largest(const float* values, std::int64_t n) {
    const float best = max_of(values, n);
    std::int64_t at = 0;
    while (values[at] != best) ++at;
    return at;
}

// Take all experts but those of the top_groups groups with the largest sums of their group_top largest numbers.
// spare: an array like `choice`.
void take_groups(const RouteArgs& a, float* choice, float* spare) {
    const std::int64_t size = a.experts / a.groups;
    for (std::int64_t group = 0; group < a.groups; ++group) {
        float sum = 0.0f, bound = -TAKEN;
        std::int64_t after = -1;  // the last number that was added, the first of equal ones
        for (std::int64_t count = 0; count < a.group_top; ++count) {
            float best = TAKEN;
            std::int64_t at = -1;
            for (std::int64_t i = 0; i < size; ++i) {
                const float value = choice[group * size + i];
                if ((value < bound || (value == bound && i > after)) && value > best) best = value, at = i;
            }
            sum += best;
            bound = best;
            after = at;
        }
        spare[group] = sum < LOWEST ? LOWEST : sum;
    }
    const std::int64_t vectors = (a.groups + LANES - 1) / LANES * LANES;
    for (std::int64_t i = a.groups; i < vectors; ++i) spare[i] = TAKEN;
    for (std::int64_t count = 0; count < a.top_groups; ++count) spare[largest(spare, vectors)] = TAKEN;
    for (std::int64_t i = 0; i < a.experts; ++i)
        if (spare[i / size] != TAKEN) choice[i] = TAKEN;
}

// The weight of the largest logit, `best`, among those not taken: its softmax over those that are not much smaller.
PENSTOCK_INLINE float share(const float* choice, std::int64_t n, float best, float threshold) {
    F32x16 sums = 0.0f;
    for (std::int64_t i = 0; i < n; i += LANES) {
        const F32x16 logit = load(choice + i), allowed = max(abs(logit), best) * threshold;
        sums = sums + select(best - logit > allowed, F32x16(0.0f), exp(logit - best));
    }
    return 1.0f / reduce_sum(sums);
}

void route(const RouteArgs& a, std::int64_t first, std::int64_t rows, float* scratch) {
    const std::int64_t vectors = (a.experts + LANES - 1) / LANES * LANES;
    float* const choice = a.bias == nullptr ? scratch : scratch + vectors;
    for (std::int64_t row = first; row < first + rows; ++row) {
        std::int64_t* ids = a.ids + row * a.top_k;
        float* weights = a.weights + row * a.top_k;
        const bool valid = score(a, a.logits + row * a.experts, scratch, choice);
        if (valid && a.groups > 1) take_groups(a, choice, scratch + 2 * vectors);
        for (std::int64_t at = 0; at < a.top_k; ++at) {
            std::int64_t id = at;
            float weight = __builtin_nanf("");
            if (valid) {
                id = largest(choice, a.experts);
                weight = a.scores == SCORES_SPARSEMIXER ? share(choice, a.experts, choice[id], a.threshold)
                                                        : scratch[id];
                choice[id] = TAKEN;
            }
            ids[at] = id;
            weights[at] = weight;
        }
        if (a.scores == SCORES_CHOSEN_SIGMOID)
            each_vector(a.top_k, PENSTOCK_BODY {
                store_some(weights + i, sigmoid(load_some(weights + i, count)), count);
            });
        float total = 0.0f;
        for (std::int64_t at = 0; at < a.top_k; ++at) total += weights[at];
        if (a.renormalize)
            for (std::int64_t at = 0; at < a.top_k; ++at) weights[at] /= total < a.min_sum ? a.min_sum : total;
        if (a.scale != 1.0f)
            for (std::int64_t at = 0; at < a.top_k; ++at) weights[at] *= a.scale;
        if (a.expert_scale != nullptr)
            for (std::int64_t at = 0; at < a.top_k; ++at) weights[at] *= a.expert_scale[ids[at]];
    }
}

// ---- Element-wise

void add(float* x, const float* h, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(x + i, load_some(x + i, count) + load_some(h + i, count), count); });
}

void add_gated(float* x, const float* h, float gate, std::int64_t count) {
    const F32x16 factor = sigmoid(gate);
    each_vector(count, PENSTOCK_BODY {
        store_some(x + i, load_some(x + i, count) + load_some(h + i, count) * factor, count);
    });
}

void round(const float* x, std::uint16_t* out, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(out + i, load_some(x + i, count), count); });
}

void scale(float* x, float factor, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(x + i, load_some(x + i, count) * factor, count); });
}

template <class Element>
void weigh(const void* x, float weight, void* out, std::int64_t count) {
    const Element* from = static_cast<const Element*>(x);
    Element* to = static_cast<Element*>(out);
    each_vector(count, [&](std::int64_t i, int some) __attribute__((always_inline)) {
        store_some(to + i, load_some(from + i, some) * weight, some);
    });
}

template <class Out>
void xielu(const XieluArgs& a, std::int64_t first, std::int64_t size) {
    const float* x = a.x + first;
    Out* out = static_cast<Out*>(a.out) + first;
    each_vector(size, PENSTOCK_BODY {
        const F32x16 value = load_some(x + i, count), low = min(a.bound, value);
        const F32x16 curve = select(low < value, exp_minus_line(low) + (low - value), exp_minus_line(low));
        const F32x16 bent = select(value > 0.0f, value * value * a.convex, curve * a.concave);
        store_some(out + i, bent + value * a.linear, count);
    });
}

void softcap(float* x, float cap, std::int64_t count) {
    each_vector(count, PENSTOCK_BODY { store_some(x + i, tanh(load_some(x + i, count) / cap) * cap, count); });
}

}  // namespace

static_assert(TYPE_F32 == 0 && TYPE_BF16 == 1, "the order in the arrays of kernels");

template <> RowKernels row_kernels<THIS_LEVEL>() {
    using Half = std::uint16_t;
    return {{epilogue<float>, epilogue<Half>},
            {rms_norm<float>, rms_norm<Half>},
            {layer_norm<float>, layer_norm<Half>},
            {rotary<float>, rotary<Half>},
            {embedding<float>, embedding<Half>},
            {xielu<float>, xielu<Half>},
            route, add, add_gated, round, scale, {weigh<float>, weigh<Half>}, softcap, norm_heads,
            {lora_shrink<float>, lora_shrink<Half>},
            {lora_expand<float>, lora_expand<Half>},
            {activated<float>, activated<Half>}};
}

}  // namespace penstock
