// Attention over a float32 and over a bfloat16 cache in plain C++: for processors without kernels of their own, and to
// read first. A dot product is summed over ascending elements, a mixture over ascending positions.

#include "attention/tile.inc.h"

namespace penstock {
namespace {

struct F32Cache {
    using Element = float;

    static float rounded(float x) { return x; }
    static std::int64_t key_index(std::int64_t d, int position, std::int64_t) { return d * GRANULE + position; }
    static std::int64_t value_index(std::int64_t d, int position, std::int64_t dim) { return position * dim + d; }
    static float to_float(float x) { return x; }
};

struct Bf16Cache {
    using Element = std::uint16_t;

    static std::uint16_t rounded(float x) {
        std::uint16_t lane[LANES];
        store(lane, F32x16(x));
        return lane[0];
    }
    static std::int64_t key_index(std::int64_t d, int position, std::int64_t) {
        return (d / 2 * GRANULE + position) * 2 + d % 2;
    }
    static std::int64_t value_index(std::int64_t d, int position, std::int64_t dim) {
        return (position / 2 * dim + d) * 2 + position % 2;
    }
    static float to_float(std::uint16_t x) {
        const std::uint32_t bits = std::uint32_t{x} << 16;
        float value;
        __builtin_memcpy(&value, &bits, sizeof value);
        return value;
    }
};

float element(const void* array, std::int32_t type, std::int64_t index) {
    return type == TYPE_F32 ? static_cast<const float*>(array)[index]
                            : Bf16Cache::to_float(static_cast<const std::uint16_t*>(array)[index]);
}

// Sixteen words that hold two bfloat16 each: the lower ones, or the higher ones.
PENSTOCK_INLINE F32x16 lower(U32x16 pairs) { return bits_as<F32x16>(pairs << 16u); }
PENSTOCK_INLINE F32x16 higher(U32x16 pairs) { return bits_as<F32x16>(pairs & 0xFFFF0000u); }
PENSTOCK_INLINE U32x16 load_pairs(const std::uint16_t* from) {
    return bits_as<U32x16>(load(reinterpret_cast<const float*>(from)));
}

// Dot products of one row [dim] with a granule's keys: [16].
PENSTOCK_INLINE void scores_of_granule(std::int64_t dim, const float* q, const float* keys, float* s) {
    F32x16 total = 0.0f;
    for (std::int64_t d = 0; d < dim; ++d) total = total + load(keys + d * GRANULE) * q[d];
    store(s, total);
}

PENSTOCK_INLINE void scores_of_granule(std::int64_t dim, const std::uint16_t* q, const std::uint16_t* keys, float* s) {
    F32x16 total = 0.0f;
    for (std::int64_t d = 0; d < dim; d += 2) {
        const U32x16 pairs = load_pairs(keys + d * GRANULE);
        total = total + lower(pairs) * Bf16Cache::to_float(q[d]);
        total = total + higher(pairs) * Bf16Cache::to_float(q[d + 1]);
    }
    store(s, total);
}

// One row's probabilities p [16] times a granule's values, onto o [dim].
PENSTOCK_INLINE void mix_granule(std::int64_t dim, const float* p, const float* values, float* o) {
    for (int j = 0; j < GRANULE; ++j)
        for (std::int64_t d = 0; d < dim; d += LANES) store(o + d, load(o + d) + load(values + j * dim + d) * p[j]);
}

PENSTOCK_INLINE void mix_granule(std::int64_t dim, const float* p, const std::uint16_t* values, float* o) {
    for (int j = 0; j < GRANULE; j += 2) {
        const float first = Bf16Cache::to_float(Bf16Cache::rounded(p[j]));
        const float second = Bf16Cache::to_float(Bf16Cache::rounded(p[j + 1]));
        for (std::int64_t d = 0; d < dim; d += LANES) {
            const U32x16 pairs = load_pairs(values + j * dim + d * 2);
            store(o + d, (load(o + d) + lower(pairs) * first) + higher(pairs) * second);
        }
    }
}

// The operand of queries: [rows][padded_dim] elements.
template <class Cache>
struct Kind {
    using Element = typename Cache::Element;
    static constexpr int STRIP = 1;

    static void scores(const TileArgs& a, int row, int, float* s) {
        const std::int64_t dim = a.cache->padded_dim;
        const Element* q = static_cast<const Element*>(a.operand) + row * dim;
        for (int g = 0; g < TILE_GRANULES; ++g)
            scores_of_granule(dim, q, reinterpret_cast<const Element*>(a.granules[g]), s + g * GRANULE);
    }

    static void mix(const TileArgs& a, int, int, float* p, float* o) {
        const std::int64_t dim = a.cache->padded_dim;
        for (std::int64_t d = 0; d < dim; ++d) o[d] = 0.0f;
        for (int g = 0; g < TILE_GRANULES; ++g)
            mix_granule(dim, p + g * GRANULE, reinterpret_cast<const Element*>(a.granules[g]) + GRANULE * dim, o);
    }
};

template <class Cache>
void pack_queries(const QueryArgs& a) {
    const std::int64_t head_dim = a.cache->head_dim, dim = a.cache->padded_dim, group = a.heads / a.cache->kv_heads;
    auto* to = static_cast<typename Cache::Element*>(a.operand);
    for (std::int64_t row = a.first_row; row < a.first_row + a.rows; ++row, to += dim) {
        const std::int64_t from = (row / group * a.heads + a.kv_head * group + row % group) * head_dim;
        for (std::int64_t d = 0; d < dim; ++d)
            to[d] = Cache::rounded(d < head_dim ? element(a.q, a.type, from + d) : 0.0f);
    }
}

template <class Cache>
void store_rows(const StoreArgs& a) {
    const std::int64_t head_dim = a.cache->head_dim, dim = a.cache->padded_dim;
    auto* keys = reinterpret_cast<typename Cache::Element*>(a.granule);
    auto* values = keys + GRANULE * dim;
    for (int i = 0; i < a.count; ++i)
        for (std::int64_t d = 0; d < dim; ++d) {
            const bool zero = a.keys == nullptr || d >= head_dim;
            const std::int64_t from = i * a.stride + d;
            keys[Cache::key_index(d, a.start + i, dim)] =
                Cache::rounded(zero ? 0.0f : element(a.keys, a.type, from));
            values[Cache::value_index(d, a.start + i, dim)] =
                Cache::rounded(zero ? 0.0f : element(a.values, a.type, from));
        }
}

template <class Cache>
void load_rows(const LoadArgs& a) {
    const std::int64_t dim = a.cache->padded_dim;
    const auto* keys = reinterpret_cast<const typename Cache::Element*>(a.granule);
    const auto* values = keys + GRANULE * dim;
    for (int i = 0; i < a.count; ++i)
        for (std::int64_t d = 0; d < a.cache->head_dim; ++d) {
            a.keys[i * a.stride + d] = Cache::to_float(keys[Cache::key_index(d, a.start + i, dim)]);
            a.values[i * a.stride + d] = Cache::to_float(values[Cache::value_index(d, a.start + i, dim)]);
        }
}

template <class Cache>
constexpr CacheKernel KERNEL = {pack_queries<Cache>, attend_tile<Kind<Cache>>, store_rows<Cache>, load_rows<Cache>};

}  // namespace

CacheKernel portable_cache_f32() { return KERNEL<F32Cache>; }
CacheKernel portable_cache_bf16() { return KERNEL<Bf16Cache>; }

}  // namespace penstock
