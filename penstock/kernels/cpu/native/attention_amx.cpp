// Attention over a bfloat16 cache with AMX tiles, 16 query rows at a time.
//
// Keys and values of a granule are B operands as they lie in memory. Scores come out in float32; probabilities go back
// as bfloat16, and their products are added to the state itself: a tile's p are relative to the greatest score so far,
//
//     n = max(m, m'),  p = e^(s - n),  l = l e^(m-n) + sum p,  o = o e^(m-n) + sum p v
//
// which is the fold of attention.h with one multiplication and one pass over o less: o is touched by vectors only where
// the greatest score has grown.

#include "amx_tiles.h"
#include "attention_layout_float.inc.h"
#include "attention_tile.inc.h"

namespace penstock {
namespace {

constexpr int STRIP = AMX_ROWS;
constexpr std::int64_t LINE = 64;
constexpr int KEY_PAIRS = 16;                 // of elements, that a product of scores takes
constexpr int VALUE_PAIRS = GRANULE / 2;      // of positions, that a product of values takes
constexpr int TILE_SUMS = 4;                  // tiles of sums
constexpr float LOG2_E = 1.44269504f;

// Tiles: 0 .. 3 sums; 4 queries and 5 keys; 6 probabilities and 7 values.
void load_config(int rows) {
    AmxConfig config;
    for (int tile = 0; tile < TILE_SUMS; ++tile) config.set(tile, rows);
    config.set(4, rows);
    config.set(5, KEY_PAIRS);
    config.set(6, rows);
    config.set(7, VALUE_PAIRS);
    config.row_bytes[6] = VALUE_PAIRS * 4;
    config.load();
}

// Some rows of a tile.
struct Strip {
    const TileArgs& a;
    int first, rows;
    float* s;     // [STRIP][TILE] scores
    Bfloat16* p;  // [STRIP][TILE] probabilities

    std::int64_t dim() const { return a.cache->padded_dim; }
    float* mixed() const { return a.mixed + first * dim(); }
    bool prefetches() const { return first == 0 && a.next[0] != nullptr; }
};

inline void prefetch(const char* from, int lines) {
    for (int line = 0; line < lines; ++line) _mm_prefetch(from + line * LINE, _MM_HINT_T1);
}

// ---- Products

void scores(const Strip& strip) {
    const std::int64_t dim = strip.dim();
    const Bfloat16* const q = static_cast<const Bfloat16*>(strip.a.operand) + strip.first * dim;
    const char* const* const keys = strip.a.granules;
    const bool prefetches = strip.prefetches();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t d = 0; d < dim; d += 2 * KEY_PAIRS) {
        const std::int64_t at = d * GRANULE * 2;
        _tile_loadd(4, q + d, dim * 2);
        _tile_loadd(5, keys[0] + at, AMX_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, keys[1] + at, AMX_BYTES);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, keys[2] + at, AMX_BYTES);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, keys[3] + at, AMX_BYTES);
        _tile_dpbf16ps(3, 4, 5);
        if (prefetches)
            for (const char* next : strip.a.next) prefetch(next + at, KEY_PAIRS);
    }
    _tile_stored(0, strip.s, TILE * 4);
    _tile_stored(1, strip.s + 16, TILE * 4);
    _tile_stored(2, strip.s + 32, TILE * 4);
    _tile_stored(3, strip.s + 48, TILE * 4);
}

// Adds p v to 16 SUMS columns of the state.
template <int SUMS>
void mix_columns(const Strip& strip, std::int64_t d) {
    const std::int64_t dim = strip.dim(), keys = dim * GRANULE * 2;
    const bool prefetches = strip.prefetches();
    float* const o = strip.mixed() + d;
    _tile_loadd(0, o, dim * 4);
    _tile_loadd(1, o + 16, dim * 4);
    if constexpr (SUMS > 2) _tile_loadd(2, o + 32, dim * 4);
    if constexpr (SUMS > 2) _tile_loadd(3, o + 48, dim * 4);
    for (int granule = 0; granule < TILE_GRANULES; ++granule) {
        const char* const values = strip.a.granules[granule] + keys + d * 4;
        _tile_loadd(6, strip.p + granule * GRANULE, TILE * 2);
        _tile_loadd(7, values, dim * 4);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, values + LINE, dim * 4);
        _tile_dpbf16ps(1, 6, 7);
        if constexpr (SUMS > 2) {
            _tile_loadd(7, values + 2 * LINE, dim * 4);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, values + 3 * LINE, dim * 4);
            _tile_dpbf16ps(3, 6, 7);
        }
        if (prefetches) prefetch(strip.a.next[granule] + keys + d * GRANULE * 2, SUMS * VALUE_PAIRS);
    }
    _tile_stored(0, o, dim * 4);
    _tile_stored(1, o + 16, dim * 4);
    if constexpr (SUMS > 2) _tile_stored(2, o + 32, dim * 4);
    if constexpr (SUMS > 2) _tile_stored(3, o + 48, dim * 4);
}

