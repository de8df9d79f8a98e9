// Attention with an int8 cache and byte products of AMX tiles: signed slices of rows times unsigned stored integers.
//
// A granule in memory consists of B operands: 64 elements of its keys are 16 rows of quads, and 16 positions of 16
// elements of its values are 4 rows. The slices of up to eight query rows, or of their probabilities, are the A
// operand. Bytes are stored + 128, so the sums are too large by 128 times the sum of the slice.
//
// Integers are exact and all other steps are those of int8.inc.h, so the bits are those of AVX-512. Most of a tile's
// time is memory access, so the next tile is prefetched throughout.

#include "amx_tiles.inc.h"
#include "attention/prefetch.inc.h"
#include "attention/int8.inc.h"

namespace penstock {
namespace {

constexpr int STEP = AMX_BYTES;      // elements per product of scores
constexpr int SHORT_STEP = GRANULE;  // the same for the rest of a head; also positions per product of values
constexpr int TILE_SUMS = 4;         // number of tiles that hold sums
constexpr int SUM_COLUMNS = TILE_SUMS * LANES;
static_assert(SUM_COLUMNS == TILE, "the sums of scores have as many columns");

// Query rows that are processed together: whole groups of the softmax.
constexpr int strip_rows(int slices) { return AMX_ROWS / slices / STRIP_ROWS * STRIP_ROWS; }

// The thread state is the number of rows of the configured strip.
// Tiles: 0 .. 3 sums; 4 queries and 5 keys; 6 probabilities and 7 values, or queries and keys of a short step.
void load_config(int operands) {
    AmxConfig config;
    for (int tile = 0; tile < TILE_SUMS; ++tile) config.set(tile, operands);
    config.set(4, operands);
    config.set(5, STEP / QUAD);
    config.set(6, operands);
    config.set(7, SHORT_STEP / QUAD);
    config.row_bytes[6] = SHORT_STEP;
    config.load();
}

// ---- Prefetching the next tile

// Approximate cycles of the parts of a tile. They only determine how prefetches are distributed.
constexpr int STEP_WORK = 16;      // one product of tiles
constexpr int SCORE_WORK = 24;     // scores of one row
constexpr int GROUP_WORK = 120;    // the softmax of four rows; their slices take as much again
constexpr int VALUE_WORK = 28;     // 64 elements of one row

int work_of(const TileArgs& a, int strip_rows) {
    const int sums = static_cast<int>((a.cache->padded_dim + SUM_COLUMNS - 1) / SUM_COLUMNS);
    const int strips = (a.rows + strip_rows - 1) / strip_rows, groups = (a.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    return strips * sums * TILE_GRANULES * (1 + TILE_SUMS) * STEP_WORK + groups * 2 * GROUP_WORK +
           a.rows * (SCORE_WORK + sums * VALUE_WORK);
}

// ---- A strip

// The compiler does not know which memory tile loads read.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

// Load tile b from memory and add tile a times tile b to tile `sums`. Tile numbers are part of the instructions.
#define PENSTOCK_PRODUCT(sums, a, b, address, stride) \
    _tile_loadd(b, address, stride);                  \
    _tile_dpbsud(sums, a, b)

inline void store_tiles(std::int32_t* sums) {
    constexpr std::int64_t ROW = SUM_COLUMNS * 4;
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + LANES, ROW);
    _tile_stored(2, sums + 2 * LANES, ROW);
    _tile_stored(3, sums + 3 * LANES, ROW);
}

template <int SLICES>
struct Strip {
    static constexpr int ROWS = strip_rows(SLICES);
    static constexpr int OPERANDS = ROWS * SLICES;

    const TileArgs& a;
    Prefetcher& prefetcher;
    int first, rows;
    QueryStrip<ROWS> queries;
    alignas(64) float p[ROWS * TILE];                 // scores, then probabilities
    alignas(64) std::int8_t slices[OPERANDS * TILE];  // slices of probabilities
    alignas(64) std::int32_t sums[2][OPERANDS * SUM_COLUMNS];
    ProbabilityRows<SLICES> numbers[ROWS / STRIP_ROWS];
    StripFold fold;

