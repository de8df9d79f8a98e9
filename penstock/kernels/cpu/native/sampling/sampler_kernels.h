// What an instruction level provides for log-probabilities and for choosing a token.
//
// sampler_kernels.inc.h is compiled once for each level on the lanes of vector_math.inc.h, so all levels give the same
// bits. A row of logits is x [n]. What is not a pass over a vocabulary is in sampler.cpp and selection.h.
#pragma once

#include <cstdint>

extern "C" {

// Parameters of M rows. kernels/sampling.py explains the fields; a null pointer is None there.
struct PenstockSampling {
    const float* temperature;              // [M]
    const std::int64_t* top_k;             // [M]
    const float* top_p;                    // [M]
    const float* min_p;                    // [M]
    const std::int64_t* noise_key;         // [M, 3]
    const std::int64_t* masked;            // [num_masked, 2]
    std::int64_t num_masked;
    const std::int64_t* bias_pairs;        // [num_bias, 2]
    const float* bias_values;              // [num_bias]
    std::int64_t num_bias;
    const float* repetition;               // [M]
    const std::int64_t* repetition_pairs;  // [num_repetition, 2]
    std::int64_t num_repetition;
    const float* frequency;                // [M]
    const float* presence;                 // [M]
    const std::int64_t* count_pairs;       // [num_counts, 2]
    const float* count_values;             // [num_counts]
    std::int64_t num_counts;
};
}

namespace penstock {

// The sum of a log-softmax over n entries: leaf i is i * n / 8 .. (i + 1) * n / 8 - 1, and leaves are added as a binary
// tree, so that ranks that share the vocabulary find the same bits.
constexpr int SUM_LEAVES = 8;

constexpr int SCAN_BLOCK = 1024;  // entries whose greatest values `scan` writes as one group of SCAN_LANES
constexpr int SCAN_LANES = 16;

constexpr int NUM_STEPS = 4;
constexpr float STEPS[NUM_STEPS] = {2.0f, 4.0f, 7.0f, 10.0f};  // how far below the greatest value `masses` looks

// What is left of a row: of entries ordered by value, the highest first, and of equal ones by id, the lowest first,
// those up to and with (value, id). That entry itself need not exist.
struct Cut {
    float value;
    std::int32_t id;
};

// The sum of exp(x - max) of all entries, and of those with x >= max - STEPS[i].
struct Masses {
    float total;
    float above[NUM_STEPS];
};

// Key and counter of a row's noise, but for the vocabulary index.
struct NoiseKey {
    std::uint32_t seed_low, seed_high, choice, position;
};

struct SamplerKernels {
    // The greatest of x, -inf where nothing else is. Also maxima [ceil(n / SCAN_BLOCK)][SCAN_LANES]: lane l of a block
    // has the greatest of its entries l, l + 16, l + 32 .. Of NaN: some value.
    float (*scan)(const float* x, std::int64_t n, float* maxima);

    // The lowest index of a value, -1 where there is none.
    std::int64_t (*find)(const float* x, std::int64_t n, float value);

    // 1 where no value is NaN or +inf and some value is above -inf.
    std::uint8_t (*finite)(const float* x, std::int64_t n);

    // out = (x - max) - log(sum of exp(x - max)), the sum in SUM_LEAVES. `out` may be x.
    void (*log_softmax)(const float* x, std::int64_t n, float max, float* out);

    // out = x / divisor. `out` may be x.
    void (*divide)(const float* x, std::int64_t n, float divisor, float* out);

    // max + log(share): what lies below it is less likely than `share` of the most likely.
    float (*floor)(float max, float share);

    Masses (*masses)(const float* x, std::int64_t n, float max);

    // Ids and values of all x >= floor, in ascending order of ids; returns how many.
    std::int64_t (*collect)(const float* x, std::int64_t n, float floor, std::int32_t* ids, float* values);

    // out = exp(x - max).
    void (*weights)(const float* x, std::int64_t n, float max, float* out);

    // The id whose value plus noise is highest, of those that the cut leaves; of equals the lowest. `max` is the
    // greatest of x, which is finite and stays. -1 where NaN leaves nothing.
    std::int64_t (*draw)(const float* x, std::int64_t n, float max, Cut cut, NoiseKey key);

    // The same of `count` entries with their ids, which ascend.
    std::int64_t (*draw_of)(const std::int32_t* ids, const float* x, std::int64_t count, float max, NoiseKey key);
};

SamplerKernels portable_sampler();
SamplerKernels avx2_sampler();
SamplerKernels avx512_sampler();

}  // namespace penstock
