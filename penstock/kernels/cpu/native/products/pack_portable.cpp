#include "products/pack_kernels.inc.h"

namespace penstock {

PackKernels portable_pack() { return KERNELS; }

}  // namespace penstock
