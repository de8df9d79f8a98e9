// Attention over a paged cache: the layout of the cache, and what an instruction level provides for it.
//
// The arithmetic runs in tiles of 64 positions at multiples of 64. A tile gives, for each query row, the greatest score
// m, the sum l of p = e^(s - m), and o = sum of p v. Tiles fold in ascending order into the state of a span (32 tiles,
// at multiples of 2048 positions), spans in ascending order into the state of the row. Folding a part (m', l', o')
// into a state (m, l, o):
//
//     n = max(m, m'),  l = l e^(m-n) + l' e^(m'-n),  o = o e^(m-n) + o' e^(m'-n)
//
// every operation rounded by itself; a part with l' = 0 (nothing visible) leaves the state untouched, bit for bit. A
// state begins as (-inf, 0, 0). Within a span a level may add p v to the state's o in the products themselves, with p
// relative to max(m, m'): the same tiles in the same order, one rounding less. So a row's bits depend on its own query
// and on what it sees: never on which rows were computed with it, which thread computed a span, where blocks lie, or how
// the prompt was cut. (The two-part attention of Tenstorrent's Falcon decode, the refresh and the combination of
// Huawei's IncreFlashAttention are this one fold.)
//
// attention.cpp is the driver: it takes a plan (kernels/attention/plan.py), lays out new keys and values, hands tiles to
// the kernels, folds spans, delivers, and stores. Kernels know neither plans nor sequences.
#pragma once

#include <cstdint>

#include "abi.h"

namespace penstock {

constexpr int TILE = 64;        // positions
constexpr int SPAN_TILES = 32;  // tiles
constexpr int SPAN = TILE * SPAN_TILES;
constexpr int GRANULE = 16;  // positions that lie together in memory
constexpr int TILE_GRANULES = TILE / GRANULE;
constexpr int MAX_HEAD_DIM = 256;
constexpr int DIM_UNIT = 32;       // a head's elements are padded to a multiple of this
constexpr int MAX_STRIP = 16;      // rows that a kernel takes through a tile together, on any level
constexpr int ROW_CAPACITY = 48;   // operands have room for a multiple of so many rows: whole strips on every level

// The cache of one layer: [blocks][kv heads][block_size / 16] granules. A granule holds 16 positions of one head: keys,
// then values. With Dp the padded head dim, all parts begin at multiples of 64 bytes:
//
//   kind   keys                                values                              then
//   f32    [Dp][16] float                      [16][Dp] float
//   bf16   [Dp / 2][16][2] bfloat16            [8][Dp][2] bfloat16 (2 positions)
//   int8   [Dp / 4][16][4] uint8, value + 128  [4][Dp][4] uint8 (4 positions)      where scales belong to tokens:
//                                                                                  [4][16] float: key scales, key
//                                                                                  offsets, value scales, offsets
//
// Elements beyond the head dim are 0 (int8: 128) at every position that was ever stored. A stored integer B stands for
// (B + offset) * scale; scale and offset belong to the token (in the granule) or to the channel (in PenstockCache).
enum CacheKind : std::int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_INT8 = 2, NUM_CACHE_KINDS = 3 };

constexpr std::int64_t padded_head_dim(std::int64_t head_dim) {
    return (head_dim + DIM_UNIT - 1) / DIM_UNIT * DIM_UNIT;
}

// Bytes of the keys (or of the values) of a granule.
constexpr std::int64_t half_granule_bytes(std::int32_t kind, std::int64_t padded_dim) {
    return GRANULE * padded_dim * (kind == CACHE_F32 ? 4 : kind == CACHE_BF16 ? 2 : 1);
}

constexpr std::int64_t granule_bytes(std::int32_t kind, std::int64_t padded_dim, bool per_token) {
    return 2 * half_granule_bytes(kind, padded_dim) + (kind == CACHE_INT8 && per_token ? 4 * GRANULE * 4 : 0);
}

inline std::int64_t granule_bytes(const PenstockCache& cache) {
    return granule_bytes(cache.kind, cache.padded_dim, cache.key_scales == nullptr);
}

