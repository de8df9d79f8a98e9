// Products with packed weights: splits rows into tiles and columns into panels, and distributes both among threads.
//
// First the rows are packed into tiles; then every item multiplies some tiles with some panels and runs the epilogue.
// The split decides only which thread computes what and when: each output is one micro-kernel's sum over its own row.

#include "products/linear.h"

#include <algorithm>

namespace penstock {

namespace {

// Bytes of weights that an item reads if there are few rows: long enough for the hardware prefetcher, short enough that
// no thread waits long for the last item.
constexpr std::int64_t ITEM_BYTES = 128 << 10;

// With this many operand rows or more, multiplying takes longer than reading the weights from memory.
constexpr std::int64_t REREAD_ROWS = 256;

// Below these limits, waking a helper takes longer than the work.
constexpr std::int64_t SERIAL_BYTES = 128 << 10;    // bytes of weights, counted once per ROWS_PER_READ rows
constexpr std::int64_t ROWS_PER_READ = 8;           // rows that are multiplied about as fast as the weights are read
constexpr std::int64_t SERIAL_ELEMENTS = 32 << 10;  // activations to pack

constexpr std::int64_t OUT_FLOATS = std::int64_t{MAX_TILES} * MAX_TILE_ROWS * PANEL * MAX_PANELS;
constexpr std::int64_t TREE_FLOATS = OUT_FLOATS * TREE_LEVELS;

constexpr std::int64_t FLOATS_PER_LINE = 16;  // per cache line

constexpr std::int64_t SUMS_PER_GROUP = 2;  // at most, per operand row (OperandArgs::sums)

std::int64_t panel_bytes(const PenstockWeight& weight) { return weight.padded_k * PANEL * weight_bits(weight) / 8; }

int slices_of(const PenstockWeight& weight) { return std::max(weight.slices, 1); }

// A product, split into tiles and items.
struct Plan {
    Product product;
    const ProductKernel* kernel;
    int slices;     // operand rows per activation row
    int tile_rows;  // activation rows of a full tile
    int rest_rows;  // activation rows of the last tile if it is not full, else 0
    std::int64_t full_tiles;
    std::int64_t tile_bytes, scales_stride, sums_stride;  // from one tile to the next
    std::int64_t item_panels;
    std::int64_t tile_groups;              // number of items with the same panels
    std::int64_t first_tile, first_item;   // numbered over all products
    char* tiles;
    float* scales;
    std::int32_t* sums;
    char* gathered;  // the rows of each tile with their columns in the weight's order, or null

