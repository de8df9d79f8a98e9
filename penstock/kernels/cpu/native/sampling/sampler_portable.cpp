#include "sampling/sampler_kernels.inc.h"
