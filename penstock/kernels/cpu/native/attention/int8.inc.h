// Attention with an int8 cache that does not convert stored integers to floats. Instead, the rows of queries and of
// probabilities are written as int8 slices, so the products are of integers and exact on every level (the
// antiquantisation of Huawei's IncreFlashAttention operator). reference/quantized_kv.py specifies integers and slices.
//
// A stored integer B means (B + offset) * scale. With x = scale * (q0 + q1 / 254 + q2 / 254^2) a sliced row, and
// d0, d1, d2 the dot products of its slices with B, v = (d0 + d1 * (1/254) + d2 * (1/254^2)) * scale. Then
//
//            scales per token                                   scales per channel
//   score    (v + (key offset * sum of the slices)) * key scale  v + sum of (x * key offset), x = query * key scales
//   o        v + sum of (x * value offset), x = p * value scale  (v + (value offset * sum of x)) * value scale, x = p
//
// with every operation rounded separately and none fused. (With scales per token, the sum of the slices is that of x.)
//
// Included by the file of each level, which provides a Dot:
//     using Operand;  // the type of a slice's elements: int8, or int16 in the order of store_slice()
//     static constexpr int ZERO_POINT;  // by how much stored bytes are too large in multiply(): 128, or 0
//     template <int OPERANDS, int QUADS, class Find>
//     static void multiply(int runs, std::int64_t step, const Find& find, const std::int32_t* start,
//                          I32x16 (*sums)[2]);
// For each of OPERANDS rows, multiply begins with the start value and adds the row's products with two columns of
// vectors of stored integers. A vector has 16 lanes of 4 bytes, each multiplied with the same 4 bytes of the row. Each
// of the runs has QUADS vectors, `step` bytes apart. find(run) returns the addresses of a run.
#pragma once

#include "attention/int8_rows.inc.h"

namespace penstock {
namespace {

// Where a run of quads begins: in two columns of stored integers, in the vectors to prefetch, and in the operand.
template <class Operand>
struct Run {
    const std::uint8_t* stored[2];
    const std::uint8_t* next[2];
    const Operand* operand;
};

// The granule to prefetch while granule g is read: for the first strip, that of the next tile; otherwise g itself,
// which is already in the processor's cache.
PENSTOCK_INLINE Granule next_granule(const TileArgs& a, int first, int g) {
    return Granule(*a.cache, first == 0 && a.next[g] != nullptr ? a.next[g] : a.granules[g]);
}

template <class Dot>
struct Int8Kind {
    static constexpr int STRIP = STRIP_ROWS;
    using Operand = typename Dot::Operand;
    using Strip = QueryStrip<STRIP, Operand>;

    static void multiply_keys(const TileArgs& a, int first, int rows, float* s) {
        with_constant<STRIP>(rows, [&](auto count) {
            (a.cache->slices == 2 ? strip_keys<count.value, 2> : strip_keys<count.value, 3>)(a, first, s);
        });
    }

    // The results are folded into the state. p is overwritten.
    static void multiply_values(const TileArgs& a, int first, int rows, float* p, const StripFold& fold) {
        with_constant<STRIP>(rows, [&](auto count) {
            (a.cache->slices == 2 ? strip_values<count.value, 2> : strip_values<count.value, 3>)(a, first, p, fold);
        });
    }

  private:
    // Two granules at a time.
    template <int ROWS, int SLICES>
    static void strip_keys(const TileArgs& a, int first, float* s) {
        constexpr int OPERANDS = ROWS * SLICES, CHUNK_QUADS = CHUNK / QUAD;
        const Strip strip(const_cast<void*>(a.operand), *a.cache, first);
        std::int32_t start[OPERANDS];
        for (int i = 0; i < OPERANDS; ++i) start[i] = -Dot::ZERO_POINT * strip.row(i / SLICES).sums[i % SLICES];
        const int chunks = static_cast<int>(a.cache->padded_dim / CHUNK);
        for (int g = 0; g < TILE_GRANULES; g += 2) {
            const Granule left(*a.cache, a.granules[g]), right(*a.cache, a.granules[g + 1]);
            const Granule next_left = next_granule(a, first, g), next_right = next_granule(a, first, g + 1);
            I32x16 sums[OPERANDS][2];
            Dot::template multiply<OPERANDS, CHUNK_QUADS>(
                chunks, LINE,
                [&](int chunk) {
                    const std::int64_t at = chunk * CHUNK_QUADS * LINE;
                    return Run<Operand>{{left.keys + at, right.keys + at},
                                        {next_left.keys + at, next_right.keys + at},
                                        strip.slices + chunk * STRIP * SLICES * CHUNK};
                },
                start, sums);
            finish_scores<ROWS, SLICES>(*a.cache, strip, sums, 0, left, s + g * GRANULE);
            finish_scores<ROWS, SLICES>(*a.cache, strip, sums, 1, right, s + (g + 1) * GRANULE);
        }
    }

