// Loops that multiply in registers as the products of a level do: the peak of a core at that level.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

struct LimitLoop {
    // Return a sum, which the caller has to use, or the compiler may remove the loop.
    float (*run)(std::int64_t iterations);
    std::int64_t operations;  // per iteration; a multiply-add counts as 2
};

// KIND_F32, KIND_BF16 and KIND_INT8, in this order.
using LimitLoops = LimitLoop[3];

void portable_limits(LimitLoops& loops);
void avx2_limits(LimitLoops& loops);
void avx512_limits(LimitLoops& loops);
void amx_limits(LimitLoops& loops);  // does not change float32

}  // namespace penstock
