#include "products.h"

namespace penstock {
ProductKernel avx512_f32() { return {}; }
ProductKernel avx512_bf16() { return {}; }
}  // namespace penstock
