// Packing: rows of a weight are rounded or quantised and written where abi.h says, panel by panel on all threads.
//
// Rows may come in any pieces and any order, each once. Memory may hold anything before: a row's own columns are
// written through all of padded_k, and the columns that stand for no row together with the last row before them. So a
// weight is complete when each of its rows has been packed.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "abi.h"
#include "context.h"
#include "products/pack_kernels.h"

namespace penstock {
namespace {

constexpr int HALF = PANEL / 2;       // columns whose rows follow one another, in a gated weight too
constexpr std::int64_t STAGGER = 16;  // units between staged rows, so that they do not share cache sets

// Bytes that an element takes before nibbles are joined.
int element_bytes(std::int32_t kind) { return kind == KIND_F32 ? 4 : kind == KIND_BF16 ? 2 : 1; }

// The byte that a weight of zero consists of.
int zero_byte(std::int32_t kind) {
    return kind == KIND_INT8 ? 128 : kind == KIND_INT4 || kind == KIND_INT4_A16 ? 8 : 0;
}

// One call of penstock_pack_rows.
struct Job {
    const PenstockWeight& weight;
    const PackKernels& kernels;
    const char* rows;
    std::int32_t type;
    std::int64_t first, end;  // rows of the weight
    std::int64_t units;       // of a staged row
    std::atomic<bool> quantisable{true};

    void pack_panel(std::int64_t panel, std::uint32_t* staged);