// Query rows as the operand of scores: an opaque array of `rows` rows (ROW_CAPACITY a unit of room).
//
// f32, bf16: the elements, rounded to the cache's type, 0 beyond the head dim. int8: the row, times the key scales where
// they belong to channels, is written as `slices` int8 rows as products.h has it (greatest |x| a, scale a / 127, slice
// s in units of 1 / 254^s), with the scale, the integer sums of the slices and what offsets need.
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

// Room for the operand of so many rows of one kv head, the same on all levels.
constexpr std::int64_t query_bytes(std::int32_t kind, std::int64_t padded_dim, std::int64_t slices, std::int64_t rows) {
    const std::int64_t room = (rows + ROW_CAPACITY - 1) / ROW_CAPACITY * ROW_CAPACITY;
    const std::int64_t element = kind == CACHE_F32 ? 4 : kind == CACHE_BF16 ? 2 : slices;
    return room * (padded_dim * element + (kind == CACHE_INT8 ? 64 : 0));
}

// One tile for some rows of one kv head: makes (m', l', o') and folds it into the rows' state.
//
// Of row r the positions j of the tile are visible with j < high[r] and (j >= low[r] or j < sink). A hidden position
// enters as p = 0, whatever the scores say. Values at hidden positions are finite, or the driver has put zeros
// there; keys, and the scales of an int8 cache, may be anything.
//
// A score, in this order: the dot product, plus the bias if `bias_before_scale`; times scale; soft cap c tanh(s / c);
// plus the bias if not before. The bias is slope * (key position - query position).
struct TileArgs {
    const PenstockCache* cache;
    const PenstockAttention* how;
    std::int64_t kv_head;
    int rows;                              // of the operand and of the state
    const void* operand;                   // as pack_queries left it
    const char* granules[TILE_GRANULES];   // each with its values right behind its keys
    const char* next[TILE_GRANULES];       // those of the tile after this one, worth prefetching; null: none
    std::int64_t base;                     // the tile's first position
    const std::int32_t* positions;         // [rows], each query's own
    const float* slopes;                   // [rows] ALiBi slopes, or null
    const std::int32_t* low;               // [rows]; null: every position is visible to every row
    const std::int32_t* high;              // [rows]
    std::int32_t sink;
    float* greatest;                       // m: [rows]
    float* sum;                            // l: [rows]
    float* mixed;                          // o: [rows][padded_dim], 64-aligned
    std::int32_t* mode;                    // the kernel's own note on its thread; 0 before the first tile of an item
};

// Rows start .. start + count - 1 of a granule get keys and values, [count] heads of [head_dim] each, `stride` elements
// apart; null keys and values: zeros. Rounds to the cache's type; int8: quant/kv.py has the values. Elements beyond the
// head dim become 0.
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

// The other way: float32 from a granule.
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
    void (*leave)(std::int32_t mode) = nullptr;  // after the last tile of an item, where not null
};

// Folding, and delivering what is done. state arrays as in TileArgs.
struct FoldKernel {
    // Part (m2, l2, o2) into state (m, l, o).
    void (*fold)(int rows, std::int64_t padded_dim, float* m, float* l, float* o, const float* m2, const float* l2,
                 const float* o2);
    // Row r of the state becomes out[r * stride ..] (head_dim elements of `type`): o / l + 0, or zeros where l = 0; and
    // lse[r] = m + log(l), or -inf, where lse is not null. `sinks`, where given, [rows] logits that take part in the
    // sum and bring no value: (sink, 1, 0) is folded in first, also where nothing is visible.
    void (*deliver)(int rows, std::int64_t padded_dim, std::int64_t head_dim, float* m, float* l, float* o,
                    const float* sinks, std::int32_t type, void* const* out, float* const* lse);
};

// The tables, one function for each file of kernels; null pointers where a level leaves a kind to the one below.
CacheKernel portable_cache_f32();
CacheKernel portable_cache_bf16();
CacheKernel portable_cache_int8();
CacheKernel avx2_cache_f32();
CacheKernel avx2_cache_bf16();
CacheKernel avx2_cache_int8();
CacheKernel avx512_cache_f32();
CacheKernel avx512_cache_bf16();
CacheKernel avx512_cache_int8();
CacheKernel amx_cache_bf16();
CacheKernel amx_cache_int8();
FoldKernel portable_fold();
FoldKernel avx2_fold();
FoldKernel avx512_fold();

}  // namespace penstock
