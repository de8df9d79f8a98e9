// Products with int4 weights in AVX-512, a group at a time: integer dot products (VNNI), or products of bfloat16 (BF16)
// or float32.
//
// Packed bytes are unpacked as little as possible, so that few rows stay memory-bound and many rows need no unpacked
// copy. The multiplications are inline assembly, because GCC 12 spills the accumulators of intrinsics.

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

// The totals of R operand rows and P panels over the groups of a leaf, kept in registers until the end of the leaf.
template <int R, int P>
struct RegisterTotals {
    Floats totals[P][R][2] = {};

    explicit RegisterTotals(float*) {}
    PENSTOCK_INLINE void add(int p, int r, int half, Floats part) { totals[p][r][half] = totals[p][r][half] + part; }
    PENSTOCK_INLINE void store(float* to) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                floats(to + (r * P + p) * PANEL) = totals[p][r][0];
                floats(to + (r * P + p) * PANEL + HALF_PANEL) = totals[p][r][1];
            }
    }
};

// The same, kept in memory: for more totals than fit into registers, and for few rows, which wait for the weights
// anyway.
template <int R, int P>
struct MemoryTotals {
    float* totals;

    explicit MemoryTotals(float* to) : totals(to) {
        for (int i = 0; i < R * P * PANEL; i += LANES) {
            floats(to + i) = Floats{};
            asm volatile("" ::: "memory");  // otherwise GCC compiles the loop to a slow string instruction
        }
    }
    PENSTOCK_INLINE void add(int p, int r, int half, Floats part) {
        float* total = totals + (r * P + p) * PANEL + half * HALF_PANEL;
        floats(total) = floats(total) + part;
    }
    PENSTOCK_INLINE void store(float*) const {}
};

inline void broadcast(__m512i& to, const std::int32_t& from) { asm("vpbroadcastd %1, %0" : "=v"(to) : "m"(from)); }

#include "products/int4_a16_avx512.inc.h"

// Activations in int8, a tile [padded_k / 4][rows][4].
//
// A byte is low + 16 high. Its dot product minus that of its low nibble is 16 times that of its high nibble, so one AND
// gives two vectors of weights. The factor 16 goes into the scale.
//
// The sums begin with the bits of 1.5 * 2^23, whose last bit has the value 1, so that as a float they are OFFSET + d.
// The fused d * scale = (OFFSET + d) * scale - OFFSET * scale is rounded once, because OFFSET * scale has ten bits and
// is exact. A bfloat16 scale leaves enough exponents in float32: 4 bits below the scale, and enough above it if the
// scale is less than 2^104.
struct Int8Rows {
    using Mode = UnchangedMode;
    static constexpr int ELEMENT = 1;
    static constexpr int SUMS = 2;
    static constexpr int MAX_ROWS = 6;  // at once, for one panel: 12 registers of sums and 12 of totals leave 8
    static constexpr float OFFSET = 12582912.0f;
    static constexpr std::int32_t OFFSET_BITS = 0x4b400000;

    // Pack a tile, and replace the sums by the start values, [groups][2][operand rows].
    static void pack(const OperandArgs& args) {
        pack_int8(args);
        const PenstockWeight& weight = *args.weight;
        const int rows = args.rows * weight.slices;
        for (std::int64_t group = weight.padded_k / weight.group_size - 1; group >= 0; --group)
            for (int row = 0; row < rows; ++row) {
                const std::int32_t sum = args.sums[group * rows + row];
                std::int32_t* starts = args.sums + 2 * group * rows;
                starts[row] = OFFSET_BITS - sum * 8;
                starts[rows + row] = static_cast<std::int32_t>(2u * OFFSET_BITS) - sum * (8 + 16 * 8);
            }
    }

    static inline void dot(__m512i& sum, __m512i weights, __m512i quads) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(quads));
    }

    // The sums of one group.
    template <int R, int P>
    struct Sums {
        __m512i low[P][R], whole[P][R];

        PENSTOCK_INLINE void start(const std::int32_t* starts, int rows) {
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    broadcast(low[p][r], starts[r]);
                    broadcast(whole[p][r], starts[rows + r]);
                }
        }

        PENSTOCK_INLINE void hold_all() {}

        PENSTOCK_INLINE void add_quad(int p, __m512i bytes, const std::int32_t* quads, int) {
            const __m512i nibbles = bytes & _mm512_set1_epi8(15);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const __m512i x = _mm512_set1_epi32(quads[r]);
                dot(low[p][r], nibbles, x);
                dot(whole[p][r], bytes, x);
            }
        }

        // totals += d * scales
        template <class Totals>
        PENSTOCK_INLINE void add_to(Totals& totals, int p, Floats low_scale, Floats high_scale) const {
            high_scale = high_scale * (1.0f / 16);
            const Floats low_offset = low_scale * OFFSET, high_offset = high_scale * OFFSET;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Ints high = (Ints)_mm512_sub_epi32(whole[p][r], low[p][r]);  // wraps around, as the starts do
                totals.add(p, r, 0, scaled((Ints)low[p][r], low_scale, low_offset));
                totals.add(p, r, 1, scaled(high, high_scale, high_offset));
            }
        }
    };

    static PENSTOCK_INLINE Floats scaled(Ints offset_sum, Floats scale, Floats offset) {
        return (Floats)_mm512_fmsub_ps((__m512)same_bits<Floats>(offset_sum), (__m512)scale, (__m512)offset);
    }
};

