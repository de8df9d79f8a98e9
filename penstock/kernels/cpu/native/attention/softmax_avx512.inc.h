// The softmax of a tile with AVX-512. tile.inc.h includes this file and states its contract.
//
// Maxima and sums are reduced for four rows together: reducing four registers to four numbers takes half the shuffles
// of reducing each alone. The maxima of all rows come first, because an exponential waits for its row's maximum. With
// BF16 (level avx512), multiplications and additions are fused in the exponential and p is summed in the fastest order,
// so the bits differ from those of other levels. Without BF16 (level avx512f), the bits are those of softmax.inc.h.
#pragma once

namespace penstock {
namespace {

constexpr int ROW_GROUP = 4;
static_assert(MAX_STRIP % ROW_GROUP == 0 && MAX_STRIP <= LANES, "whole groups of rows fit into the arrays of a strip");

PENSTOCK_INLINE __mmask16 first_rows(int rows) { return static_cast<__mmask16>((1u << rows) - 1); }

PENSTOCK_INLINE F32x16 load_rows(const float* from, int rows) {
    F32x16 result;
    result.part[0] = _mm512_maskz_loadu_ps(first_rows(rows), from);
    return result;
}

PENSTOCK_INLINE void store_rows(float* to, F32x16 a, int rows) {
    _mm512_mask_storeu_ps(to, first_rows(rows), a.part[0]);
}

// Bit i is set if lane i of the mask is set.
PENSTOCK_INLINE std::uint32_t bits_set(I32x16 mask) {
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask.part[0]));
}

struct Sum {
    PENSTOCK_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
    PENSTOCK_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
    PENSTOCK_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};

struct Max {  // not for NaN
    PENSTOCK_INLINE static __m512 of(__m512 a, __m512 b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
    PENSTOCK_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
    PENSTOCK_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
};

// Reduce the sixteen lanes of row r to number r, in the same order for each row.
template <class Op>
PENSTOCK_INLINE __m128 reduce(const __m512 (&row)[ROW_GROUP]) {
    constexpr __mmask16 ALL = 0xFFFF;
    __m512 pair[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 a = row[2 * i], b = row[2 * i + 1];
        pair[i] = Op::of(_mm512_maskz_unpacklo_ps(ALL, a, b), _mm512_maskz_unpackhi_ps(ALL, a, b));
    }
    const __m512 quarters = Op::of(_mm512_maskz_shuffle_ps(ALL, pair[0], pair[1], 0x44),
                                   _mm512_maskz_shuffle_ps(ALL, pair[0], pair[1], 0xEE));
    const __m256 halves = Op::of(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    return Op::of(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

PENSTOCK_INLINE void store_row(float* p, const __m512 (&x)[TILE_LANES]) {
    for (int i = 0; i < TILE_LANES; ++i) _mm512_storeu_ps(p + i * LANES, x[i]);
}

#if defined(__AVX512BF16__)

// e^x as power * 2^n, within 1 ulp for n >= -30, and within 3 ulp for all normal numbers.
struct Power {
    __m512 power, n;
};

PENSTOCK_INLINE Power exponential(__m512 x) {
    constexpr float LOG2_E = 1.44269504f, LN2 = 0.693147181f;
    constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer in the lowest bits
    constexpr float CURVE[] = {1.0f, 1.0f, 4.999999343e-01f, 1.666652040e-01f, 4.166839079e-02f, 8.368745196e-03f,
                               1.381454011e-03f};
    const __m512 rounder = _mm512_set1_ps(ROUNDER);
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(LOG2_E), rounder), rounder);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2), x);  // |r| <= ln 2 / 2; the product is exact
    __m512 power = _mm512_set1_ps(CURVE[6]);
#pragma GCC unroll 6
    for (int i = 5; i >= 0; --i) power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(CURVE[i]));
    return {power, n};
}

// Sixteen p; 0 where hidden or near the subnormal numbers. NaN gives NaN.
PENSTOCK_INLINE __m512 probabilities(__m512 x, __mmask16 visible) {
    constexpr float LOWEST = -87.0f;
    const __mmask16 seen = _mm512_mask_cmp_ps_mask(visible, x, _mm512_set1_ps(LOWEST), _CMP_NLT_UQ);
    const Power e = exponential(x);
    return _mm512_maskz_scalef_ps(seen, e.power, e.n);
}

