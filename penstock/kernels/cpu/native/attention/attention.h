// Attention over a paged cache: the layout of the cache, and what an instruction level provides for it.
//
// The arithmetic is an online softmax over tiles of 64 positions at multiples of 64. A tile gives, for each query row,
// the maximum score m, the sum l of p = e^(s - m), and o = sum of p v. Tiles fold in ascending order into the state of
// a span (32 tiles, at multiples of 2048 positions), spans in ascending order into the state of the row. Folding a part
// (m', l', o') into a state (m, l, o):
//
//     n = max(m, m'),  l = l e^(m-n) + l' e^(m'-n),  o = o e^(m-n) + o' e^(m'-n)
//
// with every operation rounded separately. A part with l' = 0 (nothing visible) leaves the state unchanged, bit for
// bit. A state begins as (-inf, 0, 0). Within a span, a level may add p v to the accumulator o in the products
// themselves, with p relative to max(m, m'): the same tiles in the same order, but one rounding less. So the bits of a
// row depend on its query and on what it attends to, and never on the rows computed with it, the thread that computed a
// span, the location of blocks, or how the prompt was chunked. (The two-part attention of Tenstorrent's Falcon decode
// and the refresh and combination of Huawei's IncreFlashAttention are special cases of this fold.)
//
// attention.cpp is the driver: it takes a plan (kernels/attention/plan.py), stages new keys and values, passes tiles to
// the kernels, folds spans, writes results, and stores new tokens. Kernels know neither plans nor sequences.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

constexpr int TILE = 64;        // positions
constexpr int SPAN_TILES = 32;  // tiles
constexpr int SPAN = TILE * SPAN_TILES;
constexpr int GRANULE = 16;        // positions stored together
constexpr int TILE_GRANULES = TILE / GRANULE;
constexpr int MAX_HEAD_DIM = 512;
constexpr int DIM_UNIT = 32;       // the head dim is padded to a multiple of this
constexpr int MAX_STRIP = 16;      // rows that a kernel processes together, on any level
constexpr int ROW_CAPACITY = 48;   // operands are sized for a multiple of this: whole strips on every level

// The cache of one layer: [blocks][kv heads][block_size / 16] granules. A granule holds 16 positions of one head: keys,
// then values. With Dp the padded head dim, all parts begin at multiples of 64 bytes:
//
//   kind   keys                                values                              then
//   f32    [Dp][16] float                      [16][Dp] float
//   bf16   [Dp / 2][16][2] bfloat16            [8][Dp][2] bfloat16 (2 positions)
//   int8   [Dp / 4][16][4] uint8, value + 128  [4][Dp][4] uint8 (4 positions)      if scales are per token: [4][16]
//                                                                                  float: key scales, key offsets,
//                                                                                  value scales, value offsets
//
// The layout of AVX-512 stores values of f32 and bf16 in parts of 32 elements, [Dp / 32][..][32].., each as above. Its
// products take 32 elements at a time, and reading lines that are not neighbours makes a processor fetch unneeded ones.
//
// Elements beyond the head dim are 0 (int8: 128) at every position that was stored. A stored integer B means
// (B + offset) * scale, with one scale and offset per token (in the granule) or per channel (in PenstockCache).

constexpr std::int64_t padded_head_dim(std::int64_t head_dim) {
    return (head_dim + DIM_UNIT - 1) / DIM_UNIT * DIM_UNIT;
}

// Bytes of a granule's keys, which are also those of its values.
constexpr std::int64_t half_granule_bytes(std::int32_t kind, std::int64_t padded_dim) {
    return GRANULE * padded_dim * (kind == CACHE_F32 ? 4 : kind == CACHE_BF16 ? 2 : 1);
}

constexpr std::int64_t granule_bytes(std::int32_t kind, std::int64_t padded_dim, bool per_token) {
    return 2 * half_granule_bytes(kind, padded_dim) + (kind == CACHE_INT8 && per_token ? 4 * GRANULE * 4 : 0);
}

inline std::int64_t granule_bytes(const PenstockCache& cache) {
    return granule_bytes(cache.kind, cache.padded_dim, cache.key_scales == nullptr);
}

// Query rows as the operand of scores, in the layout of the level.
//
// f32, bf16: the elements, rounded to the cache's type, 0 beyond the head dim. int8: the row, times the key scales if
// they are per channel, is written as `slices` int8 rows as in products.h (max |x| a, scale a / 127, slice s in units
// of 1 / 254^s), with the scale, the integer sums of the slices and the contribution of the offsets.
struct QueryArgs {
    const PenstockCache* cache;
    std::int32_t type;        // of q, DataType
    const void* q;            // [tokens][heads][head_dim]
    std::int64_t heads;       // query heads
    std::int64_t kv_head;
    std::int64_t first_row;   // of the packed step: row = token * group + g, query head kv_head * group + g
    int rows;
    void* operand;            // out, 64-aligned, query_bytes()
};

