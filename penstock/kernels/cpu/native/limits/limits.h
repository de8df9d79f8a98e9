// Loops that multiply from registers only, as the products of a level do: the most that a core can reach there.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

struct LimitLoop {
    // Returns a sum that the caller has to use, so that no compiler leaves the loop out.
    float (*run)(std::int64_t iterations);
    std::int64_t operations;  // of an iteration; a multiply-add counts as 2
};

// KIND_F32, KIND_BF16 and KIND_INT8, in this order.
using LimitLoops = LimitLoop[3];

void portable_limits(LimitLoops& loops);
void avx2_limits(LimitLoops& loops);
void avx512_limits(LimitLoops& loops);
void amx_limits(LimitLoops& loops);  // leaves float32 as it is

}  // namespace penstock
