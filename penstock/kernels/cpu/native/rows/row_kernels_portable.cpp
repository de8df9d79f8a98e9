#include "rows/row_kernels.inc.h"

namespace penstock {
RowKernels portable_rows() { return ROW_KERNELS; }
}  // namespace penstock
