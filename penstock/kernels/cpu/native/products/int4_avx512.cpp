// Products with int4 weights in AVX-512: integer dot products (VNNI) or bfloat16 ones (BF16), a group at a time.
//
// Packed bytes are unpacked as little as possible: few rows stay memory-bound, and many rows need no unpacked copy. The
// multiplications are inline assembly, because GCC 12 spills the accumulators of intrinsics.

#include "avx512.inc.h"
#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {
namespace {

#include "products/quantize_rows.inc.h"
#include "products/int4.inc.h"

constexpr int HALF_PANEL = 16;  // columns per register

// The group scales of 16 columns.
inline Floats load_scales(const std::uint16_t* scales) {
    const __m256i halves = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales));
    return (Floats)((Ints)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16);
}

// always_inline: GCC drops a call that it does not inline early as being without effect.
inline __attribute__((always_inline)) void prefetch(const void* line) {
    _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0);
}

inline void broadcast(__m512i& to, const std::int32_t& from) { asm("vpbroadcastd %1, %0" : "=v"(to) : "m"(from)); }

inline void set_zero(__m512& to) { asm("vpxord %0, %0, %0" : "=v"(to)); }

inline void add_to(float* total, Floats part) { floats(total) = floats(total) + part; }

// Activations in int8, a tile [padded_k / 4][rows][4].
//
// A byte is low + 16 high. Its dot product minus that of its low nibble is 16 times that of the high one, so one AND
// gives two vectors of weights; the factor 16 goes into the scale.
//
// The sums begin with the bits of 1.5 * 2^23, whose last bit has the value 1, so that as a float they are OFFSET + d.
// The fused d * scale = (OFFSET + d) * scale - OFFSET * scale is rounded once, because OFFSET * scale has ten bits and
// is exact. A bfloat16 scale leaves enough exponents in float32: 4 bits below it, and above it if it is less than
// 2^104.
struct Int8Rows {
    static constexpr int ELEMENT = 1;
    // Enough panels for the multiplications to be independent and, with few rows, for several streams from memory.
    static constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
    static constexpr float OFFSET = 12582912.0f;
    static constexpr std::int32_t OFFSET_BITS = 0x4b400000;

    static void pack(const OperandArgs& args) { pack_int8(args); }

    static inline void dot(__m512i& sum, __m512i weights, __m512i quads) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(quads));
    }

    // Start values of the sums of low nibbles and of bytes: 8 was added to every weight.
    struct Starts {
        alignas(64) std::int32_t low[LANES], whole[LANES];

        explicit Starts(const std::int32_t* sums, int rows) {
            const Ints sum = (Ints)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1 << rows) - 1), sums);
            *reinterpret_cast<Ints*>(low) = OFFSET_BITS - sum * 8;
            *reinterpret_cast<Ints*>(whole) = static_cast<std::int32_t>(2u * OFFSET_BITS) - sum * (8 + 16 * 8);
        }
    };

    // total += d * scale
    static inline void add(float* total, Ints offset_sum, Floats scale, Floats offset) {
        add_to(total, (Floats)_mm512_fmsub_ps((__m512)same_bits<Floats>(offset_sum), (__m512)scale, (__m512)offset));
    }

    template <int R, int P>
    static inline __attribute__((always_inline)) void add_group(const Group& g) {
        const auto* quads = static_cast<const std::int32_t*>(g.operands);
        const __m512i nibble = _mm512_set1_epi8(15);
        const Starts starts(g.sums, R);
        __m512i low[P][R], whole[P][R];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                broadcast(low[p][r], starts.low[r]);
                broadcast(whole[p][r], starts.whole[r]);
            }
        for (int quad = 0; quad < g.size / QUAD; ++quad) {
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                const std::uint8_t* bytes = g.values + p * g.values_stride + quad * QUAD_BYTES;
                prefetch(g.next_values + p * g.values_stride + quad * g.next_step);
                const __m512i both = _mm512_load_si512(bytes);
                const __m512i nibbles = both & nibble;
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i x = _mm512_set1_epi32(quads[quad * R + r]);
                    dot(low[p][r], nibbles, x);
                    dot(whole[p][r], both, x);
                }
            }
        }
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
            prefetch(g.next_scales + p * g.scales_stride);
            const std::uint16_t* scales = g.scales + p * g.scales_stride;
            const Floats low_scale = load_scales(scales), high_scale = load_scales(scales + HALF_PANEL) * (1.0f / 16);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* total = g.totals + (r * P + p) * PANEL;
                const Ints high = (Ints)whole[p][r] - (Ints)low[p][r];
                add(total, (Ints)low[p][r], low_scale, low_scale * OFFSET);
                add(total + HALF_PANEL, high, high_scale, high_scale * OFFSET);
            }
        }
    }
};

