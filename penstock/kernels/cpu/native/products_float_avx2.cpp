#include "products.h"

namespace penstock {
ProductKernel avx2_f32() { return {}; }
ProductKernel avx2_bf16() { return {}; }
}  // namespace penstock
