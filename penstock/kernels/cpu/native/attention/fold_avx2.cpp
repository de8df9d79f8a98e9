#include "attention/fold.inc.h"

namespace penstock {
FoldKernel avx2_fold() { return FOLD_KERNEL; }
}  // namespace penstock
