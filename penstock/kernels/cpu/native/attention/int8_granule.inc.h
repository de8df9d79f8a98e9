// The granules of an int8 cache: quantising keys and values into granules and reading them back, as specified in
// reference/quantized_kv.py.
#pragma once

#include "attention/int8_lanes.inc.h"

namespace penstock {
namespace {

constexpr std::int32_t LIMIT_BITS = (127 + 100) << 23;   // 2^100: tokens of this magnitude or more become NaN
constexpr float SMALLEST_HALF = 7.888609052210118e-31f;  // 2^-100

struct Granule {
    std::uint8_t* keys;
    std::uint8_t* values;
    float* scales;  // [4][16], if scales are per token

    PENSTOCK_INLINE Granule(const PenstockCache& cache, const char* memory) {
        const std::int64_t half = half_granule_bytes(CACHE_INT8, cache.padded_dim);
        keys = reinterpret_cast<std::uint8_t*>(const_cast<char*>(memory));
        values = keys + half;
        scales = reinterpret_cast<float*>(values + half);
    }

    PENSTOCK_INLINE float* key_scales() const { return scales; }
    PENSTOCK_INLINE float* key_offsets() const { return scales + GRANULE; }
    PENSTOCK_INLINE float* value_scales() const { return scales + 2 * GRANULE; }
    PENSTOCK_INLINE float* value_offsets() const { return scales + 3 * GRANULE; }
};

PENSTOCK_INLINE F32x16 load_elements(std::int32_t type, const void* x, std::int64_t first, std::int64_t end) {
    const int count = static_cast<int>(end - first < LANES ? end - first : LANES);
    if (type == TYPE_F32) return load_first(static_cast<const float*>(x) + first, count);
    return load_first(static_cast<const std::uint16_t*>(x) + first, count);
}

// How the elements of a token are stored: B = round((x - middle) * factor).
struct TokenCode {
    float middle, factor, scale, offset;
};

PENSTOCK_INLINE TokenCode token_code(float low, float high, bool usable) {
    if (!usable) return {0.0f, 0.0f, __builtin_nanf(""), 0.0f};
    const float middle = (low + high) * 0.5f;
    const float above = high - middle, below = middle - low;
    const float half = above > below ? above : below;
    if (half < SMALLEST_HALF) {
        const float sign = middle > 0.0f ? 1.0f : middle < 0.0f ? -1.0f : 0.0f;
        return {middle, 0.0f, middle * sign, sign};
    }
    const float scale = half / LARGEST_SLICE;
    return {middle, LARGEST_SLICE / half, scale, middle / scale};
}

// x [dim], or zeros if x is null, -> B [padded_dim], with the scale and the offset of the token.
PENSTOCK_INLINE void quantize_token(
    std::int32_t type, const void* x, std::int64_t dim, std::int64_t padded_dim, std::int8_t* to, float& scale,
    float& offset) {
    alignas(64) float copy[MAX_HEAD_DIM];
    F32x16 low = __builtin_inff(), high = -__builtin_inff();
    I32x16 max_bits = 0;
    for (std::int64_t d = 0; d < dim; d += LANES) {
        const F32x16 lanes = x == nullptr ? F32x16(0.0f) : load_elements(type, x, d, dim);
        const I32x16 inside = lane_index() < static_cast<std::int32_t>(dim - d);
        low = min(select(inside, lanes, low), low);
        high = max(select(inside, lanes, high), high);
        max_bits = max(max_bits, magnitude_bits(lanes));
        store(copy + d, lanes);
    }
    const float least = -reduce_max(low * -1.0f), most = reduce_max(high);
    const TokenCode code = token_code(least, most, reduce_lanes<MaxLanes>(max_bits).part[0][0] < LIMIT_BITS);
    for (std::int64_t d = 0; d < padded_dim; d += LANES) {
        I32x16 values = 0;
        if (d < dim && code.factor != 0.0f) {
            const I32x16 inside = lane_index() < static_cast<std::int32_t>(dim - d);
            values = round((load(copy + d) - code.middle) * code.factor) & inside;
        }
        store_slice(to + d, values);
    }
    scale = code.scale;
    offset = code.offset;
}

// The same with scales and offsets per channel, [dim].
PENSTOCK_INLINE void quantize_channels(
    std::int32_t type, const void* x, const float* scales, const float* offsets, std::int64_t dim,
    std::int64_t padded_dim, std::int8_t* to) {
    for (std::int64_t d = 0; d < padded_dim; d += LANES) {
        I32x16 values = 0;
        if (d < dim) {
            const F32x16 lanes = x == nullptr ? F32x16(0.0f) : load_elements(type, x, d, dim);
            const F32x16 steps = lanes / load_elements(TYPE_F32, scales, d, dim) -
                                 load_elements(TYPE_F32, offsets, d, dim);
            const F32x16 number = select(steps == steps, steps, F32x16(0.0f));
            const F32x16 held = max(F32x16(-LARGEST_SLICE), min(F32x16(LARGEST_SLICE), number));
            values = round(held) & (lane_index() < static_cast<std::int32_t>(dim - d));
        }
        store_slice(to + d, values);
    }
}

// Keys: quad after quad of elements, [Dp / 4][16][4].
PENSTOCK_INLINE void store_key(const std::int8_t* from, std::int64_t padded_dim, int position, std::uint8_t* keys) {
    for (std::int64_t d = 0; d < padded_dim; ++d)
        keys[d / QUAD * LINE + position * QUAD + d % QUAD] = static_cast<std::uint8_t>(from[d] + ZERO_POINT);
}

// Values: quad after quad of positions, [4][Dp][4].
PENSTOCK_INLINE void store_value(const std::int8_t* from, std::int64_t padded_dim, int position, std::uint8_t* values) {
    values += position / QUAD * padded_dim * QUAD + position % QUAD;
    for (std::int64_t d = 0; d < padded_dim; ++d) values[d * QUAD] = static_cast<std::uint8_t>(from[d] + ZERO_POINT);
}

void store_tokens(const StoreArgs& a) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t dim = cache.head_dim, padded = cache.padded_dim, channels = a.kv_head * padded;
    const Granule granule(cache, a.granule);
    alignas(64) std::int8_t values[MAX_HEAD_DIM];
    for (int i = 0; i < a.count; ++i) {
        const int at = a.start + i;
        const std::int64_t from = i * a.stride * type_bytes(a.type);
        const void* key = a.keys == nullptr ? nullptr : static_cast<const char*>(a.keys) + from;
        const void* value = a.values == nullptr ? nullptr : static_cast<const char*>(a.values) + from;
        if (cache.key_scales == nullptr)
            quantize_token(a.type, key, dim, padded, values, granule.key_scales()[at], granule.key_offsets()[at]);
        else
            quantize_channels(
                a.type, key, cache.key_scales + channels, cache.key_offsets + channels, dim, padded, values);
        store_key(values, padded, at, granule.keys);
        if (cache.value_scales == nullptr)
            quantize_token(a.type, value, dim, padded, values, granule.value_scales()[at], granule.value_offsets()[at]);
        else
            quantize_channels(
                a.type, value, cache.value_scales + channels, cache.value_offsets + channels, dim, padded, values);
        store_value(values, padded, at, granule.values);
    }
}

void load_tokens(const LoadArgs& a) {
    const PenstockCache& cache = *a.cache;
    const std::int64_t padded = cache.padded_dim;
    const Granule granule(cache, a.granule);
    for (int i = 0; i < a.count; ++i) {
        const int at = a.start + i;
        const std::uint8_t* values = granule.values + at / QUAD * padded * QUAD + at % QUAD;
        for (std::int64_t d = 0; d < cache.head_dim; ++d) {
            const std::int64_t channel = a.kv_head * padded + d;
            const float key = static_cast<float>(granule.keys[d / QUAD * LINE + at * QUAD + d % QUAD] - ZERO_POINT);
            const float value = static_cast<float>(values[d * QUAD] - ZERO_POINT);
            a.keys[i * a.stride + d] =
                cache.key_scales == nullptr ? (key + granule.key_offsets()[at]) * granule.key_scales()[at]
                                            : (key + cache.key_offsets[channel]) * cache.key_scales[channel];
            a.values[i * a.stride + d] =
                cache.value_scales == nullptr ? (value + granule.value_offsets()[at]) * granule.value_scales()[at]
                                              : (value + cache.value_offsets[channel]) * cache.value_scales[channel];
        }
    }
}

}  // namespace
}  // namespace penstock
