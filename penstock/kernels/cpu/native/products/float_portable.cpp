// Products of float weights on any processor: vectors of four floats, a multiplication and then an addition.

#include <cstdint>

namespace penstock {
namespace {

constexpr int LANES = 4;
using Vector = float __attribute__((vector_size(16), may_alias));
using Words = std::uint32_t __attribute__((vector_size(16), may_alias));

inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }

}  // namespace
}  // namespace penstock

#include "products/float_vectors.inc.h"

namespace penstock {
ProductKernel portable_f32() { return f32_kernel(); }
ProductKernel portable_bf16() { return bf16_kernel(); }
}  // namespace penstock
