// Products of rows with packed weights, several at once. linear.cpp and experts.cpp are made of them.
#pragma once

#include <cstdint>

#include "abi.h"
#include "context.h"

namespace penstock {

struct Product {
    const PenstockWeight* weight;
    const void* x;  // [.., k]
    std::int32_t x_type;
    const std::int64_t* row_index;  // the rows of x to take, [rows]; null: the first ones
    std::int64_t rows;
    void* out;  // [rows, result_columns(weight)]
    std::int64_t out_stride;  // elements between rows of out
    std::int32_t out_type;
    std::int32_t activation;  // of the gate, where the weight is gated
};

// n, or n / 2 where the weight is gated.
std::int64_t result_columns(const PenstockWeight& weight);

// Where row `row` of a contiguous [.., columns] array of that type begins.
const void* row_of(const void* array, std::int32_t type, std::int64_t columns, std::int64_t row);
void* row_of(void* array, std::int32_t type, std::int64_t columns, std::int64_t row);

// Carries out products that do not depend on each other, all items of all of them shared among the threads. Uses
// context.operands and the per-thread memory. Throws std::bad_alloc.
void multiply_all(Context& context, const Product* products, std::int64_t count);

}  // namespace penstock
