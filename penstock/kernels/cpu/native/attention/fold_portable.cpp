#include "attention/fold.inc.h"

namespace penstock {
FoldKernel portable_fold() { return FOLD_KERNEL; }
}  // namespace penstock
