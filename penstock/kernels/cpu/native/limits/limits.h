// Loops that measure the peaks of a core: some multiply in registers as the products of a level do, others only read.
#pragma once

#include <cstdint>

#include "elements.inc.h"

namespace penstock {

struct LimitLoop {
    // Return a sum, which the caller must use, because the compiler may otherwise remove the loop.
    float (*run)(std::int64_t iterations);
    std::int64_t operations;  // per iteration; a multiply-add counts as 2
};

// Read memory that begins at a multiple of 64 and return a sum of it. bytes: a multiple of READ_UNIT.
using ReadLoop = std::int64_t (*)(const char* memory, std::int64_t bytes);

constexpr std::int64_t READ_UNIT = 1024;

struct LimitLoops {
    LimitLoop multiply[3];  // KIND_F32, KIND_BF16 and KIND_INT8, in this order
    ReadLoop read[READ_LOOPS];
};

// Set the loops of a level. LEVEL_AMX leaves those for reading and float32 unchanged.
template <Level LEVEL> void set_limits(LimitLoops& loops);

// Whether a core multiplies float32 faster than pairs of bfloat16. Takes a tenth of a millisecond.
bool multiplies_floats_faster(const LimitLoops& loops);

}  // namespace penstock