// Activations in bfloat16, a tile [padded_k / 4][2][rows][2]: of every four elements first 0 and 2, then 1 and 3.
//
// A word of packed values contains nibbles of two neighbouring elements, and a look-up in a table of bfloat16 uses only
// the lowest one. So words, shifted by 0, 4, 8 and 12 bits, become elements 0 and 2 of the low and high columns, then
// elements 1 and 3.
struct Bf16Rows {
    static constexpr int ELEMENT = 2;
    static constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }  // more would spill
    using Words __attribute__((vector_size(64))) = std::uint16_t;

    static void pack(const OperandArgs& args) {
        alignas(64) std::uint16_t order[32];
        for (int i = 0; i < 32; ++i) order[i] = static_cast<std::uint16_t>((i & ~3) | (i & 1) << 1 | (i >> 1 & 1));
        const __m512i swap = _mm512_load_si512(order);
        auto* tile = static_cast<std::uint32_t*>(args.tile);
        pack_bf16(args, [=, &args](std::int64_t k, int row, const std::uint16_t* words) {
            alignas(64) std::uint32_t pairs[K_UNIT / 2];
            for (int i = 0; i < 2; ++i) {
                const __m512i half = _mm512_load_si512(words + 32 * i);
                _mm512_store_si512(pairs + 16 * i, _mm512_permutexvar_epi16(swap, half));
            }
            std::uint32_t* to = tile + k / 2 * args.rows + row;
            for (int i = 0; i < K_UNIT / 2; ++i) to[i * args.rows] = pairs[i];
        });
    }

    static inline void dot(__m512& sum, __m512i weights, __m512i pairs) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(pairs));
    }

    // bfloat16 of -8 .. 7, twice, so that the fifth bit of an index does not matter.
    static inline __m512i weight_table() {
        alignas(64) static constexpr std::uint16_t TABLE[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        return _mm512_load_si512(TABLE);
    }

    template <int R, int P>
    static inline __attribute__((always_inline)) void add_group(const Group& g) {
        const auto* pairs = static_cast<const std::int32_t*>(g.operands);
        const __m512i table = weight_table();
        __m512 low[P][R], high[P][R];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                set_zero(low[p][r]);
                set_zero(high[p][r]);
            }
        for (int quad = 0; quad < g.size / QUAD; ++quad) {
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                const std::uint8_t* bytes = g.values + p * g.values_stride + quad * QUAD_BYTES;
                prefetch(g.next_values + p * g.values_stride + quad * g.next_step);
                const Words words = (Words)_mm512_load_si512(bytes);
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; ++pair) {
                    const __m512i low_weights = _mm512_permutexvar_epi16((__m512i)(words >> 8 * pair), table);
                    const __m512i high_weights = _mm512_permutexvar_epi16((__m512i)(words >> (8 * pair + 4)), table);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const __m512i x = _mm512_set1_epi32(pairs[(quad * 2 + pair) * R + r]);
                        dot(low[p][r], low_weights, x);
                        dot(high[p][r], high_weights, x);
                    }
                }
            }
        }
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
            prefetch(g.next_scales + p * g.scales_stride);
            const std::uint16_t* scales = g.scales + p * g.scales_stride;
            const Floats low_scale = load_scales(scales), high_scale = load_scales(scales + HALF_PANEL);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* total = g.totals + (r * P + p) * PANEL;
                add_to(total, (Floats)low[p][r] * low_scale);
                add_to(total + HALF_PANEL, (Floats)high[p][r] * high_scale);
            }
        }
    }
};

template <class Rows, int R, int P>
void multiply_block(const MultiplyArgs& a, int panel) {
    multiply_panels(a, panel, P, R, Rows::ELEMENT, [](const Group& g) __attribute__((always_inline)) {
        Rows::template add_group<R, P>(g);
    });
}

template <class Rows>
void multiply(const MultiplyArgs& a) {
    with_constant<TILE_ROWS>(operand_rows(a), [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value, STEP = Rows::panels_at_once(ROWS);
        int panel = 0;
        for (; panel + STEP <= a.panels; panel += STEP) multiply_block<Rows, ROWS, STEP>(a, panel);
        for (; panel < a.panels; ++panel) multiply_block<Rows, ROWS, 1>(a, panel);
    });
}

template <class Rows>
ProductKernel kernel() {
    return {TILE_ROWS, [](int rows) { return Rows::panels_at_once(rows); }, Rows::pack, multiply<Rows>};
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4>() { return kernel<Int8Rows>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4_A16>() { return kernel<Bf16Rows>(); }

}  // namespace penstock
