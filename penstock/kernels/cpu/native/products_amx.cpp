#include "products.h"

namespace penstock {
ProductKernel amx_bf16() { return {}; }
ProductKernel amx_int8() { return {}; }
}  // namespace penstock
