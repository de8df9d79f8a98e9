// Drawing: the entry with the highest value plus Gumbel noise -log(-log(u)), where u = ((word >> 9) + 0.5) * 2^-23.
//
// Nearly all entries are skipped without a logarithm. Because -log(u) >= 1 - u, noise is at most -log(1 - u), so an
// entry exceeds `best` only if 1 - u <= exp(x - best). Because 1 - u >= 2^-24, this requires x >= best - 24 log(2).
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
    return lane_index() + static_cast<std::int32_t>(first);
}

// Lanes at .. at + 15 of x [n], -inf after its end.
PENSTOCK_INLINE F32x16 load_entries(const float* x, std::int64_t n, std::int64_t at) {
    if (at + LANES <= n) return load(x + at);
    return at < n ? load_first(x + at, static_cast<int>(n - at), MINUS_INFINITY) : F32x16(MINUS_INFINITY);
}

constexpr float MAX_NOISE = 16.7f, MIN_NOISE = -2.82f;  // 24 log(2) = 16.64, and -log(24 log(2)) = -2.812

PENSTOCK_INLINE F32x16 gumbel(U32x16 word) {
    const F32x16 u = (to_float(bits_as<I32x16>(word >> 9u)) + 0.5f) * 0x1p-23f;
    return F32x16(0.0f) - log(F32x16(0.0f) - log(u));
}

// Whether 1 - u may be at most exp(depth). The result is never false by mistake: 1 + f >= 2^f for f in 0 .. 1, and the
// float with the bits (127 + i + f) * 2^23 is 2^i (1 + f), so with i + f = depth * log2(e) it is an upper bound of exp.
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
    float threshold;       // an entry with a value plus noise, before rounding, below this cannot be the best

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
}  // namespace penstock