    Strip(const TileArgs& args, Prefetcher& next, int first_row)
        : a(args),
          prefetcher(next),
          first(first_row),
          rows(args.rows - first_row < ROWS ? args.rows - first_row : ROWS),
          queries(const_cast<void*>(args.operand), *args.cache, first_row) {}

    std::int64_t dim() const { return a.cache->padded_dim; }

    // Products run 64 columns ahead of the fold, so that neither waits for the other.
    void attend() {
        multiply_keys();
        finish_scores();
        find_probabilities();
        finish_stores();
        std::int64_t d = 0;
        for (; d + SUM_COLUMNS <= dim(); d += SUM_COLUMNS) {
            multiply_values<TILE_SUMS>(d);
            if (d > 0) fold_values<TILE_SUMS>(d - SUM_COLUMNS);
        }
        if (d < dim()) multiply_values<TILE_SUMS / 2>(d);
        if (d > 0) fold_values<TILE_SUMS>(d - SUM_COLUMNS);
        if (d < dim()) fold_values<TILE_SUMS / 2>(d);
    }

  private:
    void multiply_keys() {
        const char* const* const keys = a.granules;
        std::int64_t d = 0;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (; d + STEP <= dim(); d += STEP) {
            const std::int64_t at = d * GRANULE;
            _tile_loadd(4, queries.slices + d, dim());
            PENSTOCK_PRODUCT(0, 4, 5, keys[0] + at, LINE);
            PENSTOCK_PRODUCT(1, 4, 5, keys[1] + at, LINE);
            prefetcher.advance(2 * STEP_WORK);
            PENSTOCK_PRODUCT(2, 4, 5, keys[2] + at, LINE);
            PENSTOCK_PRODUCT(3, 4, 5, keys[3] + at, LINE);
            prefetcher.advance(2 * STEP_WORK);
        }
        for (; d < dim(); d += SHORT_STEP) {
            const std::int64_t at = d * GRANULE;
            _tile_loadd(6, queries.slices + d, dim());
            PENSTOCK_PRODUCT(0, 6, 7, keys[0] + at, LINE);
            PENSTOCK_PRODUCT(1, 6, 7, keys[1] + at, LINE);
            PENSTOCK_PRODUCT(2, 6, 7, keys[2] + at, LINE);
            PENSTOCK_PRODUCT(3, 6, 7, keys[3] + at, LINE);
            prefetcher.advance(2 * STEP_WORK);
        }
        store_tiles(sums[0]);
    }

    void finish_scores() {
        for (int r = 0; r < rows; ++r) {
            const QueryRow& row = queries.row(r);
            std::int32_t excess[SLICES];
            for (int s = 0; s < SLICES; ++s) excess[s] = ZERO_POINT * row.sums[s];
            for (int g = 0; g < TILE_GRANULES; ++g) {
                I32x16 of_slice[SLICES];
                load_sums(sums[0] + r * SLICES * SUM_COLUMNS + g * GRANULE, excess, of_slice);
                const Granule granule(*a.cache, a.granules[g]);
                store(p + r * TILE + g * GRANULE, scores_of<SLICES>(*a.cache, row, granule, of_slice));
            }
            prefetcher.advance(SCORE_WORK);
        }
    }

    void find_probabilities() {
        StripParts parts;
        for (int r = 0; r < rows; r += STRIP_ROWS) {
            const int count = rows - r < STRIP_ROWS ? rows - r : STRIP_ROWS;
            StripParts group;
            softmax(a, first + r, count, p + r * TILE, p + r * TILE, group);
            __builtin_memcpy(parts.max + r, group.max, STRIP_ROWS * sizeof(float));
            __builtin_memcpy(parts.sum + r, group.sum, STRIP_ROWS * sizeof(float));
            prefetcher.advance(GROUP_WORK);
            with_constant<STRIP_ROWS>(count, [&](auto of_group) {
                slice_probabilities<of_group.value>(
                    a, p + r * TILE, slices + r * SLICES * TILE, TILE, TILE / 2, numbers[r / STRIP_ROWS]);
            });
            prefetcher.advance(GROUP_WORK);
        }
        fold_sums(a, first, rows, parts, fold);
    }

