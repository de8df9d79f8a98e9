#include "rows/row_kernels.inc.h"

namespace penstock {
RowKernels avx512_rows() { return ROW_KERNELS; }
}  // namespace penstock
