// Attention with an int8 cache and the dot product of AVX-512 VNNI: 4 unsigned times 4 signed bytes, added to int32.
//
// The sums of a strip with two columns of vectors stay in at most 24 registers over a whole head or tile. They start
// at -128 times the sum of the row, because bytes are stored + 128.

#include "attention/int8.inc.h"

namespace penstock {
namespace {

struct VnniDot {
    using Operand = std::int8_t;
    static constexpr int ZERO_POINT = penstock::ZERO_POINT;

    template <int OPERANDS, int QUADS, class Find>
    static PENSTOCK_INLINE void multiply(
        int runs, std::int64_t step, const Find& find, const std::int32_t* start, I32x16 (*sums)[2]) {
        __m512i left[OPERANDS], right[OPERANDS];
#pragma GCC unroll 12
        for (int i = 0; i < OPERANDS; ++i) left[i] = right[i] = _mm512_set1_epi32(start[i]);
        for (int run = 0; run < runs; ++run) {
            Run<Operand> at = find(run);
#pragma GCC unroll 4
            for (int quad = 0; quad < QUADS; ++quad) {
                prefetch_to_l2(at.next[0]);
                prefetch_to_l2(at.next[1]);
                const __m512i a = _mm512_load_si512(at.stored[0]), b = _mm512_load_si512(at.stored[1]);
#pragma GCC unroll 12
                for (int i = 0; i < OPERANDS; ++i) {
                    std::int32_t four;
                    __builtin_memcpy(&four, at.operand + i * CHUNK, sizeof four);
                    const __m512i row = _mm512_set1_epi32(four);
                    add_products(left[i], a, row);
                    add_products(right[i], b, row);
                }
                at = {{at.stored[0] + step, at.stored[1] + step},
                      {at.next[0] + step, at.next[1] + step},
                      at.operand + QUAD};
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < OPERANDS; ++i) {
            sums[i][0].part[0] = (IntPart)left[i];
            sums[i][1].part[0] = (IntPart)right[i];
        }
    }

  private:
    // In assembly, because GCC 12 copies and spills the sums of the intrinsic.
    static PENSTOCK_INLINE void add_products(__m512i& sums, const __m512i& stored, const __m512i& row) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(stored), "v"(row));
    }
};

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_INT8>() { return int8_kernel<VnniDot>(); }

}  // namespace penstock
