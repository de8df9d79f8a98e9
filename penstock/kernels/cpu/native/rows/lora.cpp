// LoRA: adds to the result of a product what the adapter of each row says. Rows are grouped by their adapter, so that
// its matrices are read once for all of them; a row's bits do not depend on its group.

#include <algorithm>

#include "context.h"

namespace penstock {
namespace {

constexpr std::int64_t ROW_BLOCK = 64;       // rows of an item
constexpr std::int64_t SHRINK_COLUMNS = 4;   // columns of an item, each of which reads K elements
constexpr std::int64_t EXPAND_COLUMNS = 256;
constexpr std::int64_t SERIAL_PRODUCTS = 256 << 10;  // fewer take less time than waking a helper

// Rows with one adapter.
struct Group {
    std::int32_t slot;
    std::int32_t first;  // item, numbered over all groups
    std::int32_t begin, end;  // in `order`
};

struct Groups {
    Group* group;
    std::int32_t* order;  // rows, group after group
    std::int32_t count, items;
    std::int64_t columns;  // over all rows
};

// Group the rows whose adapter does anything here. columns(slot): how many it computes.
// Throws std::bad_alloc.
template <class Columns>
Groups grouped(
    Context& context, const PenstockLora& lora, const std::int32_t* slots, std::int64_t rows, std::int64_t step,
    const Columns& columns) {
    BumpAllocator counter(nullptr);
    const auto allocate = [&](BumpAllocator& memory) {
        return Groups{memory.allocate<Group>(lora.slots), memory.allocate<std::int32_t>(rows), 0, 0, 0};
    };
    allocate(counter);
    BumpAllocator memory(context.workspace.reserve(counter.bytes()));
    Groups found = allocate(memory);
    std::int32_t used = 0;
    for (std::int32_t slot = 0; slot < lora.slots; ++slot) {
        const std::int64_t width = columns(slot);
        if (width == 0) continue;
        const std::int32_t begin = used;
        for (std::int64_t row = 0; row < rows; ++row)
            if (slots[row] == slot) found.order[used++] = static_cast<std::int32_t>(row);
        if (used == begin) continue;
        found.group[found.count++] = {slot, found.items, begin, used};
        found.items += static_cast<std::int32_t>(divide_up(used - begin, ROW_BLOCK) * divide_up(width, step));
        found.columns += (used - begin) * width;
    }
    return found;
}

// Call kernel(args) for every block of rows and columns of every group. depth: products that a column of a row adds.
template <class Columns>
Status for_groups(
    Context& context, void (*kernel)(const LoraArgs&), LoraArgs args, const std::int32_t* slots, std::int64_t rows,
    std::int64_t step, std::int64_t depth, const Columns& columns) {
    const bool known = std::all_of(slots, slots + rows, [&](std::int32_t slot) {
        return slot >= -1 && slot < args.lora->slots;
    });
    if (!known) return STATUS_OUT_OF_RANGE;
    if (std::all_of(slots, slots + rows, [](std::int32_t slot) { return slot < 0; })) return STATUS_OK;
    const Groups groups = grouped(context, *args.lora, slots, rows, step, columns);
    const auto task = [=](std::int64_t item, int) {
        const Group& group = *(std::partition_point(groups.group, groups.group + groups.count, [=](const Group& some) {
            return some.first <= item;
        }) - 1);
        const std::int64_t width = columns(group.slot), blocks = divide_up(width, step), at = item - group.first;
        LoraArgs own = args;
        own.slot = group.slot;
        own.row = groups.order + group.begin + at / blocks * ROW_BLOCK;
        own.rows = std::min(ROW_BLOCK, group.end - group.begin - at / blocks * ROW_BLOCK);
        own.begin = at % blocks * step;
        own.end = std::min(own.begin + step, width);
        kernel(own);
    };
    context.pool.parallel_for(groups.items, task, groups.columns * depth < SERIAL_PRODUCTS);
    return STATUS_OK;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_lora_shrink(
    Context* context, const PenstockLora* lora, const std::int32_t* slots, std::int64_t rows, const void* x,
    float* hidden) {
    return run_call(context, [&] {
        const LoraArgs args{lora, 0, nullptr, 0, 0, 0, x, hidden, nullptr, 0};
        const auto columns = [=](std::int64_t slot) { return lora->ranks[slot] * std::int64_t{lora->pieces}; };
        return for_groups(*context, context->rows.lora_shrink[lora->type], args, slots, rows, SHRINK_COLUMNS,
                          lora->k, columns);
    });
}

extern "C" std::int32_t penstock_lora_expand(
    Context* context, const PenstockLora* lora, const std::int32_t* slots, std::int64_t rows, const float* hidden,
    float* out, std::int64_t out_stride) {
    return run_call(context, [&] {
        const LoraArgs args{lora, 0, nullptr, 0, 0, 0, nullptr, const_cast<float*>(hidden), out, out_stride};
        const auto columns = [=](std::int64_t slot) {
            return lora->ranks[slot] > 0 || lora->scaled[slot] != 0 ? lora->n : std::int64_t{0};
        };
        return for_groups(*context, context->rows.lora_expand[lora->type], args, slots, rows, EXPAND_COLUMNS,
                          lora->max_rank, columns);
    });
}

extern "C" std::int32_t penstock_activate(
    Context* context, const float* x, std::int64_t rows, std::int64_t n, std::int32_t activation, std::int32_t gated,
    void* out, std::int32_t out_type) {
    return run_call(context, [&] {
        const ActivateArgs args{x, n, activation, gated != 0, out};
        constexpr std::int64_t COST = 8, BLOCK = 8192;  // in simple operations: an exponential and a division
        const std::int64_t block = std::max<std::int64_t>(1, BLOCK / std::max<std::int64_t>(1, n * COST));
        context->pool.parallel_for_blocks(
            rows, block, [&](std::int64_t first, std::int64_t count, int) {
                context->rows.activate[out_type](args, first, count);
            },
            rows * n * COST < 4 * BLOCK);
        return STATUS_OK;
    });
}
