// Packing: rows of a weight are rounded, quantised or taken as they are coded, and written in the layout of abi.h, one
// panel after the other on all threads.
//
// Rows may come in any pieces and any order, each exactly once, and the memory may be uninitialised: a row writes its
// column over all of padded_k, and the last row of the weight also writes the padding columns after it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "products/codes.inc.h"
#include "products/leaves.inc.h"
#include "products/linear.h"

namespace penstock {
namespace {

constexpr int QUAD = 4;               // elements of K that codes store together
constexpr int HALF = PANEL / 2;       // this many columns are consecutive rows, even in a gated weight
constexpr std::int64_t STAGGER = 16;  // units between staged rows, so that they fall into different cache sets

// Bytes per element before nibbles are combined.
int element_bytes(std::int32_t kind) { return kind == KIND_F32 ? 4 : kind == KIND_BF16 ? 2 : 1; }

// The byte that represents a weight of zero.
int zero_byte(std::int32_t kind) {
    return kind == KIND_INT8 ? 128 : kind == KIND_INT4 || kind == KIND_INT4_A16 ? 8 : 0;
}

// The arrays of coded rows that penstock_pack_codes is given, or those of one row, with `blocks` and `groups` elements
// per row; or null.
struct CodedArrays {
    const std::uint8_t* codes;
    const char* scales;
    const char* mins;
    const std::uint8_t* steps;
    const std::uint8_t* step_mins;
    const float* column_scales;
    std::int64_t blocks, groups;

    CodedArrays of_row(std::int64_t row, std::int64_t k, std::int64_t scale_bytes) const {
        const auto at = [row](auto* array, std::int64_t size) { return array == nullptr ? array : array + row * size; };
        return {at(codes, k), at(scales, blocks * scale_bytes), at(mins, blocks * scale_bytes), at(steps, groups),
                at(step_mins, groups), at(column_scales, 1), blocks, groups};
    }
};

// Read values (PenstockBits) of each of `blocks` blocks of so many bytes, `each` values per block, and add `offset`.
void read_values(const std::uint8_t* stored, std::int64_t blocks, std::int64_t bytes, const PenstockBits* bits,
                 int count, int offset, std::uint8_t* out, std::int64_t each) {
    typedef std::uint64_t Words __attribute__((vector_size(16), aligned(1), may_alias));
    constexpr int WIDTH = sizeof(Words);
    std::memset(out, 0, static_cast<std::size_t>(blocks * each));
    for (const PenstockBits* item = bits; item < bits + count; ++item) {
        const PenstockBits b = *item;
        const unsigned mask = b.mask & 255u >> b.right & 255u >> b.left;  // nothing crosses into another byte
        const std::uint64_t of_words = mask * std::uint64_t{0x0101010101010101};
        const std::uint8_t* from = stored + b.first;
        std::uint8_t* to = out + b.to;
        for (std::int64_t block = 0; block < blocks; ++block, from += bytes, to += each) {
            int i = 0;
            for (; b.stride == 1 && i + WIDTH <= b.count; i += WIDTH)
                *reinterpret_cast<Words*>(to + i) |=
                    (*reinterpret_cast<const Words*>(from + i) >> b.right & of_words) << b.left;
            for (; i < b.count; ++i)
                to[i * b.stride] = static_cast<std::uint8_t>(to[i * b.stride] | (from[i] >> b.right & mask) << b.left);
        }
    }
    for (std::int64_t i = 0; offset != 0 && i < blocks * each; ++i) out[i] = static_cast<std::uint8_t>(out[i] + offset);
}

// 2^(exponent - 128) as bfloat16, which is subnormal below 2^-126.
std::uint16_t power_of_two(int exponent) {
    return static_cast<std::uint16_t>(exponent > 1 ? (exponent - 1) << 7 : 0x20 << exponent);
}

// One call of penstock_pack_rows, penstock_pack_codes or penstock_pack_blocks.
struct PackJob {
    const PenstockWeight& weight;
    const PackKernels& kernels;
    std::int64_t first, end;  // rows of the weight
    std::int64_t units;       // per staged row
    CodedArrays coded{};      // no codes: rows of floats, or of blocks
    const PenstockBlockForm* form = nullptr;
    const char* rows = nullptr;
    std::int32_t type = 0;
    const float* magnitudes = nullptr;  // magnitudes of the weight's rows, or null
    std::int64_t blocks = 0;            // of a panel, if it is coded
    std::atomic<bool> quantisable{true};

