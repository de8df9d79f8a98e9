// Attention over float caches with AVX2: vectors of eight floats, multiplied and added with one rounding. A bfloat16
// cache is widened as it is read, or a tile at a time for many rows; probabilities stay float32.

#include "attention/layout.inc.h"
#include "attention/tile.inc.h"
#include "avx2.inc.h"

namespace penstock {
namespace {

constexpr int GROUP = 6;  // rows per load: 12 vectors of sums and 3 operands fill the 16 registers
constexpr std::int64_t LINE = 64;

PENSTOCK_INLINE F32x16 multiply_add(float a, F32x16 b, F32x16 c) {
    const FloatPart factor = _mm256_set1_ps(a);
    for (int i = 0; i < PARTS; ++i) c.part[i] = add_float_products(c.part[i], factor, b.part[i]);
    return c;
}

// Both products have the same form: a line of 64 bytes adds one term to 16 columns in float32 (16 floats) and two terms
// in bfloat16 (16 pairs).
struct F32 {
    using Element = float;
    using Query = float;
    static constexpr int TERMS = 1;
    static PENSTOCK_INLINE F32x16 term(const char* line, int) { return load(reinterpret_cast<const float*>(line)); }
};

struct Bf16 {
    using Element = std::uint16_t;
    using Query = std::uint16_t;
    static constexpr int TERMS = 2;
    static PENSTOCK_INLINE F32x16 term(const char* line, int i) {
        const U32x16 pairs = bits_as<U32x16>(load(reinterpret_cast<const float*>(line)));
        return bits_as<F32x16>(i == 0 ? pairs << 16u : pairs & 0xFFFF0000u);
    }
};

// A tile of bfloat16 that was widened.
struct Widened : F32 {
    using Query = std::uint16_t;
};

// Add the product of a [ROWS][lines * TERMS] and `lines` lines to the sums. Prefetch a line of `ahead` per line read.
template <class Type, int ROWS>
PENSTOCK_INLINE void multiply(
    F32x16 (&sums)[ROWS], const float* a, std::int64_t a_stride, const char* b, std::int64_t b_stride, int lines,
    const char* ahead) {
    for (int line = 0; line < lines; ++line, b += b_stride, a += Type::TERMS) {
        if (ahead != nullptr) prefetch_to_l2(ahead + line * LINE);
#pragma GCC unroll 2
        for (int i = 0; i < Type::TERMS; ++i) {
            const F32x16 term = Type::term(b, i);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(a[r * a_stride + i], term, sums[r]);
        }
    }
}

// One product for up to GROUP rows. Only the first group of a tile prefetches.
struct GroupArgs {
    const TileArgs& tile;
    bool prefetches;
    const float* a;  // [rows][a_stride]: queries, or p
    std::int64_t a_stride;
    float* out;  // [rows][out_stride]
    std::int64_t out_stride;

    const char* ahead(int granule) const { return prefetches ? tile.next[granule] : nullptr; }
};

template <class Type, int ROWS>
void group_keys(const GroupArgs& g) {
    const int lines = static_cast<int>(g.tile.cache->padded_dim / Type::TERMS);
    for (int granule = 0; granule < TILE_GRANULES; ++granule) {
        F32x16 sums[ROWS] = {};
        multiply<Type, ROWS>(sums, g.a, g.a_stride, g.tile.granules[granule], LINE, lines, g.ahead(granule));
        for (int r = 0; r < ROWS; ++r) store(g.out + r * g.out_stride + granule * GRANULE, sums[r]);
    }
}

template <class Type, int ROWS>
void group_values(const GroupArgs& g) {
    constexpr int LINES = GRANULE / Type::TERMS;  // per 16 columns of a granule
    const std::int64_t dim = g.tile.cache->padded_dim;
    const std::int64_t keys = dim * GRANULE * sizeof(typename Type::Element);
    for (std::int64_t d = 0; d < dim; d += LANES) {
        F32x16 sums[ROWS] = {};
        for (int granule = 0; granule < TILE_GRANULES; ++granule) {
            const char* const values = g.tile.granules[granule] + keys + d * 4;
            const char* ahead = g.ahead(granule);
            if (ahead != nullptr) ahead += keys + d / LANES * LINES * LINE;
            multiply<Type, ROWS>(sums, g.a + granule * GRANULE, g.a_stride, values, dim * 4, LINES, ahead);
        }
        for (int r = 0; r < ROWS; ++r) store(g.out + r * g.out_stride + d, sums[r]);
    }
}

// Split a strip into groups of nearly equal size and call multiply(group, Constant<rows>) for each.
template <class Multiply>
inline void each_group(GroupArgs g, int rows, const Multiply& multiply) {
    for (int groups = (rows + GROUP - 1) / GROUP; groups > 0; --groups) {
        const int count = (rows + groups - 1) / groups;
        with_constant<GROUP>(count, [&](auto of_rows) { multiply(g, of_rows); });
        g.prefetches = false;
        g.a += count * g.a_stride;
        g.out += count * g.out_stride;
        rows -= count;
    }
}

inline const float* query_floats(const float* q, std::int64_t, float*) { return q; }

inline const float* query_floats(const std::uint16_t* q, std::int64_t count, float* room) {
    for (std::int64_t i = 0; i < count; i += LANES) store(room + i, load(q + i));
    return room;
}

template <class Type>
struct FloatKind {
    static constexpr int STRIP = 2 * GROUP;

