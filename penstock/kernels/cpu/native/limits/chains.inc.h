// Independent chains of operations in registers. Included by files that are compiled for a level.
#pragma once

#include "limits/limits.h"

namespace penstock {
namespace {

// Run `iterations` of sum = step(sum) in each of COUNT chains, and return a lane of their total. The chains start from
// different values, because the compiler would otherwise compute only one. start(i): the first value of chain i, a
// vector.
template <int COUNT, class Start, class Step>
inline __attribute__((always_inline)) auto run_chains(std::int64_t iterations, const Start& start, const Step& step) {
    decltype(start(0)) sums[COUNT];
#pragma GCC unroll 24
    for (int i = 0; i < COUNT; ++i) sums[i] = start(i);
    for (std::int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 24
        for (auto& sum : sums) step(sum);
#pragma GCC unroll 24
    for (int i = 1; i < COUNT; ++i) sums[0] += sums[i];
    return static_cast<float>(sums[0][0]);
}

#define PENSTOCK_STEP(Vector) [&](Vector& sum) __attribute__((always_inline))

}  // namespace
}  // namespace penstock
