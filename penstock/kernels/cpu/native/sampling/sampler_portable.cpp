#include "sampling/sampler_kernels.inc.h"

namespace penstock {
SamplerKernels portable_sampler() { return sampler_kernels(); }
}  // namespace penstock
