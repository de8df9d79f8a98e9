// What an instruction level provides for operations on rows: the epilogue of products, norms, rotary embedding, token
// embedding, routing, and element-wise operations.
//
// row_kernels.inc.h is compiled once per level with compiler vector types and without fused multiply-add, so all levels
// give the same bits. Arrays of rows are contiguous; kernels process `rows` rows from `first` on.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

// Turn product sums into results: multiply by the scale of the column, add its bias, then apply the activation. If the
// weight is gated, the result is the activation of the gate times the up half (ACT_CLAMPED_SILU: clamped, plus 1);
// ACT_NONE: the gate, and n / 2 columns later the up half.
struct EpilogueArgs {
    const PenstockWeight* weight;
    std::int64_t first_panel;
    int panels;
    std::int64_t rows;         // rows of `sums`
    const float* sums;         // [rows][panels * 32]
    std::int32_t activation;
    void* out;                 // where the first of these rows begins, at column 0 (not at the first panel)
    std::int64_t out_stride;   // elements between rows
};

// The RMS norm is x / sqrt(mean(x^2) + eps) * weight; the layer norm is the RMS norm of x - mean(x), plus the bias.
struct NormArgs {
    const float* x;       // [.., n]
    const float* branch;  // [.., n], added to x first, or null
    float* sum;           // out: x + branch if there is a branch; may be x
    const float* weight;  // [n]
    const float* bias;    // [n] or null; layer norm only
    float eps;
    std::int64_t n;
    void* out;            // [.., n]
};

// The norm of the heads of q, of k or of v.
struct HeadNorm {
    const float* weight;  // [size]; null: no norm
    std::int64_t size;    // head_dim: each head is normed by itself; elements of all heads: all are normed together
};

// Split rows of q, k and v, norm their heads if weights are given, and rotate those of q and k.
struct RotaryArgs {
    const float* qkv;  // [.., heads + 2 kv_heads, head_dim]
    const std::int64_t* positions;  // checked by the caller: rows of cos_sin, or later than last_position
    std::int64_t last_position;
    const float* cos_sin;  // [positions, rotary_dim], cosines then sines; null: no rotation
    const float* q_scale;  // [positions], the factor of q at each position; null: 1
    std::int64_t rotary_dim;
    std::int64_t heads, kv_heads, head_dim;
    HeadNorm q_norm, k_norm, v_norm;
    bool values_are_keys;  // qkv has no columns for v, which is k before its norm
    float eps;
    void* q;  // [.., heads, head_dim]; k and v [.., kv_heads, head_dim], or null
    void* k;
    void* v;
};

struct EmbeddingArgs {
    const std::int64_t* ids;
    const void* table;  // [.., n]; ids are checked by the caller
    std::int64_t n;
    float scale;  // factor of every element
    float* out;   // [.., n]
};

// penstock_xielu (abi.h).
struct XieluArgs {
    const float* x;
    float convex, concave, linear, bound;
    void* out;
};

// RouterParams in kernels/metadata.py explains the numbers. A row whose scores, or their sums with the bias, contain
// NaN gets the ids 0, 1, .. with weights NaN.
struct RouteArgs {
    const float* logits;  // [.., experts]
    std::int64_t experts;
    std::int64_t top_k;        // at most the experts of top_groups
    std::int32_t scores;       // RouterScores
    const float* bias;         // [experts] or null
    std::int64_t groups, top_groups, group_top;
    std::int32_t renormalize;  // divide the weights by their sum
    float min_sum, scale;
    const float* expert_scale;  // [experts], the last factor of an expert's weights; null: 1
    float threshold;
    std::int64_t* ids;         // [.., top_k]
    float* weights;            // [.., top_k]
};

// Some rows with one adapter, and a range of the columns: of hidden (piece after piece, those of the adapter's rank) or
// of out. penstock_lora_shrink and penstock_lora_expand (abi.h).
struct LoraArgs {
    const PenstockLora* lora;
    std::int64_t slot;
    const std::int32_t* row;  // [rows] indices into x, hidden and out
    std::int64_t rows;
    std::int64_t begin, end;
    const void* x;
    float* hidden;
    float* out;
    std::int64_t out_stride;
};

// penstock_activate (abi.h).
struct ActivateArgs {
    const float* x;  // [.., n]
    std::int64_t n;
    std::int32_t activation;
    bool gated;
    void* out;
};

// Arrays of `experts` numbers, in whole vectors of 16, that routing a row needs.
constexpr int ROUTE_ARRAYS = 3;

// Arrays are indexed by a DataType: that of the results or, for `embedding`, that of the table.
struct RowKernels {
    void (*epilogue[2])(const EpilogueArgs&);
    void (*rms_norm[2])(const NormArgs&, std::int64_t first, std::int64_t rows);
    void (*layer_norm[2])(const NormArgs&, std::int64_t first, std::int64_t rows);
    void (*rotary[2])(const RotaryArgs&, std::int64_t first, std::int64_t rows);
    void (*embedding[2])(const EmbeddingArgs&, std::int64_t first, std::int64_t rows);
    void (*xielu[2])(const XieluArgs&, std::int64_t first, std::int64_t count);
    // scratch: room for ROUTE_ARRAYS arrays.
    void (*route)(const RouteArgs&, std::int64_t first, std::int64_t rows, float* scratch);
    void (*add)(float* x, const float* h, std::int64_t count);          // x += h
    void (*add_gated)(float* x, const float* h, float gate, std::int64_t count);  // x += sigmoid(gate) * h
    void (*round)(const float* x, std::uint16_t* out, std::int64_t count);
    void (*scale)(float* x, float factor, std::int64_t count);          // x *= factor
    void (*weigh[2])(const void* x, float weight, void* out, std::int64_t count);   // out = weight * x, rounded
    void (*softcap)(float* x, float cap, std::int64_t count);           // x = cap tanh(x / cap)
    // Layer norm of each head of a row, in place.
    void (*norm_heads)(float* x, const float* weight, float eps, std::int64_t heads, std::int64_t head_dim);
    void (*lora_shrink[2])(const LoraArgs&);
    void (*lora_expand[2])(const LoraArgs&);
    void (*activate[2])(const ActivateArgs&, std::int64_t first, std::int64_t rows);
};

template <Level LEVEL> RowKernels row_kernels();

}  // namespace penstock
