// A tile of attention, strip of rows by strip of rows: what all levels and kinds of cache have in common. Included by
// files that are compiled once for each instruction level.
//
// A Kind brings the two products:
//     static constexpr int STRIP;                                                // rows at a time, up to MAX_STRIP
//     static void scores(const TileArgs&, int first, int rows, float* s);        // s [rows][TILE]: q . k
//     static void mix(const TileArgs&, int first, int rows, float* p, float* o); // o [rows][padded_dim]: sum of p v
// mix may overwrite p. In its p a hidden position is 0. A kind that folds sums while they are in registers has an
// attend_tile of its own, made of the same parts: softmax, fold_sums, and its own mix.
#pragma once

#if defined(__AVX512F__)
#include "avx512.inc.h"  // before others include its header
#endif
#include "attention/attention.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr int TILE_LANES = TILE / LANES;
constexpr float MINUS_INFINITY = -__builtin_inff();

// m' and l' of a strip's rows. Where all scores are NaN so is l', and m' is -inf.
struct StripParts {
    alignas(64) float greatest[MAX_STRIP];
    alignas(64) float sum[MAX_STRIP];
};

// Bit j: row r sees position j of the tile.
PENSTOCK_INLINE std::uint64_t positions_below(std::int32_t end) {
    return end <= 0 ? 0 : end >= TILE ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1;
}

PENSTOCK_INLINE std::uint64_t visible_positions(const TileArgs& a, int row) {
    if (a.low == nullptr) return ~std::uint64_t{0};
    return positions_below(a.high[row]) & (~positions_below(a.low[row]) | positions_below(a.sink));
}

// Dot products of one row become scores.
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
    return s;
}

// template <class P> void softmax(const TileArgs&, int first, int rows, float* s, P* p, StripParts&):
// dot products s [rows][TILE] of rows first, .. become p [rows][TILE], of float or rounded to bfloat16 (uint16), and m'
// and l' (of the float p). s is overwritten; p may be s.
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

// What the state and the part are multiplied with: sixteen rows, or one in all lanes.
struct FoldFactors {
    F32x16 greatest, keep, add;
};

PENSTOCK_INLINE FoldFactors fold_factors(F32x16 m, F32x16 part_m) {
    const F32x16 n = max(part_m, m);
    const F32x16 shift = select(n == MINUS_INFINITY, F32x16(0.0f), n);
    return {n, exp_to_zero(m - shift), exp_to_zero(part_m - shift)};
}

struct RowPart {
    float greatest, sum;
};

// For one row.
PENSTOCK_INLINE void fold_row(std::int64_t dim, float& m, float& l, float* o, RowPart part, const float* part_o) {
    if (part.sum == 0.0f) return;
    const FoldFactors f = fold_factors(m, part.greatest);
    alignas(64) float lane[LANES];
    for (std::int64_t d = 0; d < dim; d += LANES) store(o + d, load(o + d) * f.keep + load(part_o + d) * f.add);
    store(lane, l * f.keep + part.sum * f.add);
    l = lane[0];
    store(lane, f.greatest);
    m = lane[0];
}

// What is left to do of a strip's fold, once its sums are folded: o = o keep + o' add, where bit r is set.
struct StripFold {
    alignas(64) float keep[MAX_STRIP];
    alignas(64) float add[MAX_STRIP];
    std::uint32_t rows;
};

PENSTOCK_INLINE void fold_sums(const TileArgs& a, int first, int rows, const StripParts& parts, StripFold& fold) {
    float* const m = a.greatest + first;
    float* const l = a.sum + first;
    const F32x16 part_m = load_rows(parts.greatest, rows), part_l = load_rows(parts.sum, rows);
    const F32x16 state_m = load_rows(m, rows), state_l = load_rows(l, rows);
    const I32x16 folds = part_l != 0.0f;
    const FoldFactors f = fold_factors(state_m, part_m);
    store_rows(m, select(folds, f.greatest, state_m), rows);
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
        Kind::scores(a, first, rows, p);
        softmax(a, first, rows, p, p, parts);
        fold_sums(a, first, rows, parts, fold);
        Kind::mix(a, first, rows, p, o);
        for (int r = 0; r < rows; ++r) {
            if ((fold.rows >> r & 1) == 0) continue;
            float* const to = a.mixed + (first + r) * dim;
            const F32x16 keep = fold.keep[r], add = fold.add[r];
            const float* const part = o + r * dim;
            for (std::int64_t d = 0; d < dim; d += LANES) store(to + d, load(to + d) * keep + load(part + d) * add);
        }
    }
}

}  // namespace
}  // namespace penstock
