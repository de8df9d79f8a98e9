// Recorded programs: calls that Python records once and then replays in one call. Between two kernels that stream
// weights through the caches, every line of Python starts cold. A recorded step pays for that once, not 180 times.

#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"

namespace penstock {
namespace {

template <class Type>
Type argument(std::int64_t word) {
    if constexpr (std::is_pointer_v<Type>) {
        return reinterpret_cast<Type>(word);
    } else if constexpr (std::is_floating_point_v<Type>) {
        double number;
        std::memcpy(&number, &word, sizeof number);
        return static_cast<Type>(number);
    } else {
        return static_cast<Type>(word);
    }
}

template <class... Types, std::size_t... Index>
std::int32_t apply(std::int32_t (*function)(Context*, Types...), Context* context, const std::int64_t* words,
                   std::index_sequence<Index...>) {
    return function(context, argument<Types>(words[Index])...);
}

template <class... Types>
std::int32_t apply(std::int32_t (*function)(Context*, Types...), Context* context, const PenstockCall& call) {
    static_assert(sizeof...(Types) <= MAX_CALL_ARGUMENTS);
    return apply(function, context, call.arguments, std::index_sequence_for<Types...>{});
}

std::int32_t replay(Context* context, const PenstockCall& call) {
    switch (call.function) {
        case RECORD_LINEAR: return apply(penstock_linear, context, call);
        case RECORD_EXPERTS: return apply(penstock_experts, context, call);
        case RECORD_RMS_NORM: return apply(penstock_rms_norm, context, call);
        case RECORD_ADD_RMS_NORM: return apply(penstock_add_rms_norm, context, call);
        case RECORD_LAYER_NORM: return apply(penstock_layer_norm, context, call);
        case RECORD_ADD_LAYER_NORM: return apply(penstock_add_layer_norm, context, call);
        case RECORD_ADD: return apply(penstock_add, context, call);
        case RECORD_ROUND: return apply(penstock_round, context, call);
        case RECORD_SOFTCAP: return apply(penstock_softcap, context, call);
        case RECORD_ROTARY_QKV: return apply(penstock_rotary_qkv, context, call);
        case RECORD_EMBEDDING: return apply(penstock_embedding, context, call);
        case RECORD_ROUTE: return apply(penstock_route, context, call);
        case RECORD_ATTEND: return apply(penstock_attend, context, call);
        case RECORD_PACKED_EMBEDDING: return apply(penstock_packed_embedding, context, call);
        case RECORD_SCALE: return apply(penstock_scale, context, call);
        case RECORD_ADD_GATED: return apply(penstock_add_gated, context, call);
        case RECORD_XIELU: return apply(penstock_xielu, context, call);
        case RECORD_NORM_HEADS: return apply(penstock_norm_heads, context, call);
        case RECORD_LORA_SHRINK: return apply(penstock_lora_shrink, context, call);
        case RECORD_LORA_EXPAND: return apply(penstock_lora_expand, context, call);
        case RECORD_ACTIVATE: return apply(penstock_activate, context, call);
        default: return STATUS_OUT_OF_RANGE;
    }
}

std::int32_t choose_likeliest(Context* context, const float* logits, std::int64_t vocab, std::int64_t* token) {
    const float greedy = 0.0f;
    PenstockSampling params{};
    params.temperature = &greedy;
    const std::int32_t status = penstock_sample(context, logits, 1, vocab, &params, token);
    if (*token < 0) *token = 0;
    return status;
}

// Write the positions [rows] of a step where attention reads them.
void place(const PenstockAttentionStep& group, const std::int64_t* positions, std::int64_t rows) {
    for (std::int64_t row = 0; row < rows; ++row) {
        group.positions[row] = static_cast<std::int32_t>(positions[row]);
        group.seq_lens[row] = group.positions[row] + 1;
    }
}

}  // namespace
}  // namespace penstock

extern "C" std::int32_t penstock_decode(
    penstock::Context* context, const PenstockCall* calls, std::int64_t count, PenstockAttentionStep* groups,
    std::int64_t num_groups, const float* logits, std::int64_t logits_stride, std::int64_t vocab, std::int64_t rows,
    std::int64_t* input_ids, std::int64_t* positions, std::int64_t* tokens, std::int64_t token_stride,
    std::int64_t steps) {
    for (std::int64_t step = 0; step < steps; ++step) {
        for (std::int64_t row = 0; row < rows; ++row) input_ids[row] = tokens[row * token_stride + step];
        for (std::int64_t group = 0; group < num_groups; ++group) penstock::place(groups[group], positions, rows);
        if (const std::int32_t status = penstock_replay(context, calls, count)) return status;
        for (std::int64_t row = 0; row < rows; ++row) {
            std::int64_t* const next = tokens + row * token_stride + step + 1;
            if (*next < 0)
                if (const std::int32_t status =
                        penstock::choose_likeliest(context, logits + row * logits_stride, vocab, next))
                    return status;
            ++positions[row];
        }
        for (std::int64_t group = 0; group < num_groups; ++group)
            for (std::int64_t row = 0; row < rows; ++row) ++groups[group].slot_mapping[row];
    }
    return penstock::STATUS_OK;
}

extern "C" std::int32_t penstock_replay(penstock::Context* context, const PenstockCall* calls, std::int64_t count) {
    for (std::int64_t index = 0; index < count; ++index)
        if (const std::int32_t status = penstock::replay(context, calls[index])) return status;
    return penstock::STATUS_OK;
}
