#include "products.h"

namespace penstock {
ProductKernel avx512_int4() { return {}; }
ProductKernel avx512_int4_a16() { return {}; }
}  // namespace penstock
