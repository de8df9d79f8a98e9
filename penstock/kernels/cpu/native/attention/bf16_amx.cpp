// Attention over a bfloat16 cache with AMX tiles, 16 query rows at a time.
//
// Keys and values of a granule in memory are B operands. Scores are float32; probabilities are rounded to bfloat16, and
// their products are added to the accumulator itself, because the p of a tile are relative to the running maximum:
//
//     n = max(m, m'),  p = e^(s - n),  l = l e^(m-n) + sum p,  o = o e^(m-n) + sum p v
//
// This is the fold of attention.h with one multiplication and one pass over o less: o is rescaled only if the running
// maximum has grown.

#include "amx_tiles.inc.h"
#include "attention/layout_avx512.inc.h"
#include "attention/prefetch.inc.h"

namespace penstock {
namespace {

constexpr int STRIP = AMX_ROWS;

constexpr std::int64_t LINE = 64;
constexpr int KEY_PAIRS = 16;                 // pairs of elements per product of scores
constexpr int VALUE_PAIRS = GRANULE / 2;      // pairs of positions per product of values
constexpr int TILE_SUMS = 4;                  // number of tiles that hold sums
constexpr float LOG2_E = 1.44269504f;

// Approximate cycles of the parts of a tile. They only determine how prefetches of the next tile are distributed.
constexpr int STEP_WORK = 16;         // one product of tiles
constexpr int MAX_WORK = 12;          // maximum of one row
constexpr int PROBABILITY_WORK = 28;  // probabilities of one row

// The thread state is the number of rows of the configured tiles.
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
    float* s;          // [STRIP][TILE] scores
    std::uint16_t* p;  // [STRIP][TILE] probabilities

    std::int64_t dim() const { return a.cache->padded_dim; }
    float* accumulator() const { return a.state.accumulator + first * dim(); }
};

// ---- Products

// Load tile b from memory and add tile a times tile b to tile `sums`. Tile numbers are part of the instructions.
#define PENSTOCK_PRODUCT(sums, a, b, address, stride) \
    _tile_loadd(b, address, stride);                  \
    _tile_dpbf16ps(sums, a, b);                       \
    prefetcher.advance(STEP_WORK)

void multiply_keys(const Strip& strip, Prefetcher& prefetcher) {
    const std::int64_t dim = strip.dim();
    const std::uint16_t* const q = static_cast<const std::uint16_t*>(strip.a.operand) + strip.first * dim;
    const char* const* const keys = strip.a.granules;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t d = 0; d < dim; d += 2 * KEY_PAIRS) {
        const std::int64_t at = d * GRANULE * 2;
        _tile_loadd(4, q + d, dim * 2);
        PENSTOCK_PRODUCT(0, 4, 5, keys[0] + at, AMX_BYTES);
        PENSTOCK_PRODUCT(1, 4, 5, keys[1] + at, AMX_BYTES);
        PENSTOCK_PRODUCT(2, 4, 5, keys[2] + at, AMX_BYTES);
        PENSTOCK_PRODUCT(3, 4, 5, keys[3] + at, AMX_BYTES);
    }
    _tile_stored(0, strip.s, TILE * 4);
    _tile_stored(1, strip.s + 16, TILE * 4);
    _tile_stored(2, strip.s + 32, TILE * 4);
    _tile_stored(3, strip.s + 48, TILE * 4);
}

// Add p v to 16 SUMS columns of the accumulator.
template <int SUMS>
void multiply_columns(const Strip& strip, std::int64_t d, Prefetcher& prefetcher) {
    const std::int64_t dim = strip.dim(), keys = dim * GRANULE * 2;
    float* const o = strip.accumulator() + d;
    _tile_loadd(0, o, dim * 4);
    _tile_loadd(1, o + 16, dim * 4);
    if constexpr (SUMS > 2) _tile_loadd(2, o + 32, dim * 4);
    if constexpr (SUMS > 2) _tile_loadd(3, o + 48, dim * 4);
    for (int granule = 0; granule < TILE_GRANULES; ++granule) {
        const char* const values = strip.a.granules[granule] + keys + d * 4;
        _tile_loadd(6, strip.p + granule * GRANULE, TILE * 2);
        PENSTOCK_PRODUCT(0, 6, 7, values, dim * 4);
        PENSTOCK_PRODUCT(1, 6, 7, values + LINE, dim * 4);
        if constexpr (SUMS > 2) {
            PENSTOCK_PRODUCT(2, 6, 7, values + 2 * LINE, dim * 4);
            PENSTOCK_PRODUCT(3, 6, 7, values + 3 * LINE, dim * 4);
        }
    }
    _tile_stored(0, o, dim * 4);
    _tile_stored(1, o + 16, dim * 4);
    if constexpr (SUMS > 2) _tile_stored(2, o + 32, dim * 4);
    if constexpr (SUMS > 2) _tile_stored(3, o + 48, dim * 4);
}

