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

template <class P>
PENSTOCK_INLINE void softmax_row(const TileArgs& a, int row, const float* s, P* p, float& m, float& l) {
    const std::uint64_t visible = visible_positions(a, row);
    F32x16 x[TILE_LANES], top = MINUS_INFINITY;
    for (int i = 0; i < TILE_LANES; ++i) x[i] = score(a, row, i * LANES, load(s + i * LANES));
    if (visible != ~std::uint64_t{0})  // else, as in most tiles, there is nothing to hide
        for (int i = 0; i < TILE_LANES; ++i)
            x[i] = select(lanes_of(visible, i * LANES), x[i], F32x16(MINUS_INFINITY));
    for (int i = 0; i < TILE_LANES; ++i) top = max(x[i], top);  // top if x is NaN
    m = reduce_max(top);
    const float shift = m == MINUS_INFINITY ? 0.0f : m;
    F32x16 total = 0.0f;
    for (int i = 0; i < TILE_LANES; ++i) {
        x[i] = exp_to_zero(x[i] - shift);
        total = total + x[i];
        store(p + i * LANES, x[i]);
    }
    l = reduce_sum(total);
}

template <class P>
PENSTOCK_INLINE void softmax(const TileArgs& a, int first, int rows, float* s, P* p, StripParts& parts) {
    for (int r = 0; r < rows; ++r)
        softmax_row(a, first + r, s + r * TILE, p + r * TILE, parts.max[r], parts.sum[r]);
}

}  // namespace
}  // namespace penstock
