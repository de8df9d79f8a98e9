// A tile of attention, one strip of rows at a time: the common part of all levels and kinds of cache. Included by files
// that are compiled once per instruction level.
//
// A Kind provides the two products:
//     static constexpr int STRIP;                                          // rows at a time, up to MAX_STRIP
//     static void multiply_keys(const TileArgs&, int first, int rows, float* s);
//     static void multiply_values(const TileArgs&, int first, int rows, float* p, float* o);
// with s [rows][TILE] = q . k; p [rows][TILE], 0 at hidden positions, which may be overwritten; and o
// [rows][padded_dim] = sum of p v. A kind that folds while the sums are in registers has its own attend_tile, made of
// softmax, fold_sums and its own products.
#pragma once

#include <algorithm>

#include "attention/attention.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr int TILE_LANES = TILE / LANES;
constexpr float MINUS_INFINITY = -__builtin_inff();

// m' and l' of the rows of a strip. If all scores are NaN, l' is NaN and m' is -inf.
struct StripParts {
    alignas(64) float max[MAX_STRIP];
    alignas(64) float sum[MAX_STRIP];
};

// Bit j is set if position j of the tile is below `end` (positions_below), or visible to a row (visible_positions).
PENSTOCK_INLINE std::uint64_t positions_below(std::int32_t end) {
    return end <= 0 ? 0 : end >= TILE ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1;
}

PENSTOCK_INLINE std::uint64_t visible_positions(const TileArgs& a, int row) {
    if (a.low == nullptr) return ~std::uint64_t{0};
    return positions_below(a.high[row]) & ~positions_below(a.low[row]);
}

// Turn dot products of one row, from position `first` of the tile on, into scores.
PENSTOCK_INLINE F32x16 score(const TileArgs& a, int row, int first, F32x16 s) {
    const PenstockAttention& params = *a.params;
    F32x16 bias = 0.0f;
    if (a.slopes != nullptr) {
        const std::int64_t distance = a.base + first - a.positions[row];
        bias = to_float(lane_index() + static_cast<std::int32_t>(distance)) * a.slopes[row];
        if (params.bias_before_scale != 0) s = s + bias;
    }
    s = s * params.scale;
    if (params.softcap > 0.0f) s = tanh(s / params.softcap) * params.softcap;
    if (a.slopes != nullptr && params.bias_before_scale == 0) s = s + bias;
    if (params.distance_bias != nullptr) {
        const std::int64_t reach = params.bias_reach, below = reach + LANES - 1;
        const std::int64_t head = a.kv_head * a.group + (a.first_row + row) % a.group;
        const std::int64_t distance = std::clamp<std::int64_t>(a.base + first - a.positions[row], -below, reach);
        s = s + load(params.distance_bias + head * (reach + 1 + below + LANES - 1) + below + distance);
    }
    return s;
}

// template <class P> void softmax(const TileArgs&, int first, int rows, float* s, P* p, StripParts&):
// turn the dot products s [rows][TILE] of the rows from `first` on into p [rows][TILE], float or rounded to bfloat16
// (uint16), and into m' and l' (of the float p). s is overwritten; p may be s.
}  // namespace
}  // namespace penstock

#if defined(__AVX512F__)
#include "attention/softmax_avx512.inc.h"
#else
#include "attention/softmax.inc.h"
#endif

namespace penstock {
namespace {

// ---- The fold of attention.h

// The new m, and the factors of the state and of the part: of sixteen rows, or of one row in all lanes.
struct FoldFactors {
    F32x16 max, keep, add;
};

PENSTOCK_INLINE FoldFactors fold_factors(F32x16 m, F32x16 part_m) {
    const F32x16 n = max(part_m, m);
    const F32x16 shift = select(n == MINUS_INFINITY, F32x16(0.0f), n);
    return {n, exp_to_zero(m - shift), exp_to_zero(part_m - shift)};
}

struct RowPart {
    float max, sum;
};

// The fold of one row.
PENSTOCK_INLINE void fold_row(std::int64_t dim, float& m, float& l, float* o, RowPart part, const float* part_o) {
    if (part.sum == 0.0f) return;
    const FoldFactors f = fold_factors(m, part.max);
    alignas(64) float lane[LANES];
    for (std::int64_t d = 0; d < dim; d += LANES) store(o + d, load(o + d) * f.keep + load(part_o + d) * f.add);
    store(lane, l * f.keep + part.sum * f.add);
    l = lane[0];
    store(lane, f.max);
    m = lane[0];
}

// The rest of the fold of a strip once m and l are folded: o = o keep + o' add for rows whose bit is set.
struct StripFold {
    alignas(64) float keep[MAX_STRIP];
    alignas(64) float add[MAX_STRIP];
    std::uint32_t rows;
};

PENSTOCK_INLINE void fold_sums(const TileArgs& a, int first, int rows, const StripParts& parts, StripFold& fold) {
    float* const m = a.state.running_max + first;
    float* const l = a.state.running_sum + first;
    const F32x16 part_m = load_rows(parts.max, rows), part_l = load_rows(parts.sum, rows);
    const F32x16 state_m = load_rows(m, rows), state_l = load_rows(l, rows);
    const I32x16 folds = part_l != 0.0f;
    const FoldFactors f = fold_factors(state_m, part_m);
    store_rows(m, select(folds, f.max, state_m), rows);
    store_rows(l, select(folds, state_l * f.keep + part_l * f.add, state_l), rows);
    store(fold.keep, f.keep);
    store(fold.add, f.add);
    fold.rows = bits_set(folds);
}

template <class Kind>
void attend_tile(const TileArgs& a) {
    alignas(64) float p[Kind::STRIP * TILE];
    alignas(64) float o[Kind::STRIP * MAX_HEAD_DIM];
    const std::int64_t dim = a.cache->padded_dim;
    for (int first = 0; first < a.rows; first += Kind::STRIP) {
        const int rows = a.rows - first < Kind::STRIP ? a.rows - first : Kind::STRIP;
        StripParts parts;
        StripFold fold;
        Kind::multiply_keys(a, first, rows, p);
        softmax(a, first, rows, p, p, parts);
        fold_sums(a, first, rows, parts, fold);
        Kind::multiply_values(a, first, rows, p, o);
        for (int r = 0; r < rows; ++r) {
            if ((fold.rows >> r & 1) == 0) continue;
            float* const to = a.state.accumulator + (first + r) * dim;
            const F32x16 keep = fold.keep[r], add = fold.add[r];
            const float* const part = o + r * dim;
            for (std::int64_t d = 0; d < dim; d += LANES) store(to + d, load(to + d) * keep + load(part + d) * add);
        }
    }
}

}  // namespace
}  // namespace penstock
