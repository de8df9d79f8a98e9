// Products of int4 weights with bfloat16 activations: packing the activations, and the sums of a group. Included by
// int4_avx512.cpp within its anonymous namespace.

inline void set_zero(__m512& to) { asm("vpxord %0, %0, %0" : "=v"(to)); }

// The sums of R rows and P panels over one group, for the low columns and for the high columns of a panel.
template <class Mode, int R, int P>
struct FloatSums {
    __m512 low[P][R], high[P][R];

    PENSTOCK_INLINE void start(const std::int32_t*, int) {
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                set_zero(low[p][r]);
                set_zero(high[p][r]);
            }
    }

    PENSTOCK_INLINE void hold_all() {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                hold<Mode>(low[p][r]);
                hold<Mode>(high[p][r]);
            }
    }

    template <class Totals>
    PENSTOCK_INLINE void add_to(Totals& totals, int p, Floats low_scale, Floats high_scale) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            totals.add(p, r, 0, (Floats)low[p][r] * low_scale);
            totals.add(p, r, 1, (Floats)high[p][r] * high_scale);
        }
    }
};

#if defined(__AVX512BF16__)

// Activations in bfloat16, a tile [padded_k / 4][2][rows][2]: of every four elements, first 0 and 2, then 1 and 3.
//
// A word of packed values contains nibbles of two neighbouring elements, and a look-up in a table of bfloat16 uses only
// the lowest nibble. So words, shifted by 0, 4, 8 and 12 bits, become elements 0 and 2 of the low and high columns,
// then elements 1 and 3.
struct Bf16Rows {
    using Mode = UnchangedMode;
    static constexpr int ELEMENT = 2;
    static constexpr int SUMS = 1;
    static constexpr int MAX_ROWS = TILE_ROWS;  // with twice the work per group, totals in memory beat half tiles

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
    struct Sums : FloatSums<Mode, R, P> {
        PENSTOCK_INLINE void add_quad(int p, __m512i bytes, const std::int32_t* pairs, int rows) {
            const __m512i table = weight_table();
            const Words words = (Words)bytes;
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair) {
                const __m512i low_weights = _mm512_permutexvar_epi16((__m512i)(words >> 8 * pair), table);
                const __m512i high_weights = _mm512_permutexvar_epi16((__m512i)(words >> (8 * pair + 4)), table);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i x = _mm512_set1_epi32(pairs[pair * rows + r]);
                    dot(this->low[p][r], low_weights, x);
                    dot(this->high[p][r], high_weights, x);
                }
            }
        }
    };
};

// The order in which vdpbf16ps adds the elements of a word of packed values: the second element of every pair first.
constexpr int ORDER[QUAD] = {2, 0, 3, 1};

#else

constexpr int ORDER[QUAD] = {0, 1, 2, 3};  // the order of AVX2

#endif

// Activations in bfloat16, widened: a tile [padded_k][rows] of float32. A look-up in a table of 16 float32 uses the
// lowest nibble of a word.
struct WideBf16Rows {
    using Mode = WideBf16Words::Mode;
    static constexpr int ELEMENT = 4;
    static constexpr int SUMS = 1;
    static constexpr int MAX_ROWS = TILE_ROWS;  // totals in memory cost less than unpacking twice

    static void pack(const OperandArgs& args) { pack_bf16_widened(args); }

    // The weights of the lowest nibbles of 16 words.
    static PENSTOCK_INLINE __m512i weights(__m512i words) {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return (__m512i)_mm512_permutexvar_ps(words, table);
    }

    template <int R, int P>
    struct Sums : FloatSums<Mode, R, P> {
        PENSTOCK_INLINE void add_quad(int p, __m512i bytes, const std::int32_t* floats, int rows) {
#pragma GCC unroll 4
            for (int step = 0; step < QUAD; ++step) {
                const int i = ORDER[step];
                const __m512i low_weights = weights(_mm512_srli_epi32(bytes, 8 * i));
                const __m512i high_weights = weights(_mm512_srli_epi32(bytes, 8 * i + 4));
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i x = _mm512_set1_epi32(floats[i * rows + r]);
                    F32Words::multiply_add(this->low[p][r], low_weights, x);
                    F32Words::multiply_add(this->high[p][r], high_weights, x);
                }
            }
        }
    };
};

#if !defined(__AVX512BF16__)
using Bf16Rows = WideBf16Rows;
#endif
