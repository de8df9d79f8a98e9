// Query rows and rows of probabilities as int8 slices, and the floats that their integer products with a granule stand
// for.
#pragma once

#include "attention/int8_granule.inc.h"

namespace penstock {
namespace {

// An operand: rows of slices in chunks of 32 elements, [chunks][operand rows][32]; slice s of row r is operand row
// r * slices + s. Elements are bytes, or words where products are of words.
constexpr int CHUNK = 32;

// The scale of the slices, and the factor by which elements are multiplied. If the factor is 0, all slices are zeros.
struct RowScales {
    F32x16 scale, factor;
};

// Computed from the bits of max |x| of rows, which as integers have the order of the values, infinity and NaN being the
// largest.
PENSTOCK_INLINE RowScales row_scales(I32x16 max_bits) {
    const F32x16 a = bits_as<F32x16>(max_bits), none = 0.0f;
    const I32x16 finite = max_bits < INFINITY_BITS, usable = finite & (max_bits >= SMALLEST_BITS);
    return {select(usable, a / LARGEST_SLICE, select(finite, none, F32x16(__builtin_nanf("")))),
            select(usable, LARGEST_SLICE / a, none)};
}

// The next slice of elements. `rest` becomes the remainder, in units of the slice after that.
PENSTOCK_INLINE I32x16 take_slice(F32x16& rest) {
    const I32x16 slice = round(rest);
    rest = (rest - to_float(slice)) * SLICE_RATIO;
    return slice;
}

PENSTOCK_INLINE F32x16 first_rest(F32x16 x, F32x16 factor) { return select(factor != 0.0f, x * factor, F32x16(0.0f)); }

// The value that the integers of all slices stand for.
template <int SLICES>
PENSTOCK_INLINE F32x16 combine(const I32x16* of_slice, F32x16 scale) {
    F32x16 value = to_float(of_slice[0]);
    if (SLICES > 1) value = value + to_float(of_slice[1]) * SECOND_SLICE;
    if (SLICES > 2) value = value + to_float(of_slice[2]) * THIRD_SLICE;
    return value * scale;
}

// ---- Query rows

struct QueryRow {
    float scale;
    float sum;                      // sum of the row
    float shift;                    // scales per channel: what key offsets add to every score
    std::int32_t sums[MAX_SLICES];  // sums of the slices
};

// A strip: an operand of ROWS * slices rows, then one QueryRow of 64 bytes per row.
constexpr std::int64_t QUERY_ROW_BYTES = 64;

template <int ROWS, class Operand = std::int8_t>
struct QueryStrip {
    Operand* slices;
    char* rows;

    PENSTOCK_INLINE QueryStrip(void* operand, const PenstockCache& cache, std::int64_t first) {
        const std::int64_t row_bytes = cache.padded_dim * cache.slices * sizeof(Operand);
        char* const begin = static_cast<char*>(operand) + first * (row_bytes + QUERY_ROW_BYTES);
        slices = reinterpret_cast<Operand*>(begin);
        rows = begin + ROWS * row_bytes;
    }

