// Operations on rows between the products, in parallel over blocks of rows; element-wise operations also split rows.

#include <algorithm>
#include <cstring>
#include <limits>

#include "context.h"
#include "products/codes.inc.h"

namespace penstock {
namespace {

constexpr std::int64_t BLOCK_ELEMENTS = 8192;    // per item of work: about 2 microseconds
constexpr std::int64_t SERIAL_ELEMENTS = 32768;  // fewer elements take less time than waking a helper
constexpr std::int64_t UNPACK_COST = 4;           // in simple operations: a cache line for every two bf16 elements
constexpr std::int64_t SOFTCAP_COST = 4;          // in simple operations: an exponential and two divisions
constexpr std::int64_t XIELU_COST = 4;            // in simple operations: an exponential and a polynomial

// Call task(first, count, thread) for blocks of rows or elements. Each row or element costs `cost` simple operations.
template <class Task>
Status over_blocks(Context& context, std::int64_t count, std::int64_t cost, const Task& task) {
    const std::int64_t block = std::max<std::int64_t>(1, BLOCK_ELEMENTS / cost);
    context.pool.parallel_for_blocks(count, block, task, count * cost < SERIAL_ELEMENTS);
    return STATUS_OK;
}

bool all_within(const std::int64_t* numbers, std::int64_t count, std::int64_t stop) {
    return std::all_of(numbers, numbers + count, [=](std::int64_t number) { return number >= 0 && number < stop; });
}

float widen(float value) { return value; }

float widen(std::uint16_t half) {
    const std::uint32_t bits = std::uint32_t{half} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Write scale * row `id` of a packed weight to out [k]. A panel holds GROUP neighbouring elements of K of one row, then
// those of the next row, so a row is read with a stride.
template <class Element, int GROUP>
void unpack_row(const PenstockWeight& weight, std::int64_t id, float scale, float* out) {
    const Element* const row =
        static_cast<const Element*>(weight.values) + id / PANEL * weight.padded_k * PANEL + id % PANEL * GROUP;
    std::int64_t begin = 0, padded = 0;
    for (std::int32_t leaf = 0; leaf < weight.leaves; ++leaf) {
        const Element* from = row + padded * PANEL;
        for (std::int64_t k = begin; k < weight.leaf_ends[leaf]; k += GROUP, from += GROUP * PANEL)
            for (std::int64_t i = 0; i < std::min<std::int64_t>(GROUP, weight.leaf_ends[leaf] - k); ++i)
                out[k + i] = widen(from[i]) * scale;
        begin = weight.leaf_ends[leaf];
        padded = weight.padded_leaf_ends[leaf];
    }
}

// The same for a coded weight, with each operation rounded separately, as in kernels/coding.py.
void decode_row(const PenstockWeight& weight, std::int64_t id, float scale, float* out) {
    const std::int64_t panel = id / PANEL, groups = weight.steps != nullptr ? weight.padded_k / weight.group_size : 0;
    const int column = static_cast<int>(id % PANEL);
    const auto* values = static_cast<const std::uint8_t*>(weight.values) +
                         panel * weight.padded_k * PANEL * weight.code_bits / 8;
    std::int64_t blocks = 0, block = 0, begin = 0, padded = 0;
    const auto blocks_of = [&](std::int64_t elements) {
        return weight.block_size > 0 ? divide_up(elements, weight.block_size) : 0;
    };
    for (std::int32_t leaf = 0; leaf < weight.leaves; ++leaf)
        blocks += blocks_of(weight.padded_leaf_ends[leaf] - (leaf > 0 ? weight.padded_leaf_ends[leaf - 1] : 0));
    const bool integer = weight.kind != KIND_CODED_FLOAT;
    for (std::int32_t leaf = 0; leaf < weight.leaves; ++leaf) {
        for (std::int64_t k = begin; k < weight.leaf_ends[leaf]; ++k) {
            const std::int64_t at = padded + k - begin, group = groups > 0 ? at / weight.group_size : 0;
            const int code = code_at(weight, values, at, column);
            float value = integer ? static_cast<float>(integer_level(weight, code)) : float_level(weight, code);
            const std::int64_t of_block = weight.block_size > 0
                ? (panel * blocks + block + (k - begin) / weight.block_size) * PANEL + column : 0;
            if (weight.steps != nullptr) value *= weight.steps[(panel * groups + group) * PANEL + column];
            if (weight.scales != nullptr) value *= scale_at(weight.scales, weight.scale_type, of_block);
            if (weight.mins != nullptr) {
                float offset = scale_at(weight.mins, weight.scale_type, of_block);
                if (weight.step_mins != nullptr)
                    offset *= weight.step_mins[((panel * groups + group) / 2 * PANEL + column) * 2 + group % 2];
                value += offset;
            }
            if (weight.column_scales != nullptr) value *= weight.column_scales[id];
            out[weight.order != nullptr ? weight.order[k] : k] = value * scale;
        }
        block += blocks_of(weight.padded_leaf_ends[leaf] - padded);
        begin = weight.leaf_ends[leaf];
        padded = weight.padded_leaf_ends[leaf];
    }
}

using NormKernel = void (*)(const NormArgs&, std::int64_t first, std::int64_t rows);

// function: as in CallScope.
Status run_norm(
    Context* context, NormKernel kernel, const NormArgs& args, std::int64_t rows,
    const char* function = __builtin_FUNCTION()) {
    const auto body = [&] {
        return over_blocks(*context, rows, args.n, [&](std::int64_t first, std::int64_t count, int) {
            kernel(args, first, count);
        });
    };
    return run_call(context, body, function);
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_rms_norm(
    Context* context, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, void* out,
    std::int32_t out_type) {
    return run_norm(
        context, context->rows.rms_norm[out_type], {x, nullptr, nullptr, weight, nullptr, eps, n, out}, rows);
}

extern "C" std::int32_t penstock_add_rms_norm(
    Context* context, float* x, const float* h, const float* weight, float eps, std::int64_t rows, std::int64_t n,
    void* out, std::int32_t out_type) {
    return run_norm(context, context->rows.rms_norm[out_type], {x, h, x, weight, nullptr, eps, n, out}, rows);
}

extern "C" std::int32_t penstock_layer_norm(
    Context* context, const float* x, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type) {
    return run_norm(
        context, context->rows.layer_norm[out_type], {x, nullptr, nullptr, weight, bias, eps, n, out}, rows);
}

extern "C" std::int32_t penstock_add_layer_norm(
    Context* context, float* x, const float* h, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type) {
    return run_norm(context, context->rows.layer_norm[out_type], {x, h, x, weight, bias, eps, n, out}, rows);
}

extern "C" std::int32_t penstock_add(Context* context, float* x, const float* h, std::int64_t count) {
    return run_call(context, [&] {
        return over_blocks(*context, count, 1, [=](std::int64_t first, std::int64_t size, int) {
            context->rows.add(x + first, h + first, size);
        });
    });
}

extern "C" std::int32_t penstock_add_gated(
    Context* context, float* x, const float* h, const float* gates, std::int64_t rows, std::int64_t n) {
    return run_call(context, [&] {
        return over_blocks(*context, rows, n, [=](std::int64_t first, std::int64_t count, int) {
            for (std::int64_t row = first; row < first + count; ++row)
                context->rows.add_gated(x + row * n, h + row * n, gates[row], n);
        });
    });
}

extern "C" std::int32_t penstock_round(
    Context* context, const float* x, std::int64_t count, void* out, std::int32_t out_type) {
    return run_call(context, [&] {
        return over_blocks(*context, count, 1, [=](std::int64_t first, std::int64_t size, int) {
            if (out_type == TYPE_F32) std::copy_n(x + first, size, static_cast<float*>(out) + first);
            if (out_type == TYPE_BF16) context->rows.round(x + first, static_cast<std::uint16_t*>(out) + first, size);
        });
    });
}

extern "C" std::int32_t penstock_scale(Context* context, float* x, float factor, std::int64_t count) {
    return run_call(context, [&] {
        return over_blocks(*context, count, 1, [=](std::int64_t first, std::int64_t size, int) {
            context->rows.scale(x + first, factor, size);
        });
    });
}

extern "C" std::int32_t penstock_softcap(Context* context, float* x, float cap, std::int64_t count) {
    return run_call(context, [&] {
        return over_blocks(*context, count, SOFTCAP_COST, [=](std::int64_t first, std::int64_t size, int) {
            context->rows.softcap(x + first, cap, size);
        });
    });
}

extern "C" std::int32_t penstock_xielu(
    Context* context, const float* x, std::int64_t count, float convex, float concave, float linear, float bound,
    void* out, std::int32_t out_type) {
    return run_call(context, [&] {
        const XieluArgs args = {x, convex, concave, linear, bound, out};
        return over_blocks(*context, count, XIELU_COST, [&](std::int64_t first, std::int64_t size, int) {
            context->rows.xielu[out_type](args, first, size);
        });
    });
}

extern "C" std::int32_t penstock_norm_heads(
    Context* context, float* x, const float* weight, float eps, std::int64_t rows, std::int64_t columns,
    std::int64_t heads, std::int64_t head_dim) {
    return run_call(context, [&] {
        return over_blocks(*context, rows, heads * head_dim, [&](std::int64_t first, std::int64_t count, int) {
            for (std::int64_t row = first; row < first + count; ++row)
                context->rows.norm_heads(x + row * columns, weight, eps, heads, head_dim);
        });
    });
}

extern "C" std::int32_t penstock_rotary_qkv(
    Context* context, const float* qkv, const std::int64_t* positions, const float* cos_sin, const float* q_scale,
    std::int64_t num_positions, std::int64_t rotary_dim, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads,
    std::int64_t head_dim, const float* q_norm, std::int64_t q_norm_size, const float* k_norm,
    std::int64_t k_norm_size, const float* v_norm, std::int32_t values_are_keys, float eps, void* q, void* k, void* v,
    std::int32_t out_type) {
    return run_call(context, [&] {
        const bool has_table = cos_sin != nullptr || q_scale != nullptr;
        const std::int64_t end = k == nullptr ? std::numeric_limits<std::int64_t>::max() : num_positions;
        if (has_table && !all_within(positions, rows, end)) return STATUS_OUT_OF_RANGE;
        const RotaryArgs args = {qkv, positions, num_positions - 1, cos_sin, q_scale, rotary_dim, heads, kv_heads,
                                 head_dim, {q_norm, q_norm_size}, {k_norm, k_norm_size}, {v_norm, head_dim},
                                 values_are_keys != 0, eps, q, k, v};
        const std::int64_t cost = (heads + 2 * kv_heads) * head_dim;
        return over_blocks(*context, rows, cost, [&](std::int64_t first, std::int64_t count, int) {
            context->rows.rotary[out_type](args, first, count);
        });
    });
}

extern "C" std::int32_t penstock_embedding(
    Context* context, const std::int64_t* ids, const void* table, std::int32_t table_type, std::int64_t table_rows,
    std::int64_t rows, std::int64_t n, float scale, float* out) {
    return run_call(context, [&] {
        if (!all_within(ids, rows, table_rows)) return STATUS_OUT_OF_RANGE;
        const EmbeddingArgs args = {ids, table, n, scale, out};
        return over_blocks(*context, rows, n, [&](std::int64_t first, std::int64_t count, int) {
            context->rows.embedding[table_type](args, first, count);
        });
    });
}

extern "C" std::int32_t penstock_packed_embedding(
    Context* context, const std::int64_t* ids, const PenstockWeight* weight, std::int64_t rows, float scale,
    float* out) {
    return run_call(context, [&] {
        if (!all_within(ids, rows, weight->n)) return STATUS_OUT_OF_RANGE;
        const auto unpack = weight->code_bits > 0     ? decode_row
                            : weight->kind == KIND_F32 ? unpack_row<float, 1>
                                                       : unpack_row<std::uint16_t, 2>;
        const std::int64_t n = weight->k;
        return over_blocks(*context, rows, n * UNPACK_COST, [&](std::int64_t first, std::int64_t count, int) {
            for (std::int64_t row = first; row < first + count; ++row)
                unpack(*weight, ids[row], scale, out + row * n);
        });
    });
}

extern "C" std::int32_t penstock_route(
    Context* context, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
    std::int32_t scores, const float* bias, std::int64_t groups, std::int64_t top_groups, std::int64_t group_top,
    std::int32_t renormalize, float min_sum, float scale, const float* expert_scale, float threshold, std::int64_t* ids,
    float* weights) {
    return run_call(context, [&] {
        const RouteArgs args = {logits,    experts,     top_k,   scores, bias,         groups,    top_groups,
                                group_top, renormalize, min_sum, scale,  expert_scale, threshold, ids,        weights};
        context->reserve_per_thread(ROUTE_ARRAYS * divide_up(experts, 16) * 16 * std::int64_t{sizeof(float)});
        const std::int64_t cost = experts * (4 + top_k);  // per expert: an exponential, and its part of top_k searches
        return over_blocks(*context, rows, cost, [&](std::int64_t first, std::int64_t count, int thread) {
            context->rows.route(args, first, count, static_cast<float*>(context->per_thread[thread].data()));
        });
    });
}
