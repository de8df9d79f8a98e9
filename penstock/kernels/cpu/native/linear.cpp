// Products with a packed weight: cuts the rows into tiles and the columns into panels, and shares both among threads.

#include <algorithm>
#include <vector>

#include "abi.h"
#include "context.h"

namespace penstock {

std::int64_t operand_bytes(const PenstockWeight& weight, const ProductKernel& kernel) {
    static constexpr int ELEMENT[NUM_KINDS] = {4, 2, 1, 1, 2};
    return kernel.tile_rows * weight.padded_k * ELEMENT[weight.kind];
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_EXPORT std::int32_t penstock_linear(
    Context* context, const PenstockWeight* weight, const void* x, std::int32_t x_type, std::int64_t rows, void* out,
    std::int32_t out_type, std::int32_t activation) {
    const ProductKernel& kernel = context->products[weight->kind];
    const int slices = weight->slices > 0 ? weight->slices : 1;
    const int step = kernel.tile_rows / slices;
    const std::int64_t groups = weight->group_size ? weight->padded_k / weight->group_size : 0;
    const std::int64_t columns = weight->gated ? weight->n / 2 : weight->n;
    std::vector<float> scales(static_cast<std::size_t>(weight->leaves) * step);
    std::vector<std::int32_t> sums(static_cast<std::size_t>(std::max<std::int64_t>(groups, weight->leaves)) * MAX_TILE_ROWS);
    void* tile = context->operands.take(operand_bytes(*weight, kernel));
    float* tree = static_cast<float*>(context->per_thread[0].take(
        (TREE_LEVELS + 1) * MAX_TILE_ROWS * PANEL * MAX_PANELS * std::int64_t{4}));
    float* sum = tree + TREE_LEVELS * MAX_TILE_ROWS * PANEL * MAX_PANELS;
    for (std::int64_t row = 0; row < rows; row += step) {
        const int count = static_cast<int>(std::min<std::int64_t>(step, rows - row));
        kernel.pack({weight, x, x_type, weight->k, nullptr, row, count, tile, scales.data(), sums.data()});
        for (std::int64_t panel = 0; panel < weight->panels;) {
            const int panels = static_cast<int>(
                std::min<std::int64_t>(kernel.max_panels(count * slices), weight->panels - panel));
            kernel.multiply({weight, panel, panels, count, 1, tile, 0, scales.data(), 0, sums.data(), 0, tree, sum});
            void* to = out_type == TYPE_F32 ? static_cast<void*>(static_cast<float*>(out) + row * columns)
                                            : static_cast<void*>(static_cast<std::uint16_t*>(out) + row * columns);
            context->rows.finish({weight, panel, panels, count, sum, activation, to, columns, out_type});
            panel += panels;
        }
    }
    return 0;
}
PENSTOCK_EXPORT std::int32_t penstock_experts() { return -1; }
