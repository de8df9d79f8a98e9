// The functions of the C interface that a recorded program may call. A file that defines one includes this, so that the
// compiler holds the two against each other.
#pragma once

#include <cstdint>

#include "abi.h"
#include "context.h"

extern "C" {

constexpr int MAX_ARGUMENTS = 18;

// One call of a program.
struct PenstockCall {
    std::int64_t function;
    std::int64_t arguments[MAX_ARGUMENTS];  // those after the context; a float as the bits of a double
};

std::int32_t penstock_linear(
    penstock::Context* context, const PenstockWeight* weight, const void* x, std::int32_t x_type, std::int64_t rows,
    void* out, std::int64_t out_stride, std::int32_t out_type, std::int32_t activation);

std::int32_t penstock_experts(
    penstock::Context* context, const PenstockWeight* gate_up, const PenstockWeight* down, std::int64_t experts,
    const void* x, std::int32_t x_type, std::int64_t rows, std::int64_t top_k, const std::int64_t* ids,
    const float* weights, std::int32_t activation, float* out);

std::int32_t penstock_rms_norm(
    penstock::Context* context, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n,
    void* out, std::int32_t out_type);

std::int32_t penstock_add_rms_norm(
    penstock::Context* context, float* x, const float* h, const float* weight, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type);

std::int32_t penstock_layer_norm(
    penstock::Context* context, const float* x, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type);

std::int32_t penstock_add_layer_norm(
    penstock::Context* context, float* x, const float* h, const float* weight, const float* bias, float eps,
    std::int64_t rows, std::int64_t n, void* out, std::int32_t out_type);

std::int32_t penstock_add(penstock::Context* context, float* x, const float* h, std::int64_t count);

std::int32_t penstock_round(
    penstock::Context* context, const float* x, std::int64_t count, void* out, std::int32_t out_type);

std::int32_t penstock_softcap(penstock::Context* context, float* x, float cap, std::int64_t count);

std::int32_t penstock_rotary_qkv(
    penstock::Context* context, const float* qkv, const std::int64_t* positions, const float* cos_sin,
    std::int64_t num_positions, std::int64_t rotary_dim, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads,
    std::int64_t head_dim, const float* q_norm, std::int64_t q_norm_size, const float* k_norm,
    std::int64_t k_norm_size, float eps, void* q, void* k, void* v, std::int32_t out_type);

std::int32_t penstock_embedding(
    penstock::Context* context, const std::int64_t* ids, const void* table, std::int32_t table_type,
    std::int64_t table_rows, std::int64_t rows, std::int64_t n, float scale, float* out);

std::int32_t penstock_route(
    penstock::Context* context, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
    std::int32_t renormalize, std::int64_t* ids, float* weights);

std::int32_t penstock_attend(
    penstock::Context* context, const PenstockAttentionStep* step, const PenstockCache* cache,
    const PenstockAttention* how, const void* q, const void* k_new, const void* v_new, std::int32_t type,
    std::int64_t heads, void* out, float* lse);
}
