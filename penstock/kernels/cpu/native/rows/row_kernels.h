// What an instruction level provides for operations on rows: finishing a product, norms, rotary, embedding, routing,
// and what is done to each element by itself.
//
// row_kernels.inc.h is compiled once for each level with the compiler's vector types and no fused multiply-add, so all
// levels give the same bits; only their speed differs. Arrays of rows are contiguous; kernels that take `first` and
// `rows` work on that range of rows only.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

// Turns product sums into results: times the column's scale, plus the column's bias, then the activation of each; or,
// where the weight is gated, the gate's activation times the other half.
struct FinishArgs {
    const PenstockWeight* weight;
    std::int64_t first_panel;
    int panels;
    std::int64_t rows;         // rows of `sums`
    const float* sums;         // [rows][panels * 32]
    std::int32_t activation;
    void* out;                 // the first of these rows, column 0 (not: the first panel's column)
    std::int64_t out_stride;   // elements between rows
    std::int32_t out_type;
};

// The RMS norm is x / sqrt(mean(x^2) + eps) * weight; the layer norm is that of x - mean(x), plus the bias.
struct NormArgs {
    const float* x;       // [.., n]
    const float* branch;  // [.., n] to be added to x first, or null
    float* sum;           // x + branch, where there is a branch; may be x
    const float* weight;  // [n]
    const float* bias;    // [n] or null; of the layer norm only
    float eps;
    std::int64_t n;
    void* out;  // [.., n] of out_type
    std::int32_t out_type;
};

// The norm of the heads of q, or of those of k.
struct HeadNorm {
    const float* weight;  // [size], or null: none
    std::int64_t size;    // head_dim: every head by itself; the elements of all heads: all of them together
};

// Splits rows of q, k and v, norms the heads of q and k where weights are given, and rotates them.
struct RotaryArgs {
    const float* qkv;  // [.., heads + 2 kv_heads, head_dim]
    const std::int64_t* positions;  // each a row of cos_sin, which the caller has checked
    const float* cos_sin;  // [positions, rotary_dim], cosines then sines; null: nothing is rotated
    std::int64_t rotary_dim;
    std::int64_t heads, kv_heads, head_dim;
    HeadNorm q_norm, k_norm;
    float eps;
    void* q;  // [.., heads, head_dim] of out_type; k and v [.., kv_heads, head_dim]
    void* k;
    void* v;
    std::int32_t out_type;
};

struct EmbeddingArgs {
    const std::int64_t* ids;
    const void* table;  // [.., n] of table_type; every id is one of its rows, which the caller has checked
    std::int32_t table_type;
    std::int64_t n;
    float scale;  // of every element
    float* out;   // [.., n]
};

// Softmax over all experts, then the top_k most likely, the lower id first on a tie. A row whose softmax is not made of
// numbers (a logit is NaN or +inf, or all are -inf) gets the ids 0, 1, .. with weights NaN.
struct RouteArgs {
    const float* logits;  // [.., experts]
    std::int64_t experts;
    std::int64_t top_k;        // at most `experts`
    std::int32_t renormalize;  // divides the weights by their sum
    std::int64_t* ids;         // [.., top_k]
    float* weights;            // [.., top_k]
};

struct RowKernels {
    void (*finish)(const FinishArgs&);
    void (*rms_norm)(const NormArgs&, std::int64_t first, std::int64_t rows);
    void (*layer_norm)(const NormArgs&, std::int64_t first, std::int64_t rows);
    void (*rotary)(const RotaryArgs&, std::int64_t first, std::int64_t rows);
    void (*embedding)(const EmbeddingArgs&, std::int64_t first, std::int64_t rows);
    // scratch: the probabilities of a row, in whole vectors of 16.
    void (*route)(const RouteArgs&, std::int64_t first, std::int64_t rows, float* scratch);
    void (*add)(float* x, const float* h, std::int64_t count);          // x += h
    void (*round)(const float* x, std::uint16_t* out, std::int64_t count);
    void (*softcap)(float* x, float cap, std::int64_t count);           // x = cap tanh(x / cap)
};

RowKernels portable_rows();
RowKernels avx2_rows();
RowKernels avx512_rows();

}  // namespace penstock
