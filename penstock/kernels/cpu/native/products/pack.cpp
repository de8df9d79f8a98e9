// Packing: rows of a weight are rounded or quantised and written in the layout of abi.h, panel by panel on all threads.
//
// Rows may come in any pieces and any order, each exactly once, and the memory may be uninitialised: a row writes its
// column over all of padded_k, and the last row of the weight also writes the padding columns after it.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "context.h"
#include "products/leaves.inc.h"

namespace penstock {
namespace {

constexpr int HALF = PANEL / 2;       // this many columns are consecutive rows, even in a gated weight
constexpr std::int64_t STAGGER = 16;  // units between staged rows, so that they fall into different cache sets

// Bytes per element before nibbles are combined.
int element_bytes(std::int32_t kind) { return kind == KIND_F32 ? 4 : kind == KIND_BF16 ? 2 : 1; }

// The byte that represents a weight of zero.
int zero_byte(std::int32_t kind) {
    return kind == KIND_INT8 ? 128 : kind == KIND_INT4 || kind == KIND_INT4_A16 ? 8 : 0;
}

// One call of penstock_pack_rows.
struct PackJob {
    const PenstockWeight& weight;
    const PackKernels& kernels;
    const char* rows;
    std::int32_t type;
    std::int64_t first, end;  // rows of the weight
    std::int64_t units;       // per staged row
    const float* magnitudes;  // magnitudes of the weight's rows, or null
    std::atomic<bool> quantisable{true};

    void pack_panel(std::int64_t panel, std::uint32_t* staged) {
        pack_half(panel, 0, staged);
        pack_half(panel, 1, staged);
    }

  private:
    void pack_half(std::int64_t panel, int half, std::uint32_t* staged) {
        // The row of this half's first column, within the gate rows or up rows if the weight is gated.
        const std::int64_t index = weight.gated ? panel * HALF : panel * PANEL + half * HALF;
        const std::int64_t length = weight.gated ? weight.n / 2 : weight.n;
        const std::int64_t offset = weight.gated ? half * length : 0;
        int from = HALF, to = 0;
        for (int at = 0; at < HALF; ++at) {
            const bool padding = index + at >= length;
            const std::int64_t row = offset + (padding ? length - 1 : index + at);
            if (row < first || row >= end) continue;
            auto* out = reinterpret_cast<std::uint8_t*>(staged + at * (units + STAGGER));
            const std::int64_t column = panel * PANEL + half * HALF + at;
            if (padding)
                stage_padding(column, out);
            else
                stage(row, column, out);
            from = std::min(from, at);
            to = at + 1;
        }
        if (from >= to) return;
        const std::uint32_t* rows_of_half = staged + from * (units + STAGGER);
        const bool nibbles = weight.group_size != 0;
        auto* values = static_cast<std::uint32_t*>(weight.values) + panel * units * (nibbles ? HALF : PANEL);
        if (nibbles)
            kernels.interleave_nibbles(rows_of_half, units + STAGGER, to - from, units, half, values + from);
        else
            kernels.interleave(rows_of_half, units + STAGGER, to - from, units, values + half * HALF + from);
    }

    void stage(std::int64_t row, std::int64_t column, std::uint8_t* out) {
        if (weight.padded_k != weight.k) stage_padding(column, out);
        const char* x = rows + (row - first) * weight.k * type_bytes(type);
        if (weight.kind == KIND_INT8)
            stage_int8(x, row, column, out);
        else if (weight.kind == KIND_INT4 || weight.kind == KIND_INT4_A16)
            stage_int4(x, column, out);
        else
            stage_float(x, out);
    }

    void stage_float(const char* x, std::uint8_t* out) {
        const int size = type_bytes(type);
        each_leaf(weight, [&](const LeafRange& leaf) {
            const char* from = x + leaf.first * size;
            if (weight.kind == KIND_F32)
                kernels.to_f32(from, type, leaf.count, reinterpret_cast<float*>(out) + leaf.padded_first);
            else
                kernels.to_bf16(from, type, leaf.count, reinterpret_cast<std::uint16_t*>(out) + leaf.padded_first);
        });
    }

