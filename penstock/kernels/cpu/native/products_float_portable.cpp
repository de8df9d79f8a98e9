#include "products.h"

namespace penstock {
ProductKernel portable_f32() { return {}; }
ProductKernel portable_bf16() { return {}; }
}  // namespace penstock
