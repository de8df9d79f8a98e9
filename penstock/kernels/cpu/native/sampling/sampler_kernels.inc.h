// The passes over a vocabulary that sampler_kernels.h specifies, compiled once per instruction level.
#pragma once

#include "sampling/draw.inc.h"

namespace penstock {
namespace {

// The maximum of each lane of x [n], for n up to SCAN_BLOCK. There are four accumulators, because each has to wait for
// its last result.
PENSTOCK_INLINE F32x16 lane_maxima(const float* x, std::int64_t n) {
    F32x16 a = MINUS_INFINITY, b = MINUS_INFINITY, c = MINUS_INFINITY, d = MINUS_INFINITY;
    std::int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a = max(load(x + i), a);
        b = max(load(x + i + LANES), b);
        c = max(load(x + i + 2 * LANES), c);
        d = max(load(x + i + 3 * LANES), d);
    }
    for (; i < n; i += LANES) a = max(load_entries(x, n, i), a);
    return max(max(a, b), max(c, d));
}

float scan(const float* x, std::int64_t n, float* maxima) {
    F32x16 best = MINUS_INFINITY;
    for (std::int64_t at = 0; at < n; at += SCAN_BLOCK) {
        const F32x16 block = lane_maxima(x + at, smaller(SCAN_BLOCK, n - at));
        store(maxima, block);
        maxima += SCAN_LANES;
        best = max(block, best);
    }
    return reduce_max(best);
}

std::int64_t find(const float* x, std::int64_t n, float value) {
    for (std::int64_t at = 0; at < n; at += LANES) {
        if (at + LANES <= n && !any(load(x + at) == F32x16(value))) continue;
        for (std::int64_t i = at; i < smaller(at + LANES, n); ++i)
            if (x[i] == value) return i;
    }
    return -1;
}

std::uint8_t finite(const float* x, std::int64_t n) {
    I32x16 below_infinity = -1, some = 0;  // false for NaN
    for (std::int64_t at = 0; at < n; at += LANES) {
        const F32x16 values = load_entries(x, n, at);
        below_infinity = below_infinity & (values < F32x16(-MINUS_INFINITY));
        some = some | (values > F32x16(MINUS_INFINITY));
    }
    return any(some) && !any(below_infinity == I32x16(0));
}

// COUNT sums at once. Lanes are added in blocks, and then the blocks are added, so that errors grow with the length of
// a block and the number of blocks, not with the vocabulary.
template <int COUNT>
class BlockSums {
  public:
    PENSTOCK_INLINE void add(const F32x16 (&values)[COUNT]) {
        for (int i = 0; i < COUNT; ++i) block_[i] = block_[i] + values[i];
        if (++length_ == BLOCK) close();
    }
    PENSTOCK_INLINE void results(float (&out)[COUNT]) {
        close();
        for (int i = 0; i < COUNT; ++i) out[i] = reduce_sum(total_[i]);
    }

