// Attention over float32 and bfloat16 caches in plain C++, for processors without other kernels. Read this kernel
// first. Scores are summed over ascending elements, outputs over ascending positions.

#include "attention/layout.inc.h"
#include "attention/tile.inc.h"

namespace penstock {
namespace {

// From sixteen words of two bfloat16 each: the lower halves, or the higher halves.
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
        total = total + lower(pairs) * to_float(q[d]);
        total = total + higher(pairs) * to_float(q[d + 1]);
    }
    store(s, total);
}

// p rounded to bfloat16.
PENSTOCK_INLINE float rounded(float p) {
    std::uint16_t lane[LANES];
    store(lane, F32x16(p));
    return to_float(lane[0]);
}

// Add the probabilities p [16] of one row times the values of a granule to o [dim].
PENSTOCK_INLINE void add_values(std::int64_t dim, const float* p, const float* values, float* o) {
    for (int j = 0; j < GRANULE; ++j)
        for (std::int64_t d = 0; d < dim; d += LANES) store(o + d, load(o + d) + load(values + j * dim + d) * p[j]);
}

PENSTOCK_INLINE void add_values(std::int64_t dim, const float* p, const std::uint16_t* values, float* o) {
    for (int j = 0; j < GRANULE; j += 2) {
        const float first = rounded(p[j]);
        const float second = rounded(p[j + 1]);
        for (std::int64_t d = 0; d < dim; d += LANES) {
            const U32x16 pairs = load_pairs(values + j * dim + d * 2);
            store(o + d, (load(o + d) + lower(pairs) * first) + higher(pairs) * second);
        }
    }
}

// The operand of queries is [rows][padded_dim].
template <class Element>
struct Kind {
    static constexpr int STRIP = 1;

    static void multiply_keys(const TileArgs& a, int row, int, float* s) {
        const std::int64_t dim = a.cache->padded_dim;
        const Element* q = static_cast<const Element*>(a.operand) + row * dim;
        for (int g = 0; g < TILE_GRANULES; ++g)
            scores_of_granule(dim, q, reinterpret_cast<const Element*>(a.granules[g]), s + g * GRANULE);
    }

    static void multiply_values(const TileArgs& a, int, int, float* p, float* o) {
        const std::int64_t dim = a.cache->padded_dim;
        for (std::int64_t d = 0; d < dim; ++d) o[d] = 0.0f;
        for (int g = 0; g < TILE_GRANULES; ++g)
            add_values(dim, p + g * GRANULE, reinterpret_cast<const Element*>(a.granules[g]) + GRANULE * dim, o);
    }
};

template <class Element>
constexpr CacheKernel KERNEL = {pack_queries<Element>, attend_tile<Kind<Element>>, store_granule<Element>,
                                load_granule<Element>};

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_F32>() { return KERNEL<float>; }
template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_BF16>() { return KERNEL<std::uint16_t>; }

}  // namespace penstock