void multiply_values(const Strip& strip, Prefetcher& prefetcher) {
    __asm__ volatile("" : : : "memory");  // the compiler does not know which memory tile loads read
    std::int64_t d = 0;
    for (; d + 64 <= strip.dim(); d += 64) multiply_columns<4>(strip, d, prefetcher);
    if (d < strip.dim()) multiply_columns<2>(strip, d, prefetcher);
}

// ---- Softmax

// 2^x within 3e-6, which is far below the rounding to bfloat16; 0 if x is below -126 or not visible.
inline __m512 exp2_to_zero(__m512 x, __mmask16 visible) {
    constexpr float CURVE[] = {1.00000259f, 0.693003835f, 0.241442757f, 5.20114606e-2f, 1.35341679e-2f};
    const __m512 f = _mm512_maskz_reduce_ps(0xFFFF, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    __m512 power = _mm512_set1_ps(CURVE[4]);
#pragma GCC unroll 4
    for (int i = 3; i >= 0; --i) power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(CURVE[i]));
    const __mmask16 seen = _mm512_mask_cmp_ps_mask(visible, x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(seen, power, x);  // 2^floor(x) times power; NaN gives NaN
}

// Turn dot products into scores, up to a factor, which is returned. Without bias and soft cap, the scale is applied in
// the exponential.
float make_scores(const Strip& strip) {
    const TileArgs& a = strip.a;
    if (a.only_scaled()) return a.params->scale;
    for (int r = 0; r < strip.rows; ++r)
        for (int i = 0; i < TILE; i += LANES) {
            float* const s = strip.s + r * TILE + i;
            store(s, score(a, strip.first + r, i, load(s)));
        }
    return 1.0f;
}

// The maximum visible score of each row, in groups of rows.
void find_max(const Strip& strip, const std::uint64_t* visible, float* max_score, Prefetcher& prefetcher) {
    for (int first = 0; first < strip.rows; first += ROW_GROUP) {
        __m512 top[ROW_GROUP];
        for (int r = first; r < first + ROW_GROUP; ++r) {
            __m512& row = top[r - first] = _mm512_set1_ps(MINUS_INFINITY);
            for (int i = 0; r < strip.rows && i < TILE; i += LANES)
                row = _mm512_mask_max_ps(row, visible[r] >> i, _mm512_load_ps(strip.s + r * TILE + i), row);
            prefetcher.advance(MAX_WORK);
        }
        _mm_store_ps(max_score + first, reduce<Max>(top));
    }
}

// Compute p = e^(s factor - shift) for each row, and the sums of p.
void find_probabilities(
    const Strip& strip, const std::uint64_t* visible, float factor, const float* shift, float* sum,
    Prefetcher& prefetcher) {
    for (int first = 0; first < strip.rows; first += ROW_GROUP) {
        __m512 total[ROW_GROUP] = {};
        for (int r = first; r < first + ROW_GROUP && r < strip.rows; ++r) {
            __m512 p[TILE_LANES];
#pragma GCC unroll 4
            for (int i = 0; i < TILE_LANES; ++i) {
                const __m512 s = _mm512_load_ps(strip.s + r * TILE + i * LANES);
                // The product is rounded like the maximum score, so the difference is 0 there and never above 0.
                const __m512 below = _mm512_sub_ps(_mm512_mul_ps(s, _mm512_set1_ps(factor)), _mm512_set1_ps(shift[r]));
                p[i] = exp2_to_zero(_mm512_mul_ps(below, _mm512_set1_ps(LOG2_E)),
                                    static_cast<__mmask16>(visible[r] >> i * LANES));
            }
            store_row(strip.p + r * TILE, p);
            prefetcher.advance(PROBABILITY_WORK);
            total[r - first] = _mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3]));
        }
        _mm_store_ps(sum + first, reduce<Sum>(total));
    }
}

