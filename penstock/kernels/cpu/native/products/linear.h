// Products of rows with packed weights, several at once: the common part of linear.cpp and experts.cpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "context.h"

namespace penstock {

struct Product {
    const PenstockWeight* weight;
    const void* x;                  // [.., k]
    std::int32_t x_type;
    const std::int64_t* row_index;  // [rows] the rows of x to read; null: the first `rows` rows
    std::int64_t rows;
    void* out;                      // [rows, result_columns(weight)]
    std::int64_t out_stride;        // elements between rows of out
    std::int32_t out_type;
    std::int32_t activation;        // applies to the gate if the weight is gated
};

// Bits of a stored weight.
inline int weight_bits(const PenstockWeight& weight) {
    constexpr int BITS[NUM_KINDS] = {32, 16, 8, 4, 4, 0, 0};  // by Kind
    return weight.code_bits > 0 ? weight.code_bits : BITS[weight.kind];
}

// n, or n / 2 if the weight is gated.
std::int64_t result_columns(const PenstockWeight& weight);

// The address of row `row` of an array [.., columns] of `type`.
template <class Void>
Void* row_of(Void* array, std::int32_t type, std::int64_t columns, std::int64_t row) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(array) + row * columns * type_bytes(type);
}

// Run products that do not depend on each other as one parallel loop. Uses context.operands and the per-thread memory.
// Throws std::bad_alloc.
void multiply_all(Context& context, const Product* products, std::int64_t count);

}  // namespace penstock
