#include "products.h"

namespace penstock {
ProductKernel portable_int4() { return {}; }
ProductKernel portable_int4_a16() { return {}; }
}  // namespace penstock