  private:
    void pack_half(std::int64_t panel, int half, std::uint32_t* staged);
    void stage(std::int64_t row, std::int64_t column, std::uint8_t* out);
    void stage_float(const char* x, std::uint8_t* out);
    void stage_int8(const char* x, std::int64_t column, std::uint8_t* out);
    void stage_int4(const char* x, std::int64_t column, std::uint8_t* out);
    void stage_padding(std::int64_t column, std::uint8_t* out);
    std::uint16_t* group_scale(std::int64_t column) const;
    template <class Stage>
    void each_leaf(const Stage& stage);
};

// Calls stage(first element, elements, first position in the padded K) for every leaf.
template <class Stage>
void Job::each_leaf(const Stage& stage) {
    std::int64_t start = 0, to = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        stage(start, weight.leaf_ends[leaf] - start, to);
        start = weight.leaf_ends[leaf];
        to = weight.padded_leaf_ends[leaf];
    }
}

// The scale of a column's first group; the next group's is PANEL further.
std::uint16_t* Job::group_scale(std::int64_t column) const {
    const std::int64_t groups = weight.padded_k / weight.group_size;
    return weight.group_scales + column / PANEL * groups * PANEL + column % PANEL;
}

void Job::stage_float(const char* x, std::uint8_t* out) {
    const int size = type_bytes(type);
    each_leaf([&](std::int64_t start, std::int64_t count, std::int64_t to) {
        if (weight.kind == KIND_F32)
            kernels.to_f32(x + start * size, type, count, reinterpret_cast<float*>(out) + to);
        else
            kernels.to_bf16(x + start * size, type, count, reinterpret_cast<std::uint16_t*>(out) + to);
    });
}

void Job::stage_int8(const char* x, std::int64_t column, std::uint8_t* out) {
    constexpr float SMALLEST = 0x1p-100f;
    const int size = type_bytes(type);
    const float most = kernels.abs_max(x, type, weight.k);
    if (!(most < TOO_GREAT)) quantisable = false;
    const bool present = most >= SMALLEST && most < TOO_GREAT;
    weight.column_scales[column] = present ? most / 127 : 0;
    each_leaf([&](std::int64_t start, std::int64_t count, std::int64_t to) {
        if (present)
            kernels.to_int8(x + start * size, type, count, 127 / most, out + to);
        else
            std::memset(out + to, zero_byte(weight.kind), static_cast<std::size_t>(count));
    });
}

void Job::stage_int4(const char* x, std::int64_t column, std::uint8_t* out) {
    const int size = type_bytes(type), group = weight.group_size;
    std::uint16_t* scales = group_scale(column);
    bool all_fit = true;
    each_leaf([&](std::int64_t start, std::int64_t count, std::int64_t to) {
        for (std::int64_t at = 0; at < count; at += group) {
            const int length = static_cast<int>(std::min<std::int64_t>(group, count - at));
            scales[(to + at) / group * PANEL] =
                kernels.to_int4(x + (start + at) * size, type, length, out + to + at, all_fit);
        }
    });
    if (!all_fit) quantisable = false;
}

// A row of the weight, or nothing, as a column of weights of zero with scales of zero.
void Job::stage_padding(std::int64_t column, std::uint8_t* out) {
    std::memset(out, zero_byte(weight.kind), static_cast<std::size_t>(units) * UNIT_BYTES);
    if (weight.column_scales != nullptr) weight.column_scales[column] = 0;
    if (weight.group_scales == nullptr) return;
    std::uint16_t* scales = group_scale(column);
    for (std::int64_t at = 0; at < weight.padded_k / weight.group_size; ++at) scales[at * PANEL] = 0;
}

void Job::stage(std::int64_t row, std::int64_t column, std::uint8_t* out) {
    if (weight.padded_k != weight.k) stage_padding(column, out);
    const char* x = rows + (row - first) * weight.k * type_bytes(type);
    if (weight.kind == KIND_INT8)
        stage_int8(x, column, out);
    else if (weight.kind == KIND_INT4 || weight.kind == KIND_INT4_A16)
        stage_int4(x, column, out);
    else
        stage_float(x, out);
}

void Job::pack_half(std::int64_t panel, int half, std::uint32_t* staged) {
    // Rows of this half's columns, counted among those that share it: a gated weight has gate's and up's.
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
    const std::uint32_t* taken = staged + from * (units + STAGGER);
    const bool nibbles = weight.group_size != 0;
    auto* values = static_cast<std::uint32_t*>(weight.values) + panel * units * (nibbles ? HALF : PANEL);
    if (nibbles)
        kernels.weave_nibbles(taken, units + STAGGER, to - from, units, half, values + from);
    else
        kernels.weave(taken, units + STAGGER, to - from, units, values + half * HALF + from);
}

void Job::pack_panel(std::int64_t panel, std::uint32_t* staged) {
    pack_half(panel, 0, staged);
    pack_half(panel, 1, staged);
}

// Panels that rows first .. end - 1 of a weight, or of gate or up, touch; with the last row, all that are left.
struct PanelRange {
    std::int64_t first, end;
};

PanelRange touched(const PenstockWeight& weight, std::int64_t first, std::int64_t end) {
    if (!weight.gated) return {first / PANEL, (end + PANEL - 1) / PANEL};
    const std::int64_t half = weight.n / 2;
    if (first < half && end > half) return {0, weight.panels};
    const std::int64_t less = first < half ? 0 : half;
    return {(first - less) / HALF, (end - less + HALF - 1) / HALF};
}

}  // namespace
}  // namespace penstock

using namespace penstock;

// Rows first_row .. first_row + num_rows - 1 of a weight, [num_rows, k] of a type. Each row is to be packed once.
// STATUS_NOT_QUANTISABLE is for quantised kinds alone.
PENSTOCK_EXPORT std::int32_t penstock_pack_rows(
    Context* context, PenstockWeight* weight, const void* rows, std::int32_t type, std::int64_t first_row,
    std::int64_t num_rows) {
    const Turn turn(context);
    if (num_rows <= 0) return 0;
    const std::int64_t units = weight->padded_k * element_bytes(weight->kind) / UNIT_BYTES;
    const std::int64_t bytes = HALF * (units + STAGGER) * UNIT_BYTES;
    try {
        for (int thread = 0; thread < context->pool.threads(); ++thread) context->per_thread[thread].take(bytes);
    } catch (...) {
        return STATUS_NO_MEMORY;
    }
    Job job{*weight, context->pack, static_cast<const char*>(rows), type, first_row,
            first_row + num_rows, units};
    const PanelRange range = touched(*weight, job.first, job.end);
    context->pool.run(range.end - range.first, [&](std::int64_t item, int thread) {
        job.pack_panel(range.first + item, static_cast<std::uint32_t*>(context->per_thread[thread].take(bytes)));
    });
    return job.quantisable ? STATUS_DONE : STATUS_NOT_QUANTISABLE;
}
