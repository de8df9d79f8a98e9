// The driver of attention, in three parallel phases.
//
//   stage    Write new keys and values to the workspace as granules of the cache's kind: for each sequence, from the
//            granule of its first new token to that of its last token. Rows of the first granule that precede the new
//            tokens are copied from the cache. After this phase, new and cached tokens are read in the same way.
//   attend   Run the items of the plan: query rows against tiles of keys and values (item.cpp).
//   finish   Combine results that several items contributed to, and store new tokens to their slots. The cache is not
//            written before this phase: in a ring buffer, rows are read before they are overwritten.

#include "attention/attention.h"

#include "attention/call.h"

namespace penstock {
namespace {

constexpr std::int64_t SERIAL_BYTES = 64 << 10;  // copying less than this takes no longer than waking a helper
constexpr std::int64_t TOKENS_PER_ITEM = 64;     // in penstock_cache_store and penstock_cache_load

// ---- Checks before anything is written

bool slots_exist(const PenstockCache& cache, const std::int64_t* slots, std::int64_t count) {
    const std::int64_t stop = cache.blocks * cache.block_size;
    return std::all_of(slots, slots + count, [=](std::int64_t slot) { return slot < stop; });
}

// Whether the new tokens of all sequences, one sequence after the other, are those of the step.
bool starts_fit(const PenstockAttentionStep& step) {
    const std::int32_t* starts = step.query_start_loc;
    return starts[0] == 0 && starts[step.sequences] == step.tokens &&
           std::is_sorted(starts, starts + step.sequences + 1);
}

// Whether the block table covers all cached tokens, and the cache contains all blocks and slots.
bool within_tables(const PenstockAttentionStep& step, const PenstockCache& cache) {
    if (!starts_fit(step)) return false;
    for (std::int64_t s = 0; s < step.sequences; ++s) {
        const std::int64_t cached = step.seq_lens[s] - (step.query_start_loc[s + 1] - step.query_start_loc[s]);
        const std::int64_t columns = divide_up(cached, cache.block_size);
        const std::int32_t* blocks = step.block_table + s * step.max_blocks;
        const auto missing = [&](std::int32_t block) { return block >= cache.blocks; };
        if (cached < 0 || columns > step.max_blocks || std::any_of(blocks, blocks + columns, missing)) return false;
    }
    return slots_exist(cache, step.slot_mapping, step.tokens);
}

// ---- Stage

// A staged granule, for all kv heads.
struct Staged {
    std::int64_t sequence, index;  // index: relative to the sequence's first staged granule
    std::int64_t base;             // first position
    std::int64_t token;            // first new token, in the packed step
    int start, end;                // positions base + start .. base + end - 1 are new
};

Staged staged_at(const AttentionCall& call, std::int64_t number) {
    const PenstockAttentionStep& step = call.step;
    Staged at;
    at.sequence = std::upper_bound(step.staged, step.staged + step.sequences + 1, number) - step.staged - 1;
    at.index = number - step.staged[at.sequence];
    const std::int64_t cached = call.cached_tokens(at.sequence), length = step.seq_lens[at.sequence];
    at.base = (cached / GRANULE + at.index) * GRANULE;
    at.start = static_cast<int>(std::max<std::int64_t>(cached - at.base, 0));
    at.end = static_cast<int>(std::min<std::int64_t>(length - at.base, GRANULE));
    at.token = step.query_start_loc[at.sequence] + at.base + at.start - cached;
    return at;
}

// Write new tokens token .. token + count - 1 to rows start .. of a granule.
void store_tokens(const AttentionCall& call, std::int64_t token, int count, std::int64_t kv_head, char* granule,
                  int start) {
    const PenstockCache& cache = call.cache;
    const std::int64_t offset = (token * cache.kv_heads + kv_head) * cache.head_dim * type_bytes(call.type);
    call.kernel.store({&cache, kv_head, granule, start, count, call.type, static_cast<const char*>(call.keys) + offset,
                       static_cast<const char*>(call.values) + offset, cache.kv_heads * cache.head_dim});
}

// Rows after the last token become zeros, or keep the values of the copied granule if these are finite.
void stage_granule(const AttentionCall& call, const Staged& at, std::int64_t kv_head) {
    char* granule = call.staged_granule(at.sequence, kv_head, at.index);
    if (at.end - at.start < GRANULE) {
        const char* before = at.start > 0 ? call.cached_granule(at.sequence, kv_head, at.base) : call.zeros;
        std::memcpy(granule, before, static_cast<std::size_t>(call.granule));
        if (!values_are_finite(call.cache, granule)) store_zeros(call, kv_head, granule, at.end, GRANULE - at.end);
    }
    store_tokens(call, at.token, at.end - at.start, kv_head, granule, at.start);
}

void stage(const AttentionCall& call, ThreadPool& pool, bool serial) {
    const auto task = [&](std::int64_t number, int) {
        const Staged at = staged_at(call, number);
        for (std::int64_t kv_head = 0; kv_head < call.cache.kv_heads; ++kv_head) stage_granule(call, at, kv_head);
    };
    pool.parallel_for(call.step.staged[call.step.sequences], task, serial);
}

// ---- Finish

// Fold the partial rows of several items, spans ascending, and write the results. The partial rows of the first span
// serve as the state.
void combine(const AttentionCall& call, const PenstockAttentionCombine& combine, void* scratch) {
    const std::int64_t rows = combine.row_end - combine.row_begin;
    BumpAllocator memory(scratch);
    const RowOutputs outputs = allocate_outputs(memory, rows);
    for (std::int64_t kv_head = combine.head_begin; kv_head < combine.head_end; ++kv_head) {
        States state;
        for (std::int64_t r = combine.reference_begin; r < combine.reference_end; ++r) {
            const PenstockAttentionItem& item = call.step.item[call.step.references[r]];
            const std::int64_t item_rows = item.row_end - item.row_begin, heads = item.head_end - item.head_begin;
            std::int64_t first = item.partial + (kv_head - item.head_begin) * item_rows;
            first += combine.row_begin - item.row_begin;
            for (std::int64_t span = item.span_begin; span < item.span_end; ++span, first += heads * item_rows) {
                const States part = call.partial.from(first);
                if (state.accumulator == nullptr)
                    state = part;
                else
                    call.fold.fold(static_cast<int>(rows), state, part);
            }
        }
        write_outputs(call, outputs, kv_head, combine.row_begin, rows, state);
    }
}

// Whether the new tokens fill one granule of the cache, position for position.
bool fills_granule(const AttentionCall& call, const Staged& at) {
    const std::int64_t* slots = call.step.slot_mapping + at.token;
    if (at.start > 0 || at.end < GRANULE || slots[0] < 0 || slots[0] % GRANULE != 0) return false;
    for (int i = 1; i < GRANULE; ++i)
        if (slots[i] != slots[0] + i) return false;
    return true;
}

// Store the new tokens of a staged granule to their slots.
void store_staged(const AttentionCall& call, const Staged& at) {
    const std::int64_t* slots = call.step.slot_mapping + at.token;
    const bool whole = fills_granule(call, at);
    for (std::int64_t kv_head = 0; kv_head < call.cache.kv_heads; ++kv_head) {
        if (whole) {
            std::memcpy(granule_of_slot(call.cache, slots[0], kv_head),
                        call.staged_granule(at.sequence, kv_head, at.index), static_cast<std::size_t>(call.granule));
            continue;
        }
        for (int i = 0; i < at.end - at.start; ++i)
            if (slots[i] >= 0)
                store_tokens(call, at.token + i, 1, kv_head, granule_of_slot(call.cache, slots[i], kv_head),
                             static_cast<int>(slots[i] % GRANULE));
    }
}

void finish(const AttentionCall& call, Context& context, bool serial) {
    const std::int64_t combines = call.step.combines;
    const auto task = [&](std::int64_t number, int thread) {
        if (number < combines)
            combine(call, call.step.combine[number], context.per_thread[thread].data());
        else
            store_staged(call, staged_at(call, number - combines));
    };
    context.pool.parallel_for(combines + call.step.staged[call.step.sequences], task, serial);
}

void attend(AttentionCall& call, Context& context) {
    const PenstockAttentionStep& step = call.step;
    const std::int64_t granules = step.staged[step.sequences] * call.cache.kv_heads;
    BumpAllocator memory(context.workspace.reserve(attention_workspace_bytes(step, call.cache)));
    call.staged = memory.allocate<char>(granules * call.granule);
    char* zeros = memory.allocate<char>(call.granule);
    call.zeros = zeros;
    call.partial = allocate_states(memory, step.partial_rows, call.cache.padded_dim);
    store_zeros(call, 0, zeros, 0, GRANULE);
    context.reserve_per_thread(attention_scratch_bytes(step, call.cache));

    const bool few_new = granules * call.granule < SERIAL_BYTES;
    stage(call, context.pool, few_new);
    context.pool.parallel_for_ranges(step.item_starts, [&](std::int64_t item, int thread) {
        attend_item(call, step.item[item], context.per_thread[thread].data());
    });
    finish(call, context, few_new && state_bytes(step.partial_rows, call.cache.padded_dim) < SERIAL_BYTES);
}

// Call task(token, kv head) for all tokens and kv heads in parallel.
template <class Task>
Status over_tokens(Context& context, const PenstockCache& cache, std::int64_t tokens, const Task& task) {
    context.pool.parallel_for_blocks(tokens, TOKENS_PER_ITEM, [&](std::int64_t first, std::int64_t count, int) {
        for (std::int64_t token = first; token < first + count; ++token)
            for (std::int64_t kv_head = 0; kv_head < cache.kv_heads; ++kv_head) task(token, kv_head);
    });
    return STATUS_OK;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_attend(
    Context* context, const PenstockAttentionStep* step, const PenstockCache* cache, const PenstockAttention* params,
    const void* q, const void* sink_q, const void* k_new, const void* v_new, std::int32_t type, std::int64_t heads,
    void* out, float* lse) {
    return run_call(context, [&] {
        if (step->tokens == 0 || step->items == 0) return STATUS_OK;
        if (!within_tables(*step, *cache)) return STATUS_OUT_OF_RANGE;
        AttentionCall call{*step, *cache, *params, context->caches[cache->kind], context->fold,
                           q,     sink_q == nullptr ? q : sink_q,
                           k_new, v_new,  type,    heads,                        out,
                           lse,   heads / cache->kv_heads,                       granule_bytes(*cache),
                           nullptr, nullptr, {}};
        attend(call, *context);
        return STATUS_OK;
    });
}

extern "C" std::int32_t penstock_attention_reserve(Context* context, std::int64_t workspace, std::int64_t scratch) {
    return run_call(context, [&] {
        context->workspace.reserve(workspace);
        context->reserve_per_thread(scratch);
        return STATUS_OK;
    });
}

extern "C" std::int32_t penstock_attention_bytes(
    const PenstockAttentionStep* step, const PenstockCache* cache, std::int64_t* bytes) {
    bytes[0] = attention_workspace_bytes(*step, *cache);
    bytes[1] = attention_scratch_bytes(*step, *cache);
    return STATUS_OK;
}

extern "C" std::int32_t penstock_cache_store(
    Context* context, const PenstockCache* cache, const void* k, const void* v, std::int32_t type,
    const std::int64_t* slots, std::int64_t tokens) {
    return run_call(context, [&] {
        if (!slots_exist(*cache, slots, tokens)) return STATUS_OUT_OF_RANGE;
        return over_tokens(*context, *cache, tokens, [&](std::int64_t token, std::int64_t kv_head) {
            if (slots[token] < 0) return;
            const std::int64_t offset = (token * cache->kv_heads + kv_head) * cache->head_dim * type_bytes(type);
            context->caches[cache->kind].store({cache, kv_head, granule_of_slot(*cache, slots[token], kv_head),
                                                static_cast<int>(slots[token] % GRANULE), 1, type,
                                                static_cast<const char*>(k) + offset,
                                                static_cast<const char*>(v) + offset, 0});
        });
    });
}

extern "C" std::int32_t penstock_cache_load(
    Context* context, const PenstockCache* cache, const std::int64_t* slots, std::int64_t tokens, float* k, float* v) {
    return run_call(context, [&] {
        const bool negative = std::any_of(slots, slots + tokens, [](std::int64_t slot) { return slot < 0; });
        if (negative || !slots_exist(*cache, slots, tokens)) return STATUS_OUT_OF_RANGE;
        return over_tokens(*context, *cache, tokens, [&](std::int64_t token, std::int64_t kv_head) {
            const std::int64_t offset = (token * cache->kv_heads + kv_head) * cache->head_dim;
            context->caches[cache->kind].load({cache, kv_head, granule_of_slot(*cache, slots[token], kv_head),
                                               static_cast<int>(slots[token] % GRANULE), 1, k + offset, v + offset,
                                               0});
        });
    });
}
