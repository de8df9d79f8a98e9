#include "products/pack_kernels.inc.h"

namespace penstock {

PackKernels avx512_pack() { return KERNELS; }

}  // namespace penstock