// Turn scores into probabilities, update m and l of the state, and rescale its o for p v. Return, as bits, the rows to
// which nothing of the tile is visible.
std::uint32_t softmax(const Strip& strip, Prefetcher& prefetcher) {
    const TileArgs& a = strip.a;
    float* const m = a.state.running_max + strip.first;
    float* const l = a.state.running_sum + strip.first;
    std::uint64_t visible[STRIP];
    alignas(64) float max_score[STRIP] = {}, sum[STRIP] = {}, shift[STRIP], keep[STRIP];
    for (int r = 0; r < strip.rows; ++r) visible[r] = visible_positions(a, strip.first + r);
    const float scale = make_scores(strip);
    find_max(strip, visible, max_score, prefetcher);

    const __mmask16 rows = first_rows(strip.rows);
    const __m512 log2_e = _mm512_set1_ps(LOG2_E), before = _mm512_maskz_loadu_ps(rows, m);
    // Scaling is monotone, so the maximum score is the maximum dot product, scaled.
    const __m512 part = _mm512_mul_ps(_mm512_load_ps(max_score), _mm512_set1_ps(scale));
    const __m512 now = _mm512_maskz_max_ps(0xFFFF, part, before);
    const __mmask16 some = _mm512_cmp_ps_mask(now, _mm512_set1_ps(MINUS_INFINITY), _CMP_NEQ_UQ);
    const __m512 base = _mm512_maskz_mov_ps(some, now);
    _mm512_store_ps(shift, base);
    const __mmask16 grown = _mm512_mask_cmp_ps_mask(rows, now, before, _CMP_GT_OQ);
    const __m512 kept = exp2_to_zero(_mm512_mul_ps(_mm512_sub_ps(before, base), log2_e), grown);
    _mm512_store_ps(keep, kept);
    find_probabilities(strip, visible, scale, shift, sum, prefetcher);

    const __m512 total = _mm512_load_ps(sum), old = _mm512_maskz_loadu_ps(rows, l);
    _mm512_mask_storeu_ps(l, rows, _mm512_add_ps(_mm512_mask_mul_ps(old, grown, old, kept), total));
    _mm512_mask_storeu_ps(m, rows, now);
    for (std::uint32_t left = grown; left != 0; left &= left - 1) {
        const int r = __builtin_ctz(left);
        float* const o = strip.accumulator() + r * strip.dim();
        for (std::int64_t d = 0; d < strip.dim(); d += LANES) store(o + d, load(o + d) * keep[r]);
    }
    return _mm512_mask_cmp_ps_mask(rows, total, _mm512_setzero_ps(), _CMP_EQ_OQ);
}

// ---- A tile

// Adding a product of zeros would change -0 and subnormal numbers to 0, so rows of o without visible positions are
// saved.
inline void copy_rows(std::uint32_t rows, std::int64_t dim, const float* from, float* to) {
    for (; rows != 0; rows &= rows - 1) {
        const std::int64_t at = __builtin_ctz(rows) * dim;
        __builtin_memcpy(to + at, from + at, static_cast<std::size_t>(dim) * sizeof(float));
    }
}

int work_of(const TileArgs& a) {
    const int dim = static_cast<int>(a.cache->padded_dim), strips = (a.rows + STRIP - 1) / STRIP;
    const int products = TILE_GRANULES * (dim / (2 * KEY_PAIRS) + dim / LANES);
    return strips * products * STEP_WORK + a.rows * (MAX_WORK + PROBABILITY_WORK);
}

void attend_strips(const TileArgs& a) {
    alignas(64) float s[STRIP * TILE];
    alignas(64) std::uint16_t p[STRIP * TILE];
    alignas(64) float saved[STRIP * MAX_HEAD_DIM];
    Prefetcher prefetcher(a, work_of(a));
    for (int first = 0; first < a.rows; first += STRIP) {
        const Strip strip{a, first, a.rows - first < STRIP ? a.rows - first : STRIP, s, p};
        if (strip.rows != *a.thread_state) load_config(strip.rows);
        *a.thread_state = strip.rows;
        multiply_keys(strip, prefetcher);
        const std::uint32_t untouched = softmax(strip, prefetcher);
        copy_rows(untouched, strip.dim(), strip.accumulator(), saved);
        multiply_values(strip, prefetcher);
        copy_rows(untouched, strip.dim(), saved, strip.accumulator());
    }
}

void release(std::int32_t rows) {
    if (rows != 0) _tile_release();
}

// The operand is [rows][padded_dim].
void pack_rows(const QueryArgs& a) {
    const PenstockCache& cache = *a.cache;
    std::uint16_t* const operand = static_cast<std::uint16_t*>(a.operand);
    for (int r = 0; r < a.rows; ++r) {
        const std::int64_t head = query_head(a, a.first_row + r);
        std::uint16_t* const to = operand + r * cache.padded_dim;
        if (a.type == TYPE_BF16 && cache.head_dim == cache.padded_dim)
            __builtin_memcpy(to, static_cast<const std::uint16_t*>(a.q) + head * cache.head_dim, cache.head_dim * 2);
        else
            convert_row(a.q, a.type, head * cache.head_dim, cache, to);
    }
}

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_BF16>() {
    return {pack_rows, attend_strips, store_granule_words<Bf16Words>, load_granule<std::uint16_t>, release};
}

}  // namespace penstock
