// Programs: calls that Python wrote down once and has carried out again in one go. Between two kernels that stream
// weights through the caches, every line of Python starts cold; a recorded step pays for that once, not 180 times.

#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "context.h"
#include "functions.h"

namespace penstock {
namespace {

// In the order of kernels/cpu/library.py, RECORDABLE.
enum Function : std::int64_t {
    LINEAR,
    EXPERTS,
    RMS_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    ADD_LAYER_NORM,
    ADD,
    ROUND,
    SOFTCAP,
    ROTARY_QKV,
    EMBEDDING,
    ROUTE,
    ATTEND
};

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
    static_assert(sizeof...(Types) <= std::extent_v<decltype(PenstockCall::arguments)>);
    return apply(function, context, call.arguments, std::index_sequence_for<Types...>{});
}

std::int32_t carry_out(Context* context, const PenstockCall& call) {
    switch (call.function) {
        case LINEAR: return apply(penstock_linear, context, call);
        case EXPERTS: return apply(penstock_experts, context, call);
        case RMS_NORM: return apply(penstock_rms_norm, context, call);
        case ADD_RMS_NORM: return apply(penstock_add_rms_norm, context, call);
        case LAYER_NORM: return apply(penstock_layer_norm, context, call);
        case ADD_LAYER_NORM: return apply(penstock_add_layer_norm, context, call);
        case ADD: return apply(penstock_add, context, call);
        case ROUND: return apply(penstock_round, context, call);
        case SOFTCAP: return apply(penstock_softcap, context, call);
        case ROTARY_QKV: return apply(penstock_rotary_qkv, context, call);
        case EMBEDDING: return apply(penstock_embedding, context, call);
        case ROUTE: return apply(penstock_route, context, call);
        case ATTEND: return apply(penstock_attend, context, call);
        default: return -1;
    }
}

}  // namespace
}  // namespace penstock

// Carries out the calls in order; stops at the first that fails and returns what it returned.
PENSTOCK_EXPORT std::int32_t penstock_replay(
    penstock::Context* context, const PenstockCall* calls, std::int64_t count) {
    for (std::int64_t index = 0; index < count; ++index)
        if (const std::int32_t status = penstock::carry_out(context, calls[index])) return status;
    return penstock::STATUS_DONE;
}
