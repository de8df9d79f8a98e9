#include "products/pack_kernels.inc.h"

namespace penstock {

PackKernels avx2_pack() { return KERNELS; }

}  // namespace penstock
