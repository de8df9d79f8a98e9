// The plain C interface between Python (ctypes) and the native kernels. Knows nothing of models, layers or tensors.
//
// Every function that computes takes a Context first (context.h), reads and writes memory that the caller owns, and
// keeps no pointer after it returns. Arrays are contiguous. A Context carries out one call at a time.
//
// Two rules hold for every file here.
//   - A row of a result is a function of that row's own inputs: never of how many rows there are, of where the row
//     stands, or of which thread ran.
//   - A file compiled for an instruction level (its name ends in _avx2, _avx512, _amx) defines nothing with external
//     linkage but its table of kernels, and calls no inline function or template of the standard library that could
//     be kept out of line: the linker would keep one copy for all levels, perhaps one this processor cannot run.
#pragma once

#include <cstdint>

#define PENSTOCK_EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {

constexpr int PANEL = 32;      // output columns that are packed together
constexpr int K_UNIT = 64;     // every leaf of K is padded with zeros to a multiple of this (or of the int4 group)
constexpr int MAX_LEAVES = 8;  // pieces of K that are summed apart and added as a binary tree

enum DataType : std::int32_t { TYPE_F32 = 0, TYPE_BF16 = 1 };

constexpr int type_bytes(std::int32_t type) { return type == TYPE_F32 ? 4 : 2; }

// How a weight is stored and what it is multiplied with.
enum Kind : std::int32_t {
    KIND_F32 = 0,       // float32 x float32
    KIND_BF16 = 1,      // bfloat16 x bfloat16
    KIND_INT8 = 2,      // int8, a scale a column; activations as 1, 2 or 3 int8 slices
    KIND_INT4 = 3,      // int4, a scale a group of K and column; activations as for int8
    KIND_INT4_A16 = 4,  // stored as KIND_INT4; activations bfloat16
    NUM_KINDS = 5
};

// What a function returns.
enum Status : std::int32_t {
    STATUS_DONE = 0,
    STATUS_NO_MEMORY = -1,
    STATUS_NOT_QUANTISABLE = -2,  // a weight is not finite, or its size is 2^100 or more
    STATUS_OUT_OF_RANGE = -3      // an id or a position that its table does not have
};

enum Activation : std::int32_t { ACT_NONE = 0, ACT_SILU = 1, ACT_GELU = 2, ACT_GELU_TANH = 3 };

}  // namespace penstock

extern "C" {

// A weight [n, k], packed. K is laid out leaf after leaf, each padded: position padded_leaf_ends[l-1] + j holds element
// leaf_ends[l-1] + j. Columns come in panels of 32: column c of panel p is row 32 p + c of the weight; in a gated
// weight (gate's n/2 rows, then up's) columns 0..15 of panel p are gate's rows 16 p .., columns 16..31 up's. Padding is
// a weight of zero. All arrays begin at a multiple of 64 bytes.
//
//   kind       values, panel after panel                            bytes of a panel
//   f32        [padded_k][32] float                                 128 padded_k
//   bf16       [padded_k / 2][32][2] bfloat16                        64 padded_k
//   int8       [padded_k / 4][32][4] uint8, weight + 128             32 padded_k
//   int4       [padded_k / 4][16][4] bytes: low nibble the weight    16 padded_k
//              + 8 of columns 0..15, high nibble of columns 16..31
struct PenstockWeight {
    std::int64_t n, k;
    std::int64_t padded_k;
    std::int64_t panels;
    std::int32_t kind;
    std::int32_t slices;      // int8, int4: how many int8 rows stand for one activation row
    std::int32_t group_size;  // int4: 32, 64 or 128, a divisor of every padded leaf; else 0
    std::int32_t gated;
    std::int32_t leaves;
    std::int32_t reserved;
    std::int64_t leaf_ends[8];
    std::int64_t padded_leaf_ends[8];
    void* values;
    float* column_scales;         // int8: [panels * 32]; else null
    std::uint16_t* group_scales;  // int4: bfloat16 [panels][padded_k / group_size][32]; else null
    const float* bias;            // [panels * 32] in the order of the columns, or null
};

// The keys and values of one layer; attention.h has the layout.
struct PenstockCache {
    void* memory;
    std::int64_t blocks, block_size;  // block_size: a multiple of 16
    std::int64_t kv_heads, head_dim, padded_dim;
    std::int32_t kind;                // CacheKind
    std::int32_t slices;              // int8: how many int8 rows stand for a query row, and for a row of probabilities
    const float* key_scales;          // int8: [kv heads][padded_dim]; all four null: scales belong to tokens
    const float* key_offsets;
    const float* value_scales;
    const float* value_offsets;
};

// How scores are made in one layer.
struct PenstockAttention {
    float scale;
    float softcap;             // 0: none
    const float* slopes;       // ALiBi, [query heads], or null
    const float* sink_logits;  // [query heads], or null
    std::int32_t bias_before_scale;
    std::int32_t reserved;
};

// A piece of work, and a result that several pieces make together: kernels/attention/plan.py.
struct PenstockAttentionItem {
    std::int32_t sequence;              // whose block table is read
    std::int32_t head_begin, head_end;  // kv heads
    std::int32_t row_begin, row_end;    // rows of the packed step: token * group + g
    std::int32_t span_begin, span_end;
    std::int32_t partial;               // -1: results are final; else the first of the partial rows it writes
};

struct PenstockAttentionCombine {
    std::int32_t head_begin, head_end;
    std::int32_t row_begin, row_end;
    std::int32_t reference_begin, reference_end;  // into references: items, spans ascending
};

// One step for the layers of one cache group: where its sequences stand (kernels/ops.py, AttentionMetadata) and its
// plan. Python rewrites it before each step; recorded programs keep its address.
struct PenstockAttentionStep {
    std::int64_t sequences, tokens;
    const std::int32_t* query_start_loc;  // [sequences + 1]
    const std::int32_t* seq_lens;         // [sequences]
    const std::int32_t* block_table;      // [sequences][max_blocks]
    std::int64_t max_blocks;
    const std::int64_t* slot_mapping;     // [tokens]
    const std::int32_t* positions;        // [tokens]
    std::int64_t sliding_window;          // 0: none
    std::int64_t num_sink_tokens;
    std::int64_t items, combines;
    const PenstockAttentionItem* item;
    const std::int64_t* item_starts;      // [threads + 1]: the first item of each thread, then their number
    const PenstockAttentionCombine* combine;
    const std::int32_t* references;
    const std::int32_t* staged;           // [sequences + 1]: the first staged granule (of each head) of a sequence
    std::int64_t partial_rows;
};
}