    void stage_int8(const char* x, std::int64_t row, std::int64_t column, std::uint8_t* out) {
        constexpr float SMALLEST = 0x1p-100f;
        const int size = type_bytes(type);
        const float magnitude = magnitudes != nullptr ? magnitudes[row] : kernels.abs_max(x, type, weight.k);
        if (!(magnitude < MAGNITUDE_LIMIT)) quantisable = false;
        const bool nonzero = magnitude >= SMALLEST && magnitude < MAGNITUDE_LIMIT;
        weight.column_scales[column] = nonzero ? magnitude / 127 : 0;
        each_leaf(weight, [&](const LeafRange& leaf) {
            if (nonzero)
                kernels.to_int8(x + leaf.first * size, type, leaf.count, 127 / magnitude, out + leaf.padded_first);
            else
                std::memset(out + leaf.padded_first, zero_byte(weight.kind), static_cast<std::size_t>(leaf.count));
        });
    }

    void stage_int4(const char* x, std::int64_t column, std::uint8_t* out) {
        const int size = type_bytes(type), group = weight.group_size;
        std::uint16_t* scales = group_scale(column);
        bool all_fit = true;
        each_leaf(weight, [&](const LeafRange& leaf) {
            for (std::int64_t at = 0; at < leaf.count; at += group) {
                const int length = static_cast<int>(std::min<std::int64_t>(group, leaf.count - at));
                const std::int64_t to = leaf.padded_first + at;
                scales[to / group * PANEL] =
                    kernels.to_int4(x + (leaf.first + at) * size, type, length, out + to, all_fit);
            }
        });
        if (!all_fit) quantisable = false;
    }

    // Write a column of zero weights with zero scales.
    void stage_padding(std::int64_t column, std::uint8_t* out) {
        std::memset(out, zero_byte(weight.kind), static_cast<std::size_t>(units) * UNIT_BYTES);
        if (weight.column_scales != nullptr) weight.column_scales[column] = 0;
        if (weight.group_scales == nullptr) return;
        std::uint16_t* scales = group_scale(column);
        for (std::int64_t at = 0; at < weight.padded_k / weight.group_size; ++at) scales[at * PANEL] = 0;
    }

    // The scale of the first group of a column. That of the next group is PANEL elements further on.
    std::uint16_t* group_scale(std::int64_t column) const {
        const std::int64_t groups = weight.padded_k / weight.group_size;
        return weight.group_scales + column / PANEL * groups * PANEL + column % PANEL;
    }
};

// Make the system allocate the memory of a weight to be packed: each page is touched by the thread that will read it,
// because threads take neighbouring panels here as in products. With several NUMA nodes, each node then holds the pages
// that its cores read.
void touch_first(Context& context, const PenstockWeight& weight) {
    constexpr std::int64_t PAGE = 4096, BLOCK = std::int64_t{2} << 20;
    char* const memory = static_cast<char*>(weight.values);
    const bool nibbles = weight.group_size != 0;
    const std::int64_t bytes = weight.panels * weight.padded_k * (nibbles ? HALF : PANEL * element_bytes(weight.kind));
    const auto touch = [=](std::int64_t first, std::int64_t size, int) {
        for (std::int64_t at = first; at < first + size; at += PAGE) {
            __atomic_fetch_or(memory + at, 0, __ATOMIC_RELAXED);
        }
    };
    context.pool.parallel_for_blocks(bytes, BLOCK, touch);
}

// The panels that contain rows first .. end - 1 of a weight and, for the last row, the padding after it.
struct PanelRange {
    std::int64_t first, end;
};

PanelRange panels_of(const PenstockWeight& weight, std::int64_t first, std::int64_t end) {
    if (!weight.gated) return {first / PANEL, divide_up(end, PANEL)};
    const std::int64_t half = weight.n / 2;
    if (first < half && end > half) return {0, weight.panels};
    const std::int64_t base = first < half ? 0 : half;
    return {(first - base) / HALF, divide_up(end - base, HALF)};
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_pack_rows(
    Context* context, PenstockWeight* weight, const void* rows, std::int32_t type, std::int64_t first_row,
    std::int64_t num_rows, const float* magnitudes) {
    return run_call(context, [&] {
        if (num_rows <= 0) return STATUS_OK;
        if (first_row == 0) touch_first(*context, *weight);
        const std::int64_t units = weight->padded_k * element_bytes(weight->kind) / UNIT_BYTES;
        context->reserve_per_thread(HALF * (units + STAGGER) * UNIT_BYTES);
        PackJob job{*weight, context->pack, static_cast<const char*>(rows), type, first_row, first_row + num_rows,
                    units, magnitudes};
        const PanelRange range = panels_of(*weight, job.first, job.end);
        context->pool.parallel_for(range.end - range.first, [&](std::int64_t item, int thread) {
            job.pack_panel(range.first + item, static_cast<std::uint32_t*>(context->per_thread[thread].data()));
        });
        return job.quantisable ? STATUS_OK : STATUS_NOT_QUANTISABLE;
    });
}