    // Bytes of the memory for a panel: the staged rows, and the arrays of a row of blocks.
    std::int64_t scratch_bytes() const {
        const std::int64_t of_row = form == nullptr ? 0 : weight.k + 4 * coded.blocks + 2 * coded.groups;
        return HALF * (units + STAGGER) * UNIT_BYTES + of_row;
    }

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
                stage(row, column, out, reinterpret_cast<std::uint8_t*>(staged + HALF * (units + STAGGER)));
            from = std::min(from, at);
            to = at + 1;
        }
        if (from >= to) return;
        const std::uint32_t* rows_of_half = staged + from * (units + STAGGER);
        const int bits = weight_bits(weight), columns = to - from;
        auto* values = static_cast<std::uint32_t*>(weight.values) + panel * weight.padded_k * bits;
        if (bits >= 8) {
            kernels.interleave(rows_of_half, units + STAGGER, columns, units, values + half * HALF + from);
            return;
        }
        const std::int64_t quad = std::int64_t{bits} * QUAD;  // words of a quad of a panel
        kernels.interleave_nibbles(rows_of_half, units + STAGGER, columns, units, half, values + from, quad);
        if (bits == 6)
            kernels.interleave_high_bits(
                rows_of_half, units + STAGGER, from, columns, units, half * HALF, values + HALF, quad);
    }