    // Scores of one granule, column 0 or 1 of the sums.
    template <int ROWS, int SLICES>
    static PENSTOCK_INLINE void finish_scores(const PenstockCache& cache, const Strip& strip,
                                              const I32x16 (*sums)[2], int column, const Granule& granule, float* s) {
        for (int r = 0; r < ROWS; ++r) {
            I32x16 of_slice[SLICES];
            for (int i = 0; i < SLICES; ++i) of_slice[i] = sums[r * SLICES + i][column];
            store(s + r * TILE, scores_of<SLICES>(cache, strip.row(r), granule, of_slice));
        }
    }

    // 32 elements of a head at a time.
    template <int ROWS, int SLICES>
    static void strip_values(const TileArgs& a, int first, float* p, const StripFold& fold) {
        constexpr int OPERANDS = ROWS * SLICES, GRANULE_QUADS = GRANULE / QUAD;
        const std::int64_t dim = a.cache->padded_dim;
        constexpr int CHUNK_SIZE = OPERANDS * CHUNK;
        alignas(64) Operand slices[TILE / CHUNK * CHUNK_SIZE];
        ProbabilityRows<SLICES> numbers;
        slice_probabilities<ROWS>(a, p, slices, CHUNK, CHUNK_SIZE, numbers);
        std::int32_t start[OPERANDS];
        for (int i = 0; i < OPERANDS; ++i) start[i] = -Dot::ZERO_POINT * numbers.sums[i % SLICES][4 * (i / SLICES)];
        const std::uint8_t *values[TILE_GRANULES], *next[TILE_GRANULES];
        for (int g = 0; g < TILE_GRANULES; ++g) {
            values[g] = Granule(*a.cache, a.granules[g]).values;
            next[g] = next_granule(a, first, g).values;
        }
        for (std::int64_t d = 0; d < dim; d += 2 * LANES) {
            I32x16 sums[OPERANDS][2];
            Dot::template multiply<OPERANDS, GRANULE_QUADS>(
                TILE_GRANULES, dim * QUAD,
                [&](int g) {
                    const std::uint8_t *here = values[g] + d * QUAD, *there = next[g] + d * QUAD;
                    constexpr int IN_CHUNK = CHUNK / GRANULE;
                    return Run<Operand>{{here, here + LINE},
                                        {there, there + LINE},
                                        slices + g / IN_CHUNK * CHUNK_SIZE + g % IN_CHUNK * GRANULE};
                },
                start, sums);
            finish_values<ROWS, SLICES>(a, first, numbers, sums, 0, d, fold);
            finish_values<ROWS, SLICES>(a, first, numbers, sums, 1, d + LANES, fold);
        }
    }

    // Fold elements d .. d + 15 of a head, column 0 or 1 of the sums, into the state.
    template <int ROWS, int SLICES>
    static PENSTOCK_INLINE void finish_values(const TileArgs& a, int first, const ProbabilityRows<SLICES>& numbers,
                                              const I32x16 (*sums)[2], int column, std::int64_t d,
                                              const StripFold& fold) {
        const PenstockCache& cache = *a.cache;
        const std::int64_t channel = a.kv_head * cache.padded_dim + d;
        float* const state = a.state.accumulator + first * cache.padded_dim + d;
        for (int r = 0; r < ROWS; ++r) {
            I32x16 of_slice[SLICES];
            for (int i = 0; i < SLICES; ++i) of_slice[i] = sums[r * SLICES + i][column];
            const F32x16 part = outputs_of<SLICES>(cache, numbers.scale[4 * r], numbers.sum[4 * r], channel, of_slice);
            float* const to = state + r * cache.padded_dim;
            if ((fold.rows >> r & 1) != 0) store(to, load(to) * fold.keep[r] + part * fold.add[r]);
        }
    }
};

// Prefetch the scales of the next tile. The products prefetch its keys and values.
PENSTOCK_INLINE void prefetch_scales(const TileArgs& a) {
    if (a.next[0] == nullptr || a.cache->key_scales != nullptr) return;
    for (const char* next : a.next) {
        const Granule granule(*a.cache, next);
        for (const float* line = granule.scales; line != granule.scales + 4 * GRANULE; line += GRANULE)
            prefetch_to_l2(line);
    }
}

// The same as attend_tile, but each output is folded where it is computed.
template <class Kind>
void attend_strips(const TileArgs& a) {
    alignas(64) float p[Kind::STRIP * TILE];
    prefetch_scales(a);
    for (int first = 0; first < a.rows; first += Kind::STRIP) {
        const int rows = a.rows - first < Kind::STRIP ? a.rows - first : Kind::STRIP;
        StripParts parts;
        StripFold fold;
        Kind::multiply_keys(a, first, rows, p);
        softmax(a, first, rows, p, p, parts);
        fold_sums(a, first, rows, parts, fold);
        Kind::multiply_values(a, first, rows, p, fold);
    }
}

template <class Dot>
CacheKernel int8_kernel() {
    const auto pack_queries = [](const QueryArgs& a) { pack_strips<STRIP_ROWS, typename Dot::Operand>(a, CHUNK); };
    return {pack_queries, attend_strips<Int8Kind<Dot>>, store_tokens, load_tokens};
}

}  // namespace
}  // namespace penstock
