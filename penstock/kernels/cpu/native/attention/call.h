// One call of the attention driver: the data that its phases share, and its memory. attention.cpp has the phases.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "context.h"

namespace penstock {

constexpr std::int64_t ROW_UNIT = 16;  // arrays have room for a multiple of this many rows, to begin at multiples of 64

inline std::int64_t row_room(std::int64_t rows) { return divide_up(rows, ROW_UNIT) * ROW_UNIT; }

// ---- Memory. kernels/attention/items.py has the same formulas.

inline std::int64_t state_bytes(std::int64_t rows, std::int64_t padded_dim) {
    return row_room(rows) * (padded_dim + 2) * 4;
}

// Memory shared by the threads: staged granules, a granule of zeros, the states of partial rows.
inline std::int64_t attention_workspace_bytes(const PenstockAttentionStep& step, const PenstockCache& cache) {
    const std::int64_t granules = step.staged[step.sequences] * cache.kv_heads + 1;
    return granules * granule_bytes(cache) + state_bytes(step.partial_rows, cache.padded_dim);
}

// Scratch memory of a thread for one item: per row, the data of its output, its position, and its slope in each head;
// the operands of the queries; the states of the rows and of the current span, unless these are partial rows; and an
// operand and a tile for rows that are processed one by one.
inline std::int64_t item_scratch_bytes(const PenstockAttentionItem& item, const PenstockCache& cache) {
    const std::int64_t heads = item.head_end - item.head_begin, rows = item.row_end - item.row_begin;
    const std::int64_t states = item.partial >= 0 ? 0 : item.span_end - item.span_begin > 1 ? 2 : 1;
    const std::int64_t row_data = row_room(rows) * (36 + 4 * heads);
    return row_data + heads * (query_bytes(cache.kind, cache.padded_dim, cache.slices, rows) +
                            states * state_bytes(rows, cache.padded_dim)) +
           query_bytes(cache.kind, cache.padded_dim, cache.slices, 1) + TILE_GRANULES * granule_bytes(cache);
}

inline std::int64_t attention_scratch_bytes(const PenstockAttentionStep& step, const PenstockCache& cache) {
    std::int64_t most = 0;
    for (std::int64_t i = 0; i < step.items; ++i) most = std::max(most, item_scratch_bytes(step.item[i], cache));
    return most;
}

inline States allocate_states(BumpAllocator& memory, std::int64_t rows, std::int64_t padded_dim) {
    const std::int64_t room = row_room(rows);
    States states;
    states.running_max = memory.allocate<float>(room);
    states.running_sum = memory.allocate<float>(room);
    states.accumulator = memory.allocate<float>(room * padded_dim);
    states.padded_dim = padded_dim;
    return states;
}

inline void clear_states(const States& states, std::int64_t rows) {
    std::fill_n(states.running_max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(states.running_sum, rows, 0.0f);
    std::memset(states.accumulator, 0, static_cast<std::size_t>(rows * states.padded_dim) * sizeof(float));
}

// ---- The call

// The granule of a kv head that contains a slot of the cache.
inline char* granule_of_slot(const PenstockCache& cache, std::int64_t slot, std::int64_t kv_head) {
    const std::int64_t block = slot / cache.block_size, granules = cache.block_size / GRANULE;
    const std::int64_t index = (block * cache.kv_heads + kv_head) * granules + slot % cache.block_size / GRANULE;
    return static_cast<char*>(cache.memory) + index * granule_bytes(cache);
}

struct AttentionCall {
    const PenstockAttentionStep& step;
    const PenstockCache& cache;
    const PenstockAttention& params;
    const CacheKernel& kernel;
    const FoldKernel& fold;
    const void* q;
    const void* sink_q;  // for keys of sink tokens
    const void* keys;    // of the new tokens
    const void* values;
    std::int32_t type;
    std::int64_t heads;
    void* out;
    float* lse;
    std::int64_t group;            // query heads per kv head
    std::int64_t granule;          // bytes
    char* staged;                  // per sequence [kv heads][staged granules]
    const char* zeros;             // a granule of zeros
    States partial;

    std::int64_t cached_tokens(std::int64_t sequence) const {
        return step.seq_lens[sequence] - (step.query_start_loc[sequence + 1] - step.query_start_loc[sequence]);
    }

    // index: relative to the sequence's first staged granule.
    char* staged_granule(std::int64_t sequence, std::int64_t kv_head, std::int64_t index) const {
        const std::int64_t first = step.staged[sequence], count = step.staged[sequence + 1] - first;
        return staged + (first * cache.kv_heads + kv_head * count + index) * granule;
    }

    // A granule of a block of the cache, or zeros if no block is allocated.
    const char* granule_of_block(std::int64_t block, std::int64_t kv_head, std::int64_t index) const {
        if (block < 0) return zeros;
        const std::int64_t number = (block * cache.kv_heads + kv_head) * (cache.block_size / GRANULE) + index;
        return static_cast<const char*>(cache.memory) + number * granule;
    }

    // The granule of the cache that contains a position.
    const char* cached_granule(std::int64_t sequence, std::int64_t kv_head, std::int64_t position) const {
        const std::int64_t block = step.block_table[sequence * step.max_blocks + position / cache.block_size];
        return granule_of_block(block, kv_head, position % cache.block_size / GRANULE);
    }
};

inline bool finite_words(const std::uint32_t* words, std::int64_t count, std::uint32_t exponent) {
    std::uint32_t not_finite = 0;
    for (std::int64_t i = 0; i < count; ++i) not_finite |= (words[i] & exponent) == exponent;
    return not_finite == 0;
}

// Whether 0 times any value of a granule is 0. Always true for int8: scales of hidden positions are not used.
inline bool values_are_finite(const PenstockCache& cache, const char* granule) {
    const std::int64_t bytes = half_granule_bytes(cache.kind, cache.padded_dim);
    const auto* words = reinterpret_cast<const std::uint32_t*>(granule + bytes);
    if (cache.kind == CACHE_INT8) return true;
    if (cache.kind == CACHE_F32) return finite_words(words, bytes / 4, 0x7F800000u);
    return finite_words(words, bytes / 4, 0x7F80u) && finite_words(words, bytes / 4, 0x7F800000u);
}

// Write zeros to rows start .. start + count - 1 of a granule.
inline void store_zeros(const AttentionCall& call, std::int64_t kv_head, char* granule, int start, int count) {
    if (count > 0)
        call.kernel.store({&call.cache, kv_head, granule, start, count, call.type, nullptr, nullptr, 0});
}

// Arrays for writing the results of some rows, at the beginning of a thread's scratch memory.
struct RowOutputs {
    float* sinks;  // [rows], like the others
    void** out;
    float** lse;
};

inline RowOutputs allocate_outputs(BumpAllocator& memory, std::int64_t rows) {
    RowOutputs outputs;
    outputs.sinks = memory.allocate<float>(row_room(rows));
    outputs.out = memory.allocate<void*>(row_room(rows));
    outputs.lse = memory.allocate<float*>(row_room(rows));
    return outputs;
}

// Write the results of rows first_row, first_row + 1, .. of a kv head; their states are overwritten.
void write_outputs(const AttentionCall& call, const RowOutputs& outputs, std::int64_t kv_head, std::int64_t first_row,
                   std::int64_t rows, const States& state);

// Run one item of the plan in a thread's scratch memory of attention_scratch_bytes().
void attend_item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch);

}  // namespace penstock