    void stage(std::int64_t row, std::int64_t column, std::uint8_t* out, std::uint8_t* scratch) {
        if (weight.padded_k != weight.k) stage_padding(column, out);
        if (form != nullptr) return stage_codes(unpack_blocks(row - first, scratch), column, out);
        if (coded.codes != nullptr)
            return stage_codes(coded.of_row(row - first, weight.k, scale_bytes()), column, out);
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

    // Take a row of blocks apart.
    CodedArrays unpack_blocks(std::int64_t row, std::uint8_t* scratch) const {
        const std::int64_t size = weight.block_size, groups = coded.groups / coded.blocks;
        std::uint8_t* const codes = scratch;
        auto* const scales = reinterpret_cast<std::uint16_t*>(codes + weight.k);
        std::uint16_t* const mins = scales + coded.blocks;
        auto* const steps = reinterpret_cast<std::uint8_t*>(mins + coded.blocks);
        std::uint8_t* const step_mins = steps + coded.groups;
        const PenstockBits *of_steps = form->bits + form->codes, *of_step_mins = of_steps + form->steps;
        const std::int64_t count = coded.blocks, bytes = form->bytes;
        const auto* block = reinterpret_cast<const std::uint8_t*>(rows) + row * count * bytes;
        read_values(block, count, bytes, form->bits, form->codes, form->code_offset, codes, size);
        read_values(block, count, bytes, of_steps, form->steps, form->step_offset, steps, groups);
        read_values(block, count, bytes, of_step_mins, form->step_mins, 0, step_mins, groups);
        for (std::int64_t at = 0; at < count; ++at, block += bytes) {
            if (form->is_exponent)
                scales[at] = power_of_two(block[form->scale]);
            else
                std::memcpy(scales + at, block + form->scale, sizeof *scales);
            if (weight.mins == nullptr) continue;
            std::memcpy(mins + at, block + form->min, sizeof *mins);
            if (form->is_subtracted) mins[at] ^= 0x8000;
        }
        return {codes, reinterpret_cast<const char*>(scales), reinterpret_cast<const char*>(mins), steps, step_mins,
                nullptr, coded.blocks, coded.groups};
    }

    void stage_codes(const CodedArrays& row, std::int64_t column, std::uint8_t* out) {
        std::uint8_t largest = 0;
        const std::uint8_t magnitude = weight.kind == KIND_CODED_FLOAT && weight.code_bits == 8 ? 127 : 255;
        for (std::int64_t k = 0; k < weight.k; ++k) {
            const std::uint8_t code = row.codes[k] & magnitude;
            largest = code > largest ? code : largest;
        }
        bool finite = largest <= weight.largest_code;
        std::int64_t block = 0;
        each_leaf(weight, [&](const LeafRange& leaf) {
            std::memcpy(out + leaf.padded_first, row.codes + leaf.first, static_cast<std::size_t>(leaf.count));
            if (weight.block_size == 0) return;
            const std::int64_t from = leaf.first / weight.block_size;
            const std::int64_t count = divide_up(leaf.count, weight.block_size);
            if (weight.scales != nullptr) finite &= copy_scales(row.scales, weight.scales, from, count, column, block);
            if (weight.mins != nullptr) finite &= copy_scales(row.mins, weight.mins, from, count, column, block);
            block += divide_up(leaf.padded, weight.block_size);
            if (weight.steps == nullptr) return;
            copy_steps(row, leaf, column);
        });
        if (weight.column_scales != nullptr) {
            weight.column_scales[column] = *row.column_scales;
            finite &= std::isfinite(*row.column_scales);
        }
        if (!finite) quantisable = false;
    }

    // Copy a row's scales of blocks from .. from + count - 1 to block `to` on. Return whether they are finite.
    bool copy_scales(const char* scales, void* array, std::int64_t from, std::int64_t count, std::int64_t column,
                     std::int64_t to) const {
        if (weight.scale_type == SCALE_F32)
            return copy_scales<std::uint32_t>(scales, array, from, count, column, to, 0x7f800000);
        const std::uint16_t exponent = weight.scale_type == SCALE_F16 ? 0x7c00 : 0x7f80;
        return copy_scales<std::uint16_t>(scales, array, from, count, column, to, exponent);
    }

    template <class Bits>
    bool copy_scales(const char* of_row, void* array, std::int64_t from, std::int64_t count, std::int64_t column,
                     std::int64_t to, Bits exponent) const {
        const Bits* scales = reinterpret_cast<const Bits*>(of_row) + from;
        Bits* out = static_cast<Bits*>(array) + ((column / PANEL) * blocks + to) * PANEL + column % PANEL;
        bool finite = true;
        for (std::int64_t at = 0; at < count; ++at) {
            out[at * PANEL] = scales[at];
            finite &= (scales[at] & exponent) != exponent;
        }
        return finite;
    }

    // Copy the steps of a leaf.
    void copy_steps(const CodedArrays& row, const LeafRange& leaf, std::int64_t column) const {
        const int size = weight.group_size;
        const std::int64_t from = leaf.first / size, to = leaf.padded_first / size, count = divide_up(leaf.count, size);
        std::int8_t* const steps = steps_of(column) + to * PANEL;
        std::uint8_t* const step_mins = weight.step_mins == nullptr ? nullptr : step_mins_of(column);
        for (std::int64_t at = 0; at < count; ++at) steps[at * PANEL] = static_cast<std::int8_t>(row.steps[from + at]);
        for (std::int64_t at = 0; step_mins != nullptr && at < count; ++at)
            step_mins[step_min_at(to + at)] = row.step_mins[from + at];
    }

    // The step of the first group of a column. That of the next group is PANEL elements further on.
    std::int8_t* steps_of(std::int64_t column) const {
        return weight.steps + column / PANEL * (weight.padded_k / weight.group_size) * PANEL + column % PANEL;
    }

    // The step_min of the first group of a column, and where that of another group is.
    std::uint8_t* step_mins_of(std::int64_t column) const {
        const std::int64_t pairs = weight.padded_k / weight.group_size / 2;
        return weight.step_mins + (column / PANEL * pairs * PANEL + column % PANEL) * 2;
    }

    static std::int64_t step_min_at(std::int64_t group) { return group / 2 * PANEL * 2 + group % 2; }

    // Write a column of zero weights with zero scales.
    void stage_padding(std::int64_t column, std::uint8_t* out) {
        std::memset(out, zero_byte(weight.kind), static_cast<std::size_t>(units) * UNIT_BYTES);
        if (weight.column_scales != nullptr) weight.column_scales[column] = 0;
        const std::int64_t element = scale_bytes();
        for (void* array : {weight.scales, weight.mins}) {
            char* to = static_cast<char*>(array) + (column / PANEL * blocks * PANEL + column % PANEL) * element;
            for (std::int64_t block = 0; array != nullptr && block < blocks; ++block)
                std::memset(to + block * PANEL * element, 0, static_cast<std::size_t>(element));
        }
        const std::int64_t groups = weight.steps == nullptr ? 0 : weight.padded_k / weight.group_size;
        for (std::int64_t group = 0; group < groups; ++group) {
            steps_of(column)[group * PANEL] = 0;
            if (weight.step_mins != nullptr) step_mins_of(column)[step_min_at(group)] = 0;
        }
        if (weight.group_scales == nullptr) return;
        std::uint16_t* scales = group_scale(column);
        for (std::int64_t at = 0; at < weight.padded_k / weight.group_size; ++at) scales[at * PANEL] = 0;
    }

    std::int64_t scale_bytes() const { return weight.scale_type == SCALE_F32 ? 4 : 2; }

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
    const std::int64_t bytes = weight.panels * weight.padded_k * PANEL * weight_bits(weight) / 8;
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

// The blocks of a panel of a coded weight.
std::int64_t blocks_of(const PenstockWeight& weight) {
    std::int64_t count = 0;
    each_leaf(weight, [&](const LeafRange& leaf) {
        if (weight.block_size > 0) count += divide_up(leaf.padded, weight.block_size);
    });
    return count;
}

// Pack the rows of a job, whose `weight` and rows are set.
Status pack_all(Context& context, PackJob& job) {
    const PenstockWeight& weight = job.weight;
    if (job.first >= job.end) return STATUS_OK;
    if (job.first == 0) touch_first(context, weight);
    context.reserve_per_thread(job.scratch_bytes());
    const PanelRange range = panels_of(weight, job.first, job.end);
    context.pool.parallel_for(range.end - range.first, [&](std::int64_t item, int thread) {
        job.pack_panel(range.first + item, static_cast<std::uint32_t*>(context.per_thread[thread].data()));
    });
    return job.quantisable ? STATUS_OK : STATUS_NOT_QUANTISABLE;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_pack_rows(
    Context* context, PenstockWeight* weight, const void* rows, std::int32_t type, std::int64_t first_row,
    std::int64_t num_rows, const float* magnitudes) {
    return run_call(context, [&] {
        PackJob job{*weight, context->pack, first_row, first_row + num_rows,
                    weight->padded_k * element_bytes(weight->kind) / UNIT_BYTES};
        job.rows = static_cast<const char*>(rows);
        job.type = type;
        job.magnitudes = magnitudes;
        return pack_all(*context, job);
    });
}

extern "C" std::int32_t penstock_pack_codes(
    Context* context, PenstockWeight* weight, const std::uint8_t* codes, const void* scales, const void* mins,
    const std::int8_t* steps, const std::uint8_t* step_mins, const float* column_scales, std::int64_t blocks,
    std::int64_t groups, std::int64_t first_row, std::int64_t num_rows) {
    return run_call(context, [&] {
        PackJob job{*weight, context->pack, first_row, first_row + num_rows, weight->padded_k / UNIT_BYTES};
        job.coded = {codes, static_cast<const char*>(scales), static_cast<const char*>(mins),
                     reinterpret_cast<const std::uint8_t*>(steps), step_mins, column_scales, blocks, groups};
        job.blocks = blocks_of(*weight);
        return pack_all(*context, job);
    });
}

extern "C" std::int32_t penstock_pack_blocks(
    Context* context, PenstockWeight* weight, const std::uint8_t* blocks, const PenstockBlockForm* form,
    std::int64_t first_row, std::int64_t num_rows) {
    return run_call(context, [&] {
        PackJob job{*weight, context->pack, first_row, first_row + num_rows, weight->padded_k / UNIT_BYTES};
        job.form = form;
        job.rows = reinterpret_cast<const char*>(blocks);
        job.coded.blocks = weight->k / weight->block_size;
        job.coded.groups = weight->steps == nullptr ? 0 : weight->k / weight->group_size;
        job.blocks = blocks_of(*weight);
        return pack_all(*context, job);
    });
}
