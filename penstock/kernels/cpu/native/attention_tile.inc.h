// A tile of attention, strip of rows by strip of rows: what all levels and kinds of cache have in common. Included, with
// vector_math.inc.h, by files that are compiled once for each instruction level.
//
// A Kind brings the two products:
//     static constexpr int STRIP;                                                // rows at a time, up to MAX_STRIP
//     static void scores(const TileArgs&, int first, int rows, float* s);        // s [rows][TILE]: q . k
//     static void mix(const TileArgs&, int first, int rows, float* p, float* o); // o [rows][padded_dim]: sum of p v
// mix may overwrite p. In its p a hidden position is 0.
#pragma once

#include "attention.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr int TILE_LANES = TILE / LANES;
constexpr float MINUS_INFINITY = -__builtin_inff();

// The positions of the tile that row r sees, lanes first .. first + 15: all bits set.
PENSTOCK_INLINE I32x16 visible_lanes(const TileArgs& a, int row, int first) {
    const I32x16 j = lane_index() + first;
    return (j < a.high[row]) & ((j >= a.low[row]) | (j < a.sink));
}

// Dot products of one row become scores, hidden ones -inf.
PENSTOCK_INLINE F32x16 score(const TileArgs& a, int row, int first, F32x16 s) {
    const PenstockAttention& how = *a.how;
    F32x16 bias = 0.0f;
    if (a.slopes != nullptr) {
        const std::int64_t distance = a.base + first - a.positions[row];
        bias = to_float(lane_index() + static_cast<std::int32_t>(distance)) * a.slopes[row];
        if (how.bias_before_scale != 0) s = s + bias;
    }
    s = s * how.scale;
    if (how.softcap > 0.0f) s = tanh(s / how.softcap) * how.softcap;
    if (a.slopes != nullptr && how.bias_before_scale == 0) s = s + bias;
    if (a.low != nullptr) s = select(visible_lanes(a, row, first), s, F32x16(MINUS_INFINITY));
    return s;
}

// Dot products [TILE] of one row become p; returns m' and l'. Where all scores are NaN so is l', and m' is -inf.
struct RowPart {
    float greatest, sum;
};

PENSTOCK_INLINE RowPart probabilities(const TileArgs& a, int row, float* s) {
    F32x16 x[TILE_LANES], top = MINUS_INFINITY;
    for (int i = 0; i < TILE_LANES; ++i) {
        x[i] = score(a, row, i * LANES, load(s + i * LANES));
        top = max(x[i], top);  // of a NaN: top
    }
    const float m = greatest(top);
    const float shift = m == MINUS_INFINITY ? 0.0f : m;
    F32x16 total = 0.0f;
    for (int i = 0; i < TILE_LANES; ++i) {
        x[i] = exp_to_zero(x[i] - shift);
        total = total + x[i];
        store(s + i * LANES, x[i]);
    }
    return {m, sum(total)};
}

// e^x for one number up to 0; 1 for 0, 0 for -inf.
PENSTOCK_INLINE float exp_to_zero(float x) {
    alignas(64) float lane[LANES];
    store(lane, exp_to_zero(F32x16(x)));
    return lane[0];
}

// The fold of attention.h, for one row.
PENSTOCK_INLINE void fold_row(std::int64_t dim, float& m, float& l, float* o, RowPart part, const float* part_o) {
    if (part.sum == 0.0f) return;
    const float n = part.greatest > m ? part.greatest : m;
    const float shift = n == MINUS_INFINITY ? 0.0f : n;
    const float keep = exp_to_zero(m - shift), add = exp_to_zero(part.greatest - shift);
    for (std::int64_t d = 0; d < dim; d += LANES) store(o + d, load(o + d) * keep + load(part_o + d) * add);
    l = l * keep + part.sum * add;
    m = n;
}

template <class Kind>
void attend_tile(const TileArgs& a) {
    alignas(64) float p[Kind::STRIP * TILE];
    alignas(64) float o[Kind::STRIP * MAX_HEAD_DIM];
    const std::int64_t dim = a.cache->padded_dim;
    for (int first = 0; first < a.rows; first += Kind::STRIP) {
        const int rows = a.rows - first < Kind::STRIP ? a.rows - first : Kind::STRIP;
        RowPart parts[Kind::STRIP];
        Kind::scores(a, first, rows, p);
        for (int r = 0; r < rows; ++r) parts[r] = probabilities(a, first + r, p + r * TILE);
        Kind::mix(a, first, rows, p, o);
        for (int r = 0; r < rows; ++r)
            fold_row(dim, a.greatest[first + r], a.sum[first + r], a.mixed + (first + r) * dim, parts[r], o + r * dim);
    }
}

}  // namespace
}  // namespace penstock
