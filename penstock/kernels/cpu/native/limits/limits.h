// Loops that multiply in registers as the products of a level do: the peak of a core at that level.
#pragma once

#include <cstdint>

#include "elements.inc.h"

namespace penstock {

struct LimitLoop {
    // Return a sum, which the caller has to use, or the compiler may remove the loop.
    float (*run)(std::int64_t iterations);
    std::int64_t operations;  // per iteration; a multiply-add counts as 2
};

// KIND_F32, KIND_BF16 and KIND_INT8, in this order.
using LimitLoops = LimitLoop[3];

// Set the loops of a level. That of AMX leaves float32 unchanged.
template <Level LEVEL> void set_limits(LimitLoops& loops);

}  // namespace penstock