    static void multiply_keys(const TileArgs& a, int first, int rows, float* s) {
        alignas(64) float room[STRIP * MAX_HEAD_DIM];
        const std::int64_t dim = a.cache->padded_dim;
        const auto* const operand = static_cast<const typename Type::Query*>(a.operand) + first * dim;
        const float* const q = query_floats(operand, rows * dim, room);
        each_group({a, first == 0, q, dim, s, TILE}, rows, [](const GroupArgs& g, auto count) {
            group_keys<Type, count.value>(g);
        });
    }

    static void multiply_values(const TileArgs& a, int first, int rows, float* p, float* o) {
        const std::int64_t dim = a.cache->padded_dim;
        each_group({a, first == 0, p, TILE, o, dim}, rows, [](const GroupArgs& g, auto count) {
            group_values<Type, count.value>(g);
        });
    }
};

// Widening a tile takes as long as attending two rows to it, and saves about a tenth of the time of each row.
constexpr int MIN_WIDENED_ROWS = 3 * GROUP;
constexpr int MAX_WIDENED_DIM = 128;

// Widen [rows][columns] pairs to [2 rows][columns] floats: the lower halves of a row, then its upper halves.
void widen_pairs(const char* pairs, std::int64_t rows, std::int64_t columns, float* out) {
    for (std::int64_t row = 0; row < rows; ++row, out += 2 * columns) {
        for (std::int64_t c = 0; c < columns; c += LANES, pairs += LINE) {
            store(out + c, Bf16::term(pairs, 0));
            store(out + columns + c, Bf16::term(pairs, 1));
        }
    }
}

void attend_bf16_tile(const TileArgs& a) {
    const std::int64_t dim = a.cache->padded_dim;
    if (a.rows < MIN_WIDENED_ROWS || dim > MAX_WIDENED_DIM) return attend_tile<FloatKind<Bf16>>(a);
    alignas(64) float floats[TILE_GRANULES][2 * GRANULE * MAX_WIDENED_DIM];
    const std::int64_t keys = half_granule_bytes(CACHE_BF16, dim);
    TileArgs wide = a;
    for (int granule = 0; granule < TILE_GRANULES; ++granule) {
        if (a.next[granule] != nullptr)
            for (std::int64_t at = 0; at < 2 * keys; at += LINE) prefetch_to_l2(a.next[granule] + at);
        widen_pairs(a.granules[granule], dim / 2, GRANULE, floats[granule]);
        widen_pairs(a.granules[granule] + keys, GRANULE / 2, dim, floats[granule] + GRANULE * dim);
        wide.granules[granule] = reinterpret_cast<const char*>(floats[granule]);
        wide.next[granule] = nullptr;
    }
    attend_tile<FloatKind<Widened>>(wide);
}

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_F32>() {
    return {pack_queries<float>, attend_tile<FloatKind<F32>>, store_granule<float>, load_granule<float>};
}

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_BF16>() {
    using Element = Bf16::Element;
    return {pack_queries<Element>, attend_bf16_tile, store_granule<Element>, load_granule<Element>};
}

}  // namespace penstock