    // Compute columns d .. d + 16 SUMS - 1 of p v.
    template <int SUMS>
    void multiply_values(std::int64_t d) {
        const std::int64_t row = dim() * QUAD, keys = dim() * GRANULE;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (SUMS > 2) _tile_zero(2);
        if constexpr (SUMS > 2) _tile_zero(3);
        for (int g = 0; g < TILE_GRANULES; ++g) {
            const char* const values = a.granules[g] + keys + d * QUAD;
            _tile_loadd(6, slices + g * GRANULE, TILE);
            PENSTOCK_PRODUCT(0, 6, 7, values, row);
            PENSTOCK_PRODUCT(1, 6, 7, values + LINE, row);
            prefetcher.advance(2 * STEP_WORK);
            if constexpr (SUMS > 2) {
                PENSTOCK_PRODUCT(2, 6, 7, values + 2 * LINE, row);
                PENSTOCK_PRODUCT(3, 6, 7, values + 3 * LINE, row);
                prefetcher.advance(2 * STEP_WORK);
            }
        }
        store_tiles(sums[d / SUM_COLUMNS % 2]);
    }

    // Fold columns d .. d + 16 SUMS - 1 into the state.
    template <int SUMS>
    void fold_values(std::int64_t d) {
        const std::int64_t channel = a.kv_head * dim() + d;
        for (int r = 0; r < rows; ++r) {
            prefetcher.advance(VALUE_WORK);
            if ((fold.rows >> r & 1) == 0) continue;
            const ProbabilityRows<SLICES>& group = numbers[r / STRIP_ROWS];
            const int lane = r % STRIP_ROWS * 4;
            const F32x16 keep = fold.keep[r], add = fold.add[r];
            float* const o = a.state.accumulator + (first + r) * dim() + d;
            std::int32_t excess[SLICES];
            for (int s = 0; s < SLICES; ++s) excess[s] = ZERO_POINT * group.sums[s][lane];
            for (int i = 0; i < SUMS; ++i) {
                I32x16 of_slice[SLICES];
                load_sums(sums[d / SUM_COLUMNS % 2] + r * SLICES * SUM_COLUMNS + i * LANES, excess, of_slice);
                const F32x16 part =
                    outputs_of<SLICES>(*a.cache, group.scale[lane], group.sum[lane], channel + i * LANES, of_slice);
                store(o + i * LANES, load(o + i * LANES) * keep + part * add);
            }
        }
    }

    // Load the sums of the slices of a row for 16 columns, without the excess.
    PENSTOCK_INLINE static void load_sums(
        const std::int32_t* from, const std::int32_t (&excess)[SLICES], I32x16 (&of_slice)[SLICES]) {
        for (int s = 0; s < SLICES; ++s) {
            of_slice[s].part[0] = (IntPart)_mm512_load_si512(from + s * SUM_COLUMNS);
            of_slice[s] = of_slice[s] - excess[s];
        }
    }
};

template <int SLICES>
void attend_strips(const TileArgs& a) {
    constexpr int ROWS = Strip<SLICES>::ROWS;
    Prefetcher prefetcher(a, work_of(a, ROWS));
    for (int first = 0; first < a.rows; first += ROWS) {
        Strip<SLICES> strip(a, prefetcher, first);
        if (strip.rows != *a.thread_state) load_config(strip.rows * SLICES);
        *a.thread_state = strip.rows;
        strip.attend();
    }
}

void release(std::int32_t rows) {
    if (rows != 0) _tile_release();
}

void attend_tile(const TileArgs& a) { (a.cache->slices == 2 ? attend_strips<2> : attend_strips<3>)(a); }

// Operand rows are contiguous: an A operand is 64 elements of each row, one row length apart.
void pack_queries(const QueryArgs& a) {
    (a.cache->slices == 2 ? pack_strips<strip_rows(2)> : pack_strips<strip_rows(3)>)(a, a.cache->padded_dim);
}

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_INT8>() {
    return {pack_queries, attend_tile, store_tokens, load_tokens, release};
}

}  // namespace penstock