// Prefetch neighbouring lines of P panels.
template <int P>
PENSTOCK_INLINE void prefetch_values(const std::uint8_t* from, std::int64_t stride, int lines) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
        for (int line = 0; line < lines; ++line) {
            const std::uint8_t* const at = from + p * stride + line * QUAD_BYTES;
            if constexpr (P == 2)
                __builtin_prefetch(at);  // bound by arithmetic: 1.2 times as fast as into the L2 on Zen 4
            else
                prefetch_to_l2(at);
        }
}

// Multiply R of ROWS operand rows, from `row` on, with P panels.
template <class Rows, int ROWS, int R, int P>
void multiply_rows(const Groups& g, int row, int part) {
    constexpr bool PART = R < ROWS;
    // A part is unrolled for fewer instructions; otherwise a stream from memory is prefetched line by line.
    constexpr int AT_ONCE = PART ? 8 : 1;
    std::conditional_t<PART, RegisterTotals<R, P>, MemoryTotals<R, P>> totals(g.totals + row * P * PANEL);
    const auto* operands = static_cast<const std::int32_t*>(g.operands) + row;
    const std::int64_t bytes = g.bytes();
    // The lines to prefetch for every AT_ONCE lines of weights.
    const int lines = AT_ONCE > 1 && g.parts < AT_ONCE ? AT_ONCE / g.parts : 1;
    const int step = g.parts < AT_ONCE ? lines * QUAD_BYTES : (AT_ONCE * QUAD_BYTES + g.parts - 1) / g.parts;
    for (int i = 0; i < g.count; ++i) {
        const std::int64_t next = g.next(i);
        const std::uint8_t* values = g.values + i * bytes;
        const std::uint8_t* ahead = values + STREAM_AHEAD;
        if constexpr (P < MAX_PANELS) ahead = g.values + next * bytes + part * bytes / g.parts;
        typename Rows::template Sums<R, P> sums;
        sums.start(g.sums + i * Rows::SUMS * ROWS + row, ROWS);
        {
            const typename Rows::Mode mode;
            sums.hold_all();
            for (int quads = g.elements(i) / QUAD; quads > 0; quads -= AT_ONCE) {
                prefetch_values<P>(ahead, g.values_stride, lines);
                ahead += step;
#pragma GCC unroll 8
                for (int quad = 0; quad < AT_ONCE; ++quad) {
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p)
                        sums.add_quad(p, _mm512_load_si512(values + p * g.values_stride), operands, ROWS);
                    values += QUAD_BYTES;
                    operands += Rows::ELEMENT * ROWS;  // words of four elements
                }
            }
            sums.hold_all();
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const std::uint16_t* scales = g.scales + i * PANEL + p * g.scales_stride;
            prefetch_to_l2(g.scales + next * PANEL + p * g.scales_stride);
            sums.add_to(totals, p, load_scales(scales), load_scales(scales + HALF_PANEL));
        }
    }
    totals.store(g.totals + row * P * PANEL);
}

template <class Rows, int R, int P>
void multiply_block(const MultiplyArgs& a, int panel) {
    constexpr int PARTS = R > Rows::MAX_ROWS ? 2 : 1, FIRST = (R + PARTS - 1) / PARTS;
    multiply_panels(a, panel, P, {Rows::ELEMENT, Rows::SUMS, PARTS}, [](const Groups& g) {
        multiply_rows<Rows, R, FIRST, P>(g, 0, g.part);
        if constexpr (R > FIRST) multiply_rows<Rows, R, R - FIRST, P>(g, FIRST, g.part + 1);
    });
}

template <class Rows>
void multiply(const MultiplyArgs& a) {
    with_constant<TILE_ROWS>(operand_rows(a), [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value, STEP = panels_at_once(ROWS);
        int panel = 0;
        for (; panel + STEP <= a.panels; panel += STEP) multiply_block<Rows, ROWS, STEP>(a, panel);
        for (; panel < a.panels; ++panel) multiply_block<Rows, ROWS, 1>(a, panel);
    });
}

template <class Rows>
ProductKernel kernel() {
    return {TILE_ROWS, Rows::ELEMENT, panels_at_once, Rows::pack, multiply<Rows>, false, false, INTEGER_PASS_BYTES};
}

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4>() { return kernel<Int8Rows>(); }
template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT4_A16>() { return kernel<Bf16Rows>(); }
#if defined(__AVX512BF16__)
template <> ProductKernel product_kernel<LEVEL_AVX512FMA, KIND_INT4_A16>() { return kernel<WideBf16Rows>(); }
#endif

}  // namespace penstock
