// The softmax of a tile for levels without AVX-512. tile.inc.h includes this file and states its contract.
#pragma once

namespace penstock {
namespace {

PENSTOCK_INLINE F32x16 load_rows(const float* from, int rows) { return load_first(from, rows); }
PENSTOCK_INLINE void store_rows(float* to, F32x16 a, int rows) { store_first(to, a, rows); }

// Bit i is set if lane i of the mask is set.
PENSTOCK_INLINE std::uint32_t bits_set(I32x16 mask) {
    alignas(64) std::int32_t lane[LANES];
    store(lane, mask);
    std::uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= (lane[i] & 1u) << i;
    return bits;
}

// A mask of lanes from bits first .. first + 15.
PENSTOCK_INLINE I32x16 lanes_of(std::uint64_t bits, int first) {
    const I32x16 mine = static_cast<std::int32_t>(bits >> first & 0xFFFF);
    return (mine >> lane_index() & 1) != 0;
}

// Turn the dot products of a row into scores, and return the maximum.
PENSTOCK_INLINE float score_row(const TileArgs& a, int row, float* s) {
    const std::uint64_t visible = visible_positions(a, row);
    F32x16 top = MINUS_INFINITY;
    for (int i = 0; i < TILE_LANES; ++i) {
        F32x16 x = score(a, row, i * LANES, load(s + i * LANES));
        if (visible != ~std::uint64_t{0})  // else, as in most tiles, there is nothing to hide
            x = select(lanes_of(visible, i * LANES), x, F32x16(MINUS_INFINITY));
        store(s + i * LANES, x);
        top = max(x, top);  // top if x is NaN
    }
    return reduce_max(top);
}

// All maxima come first, and all sums last: an exponential waits for its row's maximum, and a row has more instructions
// than a core looks ahead.
template <class P>
PENSTOCK_INLINE void softmax(const TileArgs& a, int first, int rows, float* s, P* p, StripParts& parts) {
    F32x16 total[MAX_STRIP];
    for (int r = 0; r < rows; ++r) parts.max[r] = score_row(a, first + r, s + r * TILE);
    for (int r = 0; r < rows; ++r) {
        const float shift = parts.max[r] == MINUS_INFINITY ? 0.0f : parts.max[r];
        total[r] = 0.0f;
        for (int i = r * TILE; i < (r + 1) * TILE; i += LANES) {
            const F32x16 x = exp_to_zero(load(s + i) - shift);
            total[r] = total[r] + x;
            store(p + i, x);
        }
    }
    for (int r = 0; r < rows; ++r) parts.sum[r] = reduce_sum(total[r]);
}

}  // namespace
}  // namespace penstock