  private:
    static constexpr int BLOCK = 32;
    PENSTOCK_INLINE void close() {
        for (int i = 0; i < COUNT; ++i) {
            total_[i] = total_[i] + block_[i];
            block_[i] = 0.0f;
        }
        length_ = 0;
    }
    F32x16 total_[COUNT] = {}, block_[COUNT] = {};
    int length_ = 0;
};

// The sum of exp(x - max) over x [n].
PENSTOCK_INLINE float sum_of_exp(const float* x, std::int64_t n, float max) {
    BlockSums<1> sums;
    for (std::int64_t at = 0; at < n; at += LANES) sums.add({exp_to_zero(load_entries(x, n, at) - max)});
    float total[1];
    sums.results(total);
    return total[0];
}

void log_softmax(const float* x, std::int64_t n, float max, float* out) {
    float leaf[SUM_LEAVES];
    for (int i = 0; i < SUM_LEAVES; ++i) {
        const std::int64_t begin = i * n / SUM_LEAVES, end = (i + 1) * n / SUM_LEAVES;
        leaf[i] = sum_of_exp(x + begin, end - begin, max);
    }
    for (int width = 1; width < SUM_LEAVES; width *= 2)
        for (int i = 0; i < SUM_LEAVES; i += 2 * width) leaf[i] += leaf[i + width];
    alignas(64) float log_sum[LANES];
    store(log_sum, log(F32x16(leaf[0])));
    for (std::int64_t at = 0; at < n; at += LANES) {
        const F32x16 result = (load_entries(x, n, at) - max) - log_sum[0];
        store_some(out + at, result, static_cast<int>(smaller(n - at, LANES)));
    }
}

void divide(const float* x, std::int64_t n, float divisor, float* out) {
    std::int64_t at = 0;
    for (; at + LANES <= n; at += LANES) store(out + at, load(x + at) / F32x16(divisor));
    for (; at < n; ++at) out[at] = x[at] / divisor;
}

float floor_of(float max, float share) {
    alignas(64) float logs[LANES];
    store(logs, log(F32x16(share)));
    return max + (logs[0] < 0.0f ? logs[0] : 0.0f);
}

Masses masses(const float* x, std::int64_t n, float max) {
    BlockSums<1 + NUM_STEPS> sums;
    for (std::int64_t at = 0; at < n; at += LANES) {
        const F32x16 depth = load_entries(x, n, at) - max;
        F32x16 mass[1 + NUM_STEPS] = {exp_to_zero(depth)};
        for (int i = 0; i < NUM_STEPS; ++i) mass[1 + i] = select(depth >= F32x16(-STEPS[i]), mass[0], F32x16(0.0f));
        sums.add(mass);
    }
    float totals[1 + NUM_STEPS];
    sums.results(totals);
    Masses result = {totals[0], {}};
    for (int i = 0; i < NUM_STEPS; ++i) result.above[i] = totals[1 + i];
    return result;
}

// The entries that `collect` finds.
struct Found {
    std::int32_t* ids;
    float* values;
    std::int64_t count = 0;

    // Add the entries of x[begin .. end-1] that reach the floor. Writes after the count, but never after `end`.
    PENSTOCK_INLINE void add(const float* x, std::int64_t begin, std::int64_t end, float floor) {
        for (std::int64_t i = begin; i < end; ++i) {
            ids[count] = static_cast<std::int32_t>(i);
            values[count] = x[i];
            count += x[i] >= floor;
        }
    }

#if defined(__AVX512F__)
    PENSTOCK_INLINE void add_lanes(const float* x, std::int64_t begin, float floor) {
        const __m512 entries = _mm512_loadu_ps(x + begin);
        const __mmask16 reach = _mm512_cmp_ps_mask(entries, _mm512_set1_ps(floor), _CMP_GE_OQ);
        const __m512i entry_ids = reinterpret_cast<__m512i>(ids_from(begin).part[0]);
        _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(reach, entries));
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(reach, entry_ids));
        count += __builtin_popcount(reach);
    }
#else
    PENSTOCK_INLINE void add_lanes(const float* x, std::int64_t begin, float floor) {
        add(x, begin, begin + LANES, floor);
    }
#endif
};

std::int64_t collect(const float* x, std::int64_t n, float floor, std::int32_t* ids, float* values) {
    Found found = {ids, values};
    std::int64_t at = 0;
    for (; at + LANES <= n; at += LANES)
        if (any(load(x + at) >= F32x16(floor))) found.add_lanes(x, at, floor);
    found.add(x, at, n, floor);
    return found.count;
}

void weights(const float* x, std::int64_t n, float max, float* out) {
    for (std::int64_t at = 0; at < n; at += LANES) {
        const F32x16 result = exp_to_zero(load_entries(x, n, at) - max);
        store_some(out + at, result, static_cast<int>(smaller(n - at, LANES)));
    }
}

}  // namespace

template <> SamplerKernels sampler_kernels<THIS_LEVEL>() {
    return {scan, find, finite, log_softmax, divide, floor_of, masses, collect, weights, draw, draw_of};
}

}  // namespace penstock