    std::int64_t tile_count() const { return full_tiles + (rest_rows > 0); }
    std::int64_t item_count() const { return divide_up(product.weight->panels, item_panels) * tile_groups; }
    int max_panels(int rows) const { return std::clamp(kernel->max_panels(rows * slices), 1, MAX_PANELS); }
};

// Panels per item. Few rows stream the weight, with an item for every thread if there are enough panels; many rows keep
// the panels in the cache.
std::int64_t panels_of_item(const Plan& plan, int threads) {
    if (plan.tile_count() > 1) return plan.max_panels(plan.tile_rows);
    const PenstockWeight& weight = *plan.product.weight;
    const std::int64_t most = plan.max_panels(static_cast<int>(plan.product.rows));
    const std::int64_t together = std::clamp<std::int64_t>(weight.panels / threads, 1, most);
    return std::max<std::int64_t>(ITEM_BYTES / panel_bytes(weight) / together, 1) * together;
}

// Activation rows of a full tile.
int rows_of_tile(const ProductKernel& kernel, int slices, std::int64_t rows) {
    const int most = kernel.tile_rows / slices;
    return kernel.even_tiles ? static_cast<int>(divide_up(rows, divide_up(rows, most))) : most;
}

Plan plan_product(const Context& context, const Product& product) {
    const PenstockWeight& weight = *product.weight;
    Plan plan{};
    plan.product = product;
    plan.kernel = &context.products[weight.kind];
    plan.slices = slices_of(weight);
    plan.tile_rows = rows_of_tile(*plan.kernel, plan.slices, product.rows);
    plan.full_tiles = product.rows / plan.tile_rows;
    plan.rest_rows = static_cast<int>(product.rows % plan.tile_rows);
    plan.tile_bytes = operand_bytes(weight, *plan.kernel);
    const std::int64_t groups = weight.group_size > 0 ? weight.padded_k / weight.group_size : 0;
    plan.scales_stride = std::int64_t{weight.leaves} * plan.tile_rows;
    plan.sums_stride = std::max<std::int64_t>(SUMS_PER_GROUP * groups, weight.leaves) * plan.tile_rows * plan.slices;
    plan.item_panels = panels_of_item(plan, context.pool.threads());
    plan.tile_groups = std::max<std::int64_t>(divide_up(plan.full_tiles, MAX_TILES), 1);
    return plan;
}

std::int64_t row_bytes(const Product& product) { return product.weight->k * type_bytes(product.x_type); }

void allocate_operands(Plan& plan, BumpAllocator& memory) {
    plan.tiles = memory.allocate<char>(plan.tile_count() * plan.tile_bytes);
    plan.scales = memory.allocate<float>(plan.tile_count() * plan.scales_stride);
    plan.sums = memory.allocate<std::int32_t>(plan.tile_count() * plan.sums_stride);
    if (plan.product.weight->order != nullptr)
        plan.gathered = memory.allocate<char>(plan.tile_count() * plan.tile_rows * row_bytes(plan.product));
}

// The plans of all products, with memory for their tiles in context.operands.
Plan* plan_all(Context& context, const Product* products, std::int64_t count) {
    BumpAllocator counter(nullptr);
    counter.allocate<Plan>(count);
    for (std::int64_t i = 0; i < count; ++i) {
        Plan plan = plan_product(context, products[i]);
        allocate_operands(plan, counter);
    }
    BumpAllocator memory(context.operands.reserve(counter.bytes()));
    Plan* plans = memory.allocate<Plan>(count);
    std::int64_t tiles = 0, items = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        plans[i] = plan_product(context, products[i]);
        plans[i].first_tile = tiles;
        plans[i].first_item = items;
        tiles += plans[i].tile_count();
        items += plans[i].item_count();
        allocate_operands(plans[i], memory);
    }
    return plans;
}

// Copy the rows of a tile with their columns in the weight's order, and let the tile be packed from the copy.
template <class Element>
void gather_columns(const Plan& plan, std::int64_t tile, OperandArgs& args) {
    const PenstockWeight& weight = *args.weight;
    auto* const copy = reinterpret_cast<Element*>(
        plan.gathered + tile * plan.tile_rows * row_bytes(plan.product));
    for (int r = 0; r < args.rows; ++r) {
        const std::int64_t row = args.row_index != nullptr ? args.row_index[r] : args.first_row + r;
        const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride;
        for (std::int64_t k = 0; k < weight.k; ++k) copy[r * weight.k + k] = x[weight.order[k]];
    }
    args.x = copy;
    args.row_index = nullptr;
    args.first_row = 0;
}

void pack_tile(const Plan& plan, std::int64_t tile) {
    const Product& product = plan.product;
    const std::int64_t first = tile * plan.tile_rows;
    OperandArgs args{product.weight, product.x, product.x_type, product.weight->k,
                     product.row_index != nullptr ? product.row_index + first : nullptr, first,
                     tile < plan.full_tiles ? plan.tile_rows : plan.rest_rows, plan.tiles + tile * plan.tile_bytes,
                     plan.scales + tile * plan.scales_stride, plan.sums + tile * plan.sums_stride};
    if (plan.gathered != nullptr)
        (product.x_type == TYPE_F32 ? gather_columns<float> : gather_columns<std::uint16_t>)(plan, tile, args);
    plan.kernel->pack(args);
}

void run_epilogue(const RowKernels& kernels, const Plan& plan, const MultiplyArgs& multiplied, std::int64_t first_row) {
    const Product& product = plan.product;
    kernels.epilogue[product.out_type](
        {product.weight, multiplied.first_panel, multiplied.panels, std::int64_t{multiplied.tiles} * multiplied.rows,
         multiplied.out, product.activation, row_of(product.out, product.out_type, product.out_stride, first_row),
         product.out_stride});
}

struct Panels {
    std::int64_t begin, end;
};

// Whether the product needs no epilogue, so that the micro-kernel can write to the output directly. This holds if there
// are no scales, bias, gate or activation, the output is float32, and every row has whole cache lines, even in the last
// panel.
bool writes_directly(const Plan& plan) {
    const Product& product = plan.product;
    const PenstockWeight& weight = *product.weight;
    return plan.kernel->strided && product.out_type == TYPE_F32 && weight.column_scales == nullptr &&
           weight.bias == nullptr && weight.gated == 0 && product.activation == ACT_NONE &&
           weight.n == weight.panels * PANEL && product.out_stride % FLOATS_PER_LINE == 0 &&
           reinterpret_cast<std::uintptr_t>(product.out) % 64 == 0;
}

// Multiply tiles of `rows` rows each with some panels, as many per call as suit the micro-kernel. memory: the thread's.
void multiply_tiles(const RowKernels& kernels, const Plan& plan, std::int64_t tile, std::int64_t tiles, int rows,
                    Panels panels, float* memory) {
    MultiplyArgs args{};
    args.weight = plan.product.weight;
    args.rows = rows;
    args.tiles = static_cast<int>(tiles);
    args.tile = plan.tiles + tile * plan.tile_bytes;
    args.tile_stride = plan.tile_bytes;
    args.scales = plan.scales + tile * plan.scales_stride;
    args.scales_stride = plan.scales_stride;
    args.sums = plan.sums + tile * plan.sums_stride;
    args.sums_stride = plan.sums_stride;
    args.partial = memory;
    args.tree = memory + OUT_FLOATS;
    const std::int64_t together = plan.max_panels(rows), first_row = tile * plan.tile_rows;
    const bool direct = writes_directly(plan);
    for (args.first_panel = panels.begin; args.first_panel < panels.end; args.first_panel += together) {
        args.panels = static_cast<int>(std::min(together, panels.end - args.first_panel));
        args.out_stride = direct ? plan.product.out_stride : args.panels * PANEL;
        args.out = args.partial;
        if (direct)
            args.out = static_cast<float*>(plan.product.out) + first_row * args.out_stride + args.first_panel * PANEL;
        plan.kernel->multiply(args);
        if (!direct) run_epilogue(kernels, plan, args, first_row);
    }
}

// Consecutive items of a plan go through the groups of tiles first, so that a thread reuses panels. If the groups are
// large, they go through the panels first, so that a thread reuses operands.
void run_item(const RowKernels& kernels, const Plan& plan, std::int64_t item, float* memory) {
    const std::int64_t ranges = divide_up(plan.product.weight->panels, plan.item_panels);
    const bool large = plan.kernel->tile_rows * MAX_TILES >= REREAD_ROWS;
    const std::int64_t group = large ? item / ranges : item % plan.tile_groups;
    const std::int64_t panel = (large ? item % ranges : item / plan.tile_groups) * plan.item_panels;
    const Panels panels{panel, std::min(panel + plan.item_panels, plan.product.weight->panels)};
    const std::int64_t begin = plan.full_tiles * group / plan.tile_groups;
    const std::int64_t end = plan.full_tiles * (group + 1) / plan.tile_groups;
    if (end > begin) multiply_tiles(kernels, plan, begin, end - begin, plan.tile_rows, panels, memory);
    if (plan.rest_rows > 0 && group + 1 == plan.tile_groups)
        multiply_tiles(kernels, plan, plan.full_tiles, 1, plan.rest_rows, panels, memory);
}

// The plan to which an item (or tile) belongs: the last plan that begins at or before it.
const Plan& plan_of(const Plan* plans, std::int64_t count, std::int64_t Plan::*first, std::int64_t at) {
    return *(std::partition_point(plans, plans + count, [=](const Plan& plan) { return plan.*first <= at; }) - 1);
}

void pack_all(Context& context, const Plan* plans, std::int64_t count) {
    std::int64_t elements = 0;
    for (std::int64_t i = 0; i < count; ++i) elements += plans[i].product.rows * plans[i].product.weight->k;
    const Plan& last = plans[count - 1];
    const std::int64_t tiles = last.first_tile + last.tile_count();
    const auto task = [=](std::int64_t tile, int) {
        const Plan& plan = plan_of(plans, count, &Plan::first_tile, tile);
        pack_tile(plan, tile - plan.first_tile);
    };
    context.pool.parallel_for(tiles, task, elements < SERIAL_ELEMENTS);
}

void run_all_items(Context& context, const Plan* plans, std::int64_t count) {
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const Product& product = plans[i].product;
        bytes += product.weight->panels * panel_bytes(*product.weight) * divide_up(product.rows, ROWS_PER_READ);
    }
    context.reserve_per_thread((OUT_FLOATS + TREE_FLOATS) * std::int64_t{sizeof(float)});
    const Plan& last = plans[count - 1];
    const std::int64_t items = last.first_item + last.item_count();
    const auto task = [=, &context](std::int64_t item, int thread) {
        const Plan& plan = plan_of(plans, count, &Plan::first_item, item);
        run_item(context.rows, plan, item - plan.first_item, static_cast<float*>(context.per_thread[thread].data()));
    };
    context.pool.parallel_for(items, task, bytes < SERIAL_BYTES);
}

