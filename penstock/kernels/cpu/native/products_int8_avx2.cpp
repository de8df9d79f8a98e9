#include "products.h"

namespace penstock {
ProductKernel avx2_int8() { return {}; }
}  // namespace penstock
