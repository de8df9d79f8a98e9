// The passes over a vocabulary that sampler_kernels.h specifies, compiled once per instruction level.
#pragma once

#include "sampling/philox.inc.h"
#include "sampling/sampler_kernels.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr float MINUS_INFINITY = -__builtin_inff();

PENSTOCK_INLINE bool any(I32x16 mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask.part[0])) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(reinterpret_cast<__m256>(mask.part[0] | mask.part[1])) != 0;
#else
    typedef std::uint64_t Pair __attribute__((vector_size(16)));
    const Pair either = reinterpret_cast<Pair>(mask.part[0] | mask.part[1] | mask.part[2] | mask.part[3]);
    return (either[0] | either[1]) != 0;
#endif
}

PENSTOCK_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

PENSTOCK_INLINE I32x16 ids_from(std::int64_t first) {
    I32x16 ids;
    for (int i = 0; i < LANES; ++i) ids.part[i / PART_LANES][i % PART_LANES] = i;
    return ids + static_cast<std::int32_t>(first);
}

// Lanes at .. at + 15 of x [n], -inf after its end.
PENSTOCK_INLINE F32x16 load_entries(const float* x, std::int64_t n, std::int64_t at) {
    if (at + LANES <= n) return load(x + at);
    return at < n ? load_first(x + at, static_cast<int>(n - at), MINUS_INFINITY) : F32x16(MINUS_INFINITY);
}

// The maximum of each lane of x [n], n up to SCAN_BLOCK. Four accumulators, because each has to wait for its last
// result.
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

// COUNT sums at once. Lanes are added in blocks, then the blocks are added, so that errors grow with the length of a
// block and the number of blocks, not with the vocabulary.
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
        if (at + LANES <= n)
            store(out + at, result);
        else
            store_first(out + at, result, static_cast<int>(n - at));
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
        if (at + LANES <= n)
            store(out + at, result);
        else
            store_first(out + at, result, static_cast<int>(n - at));
    }
}

// ---- Drawing: the highest value plus Gumbel noise -log(-log(u)), u = ((word >> 9) + 0.5) * 2^-23.
//
// Nearly all entries are skipped without a logarithm. Because -log(u) >= 1 - u, noise is at most -log(1 - u), so an
// entry exceeds `best` only if 1 - u <= exp(x - best). And because 1 - u >= 2^-24, only if x >= best - 24 log(2).

constexpr float MAX_NOISE = 16.7f, MIN_NOISE = -2.82f;  // 24 log(2) = 16.64, and -log(24 log(2)) = -2.812

PENSTOCK_INLINE F32x16 gumbel(U32x16 word) {
    const F32x16 u = (to_float(bits_as<I32x16>(word >> 9u)) + 0.5f) * 0x1p-23f;
    return F32x16(0.0f) - log(F32x16(0.0f) - log(u));
}

// Whether 1 - u may be at most exp(depth); never false by mistake. 1 + f >= 2^f for f in 0 .. 1, and the float with the
// bits (127 + i + f) * 2^23 is 2^i (1 + f): so those bits, with f + i = depth * log2(e), are an upper bound of exp.
PENSTOCK_INLINE I32x16 may_win(U32x16 word, F32x16 depth) {
    constexpr float LOG2_E = 1.44269504f, TWO_23 = 8388608.0f, EXPONENT = 127.0f + 23.0f, SLACK = 0.001f;
    const F32x16 rest = 8388607.5f - to_float(bits_as<I32x16>(word >> 9u));  // (1 - u) * 2^23, exact
    const F32x16 near = min(max(depth, F32x16(-80.0f)), F32x16(40.0f));
    const F32x16 bits = (near * LOG2_E + (EXPONENT + SLACK)) * TWO_23;
    I32x16 bound;
    for (int i = 0; i < PARTS; ++i) bound.part[i] = __builtin_convertvector(bits.part[i], IntPart);
    return rest <= bits_as<F32x16>(bound);
}

// The best entry so far.
struct GumbelMax {
    float value = MINUS_INFINITY;   // with noise
    std::int64_t id = -1;  // -1: none yet
    float threshold;       // an entry whose value plus noise, before rounding, is below this cannot be the best

    // max: the maximum of the entries.
    PENSTOCK_INLINE explicit GumbelMax(float max) { must_reach(max + MIN_NOISE); }

    // Set the threshold slightly below `least`, to allow for all roundings.
    PENSTOCK_INLINE void must_reach(float least) {
        threshold = least - (0.001f + (least < 0.0f ? -least : least) * 0x1p-21f);
    }

    PENSTOCK_INLINE void consider(F32x16 values, U32x16 words, I32x16 ids) {
        alignas(64) float noisy[LANES];
        alignas(64) std::int32_t lane_ids[LANES];
        store(noisy, values + gumbel(words));
        store(lane_ids, ids);
        for (int i = 0; i < LANES; ++i)
            if (noisy[i] > value) {
                value = noisy[i];
                id = lane_ids[i];
            }
        if (id >= 0 && value > threshold) must_reach(value);
    }
};

std::int64_t draw(const float* x, std::int64_t n, float max, Cut cut, NoiseKey key) {
    GumbelMax best(max);
    for (std::int64_t at = 0; at < n; at += PHILOX_ENTRIES) {
        alignas(64) float padded[PHILOX_ENTRIES];
        const float* group = x + at;
        if (at + PHILOX_ENTRIES > n) {
            for (int i = 0; i < PHILOX_ENTRIES; ++i) padded[i] = at + i < n ? group[i] : MINUS_INFINITY;
            group = padded;
        }
        const float least = best.threshold - MAX_NOISE;
        const F32x16 needed = least > cut.value ? least : cut.value;
        I32x16 near = 0;
        for (int v = 0; v < PHILOX_VECTORS; ++v) near = near | (load(group + v * LANES) >= needed);
        if (!any(near)) continue;
        U32x16 words[PHILOX_VECTORS];
        words_of_group(key, static_cast<std::uint64_t>(at) / PHILOX_ENTRIES, words);
        for (int v = 0; v < PHILOX_VECTORS; ++v) {
            const F32x16 values = load(group + v * LANES);
            if (!any(may_win(words[v], values - best.threshold))) continue;
            const I32x16 ids = ids_from(at + v * LANES);
            const I32x16 tie = (values == F32x16(cut.value)) & (ids <= I32x16(cut.id));
            best.consider(select((values > F32x16(cut.value)) | tie, values, F32x16(MINUS_INFINITY)), words[v], ids);
        }
    }
    return best.id;
}

std::int64_t draw_of(const std::int32_t* ids, const float* x, std::int64_t count, float max, NoiseKey key) {
    GumbelMax best(max);
    for (std::int64_t at = 0; at < count; at += LANES) {
        std::int32_t some[LANES];
        for (int i = 0; i < LANES; ++i) some[i] = ids[smaller(at + i, count - 1)];
        const F32x16 values = load_entries(x, count, at);
        const U32x16 words = words_of_entries(key, some);
        if (!any(may_win(words, values - best.threshold))) continue;
        I32x16 lane_ids;
        for (int i = 0; i < LANES; ++i) lane_ids.part[i / PART_LANES][i % PART_LANES] = some[i];
        best.consider(values, words, lane_ids);
    }
    return best.id;
}

}  // namespace

template <> SamplerKernels sampler_kernels<THIS_LEVEL>() {
    return {scan, find, finite, log_softmax, divide, floor_of, masses, collect, weights, draw, draw_of};
}

}  // namespace penstock
