// Products of float weights with AVX2: vectors of eight floats, multiplied and added in one rounding.

#include <immintrin.h>

#include <cstdint>

namespace penstock {
namespace {

constexpr int LANES = 8;
using Vector = float __attribute__((vector_size(32), may_alias));
using Words = std::uint32_t __attribute__((vector_size(32), may_alias));

inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace penstock

#include "products/float_vectors.inc.h"

namespace penstock {
ProductKernel avx2_f32() { return f32_kernel(); }
ProductKernel avx2_bf16() { return bf16_kernel(); }
}  // namespace penstock
