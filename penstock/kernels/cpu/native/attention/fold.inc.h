// Folding one state of attention into another, and turning what is done into results: attention.h, FoldKernel.
#pragma once

#include "attention/tile.inc.h"

namespace penstock {
namespace {

void fold(int rows, std::int64_t padded_dim, float* m, float* l, float* o, const float* m2, const float* l2,
          const float* o2) {
    for (int r = 0; r < rows; ++r)
        fold_row(padded_dim, m[r], l[r], o + r * padded_dim, {m2[r], l2[r]}, o2 + r * padded_dim);
}

// A sum of one with the logit as its greatest score, and no value.
PENSTOCK_INLINE void fold_sink(std::int64_t padded_dim, float& m, float& l, float* o, float logit) {
    alignas(64) const float nothing[MAX_HEAD_DIM] = {};
    fold_row(padded_dim, m, l, o, {logit, 1.0f}, nothing);
}

// o / l, and 0 for -0: a sum's zero has a sign that depends on how many zeros were added.
template <class Element>
PENSTOCK_INLINE void divide(std::int64_t head_dim, const float* o, float l, Element* out) {
    const auto quotient = [=](std::int64_t d) { return l == 0.0f ? F32x16(0.0f) : load(o + d) / l + 0.0f; };
    std::int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store(out + d, quotient(d));
    if (d < head_dim) store_first(out + d, quotient(d), static_cast<int>(head_dim - d));
}

PENSTOCK_INLINE float log_of_sum(float m, float l) {
    alignas(64) float lane[LANES];
    store(lane, log(F32x16(l)));
    return l == 0.0f ? MINUS_INFINITY : m + lane[0];
}

void deliver(int rows, std::int64_t padded_dim, std::int64_t head_dim, float* m, float* l, float* o,
             const float* sinks, std::int32_t type, void* const* out, float* const* lse) {
    for (int r = 0; r < rows; ++r) {
        float* row = o + r * padded_dim;
        if (sinks != nullptr) fold_sink(padded_dim, m[r], l[r], row, sinks[r]);
        if (type == TYPE_F32) divide(head_dim, row, l[r], static_cast<float*>(out[r]));
        if (type == TYPE_BF16) divide(head_dim, row, l[r], static_cast<std::uint16_t*>(out[r]));
        if (lse != nullptr) *lse[r] = log_of_sum(m[r], l[r]);
    }
}

constexpr FoldKernel FOLD_KERNEL = {fold, deliver};

}  // namespace
}  // namespace penstock