// The index in q [tokens][heads] of the query head of a row of the packed step.
inline std::int64_t query_head(const QueryArgs& a, std::int64_t row) {
    const std::int64_t group = a.heads / a.cache->kv_heads;
    return row / group * a.heads + a.kv_head * group + row % group;
}

// Bytes of the operand of `rows` rows of one kv head. They are the same on all levels; some widen bfloat16 to float32,
// and int8 to int16.
constexpr std::int64_t query_bytes(std::int32_t kind, std::int64_t padded_dim, std::int64_t slices, std::int64_t rows) {
    const std::int64_t room = (rows + ROW_CAPACITY - 1) / ROW_CAPACITY * ROW_CAPACITY;
    const std::int64_t element = kind == CACHE_INT8 ? 2 * slices : 4;
    return room * (padded_dim * element + (kind == CACHE_INT8 ? 64 : 0));
}

// States of some rows: m, l, o as above.
struct States {
    float* running_max = nullptr;  // [rows]
    float* running_sum = nullptr;  // [rows]
    float* accumulator = nullptr;  // [rows][padded_dim], 64-aligned
    std::int64_t padded_dim = 0;

    States from(std::int64_t row) const {
        return {running_max + row, running_sum + row, accumulator + row * padded_dim, padded_dim};
    }
};

// One tile for some rows of one kv head: computes (m', l', o') and folds it into the state of the rows.
//
// Position j of the tile is visible to row r if low[r] <= j < high[r]. A hidden position enters as p = 0, whatever its
// score. Values at hidden positions are finite, or the driver has replaced them by zeros; keys, and
// the scales of an int8 cache, may be anything.
//
// A score, in this order: the dot product, plus the bias if `bias_before_scale`; times scale; soft cap c tanh(s / c);
// plus the bias otherwise, and the bias of the distance. The bias is slope * distance, and the distance the position of
// the key minus that of the query. The bias of a distance d is entry d + bias_reach + 15 of the query head's row of
// `distance_bias`, d limited to -bias_reach .. bias_reach. 15 copies of its ends let sixteen lanes be read at once.
struct TileArgs {
    const PenstockCache* cache;
    const PenstockAttention* params;
    std::int64_t kv_head;
    std::int64_t group, first_row;         // query heads per kv head; the first row, as in QueryArgs
    int rows;                              // of the operand and of the state
    const void* operand;                   // written by pack_queries
    const char* granules[TILE_GRANULES];   // keys, then values
    const char* next[TILE_GRANULES];       // granules of the next tile, to be prefetched, or null
    std::int64_t base;                     // first position of the tile
    const std::int32_t* positions;         // [rows] positions of the queries
    const float* slopes;                   // [rows] ALiBi slopes, or null
    const std::int32_t* low;               // [rows]; null: every position is visible to every row
    const std::int32_t* high;              // [rows]
    States state;
    std::int32_t* thread_state;            // for the kernel's own use, per thread; 0 before the first tile of an item

    // Whether a score is a dot product times a positive scale.
    bool only_scaled() const {
        return slopes == nullptr && params->distance_bias == nullptr && !(params->softcap > 0.0f) &&
               params->scale > 0.0f;
    }
};

// Write keys and values, [count] heads of [head_dim] each, `stride` elements apart, to rows start .. start + count - 1
// of a granule; if keys and values are null, write zeros. Round to the cache's type (int8: as quantized_kv.py does);
// elements beyond the head dim become 0.
struct StoreArgs {
    const PenstockCache* cache;
    std::int64_t kv_head;
    char* granule;
    int start, count;
    std::int32_t type;
    const void* keys;
    const void* values;
    std::int64_t stride;
};

// Read keys and values of a granule as float32.
struct LoadArgs {
    const PenstockCache* cache;
    std::int64_t kv_head;
    const char* granule;
    int start, count;
    float* keys;
    float* values;
    std::int64_t stride;
};

struct CacheKernel {
    void (*pack_queries)(const QueryArgs&);
    void (*attend_tile)(const TileArgs&);
    void (*store)(const StoreArgs&);
    void (*load)(const LoadArgs&);
    void (*release)(std::int32_t thread_state) = nullptr;  // called after the last tile of an item unless null
};

// Turn states into results: row r becomes out[r][0 .. head_dim - 1] of `type`, o / l + 0, or zeros if l = 0; and
// lse[r] = m + log(l), or -inf, unless lse is null. The states are overwritten.
struct OutputArgs {
    int rows;
    std::int64_t head_dim;
    States state;
    const float* sinks;  // [rows] logits without values, or null: (sink, 1, 0) is folded in first
    std::int32_t type;
    void* const* out;    // [rows]
    float* const* lse;   // [rows] or null
};

struct FoldKernel {
    void (*fold)(int rows, const States& state, const States& part);  // part into state
    void (*write_output)(const OutputArgs&);
};

// The kernel of a level for a kind of cache. LEVEL_AMX has bfloat16 and int8; for float32 it uses AVX-512's kernel.
template <Level LEVEL, CacheKind KIND> CacheKernel cache_kernel();

template <Level LEVEL> FoldKernel fold_kernel();

}  // namespace penstock
