// What an instruction level provides for log-probabilities and for sampling: passes over a row of logits x [n].
//
// sampler_kernels.inc.h is compiled once per level on the lanes of vector_math.inc.h, so all levels give the same bits.
// Everything else is in sampler.cpp and selection.h.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

// Leaf i of a log-softmax over n entries is i * n / 8 .. (i + 1) * n / 8 - 1. The sums of leaves are added as a binary
// tree, so that ranks that each hold a part of the vocabulary get the same bits.
constexpr int SUM_LEAVES = 8;

constexpr int SCAN_BLOCK = 1024;  // entries whose maxima `scan` writes as one group of SCAN_LANES
constexpr int SCAN_LANES = 16;

constexpr int NUM_STEPS = 4;
constexpr float STEPS[NUM_STEPS] = {2.0f, 4.0f, 7.0f, 10.0f};  // distances below the maximum at which `masses` sums

// Keeps the entries up to and including (value, id). The order is by value, the highest first, and for equal values by
// id, the lowest first. The entry (value, id) itself need not exist.
struct Cut {
    float value;
    std::int32_t id;
};

// The sum of exp(x - max) of all entries, and of those with x >= max - STEPS[i].
struct Masses {
    float total;
    float above[NUM_STEPS];
};

// Key and counter of a row's noise, without the vocabulary index.
struct NoiseKey {
    std::uint32_t seed_low, seed_high, choice, position;
};

struct SamplerKernels {
    // Return the maximum of x, and write maxima [ceil(n / SCAN_BLOCK)][SCAN_LANES]: lane l of a block is the maximum of
    // its entries l, l + 16, l + 32, .. If entries are NaN, the values are unspecified.
    float (*scan)(const float* x, std::int64_t n, float* maxima);

    // The lowest index of a value, or -1 if x does not contain it.
    std::int64_t (*find)(const float* x, std::int64_t n, float value);

    // 1 if no value is NaN or +inf and some value is above -inf, else 0.
    std::uint8_t (*finite)(const float* x, std::int64_t n);

    // out = (x - max) - log(sum of exp(x - max)), with the sum in SUM_LEAVES leaves. `out` may be x.
    void (*log_softmax)(const float* x, std::int64_t n, float max, float* out);

    // out = x / divisor. `out` may be x.
    void (*divide)(const float* x, std::int64_t n, float divisor, float* out);

    // max + log(share). Values below it are less likely than `share` times the most likely value.
    float (*floor)(float max, float share);

    Masses (*masses)(const float* x, std::int64_t n, float max);

    // Write ids and values of all x >= floor by ascending id; return their number.
    std::int64_t (*collect)(const float* x, std::int64_t n, float floor, std::int32_t* ids, float* values);

    // out = exp(x - max).
    void (*weights)(const float* x, std::int64_t n, float max, float* out);

    // The id with the highest value plus noise among the entries that the cut keeps, the lowest id on a tie; -1 if only
    // NaN entries are left. `max` is the maximum of x, which is finite and kept by the cut.
    std::int64_t (*draw)(const float* x, std::int64_t n, float max, Cut cut, NoiseKey key);

    // The same for `count` entries with ascending ids.
    std::int64_t (*draw_of)(const std::int32_t* ids, const float* x, std::int64_t count, float max, NoiseKey key);
};

template <Level LEVEL> SamplerKernels sampler_kernels();

}  // namespace penstock
