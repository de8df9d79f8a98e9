// The common parts of all micro-kernels: the leaves of K, the binary tree in which they are added (products.h), and the
// rows from which a tile is packed. Internal linkage: every level has its own copy.
#pragma once

#include "elements.inc.h"
#include "products/products.h"

namespace penstock {
namespace {

// A leaf: elements first .. first + count - 1 of K, at positions padded_first .. padded_first + padded - 1 of padded K.
struct LeafRange {
    int index;
    std::int64_t first, count;
    std::int64_t padded_first, padded;
};

template <class Body>
inline void each_leaf(const PenstockWeight& weight, const Body& body) {
    std::int64_t first = 0, padded_first = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        const std::int64_t end = weight.leaf_ends[leaf], padded_end = weight.padded_leaf_ends[leaf];
        body(LeafRange{leaf, first, end - first, padded_first, padded_end - padded_first});
        first = end;
        padded_first = padded_end;
    }
}

// Element `first` of activation row r of a tile.
inline const char* row_address(const OperandArgs& a, int r, std::int64_t first) {
    const std::int64_t row = a.row_index != nullptr ? a.row_index[r] : a.first_row + r;
    return static_cast<const char*>(a.x) + (row * a.x_stride + first) * type_bytes(a.x_type);
}

// The tree works like a binary counter: if bit i of the number of finished leaves is set, level i holds the sum of 2^i
// leaves.

// The levels (bit i: level i) that are added, lowest first, to the left of a leaf's own sum.
inline unsigned levels_to_add(int leaf, int leaves) {
    const unsigned done = static_cast<unsigned>(leaf);
    return leaf + 1 == leaves ? done : done & ~(done + 1);
}

// The level that then keeps the sum. After the last leaf, the sum is the result instead.
inline int level_to_keep(int leaf) { return __builtin_ctz(~static_cast<unsigned>(leaf)); }

}  // namespace
}  // namespace penstock
