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
        default: return STATUS_OUT_OF_RANGE;
    }
}

}  // namespace
}  // namespace penstock

extern "C" std::int32_t penstock_replay(penstock::Context* context, const PenstockCall* calls, std::int64_t count) {
    for (std::int64_t index = 0; index < count; ++index)
        if (const std::int32_t status = penstock::replay(context, calls[index])) return status;
    return penstock::STATUS_OK;
}