// Rows per pass, few enough for operands to stay in the cache: whole tiles, evenly distributed over the passes.
std::int64_t rows_per_pass(const Context& context, const PenstockWeight& weight, std::int64_t rows) {
    const ProductKernel& kernel = context.products[weight.kind];
    const std::int64_t step = kernel.tile_rows / slices_of(weight);
    const std::int64_t tiles = divide_up(rows, step);
    const std::int64_t most = std::max<std::int64_t>(kernel.pass_bytes / operand_bytes(weight, kernel), MAX_TILES);
    return divide_up(tiles, divide_up(tiles, most)) * step;
}

}  // namespace

std::int64_t operand_bytes(const PenstockWeight& weight, const ProductKernel& kernel) {
    return kernel.tile_rows * weight.padded_k * kernel.element_bytes;
}

std::int64_t result_columns(const PenstockWeight& weight) { return weight.gated != 0 ? weight.n / 2 : weight.n; }

void multiply_all(Context& context, const Product* products, std::int64_t count) {
    if (count == 0) return;
    const Plan* plans = plan_all(context, products, count);
    pack_all(context, plans, count);
    run_all_items(context, plans, count);
}

}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_linear(
    Context* context, const PenstockWeight* weight, const void* x, std::int32_t x_type, std::int64_t rows, void* out,
    std::int64_t out_stride, std::int32_t out_type, std::int32_t activation) {
    return run_call(context, [&] {
        const std::int64_t step = rows > 0 ? rows_per_pass(*context, *weight, rows) : 1;
        for (std::int64_t row = 0; row < rows; row += step) {
            const Product product{weight, row_of(x, x_type, weight->k, row), x_type, nullptr,
                                  std::min(step, rows - row), row_of(out, out_type, out_stride, row), out_stride,
                                  out_type, activation};
            multiply_all(*context, &product, 1);
        }
        return STATUS_OK;
    });
}
