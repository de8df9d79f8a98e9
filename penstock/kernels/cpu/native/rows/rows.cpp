// Operations on rows between the products, shared among threads: a row is computed by one thread, from first to last;
// where every element is computed by itself, rows are cut as well.

#include <algorithm>

#include "abi.h"
#include "context.h"
#include "functions.h"

namespace penstock {
namespace {

constexpr std::int64_t ITEM_ELEMENTS = 8192;     // of one piece of work: about 2 microseconds
constexpr std::int64_t SHARED_ELEMENTS = 32768;  // fewer are done sooner than another thread has begun
constexpr std::int64_t SOFTCAP_COST = 4;         // an exponential and two divisions, in elements that cost little

// Calls task(first, rows, thread) for ranges that make up all rows; by this thread alone where there is little to do.
template <class Task>
void over_rows(Context& context, std::int64_t rows, std::int64_t elements_per_row, const Task& task) {
    if (rows * elements_per_row < SHARED_ELEMENTS) {
        if (rows > 0) task(0, rows, 0);
        return;
    }
    const std::int64_t step = std::max<std::int64_t>(1, ITEM_ELEMENTS / elements_per_row);
    context.pool.run((rows + step - 1) / step, [&](std::int64_t item, int thread) {
        const std::int64_t first = item * step;
        task(first, std::min(step, rows - first), thread);
    });
}

// Calls task(first, count) for ranges that make up all elements, each of which costs so much. Ranges begin at whole
// cache lines, counted from the first element.
template <class Task>
void over_elements(Context& context, std::int64_t count, std::int64_t cost, const Task& task) {
    const std::int64_t step = ITEM_ELEMENTS / cost;
    if (count * cost < SHARED_ELEMENTS) {
        if (count > 0) task(0, count);
        return;
    }
    context.pool.run((count + step - 1) / step, [&](std::int64_t item, int) {
        task(item * step, std::min(step, count - item * step));
    });
}

bool all_within(const std::int64_t* numbers, std::int64_t count, std::int64_t stop) {
    return std::all_of(numbers, numbers + count, [=](std::int64_t number) { return number >= 0 && number < stop; });
}

std::int32_t rms_norm(Context& context, const NormArgs& args, std::int64_t rows) {
    over_rows(context, rows, args.n, [&](std::int64_t first, std::int64_t count, int) {
        context.rows.rms_norm(args, first, count);
    });
    return STATUS_DONE;
}

std::int32_t layer_norm(Context& context, const NormArgs& args, std::int64_t rows) {
    over_rows(context, rows, args.n, [&](std::int64_t first, std::int64_t count, int) {
        context.rows.layer_norm(args, first, count);
    });
    return STATUS_DONE;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

PENSTOCK_EXPORT std::int32_t penstock_rms_norm(
    Context* context, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, void* out,
    std::int32_t out_type) {
    const Turn turn(context);
    return rms_norm(*context, {x, nullptr, nullptr, weight, nullptr, eps, n, out, out_type}, rows);
}

PENSTOCK_EXPORT std::int32_t penstock_add_rms_norm(
    Context* context, float* x, const float* h, const float* weight, float eps, std::int64_t rows, std::int64_t n,
    void* out, std::int32_t out_type) {
    const Turn turn(context);
    return rms_norm(*context, {x, h, x, weight, nullptr, eps, n, out, out_type}, rows);
}

PENSTOCK_EXPORT std::int32_t penstock_layer_norm(
    Context* context, const float* x, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type) {
    const Turn turn(context);
    return layer_norm(*context, {x, nullptr, nullptr, weight, bias, eps, n, out, out_type}, rows);
}

PENSTOCK_EXPORT std::int32_t penstock_add_layer_norm(
    Context* context, float* x, const float* h, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type) {
    const Turn turn(context);
    return layer_norm(*context, {x, h, x, weight, bias, eps, n, out, out_type}, rows);
}

PENSTOCK_EXPORT std::int32_t penstock_add(Context* context, float* x, const float* h, std::int64_t count) {
    const Turn turn(context);
    over_elements(*context, count, 1, [=](std::int64_t first, std::int64_t some) {
        context->rows.add(x + first, h + first, some);
    });
    return STATUS_DONE;
}

PENSTOCK_EXPORT std::int32_t penstock_round(
    Context* context, const float* x, std::int64_t count, void* out, std::int32_t out_type) {
    const Turn turn(context);
    over_elements(*context, count, 1, [=](std::int64_t first, std::int64_t some) {
        if (out_type == TYPE_F32) std::copy_n(x + first, some, static_cast<float*>(out) + first);
        if (out_type == TYPE_BF16) context->rows.round(x + first, static_cast<std::uint16_t*>(out) + first, some);
    });
    return STATUS_DONE;
}

PENSTOCK_EXPORT std::int32_t penstock_softcap(Context* context, float* x, float cap, std::int64_t count) {
    const Turn turn(context);
    over_elements(*context, count, SOFTCAP_COST, [=](std::int64_t first, std::int64_t some) {
        context->rows.softcap(x + first, cap, some);
    });
    return STATUS_DONE;
}

// Positions that the table does not have are refused before anything is written.
PENSTOCK_EXPORT std::int32_t penstock_rotary_qkv(
    Context* context, const float* qkv, const std::int64_t* positions, const float* cos_sin,
    std::int64_t num_positions, std::int64_t rotary_dim,
    std::int64_t rows, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, const float* q_norm,
    std::int64_t q_norm_size, const float* k_norm, std::int64_t k_norm_size, float eps, void* q, void* k, void* v,
    std::int32_t out_type) {
    const Turn turn(context);
    if (cos_sin != nullptr && !all_within(positions, rows, num_positions)) return STATUS_OUT_OF_RANGE;
    const HeadNorm q_norms = {q_norm, q_norm_size}, k_norms = {k_norm, k_norm_size};
    const RotaryArgs args = {qkv,     positions, cos_sin, rotary_dim, heads, kv_heads, head_dim,
                             q_norms, k_norms,   eps,     q,          k,     v,        out_type};
    over_rows(*context, rows, (heads + 2 * kv_heads) * head_dim, [&](std::int64_t first, std::int64_t count, int) {
        context->rows.rotary(args, first, count);
    });
    return STATUS_DONE;
}

// Ids that the table does not have are refused before anything is written.
PENSTOCK_EXPORT std::int32_t penstock_embedding(
    Context* context, const std::int64_t* ids, const void* table, std::int32_t table_type,
    std::int64_t table_rows, std::int64_t rows, std::int64_t n, float scale, float* out) {
    const Turn turn(context);
    if (!all_within(ids, rows, table_rows)) return STATUS_OUT_OF_RANGE;
    const EmbeddingArgs args = {ids, table, table_type, n, scale, out};
    over_rows(*context, rows, n, [&](std::int64_t first, std::int64_t count, int) {
        context->rows.embedding(args, first, count);
    });
    return STATUS_DONE;
}

PENSTOCK_EXPORT std::int32_t penstock_route(
    Context* context, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
    std::int32_t renormalize, std::int64_t* ids, float* weights) {
    const Turn turn(context);
    const RouteArgs args = {logits, experts, top_k, renormalize, ids, weights};
    const std::int64_t row_floats = (experts + 15) / 16 * 16;
    float* scratch = nullptr;
    try {
        scratch = static_cast<float*>(context->workspace.take(context->pool.threads() * row_floats * sizeof(float)));
    } catch (...) {
        return STATUS_NO_MEMORY;
    }
    // Each expert costs an exponential and its part of top_k searches.
    over_rows(*context, rows, experts * (4 + top_k), [&](std::int64_t first, std::int64_t count, int thread) {
        context->rows.route(args, first, count, scratch + thread * row_floats);
    });
    return STATUS_DONE;
}