    PENSTOCK_INLINE QueryRow& row(int r) const { return *reinterpret_cast<QueryRow*>(rows + r * QUERY_ROW_BYTES); }
};

// Write a row as slices, in chunks of `chunk` elements.
template <int SLICES, int ROWS, class Operand>
void pack_row(
    const QueryArgs& a, std::int64_t row, const QueryStrip<ROWS, Operand>& strip, int r, std::int64_t chunk) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t dim = cache.head_dim, channels = a.kv_head * cache.padded_dim;
    const char* q = static_cast<const char*>(a.q) + query_head(a, row) * dim * type_bytes(a.type);
    alignas(64) float x[MAX_HEAD_DIM];
    I32x16 max_bits = 0;
    F32x16 shift = 0.0f;
    for (std::int64_t d = 0; d < cache.padded_dim; d += LANES) {
        F32x16 lanes = 0.0f;
        if (d < dim) lanes = load_elements(a.type, q, d, dim);
        if (d < dim && cache.key_scales != nullptr) {
            lanes = lanes * load_elements(TYPE_F32, cache.key_scales + channels, d, dim);
            shift = shift + lanes * load_elements(TYPE_F32, cache.key_offsets + channels, d, dim);
        }
        store(x + d, lanes);
        max_bits = max(max_bits, magnitude_bits(lanes));
    }
    const RowScales found = row_scales(reduce_lanes<MaxLanes>(max_bits));
    I32x16 sums[SLICES];
    for (int s = 0; s < SLICES; ++s) sums[s] = 0;
    for (std::int64_t d = 0; d < cache.padded_dim; d += LANES) {
        Operand* to = strip.slices + (d / chunk * ROWS + r) * SLICES * chunk + d % chunk;
        F32x16 rest = first_rest(load(x + d), found.factor);
        for (int s = 0; s < SLICES; ++s) {
            const I32x16 slice = take_slice(rest);
            store_slice(to + s * chunk, slice);
            sums[s] = sums[s] + slice;
        }
    }
    QueryRow& out = strip.row(r);
    for (int s = 0; s < SLICES; ++s) {
        sums[s] = reduce_lanes<AddLanes>(sums[s]);
        out.sums[s] = sums[s].part[0][0];
    }
    out.scale = found.scale.part[0][0];
    out.sum = combine<SLICES>(sums, found.scale).part[0][0];
    out.shift = reduce_lanes<AddLanes>(shift).part[0][0];
}

template <int ROWS, class Operand = std::int8_t>
void pack_strips(const QueryArgs& a, std::int64_t chunk) {
    for (int r = 0; r < a.rows; ++r) {
        const QueryStrip<ROWS, Operand> strip(a.operand, *a.cache, r / ROWS * ROWS);
        const auto pack = a.cache->slices == 2 ? pack_row<2, ROWS, Operand> : pack_row<3, ROWS, Operand>;
        pack(a, a.first_row + r, strip, r % ROWS, chunk);
    }
}

// ---- Scores, probabilities and outputs

// Scores of a granule, from the integers of the slices of a row.
template <int SLICES>
PENSTOCK_INLINE F32x16 scores_of(
    const PenstockCache& cache, const QueryRow& row, const Granule& granule, const I32x16 (&of_slice)[SLICES]) {
    const F32x16 value = combine<SLICES>(of_slice, row.scale);
    if (cache.key_scales != nullptr) return value + row.shift;
    return (value + load(granule.key_offsets()) * row.sum) * load(granule.key_scales());
}

// Scales and sums of four rows of probabilities. Those of row r are in lane 4 r.
template <int SLICES>
struct ProbabilityRows {
    alignas(64) float scale[LANES];
    alignas(64) float sum[LANES];  // scales per token: sum of x * value offset; per channel: sum of x
    alignas(64) std::int32_t sums[SLICES][LANES];  // sums of the slices
};

// Turn p [TILE] of a row into x. If p is 0, the position may be hidden, and its scale and offset may be anything.
PENSTOCK_INLINE void scale_probabilities(const TileArgs& a, float* p, F32x16& sum, I32x16& max_bits) {
    F32x16 part[TILE_GRANULES];
    max_bits = 0;
    for (int g = 0; g < TILE_GRANULES; ++g) {
        F32x16 x = load(p + g * GRANULE);
        part[g] = x;
        if (a.cache->value_scales == nullptr) {
            const Granule granule(*a.cache, a.granules[g]);
            const I32x16 present = x != 0.0f;
            x = select(present, x * load(granule.value_scales()), F32x16(0.0f));
            part[g] = select(present, x * load(granule.value_offsets()), F32x16(0.0f));
            store(p + g * GRANULE, x);
        }
        max_bits = max(max_bits, magnitude_bits(x));
    }
    sum = (part[0] + part[1]) + (part[2] + part[3]);
}

// Write p [ROWS][TILE] as an operand: slice s of row r is 32 elements at (r * SLICES + s) * stride, and 32 elements at
// half_stride after these.
template <int ROWS, int SLICES, class Operand>
PENSTOCK_INLINE void slice_probabilities(
    const TileArgs& a, float* p, Operand* slices, int stride, int half_stride, ProbabilityRows<SLICES>& out) {
    F32x16 sum[STRIP_ROWS];
    I32x16 max_bits[STRIP_ROWS], sums[SLICES][STRIP_ROWS];
    for (int r = 0; r < STRIP_ROWS; ++r)
        if (r < ROWS)
            scale_probabilities(a, p + r * TILE, sum[r], max_bits[r]);
        else
            sum[r] = sum[0], max_bits[r] = max_bits[0];
    const RowScales found = row_scales(reduce_rows<MaxLanes>(max_bits));
    alignas(64) float factor[LANES];
    store(factor, found.factor);
    store(out.scale, found.scale);
    store(out.sum, reduce_rows<AddLanes>(sum));
    for (int r = 0; r < ROWS; ++r) {
        F32x16 rest[TILE_LANES];
        for (int i = 0; i < TILE_LANES; ++i) rest[i] = first_rest(load(p + r * TILE + i * LANES), factor[4 * r]);
        for (int s = 0; s < SLICES; ++s) {
            I32x16 slice[TILE_LANES];
            for (int i = 0; i < TILE_LANES; ++i) slice[i] = take_slice(rest[i]);
            Operand* to = slices + (r * SLICES + s) * stride;
            store_tile(to, to + half_stride, slice);
            sums[s][r] = (slice[0] + slice[1]) + (slice[2] + slice[3]);
        }
    }
    for (int s = 0; s < SLICES; ++s) {
        for (int r = ROWS; r < STRIP_ROWS; ++r) sums[s][r] = sums[s][0];
        store(out.sums[s], reduce_rows<AddLanes>(sums[s]));
    }
}

// Elements of o from `channel` on, from the integers of the slices of a row. scale and sum are as in ProbabilityRows.
template <int SLICES>
PENSTOCK_INLINE F32x16 outputs_of(
    const PenstockCache& cache, float scale, float sum, std::int64_t channel, const I32x16 (&of_slice)[SLICES]) {
    const F32x16 value = combine<SLICES>(of_slice, scale);
    if (cache.value_scales == nullptr) return value + sum;
    return (value + load(cache.value_offsets + channel) * sum) * load(cache.value_scales + channel);
}

}  // namespace
}  // namespace penstock
