#include "sampling/sampler_kernels.inc.h"

namespace penstock {
SamplerKernels avx2_sampler() { return sampler_kernels(); }
}  // namespace penstock
