// Folding one state of attention into another and turning states into results: FoldKernel of attention.h.
#pragma once

#include "attention/tile.inc.h"

namespace penstock {
namespace {

void fold(int rows, const States& state, const States& part) {
    for (int r = 0; r < rows; ++r) {
        const States to = state.from(r), from = part.from(r);
        fold_row(to.padded_dim, *to.running_max, *to.running_sum, to.accumulator,
                 {*from.running_max, *from.running_sum}, from.accumulator);
    }
}

// Fold in a part with the logit as its maximum score, a sum of 1, and no value.
PENSTOCK_INLINE void fold_sink(std::int64_t padded_dim, float& m, float& l, float* o, float logit) {
    alignas(64) static constexpr float nothing[MAX_HEAD_DIM] = {};
    fold_row(padded_dim, m, l, o, {logit, 1.0f}, nothing);
}

// o / l, with 0 for -0: the sign of a zero sum depends on the number of zeros added.
template <class Element>
PENSTOCK_INLINE void divide(std::int64_t head_dim, const float* o, float l, Element* out) {
    const auto quotient = [=](std::int64_t d) { return l == 0.0f ? F32x16(0.0f) : load(o + d) / l + 0.0f; };
    each_vector(head_dim, PENSTOCK_BODY { store_some(out + i, quotient(i), count); });
}

PENSTOCK_INLINE float log_of_sum(float m, float l) {
    alignas(64) float lane[LANES];
    store(lane, log(F32x16(l)));
    return l == 0.0f ? MINUS_INFINITY : m + lane[0];
}

void write_output(const OutputArgs& a) {
    for (int r = 0; r < a.rows; ++r) {
        const States row = a.state.from(r);
        float &m = *row.running_max, &l = *row.running_sum;
        float* o = row.accumulator;
        if (a.sinks != nullptr) fold_sink(row.padded_dim, m, l, o, a.sinks[r]);
        if (a.type == TYPE_F32) divide(a.head_dim, o, l, static_cast<float*>(a.out[r]));
        if (a.type == TYPE_BF16) divide(a.head_dim, o, l, static_cast<std::uint16_t*>(a.out[r]));
        if (a.lse != nullptr) *a.lse[r] = log_of_sum(m, l);
    }
}

}  // namespace

template <> FoldKernel fold_kernel<THIS_LEVEL>() { return {fold, write_output}; }

}  // namespace penstock