void mix(const Strip& strip) {
    __asm__ volatile("" : : : "memory");  // the compiler does not know what tile loads read
    std::int64_t d = 0;
    for (; d + 64 <= strip.dim(); d += 64) mix_columns<4>(strip, d);
    if (d < strip.dim()) mix_columns<2>(strip, d);
}

// ---- One number from each of 16 vectors

// Where vector r has to lie for result r to be lane r.
constexpr int slot(int r) { return (r & 1) << 1 | (r & 2) >> 1 | (r & 4) << 1 | (r & 8) >> 1; }

struct Max {
    static __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
};

struct Sum {
    static __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};

template <class Op>
__m512 reduce(const float (&x)[STRIP][LANES]) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 u = _mm512_load_ps(x[i]), v = _mm512_load_ps(x[i + 8]);
        a[i] = Op::of(_mm512_shuffle_f32x4(u, v, 0x44), _mm512_shuffle_f32x4(u, v, 0xEE));
    }
    for (int i = 0; i < 4; ++i)
        b[i] = Op::of(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
    for (int i = 0; i < 2; ++i) {
        const __m512d u = _mm512_castps_pd(b[i]), v = _mm512_castps_pd(b[i + 2]);
        c[i] = Op::of(_mm512_castpd_ps(_mm512_unpacklo_pd(u, v)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, v)));
    }
    return Op::of(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
}

// ---- Softmax

// 2^x within 3e-6 for x up to about 0; 0 below -126, and NaN for NaN.
inline __m512 exp2_to_zero(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 0x01);  // x - floor(x)
    __m512 y = _mm512_set1_ps(1.3534167e-2f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.2011464e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4144275e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9300383e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0000026f));
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(some, y, x);  // y 2^floor(x)
}

// The scores of a layer without bias and cap stay products until they are an exponent.
inline bool plain(const TileArgs& a) {
    return a.slopes == nullptr && !(a.how->softcap > 0.0f) && a.how->scale > 0.0f;
}

// Hides what is hidden, makes scores of products unless they are plain, and leaves the greatest of each row.
template <bool PLAIN>
void find_greatest(const Strip& strip, float (&greatest)[STRIP][LANES]) {
    const TileArgs& a = strip.a;
    for (int r = 0; r < strip.rows; ++r) {
        float* const s = strip.s + r * TILE;
        F32x16 x[TILE_LANES];
        for (int i = 0; i < TILE_LANES; ++i) {
            x[i] = load(s + i * LANES);
            if constexpr (!PLAIN) x[i] = score(a, strip.first + r, i * LANES, x[i]);
            if (PLAIN && a.low != nullptr)
                x[i] = select(visible_lanes(a, strip.first + r, i * LANES), x[i], F32x16(MINUS_INFINITY));
            if (!PLAIN || a.low != nullptr) store(s + i * LANES, x[i]);
        }
        // Of a NaN: the other.
        F32x16 top = max(x[0], F32x16(MINUS_INFINITY));
        for (int i = 1; i < TILE_LANES; ++i) top = max(x[i], top);
        store(greatest[slot(r)], top);
    }
}

