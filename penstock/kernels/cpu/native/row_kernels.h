// What an instruction level provides for operations on rows: norms, rotary, activations, sampling.
//
// row_kernels.inc.h is compiled once for each level with the compiler's vector types and no fused multiply-add, so all
// levels give the same bits; only their speed differs.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

// Turns product sums into results: times the column's scale, plus the column's bias, then gated if the weight is.
struct FinishArgs {
    const PenstockWeight* weight;
    std::int64_t first_panel;
    int panels;
    std::int64_t rows;         // rows of `sums`
    const float* sums;         // [rows][panels * 32]
    std::int32_t activation;   // of the gate, where the weight is gated
    void* out;                 // the first of these rows, column 0 (not: the first panel's column)
    std::int64_t out_stride;   // elements between rows; n, or n / 2 where gated
    std::int32_t out_type;
};

struct RowKernels {
    void (*finish)(const FinishArgs&);
    // Further kernels are added here, one a row operation, each with a struct of arguments.
};

RowKernels portable_rows();
RowKernels avx2_rows();
RowKernels avx512_rows();

}  // namespace penstock
