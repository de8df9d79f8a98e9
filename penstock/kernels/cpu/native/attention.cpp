#include "attention.h"

#include "context.h"
#include "functions.h"

using namespace penstock;

PENSTOCK_EXPORT std::int32_t penstock_attend(
    Context*, const PenstockAttentionStep*, const PenstockCache*, const PenstockAttention*, const void*, const void*,
    const void*, std::int32_t, std::int64_t, void*, float*) {
    return STATUS_NO_MEMORY;
}
PENSTOCK_EXPORT std::int32_t penstock_attention_reserve(Context*, std::int64_t, std::int64_t) { return STATUS_NO_MEMORY; }
PENSTOCK_EXPORT std::int32_t penstock_attention_bytes(
    const PenstockAttentionStep*, const PenstockCache*, std::int64_t, std::int64_t, std::int64_t*) {
    return STATUS_NO_MEMORY;
}
PENSTOCK_EXPORT std::int32_t penstock_cache_store(
    Context*, const PenstockCache*, const void*, const void*, std::int32_t, const std::int64_t*, std::int64_t) {
    return STATUS_NO_MEMORY;
}
PENSTOCK_EXPORT std::int32_t penstock_cache_load(
    Context*, const PenstockCache*, const std::int64_t*, std::int64_t, float*, float*) {
    return STATUS_NO_MEMORY;
}
