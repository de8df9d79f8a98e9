// Packing queries, and storing to and loading from float caches (layout: attention.h), 16 elements of a head at a time.
// Included by files that are compiled once per instruction level.
#pragma once

#include "attention/attention.h"
#include "vector_math.inc.h"

namespace penstock {
namespace {

// The index of element d of position p in the keys and in the values of a granule. 32 bits contain UNIT neighbouring
// elements of one key, or one element of UNIT neighbouring values. `width`, a divisor of the padded head dim, is the
// number of neighbouring elements of values that lie together (attention.h).
template <class Element>
struct GranuleLayout {
    static constexpr int UNIT = 4 / sizeof(Element);
    static PENSTOCK_INLINE std::int64_t key(int p, std::int64_t d) {
        return (d / UNIT * GRANULE + p) * UNIT + d % UNIT;
    }
    static PENSTOCK_INLINE std::int64_t value(int p, std::int64_t d, std::int64_t width) {
        return ((d / width * (GRANULE / UNIT) + p / UNIT) * width + d % width) * UNIT + p % UNIT;
    }
};

PENSTOCK_INLINE int lanes_left(std::int64_t first, std::int64_t end) {
    return end - first >= LANES ? LANES : end > first ? static_cast<int>(end - first) : 0;
}

// Elements first .. first + 15 of a head as floats, zeros beyond head_dim.
PENSTOCK_INLINE F32x16 head_lanes(const void* head, std::int32_t type, std::int64_t first, std::int64_t head_dim) {
    const int count = lanes_left(first, head_dim);
    if (count == 0 || head == nullptr) return 0.0f;
    if (type == TYPE_F32) return load_some(static_cast<const float*>(head) + first, count);
    return load_some(static_cast<const std::uint16_t*>(head) + first, count);
}

inline const void* head_address(const void* heads, std::int32_t type, std::int64_t element) {
    return heads == nullptr ? nullptr : static_cast<const char*>(heads) + element * type_bytes(type);
}

// The operand is [rows][padded_dim].
template <class Element>
void pack_queries(const QueryArgs& a) {
    const std::int64_t dim = a.cache->padded_dim, head_dim = a.cache->head_dim;
    Element* to = static_cast<Element*>(a.operand);
    for (std::int64_t row = a.first_row; row < a.first_row + a.rows; ++row, to += dim) {
        const void* q = head_address(a.q, a.type, query_head(a, row) * head_dim);
        for (std::int64_t d = 0; d < dim; d += LANES) store(to + d, head_lanes(q, a.type, d, head_dim));
    }
}

template <class Element>
void store_granule(const StoreArgs& a) {
    using Layout = GranuleLayout<Element>;
    const std::int64_t dim = a.cache->padded_dim, head_dim = a.cache->head_dim;
    Element* const keys = reinterpret_cast<Element*>(a.granule);
    Element* const values = keys + GRANULE * dim;
    for (int i = 0; i < a.count; ++i) {
        const int p = a.start + i;
        const void* const key = head_address(a.keys, a.type, i * a.stride);
        const void* const value = head_address(a.values, a.type, i * a.stride);
        for (std::int64_t d = 0; d < dim; d += LANES) {
            alignas(64) Element key_lane[LANES], value_lane[LANES];
            store(key_lane, head_lanes(key, a.type, d, head_dim));
            store(value_lane, head_lanes(value, a.type, d, head_dim));
            for (int lane = 0; lane < LANES; ++lane) {
                keys[Layout::key(p, d + lane)] = key_lane[lane];
                values[Layout::value(p, d + lane, dim)] = value_lane[lane];
            }
        }
    }
}

// VALUE_DIMS: how many elements of values lie together; 0: all.
template <class Element, int VALUE_DIMS = 0>
void load_granule(const LoadArgs& a) {
    using Layout = GranuleLayout<Element>;
    const std::int64_t dim = a.cache->padded_dim, head_dim = a.cache->head_dim;
    const std::int64_t width = VALUE_DIMS == 0 ? dim : VALUE_DIMS;
    const Element* const keys = reinterpret_cast<const Element*>(a.granule);
    const Element* const values = keys + GRANULE * dim;
    for (int i = 0; i < a.count; ++i) {
        const int p = a.start + i;
        for (std::int64_t d = 0; d < head_dim; d += LANES) {
            alignas(64) Element key_lane[LANES], value_lane[LANES];
            for (int lane = 0; lane < LANES; ++lane) {
                key_lane[lane] = keys[Layout::key(p, d + lane)];
                value_lane[lane] = values[Layout::value(p, d + lane, width)];
            }
            const int count = lanes_left(d, head_dim);
            store_first(a.keys + i * a.stride + d, load(key_lane), count);
            store_first(a.values + i * a.stride + d, load(value_lane), count);
        }
    }
}

}  // namespace
}  // namespace penstock
