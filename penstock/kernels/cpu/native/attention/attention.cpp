// The driver of attention, in three phases that share their work among threads.
//
//   stage    New keys and values are laid out as granules of the cache's kind in the workspace: from the granule of a
//            sequence's first new token, whose older rows come from the cache, to that of its last one. From here on
//            it makes no difference whether a token is new.
//   attend   The plan's items: rows of queries through tiles of keys and values (attention_item.cpp).
//   finish   Results that several items made together, and the store of new tokens to their slots. Nothing waits for
//            the store, and the cache is not written before: in a ring, rows are read before they are used again.

#include "attention/attention.h"

#include "attention/call.h"
#include "functions.h"

namespace penstock {
namespace {

constexpr std::int64_t ALONE_BYTES = 64 << 10;  // to copy less takes no longer than waking a helper
constexpr std::int64_t TOKENS_PER_ITEM = 64;    // of a plain store or load

// Calls task(item, thread) for all items; by this thread alone where there is little to do.
template <class Task>
void share(ThreadPool& pool, bool alone, std::int64_t count, const Task& task) {
    if (!alone) return pool.run(count, task);
    for (std::int64_t item = 0; item < count; ++item) task(item, 0);
}

// ---- What is refused before anything is written

bool slots_exist(const PenstockCache& cache, const std::int64_t* slots, std::int64_t count) {
    const std::int64_t stop = cache.blocks * cache.block_size;
    return std::all_of(slots, slots + count, [=](std::int64_t slot) { return slot < stop; });
}

// New tokens of all sequences are those of the step, one after the other.
bool starts_fit(const PenstockAttentionStep& step) {
    const std::int32_t* starts = step.query_start_loc;
    return starts[0] == 0 && starts[step.sequences] == step.tokens && std::is_sorted(starts, starts + step.sequences + 1);
}

// Cached tokens have a column of the block table, blocks and slots a place in the cache.
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

// A staged granule, of all kv heads.
struct Staged {
    std::int64_t sequence, index;  // index: from the first of the sequence
    std::int64_t base;             // its first position
    std::int64_t token;            // its first new one, of the packed step
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

// New tokens token .. token + count - 1 to rows start .. of a granule.
void store_tokens(const AttentionCall& call, std::int64_t token, int count, std::int64_t kv_head, char* granule,
                  int start) {
    const PenstockCache& cache = call.cache;
    const std::int64_t offset = (token * cache.kv_heads + kv_head) * cache.head_dim * type_bytes(call.type);
    call.kernel.store({&cache, kv_head, granule, start, count, call.type, static_cast<const char*>(call.keys) + offset,
                       static_cast<const char*>(call.values) + offset, cache.kv_heads * cache.head_dim});
}

// Rows behind the last token become zeros or, where that is less work, stay what they were, if it is finite.
void stage_granule(const AttentionCall& call, const Staged& at, std::int64_t kv_head) {
    char* granule = call.staged_granule(at.sequence, kv_head, at.index);
    if (at.end - at.start < GRANULE) {
        const char* before = at.start > 0 ? call.cached_granule(at.sequence, kv_head, at.base) : call.zeros;
        std::memcpy(granule, before, static_cast<std::size_t>(call.granule));
        if (!values_are_finite(call.cache, granule)) store_zeros(call, kv_head, granule, at.end, GRANULE - at.end);
    }
    store_tokens(call, at.token, at.end - at.start, kv_head, granule, at.start);
}

void stage(const AttentionCall& call, ThreadPool& pool, bool alone) {
    share(pool, alone, call.step.staged[call.step.sequences], [&](std::int64_t number, int) {
        const Staged at = staged_at(call, number);
        for (std::int64_t kv_head = 0; kv_head < call.cache.kv_heads; ++kv_head) stage_granule(call, at, kv_head);
    });
}

// ---- Finish

// Folds what several items have made of some rows, spans ascending, and delivers. The first span's partial rows become
// the rows' state.
void combine(const AttentionCall& call, const PenstockAttentionCombine& combine, void* scratch) {
    const std::int64_t rows = combine.row_end - combine.row_begin, dim = call.cache.padded_dim;
    Carver carver(scratch);
    const Delivery delivery = Delivery::cut(carver, rows);
    for (std::int64_t kv_head = combine.head_begin; kv_head < combine.head_end; ++kv_head) {
        States state;
        for (std::int64_t r = combine.reference_begin; r < combine.reference_end; ++r) {
            const PenstockAttentionItem& item = call.step.item[call.step.references[r]];
            const std::int64_t item_rows = item.row_end - item.row_begin, heads = item.head_end - item.head_begin;
            std::int64_t first = item.partial + (kv_head - item.head_begin) * item_rows;
            first += combine.row_begin - item.row_begin;
            for (std::int64_t span = item.span_begin; span < item.span_end; ++span, first += heads * item_rows) {
                const States part = call.partial.from(first, dim);
                if (state.mixed == nullptr)
                    state = part;
                else
                    call.fold.fold(static_cast<int>(rows), dim, state.greatest, state.sum, state.mixed, part.greatest,
                                   part.sum, part.mixed);
            }
        }
        delivery.deliver(call, kv_head, combine.row_begin, rows, state);
    }
}

// Whether the granule's tokens fill one granule of the cache, position for position.
bool fills_granule(const AttentionCall& call, const Staged& at) {
    const std::int64_t* slots = call.step.slot_mapping + at.token;
    if (at.start > 0 || at.end < GRANULE || slots[0] < 0 || slots[0] % GRANULE != 0) return false;
    for (int i = 1; i < GRANULE; ++i)
        if (slots[i] != slots[0] + i) return false;
    return true;
}

// New tokens of a staged granule to their slots.
void keep(const AttentionCall& call, const Staged& at) {
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

void finish(const AttentionCall& call, Context& context, bool alone) {
    const std::int64_t combines = call.step.combines;
    share(context.pool, alone, combines + call.step.staged[call.step.sequences], [&](std::int64_t number, int thread) {
        if (number < combines)
            combine(call, call.step.combine[number], context.per_thread[thread].take(0));
        else
            keep(call, staged_at(call, number - combines));
    });
}

void attend(AttentionCall& call, Context& context) {
    const PenstockAttentionStep& step = call.step;
    const std::int64_t granules = step.staged[step.sequences] * call.cache.kv_heads;
    const std::int64_t scratch = attention_scratch_bytes(step, call.cache);
    Carver carver(context.workspace.take(attention_workspace_bytes(step, call.cache)));
    call.staged = carver.cut<char>(granules * call.granule);
    char* zeros = carver.cut<char>(call.granule);
    call.zeros = zeros;
    call.partial = States::cut(carver, step.partial_rows, call.cache.padded_dim);
    store_zeros(call, 0, zeros, 0, GRANULE);
    for (int thread = 0; thread < context.pool.threads(); ++thread) context.per_thread[thread].take(scratch);

    const bool few_new = granules * call.granule < ALONE_BYTES;
    stage(call, context.pool, few_new);
    context.pool.run_ranges(step.item_starts, [&](std::int64_t item, int thread) {
        attend_item(call, step.item[item], context.per_thread[thread].take(0));
    });
    finish(call, context, few_new && state_bytes(step.partial_rows, call.cache.padded_dim) < ALONE_BYTES);
}

// Calls task(token, kv head) for all, shared among threads.
template <class Task>
void over_tokens(Context& context, const PenstockCache& cache, std::int64_t tokens, const Task& task) {
    context.pool.run(divide_up(tokens, TOKENS_PER_ITEM), [&](std::int64_t item, int) {
        const std::int64_t end = std::min((item + 1) * TOKENS_PER_ITEM, tokens);
        for (std::int64_t token = item * TOKENS_PER_ITEM; token < end; ++token)
            for (std::int64_t kv_head = 0; kv_head < cache.kv_heads; ++kv_head) task(token, kv_head);
    });
}

}  // namespace
}  // namespace penstock

using namespace penstock;

PENSTOCK_EXPORT std::int32_t penstock_attend(
    Context* context, const PenstockAttentionStep* step, const PenstockCache* cache, const PenstockAttention* how,
    const void* q, const void* k_new, const void* v_new, std::int32_t type, std::int64_t heads, void* out,
    float* lse) try {
    const Turn turn(context);
    if (step->tokens == 0 || step->items == 0) return STATUS_DONE;
    if (!within_tables(*step, *cache)) return STATUS_OUT_OF_RANGE;
    AttentionCall call{*step, *cache, *how,  context->caches[cache->kind], context->fold, q,
                       k_new, v_new,  type,  heads, out, lse, heads / cache->kv_heads, granule_bytes(*cache),
                       nullptr, nullptr, {}};
    attend(call, *context);
    return STATUS_DONE;
} catch (...) {
    return STATUS_NO_MEMORY;
}

// Memory of which later steps ask no more: shared by the threads, and of each thread.
PENSTOCK_EXPORT std::int32_t penstock_attention_reserve(Context* context, std::int64_t workspace,
                                                        std::int64_t scratch) try {
    const Turn turn(context);
    context->workspace.take(workspace);
    for (int thread = 0; thread < context->pool.threads(); ++thread) context->per_thread[thread].take(scratch);
    return STATUS_DONE;
} catch (...) {
    return STATUS_NO_MEMORY;
}

// What a step takes of both.
PENSTOCK_EXPORT std::int32_t penstock_attention_bytes(const PenstockAttentionStep* step, const PenstockCache* cache,
                                                      std::int64_t* bytes) {
    bytes[0] = attention_workspace_bytes(*step, *cache);
    bytes[1] = attention_scratch_bytes(*step, *cache);
    return STATUS_DONE;
}

// Negative slots are not kept.
PENSTOCK_EXPORT std::int32_t penstock_cache_store(Context* context, const PenstockCache* cache, const void* k,
                                                  const void* v, std::int32_t type, const std::int64_t* slots,
                                                  std::int64_t tokens) {
    const Turn turn(context);
    if (!slots_exist(*cache, slots, tokens)) return STATUS_OUT_OF_RANGE;
    over_tokens(*context, *cache, tokens, [&](std::int64_t token, std::int64_t kv_head) {
        if (slots[token] < 0) return;
        const std::int64_t offset = (token * cache->kv_heads + kv_head) * cache->head_dim * type_bytes(type);
        context->caches[cache->kind].store({cache, kv_head, granule_of_slot(*cache, slots[token], kv_head),
                                            static_cast<int>(slots[token] % GRANULE), 1, type,
                                            static_cast<const char*>(k) + offset,
                                            static_cast<const char*>(v) + offset, 0});
    });
    return STATUS_DONE;
}

// Negative slots are refused.
PENSTOCK_EXPORT std::int32_t penstock_cache_load(Context* context, const PenstockCache* cache,
                                                 const std::int64_t* slots, std::int64_t tokens, float* k, float* v) {
    const Turn turn(context);
    const bool negative = std::any_of(slots, slots + tokens, [](std::int64_t slot) { return slot < 0; });
    if (negative || !slots_exist(*cache, slots, tokens)) return STATUS_OUT_OF_RANGE;
    over_tokens(*context, *cache, tokens, [&](std::int64_t token, std::int64_t kv_head) {
        const std::int64_t offset = (token * cache->kv_heads + kv_head) * cache->head_dim;
        context->caches[cache->kind].load({cache, kv_head, granule_of_slot(*cache, slots[token], kv_head),
                                           static_cast<int>(slots[token] % GRANULE), 1, k + offset, v + offset, 0});
    });
    return STATUS_DONE;
}