PENSTOCK_INLINE void store_row(std::uint16_t* p, const __m512 (&x)[TILE_LANES]) {
    for (int i = 0; i < TILE_LANES; i += 2)
        _mm512_storeu_si512(p + i * LANES, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
}

PENSTOCK_INLINE __m512 add_registers(const __m512 (&x)[TILE_LANES]) {
    return _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
}

PENSTOCK_INLINE __m128 add_lanes(const __m512 (&row)[ROW_GROUP]) { return reduce<Sum>(row); }

#else

// The same, by the exponential of other levels.
PENSTOCK_INLINE __m512 probabilities(__m512 x, __mmask16 visible) {
    F32x16 lanes;
    lanes.part[0] = x;
    return _mm512_maskz_mov_ps(visible, exp_to_zero(lanes).part[0]);
}

PENSTOCK_INLINE __m512 add_registers(const __m512 (&x)[TILE_LANES]) {
    return _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
}

// In the order of reduce_sum(): lane i with lane i + 8, then i + 4, i + 2, i + 1.
PENSTOCK_INLINE __m128 add_lanes(const __m512 (&row)[ROW_GROUP]) {
    __m128 quarter[ROW_GROUP];
    for (int i = 0; i < ROW_GROUP; ++i) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(row[i]), _mm512_extractf32x8_ps(row[i], 1));
        quarter[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(quarter[0], quarter[1], quarter[2], quarter[3]);
    return _mm_add_ps(_mm_add_ps(quarter[0], quarter[2]), _mm_add_ps(quarter[1], quarter[3]));
}

#endif

// For each row of a strip: the maximum score, which its exponentials subtract (0 if it sees nothing), and the sum of
// its four registers of p.
struct StripSums {
    alignas(64) float shift[MAX_STRIP];
    __m512 total[MAX_STRIP];
};

// A row of a group. The first row stands in for missing rows.
PENSTOCK_INLINE int group_row(int row, int rows) { return row < rows ? row : 0; }

// Scaling is monotone, so the maximum score is the maximum dot product, scaled.
template <bool ALL_VISIBLE>
PENSTOCK_INLINE void find_maxima(
    const TileArgs& a, int first, int rows, float scale, const float* s, float* m, StripSums& sums) {
    for (int begin = 0; begin < rows; begin += ROW_GROUP) {
        __m512 top[ROW_GROUP];
#pragma GCC unroll 4
        for (int i = 0; i < ROW_GROUP; ++i) {
            const int row = group_row(begin + i, rows);
            const std::uint64_t visible = ALL_VISIBLE ? ~std::uint64_t{0} : visible_positions(a, first + row);
            top[i] = _mm512_set1_ps(MINUS_INFINITY);
#pragma GCC unroll 4
            for (int j = 0; j < TILE_LANES; ++j) {
                const __m512 x = _mm512_loadu_ps(s + row * TILE + j * LANES);
                const __mmask16 lanes = static_cast<__mmask16>(visible >> j * LANES);
                top[i] = _mm512_mask_max_ps(top[i], lanes, x, top[i]);  // top if x is NaN
            }
        }
        const __m128 max_score = _mm_mul_ps(reduce<Max>(top), _mm_set1_ps(scale));
        const __m128 hidden = _mm_cmpeq_ps(max_score, _mm_set1_ps(MINUS_INFINITY));
        _mm_store_ps(m + begin, max_score);
        _mm_store_ps(sums.shift + begin, _mm_andnot_ps(hidden, max_score));
    }
}

template <bool ALL_VISIBLE, class P>
PENSTOCK_INLINE void softmax_rows(
    const TileArgs& a, int first, int rows, float scale, const float* s, P* p, StripParts& parts) {
    StripSums sums;
    find_maxima<ALL_VISIBLE>(a, first, rows, scale, s, parts.max, sums);
    for (int r = 0; r < rows; ++r) {
        const std::uint64_t visible = ALL_VISIBLE ? ~std::uint64_t{0} : visible_positions(a, first + r);
        const __m512 shift = _mm512_set1_ps(sums.shift[r]), factor = _mm512_set1_ps(scale);
        __m512 x[TILE_LANES];
#pragma GCC unroll 4
        for (int i = 0; i < TILE_LANES; ++i) {
            const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(s + r * TILE + i * LANES), factor);
            x[i] = probabilities(_mm512_sub_ps(scaled, shift), static_cast<__mmask16>(visible >> i * LANES));
        }
        store_row(p + r * TILE, x);
        sums.total[r] = add_registers(x);
    }
    for (int begin = 0; begin < rows; begin += ROW_GROUP) {
        __m512 total[ROW_GROUP];
        for (int i = 0; i < ROW_GROUP; ++i) total[i] = sums.total[group_row(begin + i, rows)];
        _mm_store_ps(parts.sum + begin, add_lanes(total));
    }
}

template <class P>
PENSTOCK_INLINE void softmax(const TileArgs& a, int first, int rows, float* s, P* p, StripParts& parts) {
    float scale = a.params->scale;
    if (!a.only_scaled()) {
        for (int r = 0; r < rows; ++r)
            for (float* x = s + r * TILE; x != s + (r + 1) * TILE; x += LANES)
                store(x, score(a, first + r, static_cast<int>(x - (s + r * TILE)), load(x)));
        scale = 1.0f;
    }
    if (a.low == nullptr)
        softmax_rows<true>(a, first, rows, scale, s, p, parts);
    else
        softmax_rows<false>(a, first, rows, scale, s, p, parts);
}

}  // namespace
}  // namespace penstock
