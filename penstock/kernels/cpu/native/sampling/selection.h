// The entry at which a sum over entries in descending order reaches a limit, found without sorting.
//
// Entries are ordered by value, the highest first, and equal values by id, the lowest first. An entry is dropped if the
// entries before it have a total weight of `limit` or more: weights of 1 give top-k, integer probabilities give top-p.
// Integer sums do not depend on the order, so entries are only summed into buckets of neighbouring values. The bucket
// in which the sum reaches the limit is split again, and no other bucket is ever sorted.
#pragma once

#include <cstdint>
#include <cstring>

#include "sampling/sampler_kernels.h"

namespace penstock {

// Some entries of a row, by ascending id.
struct Candidates {
    std::int64_t count;
    std::int32_t* ids;
    float* values;

    // Drop the entries after the cut.
    void keep(Cut cut) {
        std::int64_t kept = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const float value = values[i];
            const std::int32_t id = ids[i];
            values[kept] = value;
            ids[kept] = id;
            kept += value > cut.value || (value == cut.value && id <= cut.id);
        }
        count = kept;
    }
};

// An integer that has the order of the float; -0 counts as 0.
inline std::uint32_t ordered_key(float value) {
    value += 0.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int SELECTION_BUCKETS = 1024;

// The last entry that stays, as an index into `from`, or -1 if the sum of all weights is less than the limit.
// weight(i): the weight of entry i, a std::uint64_t; limit: at least 1; open [from.count]: scratch memory.
template <class Weight>
std::int64_t last_within(const Candidates& from, std::uint64_t limit, std::int32_t* open, const Weight& weight) {
    std::int64_t count = from.count;
    std::uint64_t before = 0;  // weight of the entries before all open entries
    bool all = true;           // whether all entries are open; later only those in `open` are, which are one bucket
    const auto entry = [&](std::int64_t i) { return all ? static_cast<std::int32_t>(i) : open[i]; };
    while (count > 0) {
        std::uint32_t lowest = UINT32_MAX, highest = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::uint32_t key = ordered_key(from.values[entry(i)]);
            lowest = key < lowest ? key : lowest;
            highest = key > highest ? key : highest;
        }
        int shift = 0;
        while ((highest - lowest) >> shift >= SELECTION_BUCKETS) ++shift;
        const auto bucket_of = [&](std::int32_t i) { return (highest - ordered_key(from.values[i])) >> shift; };

        std::uint64_t sums[SELECTION_BUCKETS] = {};
        for (std::int64_t i = 0; i < count; ++i) sums[bucket_of(entry(i))] += weight(entry(i));
        std::uint32_t bucket = 0;
        while (bucket < SELECTION_BUCKETS && before + sums[bucket] < limit) before += sums[bucket++];
        if (bucket == SELECTION_BUCKETS) return -1;

        std::int64_t inside = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int32_t at = entry(i);
            open[inside] = at;
            inside += bucket_of(at) == bucket;
        }
        count = inside;
        all = false;
        if (shift == 0) break;  // equal values, by ascending id
    }
    for (std::int64_t i = 0; i < count; ++i) {
        before += weight(open[i]);
        if (before >= limit) return open[i];
    }
    return -1;
}

}  // namespace penstock
