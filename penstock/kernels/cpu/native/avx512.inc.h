// The intrinsics, without GCC 12's warnings about its own header, and functions built on them that several kernels use.
// Internal linkage, for files compiled with AVX-512.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <type_traits>

#include "elements.inc.h"

namespace penstock {
namespace {

// How many neighbouring panels of a weight are multiplied together: enough for independent multiplications and, with
// few rows, for several streams from memory.
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }

// The prefetch distance in each of several panels, in bytes. Measured (docs/perf_log.md); a single panel needs more.
constexpr std::int64_t STREAM_AHEAD = 1024;

// ---- Elements in words of four bytes: a pair of bfloat16 or one float32

// A mask of the first `count` lanes, at most 32.
inline __mmask32 first_lanes(std::int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// The first `count` (at least 1) of 16 elements as float32, the others zero.
inline __m512i load_f32(const char* from, std::int64_t count, std::int32_t type) {
    const __mmask16 mask = static_cast<__mmask16>(first_lanes(count));
    if (type == TYPE_F32) return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, from));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
}

// The float mode that vdpbf16ps always has, whatever the mode of the thread: subnormal operands and results are zeros.
class SubnormalsAreZero {
  public:
    SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | DENORMALS_ZERO_ON); }
    ~SubnormalsAreZero() { _mm_setcsr(before_); }
    SubnormalsAreZero(const SubnormalsAreZero&) = delete;
    SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

  private:
    static constexpr unsigned DENORMALS_ZERO_ON = 0x40;
    const unsigned before_;
};

struct UnchangedMode {
    ~UnchangedMode() {}  // so that compilers do not warn about an unused object
};

// Keep the multiply-adds of a sum, which are assembly without side effects, from moving across a change of the mode.
template <class Mode>
PENSTOCK_INLINE void hold(__m512& sum) {
    if constexpr (!std::is_empty_v<Mode>) __asm__ volatile("" : "+v"(sum));
}

// The types of words. A word of weights, keys or values is multiplied with a word of the other operand in TERMS steps,
// each of which is one multiply-add in all lanes:
//     of_step(i)                      // the term of step i, which is the index of its word among the operand's words
//     term(words, t)                  // 16 words in memory as the factors of term t
//     multiply_add(acc, term, word)   // acc += term * word; the word is in all lanes
// The other operand is of type Operand, and the steps run in a Mode. They are in assembly, because compilers load a
// broadcast word into an extra register and then spill, and GCC 12 copies the sums of the intrinsics.

struct F32Words {
    using Element = float;
    using Operand = F32Words;
    using Mode = UnchangedMode;
    static constexpr int ELEMENTS = 1;  // per word
    static constexpr int TERMS = 1;

    static constexpr int of_step(int) { return 0; }

    static PENSTOCK_INLINE __m512i term(const void* words, int) { return _mm512_load_si512(words); }
    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i term, __m512i word) {
        __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(term), "v"(word));
    }
    static constexpr auto load = load_f32;
};

#if defined(__AVX512BF16__)

// The same as load_f32 for 32 elements as bfloat16.
inline __m512i load_bf16(const char* from, std::int64_t count, std::int32_t type) {
    const __mmask32 mask = first_lanes(count);
    if (type == TYPE_BF16) return _mm512_maskz_loadu_epi16(mask, from);
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 64);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Both elements of a pair at once.
struct Bf16Words {
    using Element = std::uint16_t;
    using Operand = Bf16Words;
    using Mode = UnchangedMode;
    static constexpr int ELEMENTS = 2;
    static constexpr int TERMS = 1;

    static constexpr int of_step(int) { return 0; }

    static PENSTOCK_INLINE __m512i term(const void* words, int) { return _mm512_load_si512(words); }
    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i term, __m512i word) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(term), "v"(word));
    }
    static constexpr auto load = load_bf16;
};

// The first `count` (at least 1) of 16 elements rounded to bfloat16, as float32, the others zero.
inline __m512i load_rounded(const char* from, std::int64_t count, std::int32_t type) {
    if (type == TYPE_BF16) return load_f32(from, count, type);
    const __m512 floats = _mm512_maskz_loadu_ps(static_cast<__mmask16>(first_lanes(count)), from);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(floats)), 16);
}

#else

// The first `count` (at least 1) of 16 elements rounded to bfloat16, as float32, the others zero. A NaN stays a NaN.
inline __m512i load_rounded(const char* from, std::int64_t count, std::int32_t type) {
    const __m512i bits = load_f32(from, count, type);
    if (type == TYPE_BF16) return bits;
    typedef std::uint32_t Words __attribute__((vector_size(64)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)bits, (__m512)bits, _CMP_UNORD_Q);
    const Words rounded = round_to_bf16((Words)bits) << 16u, quiet = ((Words)bits | 0x400000u) & 0xFFFF0000u;
    return _mm512_mask_mov_epi32((__m512i)rounded, is_nan, (__m512i)quiet);
}

#endif

// A pair of bfloat16 as two float32. The other operand is widened beforehand. With BF16, each step is one of the two
// multiply-adds that make up vdpbf16ps on Intel's processors: the element of higher index first, without subnormal
// numbers. The bits are those of vdpbf16ps, at twice its rate on processors that start one vdpbf16ps every other cycle
// and two multiply-adds every cycle. Without BF16, the element of lower index is first, which gives the arithmetic and
// the bits of AVX2.
struct WideBf16Words {
    using Element = std::uint16_t;
    struct Operand : F32Words {
        static constexpr auto load = load_rounded;
    };
#if defined(__AVX512BF16__)
    using Mode = SubnormalsAreZero;
    static constexpr int of_step(int i) { return 1 - i; }
#else
    using Mode = UnchangedMode;
    static constexpr int of_step(int i) { return i; }
#endif
    static constexpr int ELEMENTS = 2;
    static constexpr int TERMS = 2;

    static PENSTOCK_INLINE __m512i term(const void* words, int t) {
        const __m512i pairs = _mm512_load_si512(words);
        return t == 0 ? _mm512_slli_epi32(pairs, 16)
                      : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<std::int32_t>(0xFFFF0000)));
    }
    static PENSTOCK_INLINE void multiply_add(__m512& acc, __m512i term, __m512i word) {
        F32Words::multiply_add(acc, term, word);
    }
};

#if !defined(__AVX512BF16__)
using Bf16Words = WideBf16Words;
#endif

// ---- Transposing sixteen registers of sixteen words

constexpr int REGISTER_WORDS = 16;

// Word j of register i becomes word i of register j.
inline void transpose(__m512i (&words)[REGISTER_WORDS]) {
    __m512i pairs[REGISTER_WORDS], quads[REGISTER_WORDS];
#pragma GCC unroll 8
    for (int i = 0; i < REGISTER_WORDS; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(words[i], words[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(words[i], words[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < REGISTER_WORDS; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // Quarter q of quads[4 g + j] is now word 4 q + j of rows 4 g .. 4 g + 3; the quarters remain to be gathered.
    constexpr int EVEN = 0x88, ODD = 0xdd;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i even_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], EVEN);
        const __m512i even_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], EVEN);
        const __m512i odd_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], ODD);
        const __m512i odd_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], ODD);
        words[j] = _mm512_shuffle_i32x4(even_low, even_high, EVEN);
        words[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, EVEN);
        words[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, ODD);
        words[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, ODD);
    }
}

}  // namespace
}  // namespace penstock
