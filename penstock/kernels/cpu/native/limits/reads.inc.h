// Loops that only read memory. Included by files that are compiled for a level.
//
// How many cache lines a core keeps in flight depends on its prefetchers, so there are several loops. If the hardware
// prefetches well, few streams of neighbouring lines without prefetches are the fastest (two cores of AMD Zen 5 read
// 64 GB/s, against 50 with four streams and prefetches and 52 with loads of 16 bytes). Elsewhere, prefetches help.
#pragma once

#include "limits/limits.h"

namespace penstock {
namespace {

// Read memory as STREAMS streams of equal length, LINES cache lines of each in turn. AHEAD: how many bytes ahead lines
// are prefetched into the L2, or 0.
template <class Vector, int STREAMS, int LINES, int AHEAD>
std::int64_t read_streams(const char* memory, std::int64_t bytes) {
    constexpr int LINE = 64, INTO_L2 = 2, VECTORS = LINE / sizeof(Vector);
    static_assert(READ_UNIT % (STREAMS * LINES * LINE) == 0);
    const std::int64_t stream = bytes / STREAMS;
    Vector sums[STREAMS * LINES] = {};
    for (std::int64_t at = 0; at < stream; at += LINES * LINE) {
#pragma GCC unroll 16
        for (int i = 0; i < STREAMS * LINES; ++i) {
            const char* line = memory + i / LINES * stream + at + i % LINES * LINE;
            if constexpr (AHEAD > 0) __builtin_prefetch(line + AHEAD, 0, INTO_L2);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[i] += reinterpret_cast<const Vector*>(line)[v];
        }
    }
#pragma GCC unroll 16
    for (int i = 1; i < STREAMS * LINES; ++i) sums[0] += sums[i];
    return sums[0][0] + sums[0][1];
}

template <class Vector>
inline void set_reads(LimitLoops& loops) {
    static_assert(READ_LOOPS == 4);
    loops.read[0] = read_streams<Vector, 2, 4, 0>;
    loops.read[1] = read_streams<Vector, 1, 8, 0>;
    loops.read[2] = read_streams<Vector, 1, 8, 2048>;
    loops.read[3] = read_streams<Vector, 4, 1, 2048>;
}

}  // namespace
}  // namespace penstock
