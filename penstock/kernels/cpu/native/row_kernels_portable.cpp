#include <cstring>

#include "row_kernels.h"

namespace penstock {
namespace {
// Stand-in until the vector version is there: no gate.
void finish(const FinishArgs& a) {
    for (std::int64_t r = 0; r < a.rows; ++r)
        for (int c = 0; c < a.panels * PANEL; ++c) {
            const std::int64_t column = a.first_panel * PANEL + c;
            if (column >= a.weight->n) continue;
            float v = a.sums[r * a.panels * PANEL + c];
            if (a.weight->column_scales) v *= a.weight->column_scales[column];
            if (a.weight->bias) v += a.weight->bias[column];
            static_cast<float*>(a.out)[r * a.out_stride + column] = v;
        }
}
}  // namespace
RowKernels portable_rows() { return {finish}; }
}  // namespace penstock
