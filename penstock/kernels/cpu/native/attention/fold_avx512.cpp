#include "attention/fold.inc.h"

namespace penstock {
FoldKernel avx512_fold() { return FOLD_KERNEL; }
}  // namespace penstock
