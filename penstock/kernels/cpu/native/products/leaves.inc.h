// The binary tree in which the leaves of K are added (products.h), carried out like a binary counter: bit i of the
// number of leaves done says that level i holds the sum of 2^i of them. Internal linkage: every level has its own copy.
#pragma once

namespace penstock {
namespace {

// Levels (bit i: level i) that are added, lowest first, to the left of a leaf's own sum.
inline unsigned levels_to_add(int leaf, int leaves) {
    const unsigned done = static_cast<unsigned>(leaf);
    return leaf + 1 == leaves ? done : done & ~(done + 1);
}

// The level at which the sum then waits; after the last leaf it is the result instead.
inline int level_to_keep(int leaf) { return __builtin_ctz(~static_cast<unsigned>(leaf)); }

}  // namespace
}  // namespace penstock
