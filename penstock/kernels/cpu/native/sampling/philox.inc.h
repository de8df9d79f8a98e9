// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) for 64 vocabulary entries at once.
//
// kernels/sampling.py specifies the key, the counter and the word of each entry.
//
// A register contains one word of several blocks, each in the lower half of a 64-bit lane. The upper half is arbitrary,
// because a product reads only the lower half. So a round is two products, two shifts and four xors.
#pragma once

#include "sampling/sampler_kernels.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

constexpr int PHILOX_ENTRIES = 64;
constexpr int PHILOX_VECTORS = PHILOX_ENTRIES / LANES;
constexpr int PHILOX_ROUNDS = 10;
constexpr int PART_BLOCKS = PART_LANES / 2;                // blocks per register
constexpr int BLOCK_PARTS = PHILOX_ENTRIES / 4 / PART_BLOCKS;  // registers per word of 16 blocks

typedef std::uint64_t WidePart __attribute__((vector_size(4 * PART_LANES)));

#if defined(__AVX512F__)
constexpr __mmask8 ALL_LANES = 0xFF;  // GCC 12 warns about its own header in the forms without a mask
#endif

// The product of the lower halves, lane by lane.
PENSTOCK_INLINE WidePart multiply_low_halves(WidePart a, WidePart b) {
#if defined(__AVX512F__)
    return reinterpret_cast<WidePart>(
        _mm512_maskz_mul_epu32(ALL_LANES, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<WidePart>(
        _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// Even lanes: first {a0, b0, a2, b2, ..}; odd lanes: second {a1, b1, a3, b3, ..}.
PENSTOCK_INLINE void interleave(WidePart a, WidePart b, WidePart& first, WidePart& second) {
#if defined(__AVX512F__)
    const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    first = reinterpret_cast<WidePart>(_mm512_maskz_unpacklo_epi64(ALL_LANES, x, y));
    second = reinterpret_cast<WidePart>(_mm512_maskz_unpackhi_epi64(ALL_LANES, x, y));
#elif defined(__AVX2__)
    const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
    first = reinterpret_cast<WidePart>(_mm256_unpacklo_epi64(x, y));
    second = reinterpret_cast<WidePart>(_mm256_unpackhi_epi64(x, y));
#else
    first = WidePart{a[0], b[0]};
    second = WidePart{a[1], b[1]};
#endif
}

// The block number of each lane of register p. `interleave` gives entries in order if even lanes hold the blocks of one
// result and odd lanes those of the next result.
PENSTOCK_INLINE WidePart block_numbers(std::uint64_t first_block, int p) {
    WidePart numbers;
    for (int lane = 0; lane < PART_BLOCKS; ++lane) {
        const int result = 2 * p + lane % 2;
        numbers[lane] = first_block + static_cast<std::uint64_t>(result * (PART_BLOCKS / 2) + lane / 2);
    }
    return numbers;
}

// One word of 16 blocks, or their numbers.
struct BlockWord {
    WidePart part[BLOCK_PARTS];
};

// The four words of the blocks with these numbers.
PENSTOCK_INLINE void philox(NoiseKey key, const BlockWord& numbers, BlockWord (&words)[4]) {
    constexpr std::uint64_t MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;
    constexpr std::uint32_t WEYL_0 = 0x9E3779B9u, WEYL_1 = 0xBB67AE85u;
    const WidePart zero = {}, m0 = zero + MULTIPLIER_0, m1 = zero + MULTIPLIER_1;
    BlockWord c0, c1, c2 = numbers, c3;
    for (int p = 0; p < BLOCK_PARTS; ++p) {
        c0.part[p] = zero + std::uint64_t{key.choice};
        c1.part[p] = zero + std::uint64_t{key.position};
        c3.part[p] = zero;
    }
    std::uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        for (int p = 0; p < BLOCK_PARTS; ++p) {
            const WidePart product0 = multiply_low_halves(c0.part[p], m0);
            const WidePart product1 = multiply_low_halves(c2.part[p], m1);
            c0.part[p] = (product1 >> 32) ^ c1.part[p] ^ (zero + std::uint64_t{k0});
            c1.part[p] = product1;
            c2.part[p] = (product0 >> 32) ^ c3.part[p] ^ (zero + std::uint64_t{k1});
            c3.part[p] = product0;
        }
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// The random words of entries 64 * group .. 64 * group + 63.
PENSTOCK_INLINE void words_of_group(NoiseKey key, std::uint64_t group, U32x16 (&words)[PHILOX_VECTORS]) {
    BlockWord numbers, word[4];
    for (int p = 0; p < BLOCK_PARTS; ++p) numbers.part[p] = block_numbers(group * (PHILOX_ENTRIES / 4), p);
    philox(key, numbers, word);
    for (int p = 0; p < BLOCK_PARTS; ++p) {
        WidePart first, second;
        interleave((word[0].part[p] & 0xFFFFFFFFu) | word[1].part[p] << 32,
                   (word[2].part[p] & 0xFFFFFFFFu) | word[3].part[p] << 32, first, second);
        const int at = 2 * p;
        words[at / PARTS].part[at % PARTS] = reinterpret_cast<UintPart>(first);
        words[(at + 1) / PARTS].part[(at + 1) % PARTS] = reinterpret_cast<UintPart>(second);
    }
}

// The random words of any 16 entries.
PENSTOCK_INLINE U32x16 words_of_entries(NoiseKey key, const std::int32_t (&ids)[LANES]) {
    BlockWord numbers, word[4];
    for (int i = 0; i < LANES; ++i)
        numbers.part[i / PART_BLOCKS][i % PART_BLOCKS] = static_cast<std::uint64_t>(ids[i]) / 4;
    philox(key, numbers, word);
    U32x16 result;
    for (int i = 0; i < LANES; ++i)
        result.part[i / PART_LANES][i % PART_LANES] =
            static_cast<std::uint32_t>(word[ids[i] % 4].part[i / PART_BLOCKS][i % PART_BLOCKS]);
    return result;
}

}  // namespace
}  // namespace penstock