// One row's probabilities; leaves their sum over every 16th.
inline void probabilities(const Strip& strip, int r, __m512 factor, float shift, float* sum) {
    const float* const s = strip.s + r * TILE;
    Bfloat16* const p = strip.p + r * TILE;
    const __m512 offset = _mm512_set1_ps(shift);
    __m512 x[TILE_LANES];
    for (int i = 0; i < TILE_LANES; ++i)
        x[i] = exp2_to_zero(_mm512_fmsub_ps(_mm512_load_ps(s + i * LANES), factor, offset));
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
    _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
    _mm512_store_si512(p + 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
}

inline void scale_row(float* o, std::int64_t dim, float by) {
    const __m512 factor = _mm512_set1_ps(by);
    for (std::int64_t d = 0; d < dim; d += LANES) _mm512_store_ps(o + d, _mm512_mul_ps(_mm512_load_ps(o + d), factor));
}

// Scores become probabilities; the state's m and l take the tile in, and its o is made ready
// for p v. Returns the rows, as bits, that see nothing of the tile.
unsigned softmax(const Strip& strip) {
    const TileArgs& a = strip.a;
    alignas(64) float each[STRIP][LANES] = {};
    alignas(64) float shift[LANES], keep[LANES];
    const __mmask16 rows = static_cast<__mmask16>((1u << strip.rows) - 1);
    const bool is_plain = plain(a);
    if (is_plain) {
        find_greatest<true>(strip, each);
    } else {
        find_greatest<false>(strip, each);
    }
    const __m512 scale = _mm512_set1_ps(is_plain ? a.how->scale : 1.0f);
    const __m512 log2_e = _mm512_set1_ps(LOG2_E);
    const __m512 before = _mm512_maskz_loadu_ps(rows, a.greatest + strip.first);
    const __m512 greatest = _mm512_max_ps(_mm512_mul_ps(reduce<Max>(each), scale), before);
    const __mmask16 some = _mm512_cmp_ps_mask(greatest, _mm512_set1_ps(MINUS_INFINITY), _CMP_NEQ_UQ);
    const __m512 exponent = _mm512_maskz_mul_ps(some, greatest, log2_e);
    _mm512_store_ps(shift, exponent);
    _mm512_store_ps(keep, exp2_to_zero(_mm512_fmsub_ps(before, log2_e, exponent)));
    const __mmask16 grown = _mm512_mask_cmp_ps_mask(rows, greatest, before, _CMP_GT_OQ);
    for (int r = 0; r < strip.rows; ++r)
        probabilities(strip, r, _mm512_mul_ps(scale, log2_e), shift[r], each[slot(r)]);
    const __m512 sum = reduce<Sum>(each);
    __m512 l = _mm512_maskz_loadu_ps(rows, a.sum + strip.first);
    l = _mm512_mask_mul_ps(l, grown, l, _mm512_load_ps(keep));
    _mm512_mask_storeu_ps(a.sum + strip.first, rows, _mm512_add_ps(l, sum));
    _mm512_mask_storeu_ps(a.greatest + strip.first, rows, greatest);
    for (unsigned left = grown; left != 0; left &= left - 1) {
        const int r = __builtin_ctz(left);
        scale_row(strip.mixed() + r * strip.dim(), strip.dim(), keep[r]);
    }
    return _mm512_mask_cmp_ps_mask(rows, sum, _mm512_setzero_ps(), _CMP_EQ_OQ);
}

// Adding a product of zeros would make 0 of a -0 or of a number below the normal range: such rows of o are kept aside.
inline void copy_rows(unsigned rows, std::int64_t dim, const float* from, float* to) {
    for (; rows != 0; rows &= rows - 1) {
        const std::int64_t at = __builtin_ctz(rows) * dim;
        __builtin_memcpy(to + at, from + at, static_cast<std::size_t>(dim) * sizeof(float));
    }
}

void attend_strips(const TileArgs& a) {
    alignas(64) float s[STRIP * TILE];
    alignas(64) Bfloat16 p[STRIP * TILE];
    alignas(64) float aside[STRIP * MAX_HEAD_DIM];
    int configured = 0;
    for (int first = 0; first < a.rows; first += STRIP) {
        const Strip strip{a, first, a.rows - first < STRIP ? a.rows - first : STRIP, s, p};
        if (strip.rows != configured) load_config(strip.rows);
        configured = strip.rows;
        scores(strip);
        const unsigned untouched = softmax(strip);
        copy_rows(untouched, strip.dim(), strip.mixed(), aside);
        mix(strip);
        copy_rows(untouched, strip.dim(), aside, strip.mixed());
    }
    _tile_release();
}

}  // namespace

CacheKernel amx_cache_bf16() {
    return {pack_queries<Bfloat16>, attend_strips, store_rows<Bfloat16>, load_rows<Bfloat16>};
}

}  // namespace penstock
