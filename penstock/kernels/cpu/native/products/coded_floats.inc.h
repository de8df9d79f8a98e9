// Codes whose levels are not integers, as float32: floats of 8 bits with MANTISSA bits of mantissa, whose bits are
// multiplied as they are (coded.inc.h), or 4 bits for a table. Included by coded_vectors.inc.h, within its namespace.
template <int CODE_BITS, int MANTISSA>
struct FloatCodes {
    static constexpr int BITS = CODE_BITS;
    static constexpr int PIECE = 128;
    static constexpr int SLICES = 1, WHOLE_ROWS = 2;
    static constexpr int BLOCK_ROWS = HALVES == 1 ? 12 : 6;
    template <int COLUMNS>
    using Quad = Floats[QUAD][COLUMNS];

    Floats factor;
    Floats table[MAX_LEVELS / LANES];

    explicit FloatCodes(const PenstockWeight& w) : factor(sum_factor(w) - Floats{}) {
        __builtin_memcpy(table, w.levels, sizeof table);
    }

    PENSTOCK_INLINE Floats lookup(const Ints& codes) const {
#if defined(__AVX512F__)
        return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)table[0]);
#else
        const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], (__m256i)codes);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)codes);
        return (Floats)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#endif
    }

    // Call take(i, weight) for the elements of a quad, where weight(c) unpacks the weights of register c.
    template <int HALF, int COLUMNS, class Take>
    PENSTOCK_INLINE void unpack(const std::uint8_t* quad, const Take& take) const {
        Ints codes[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c)
            codes[c] = load_register(quad + (BITS == 4 ? HALF + c / PAIR : register_of(HALF, c)) * WIDTH);
        if constexpr (BITS == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; ++i)
                take(i, [&](int c) __attribute__((always_inline)) {
                    return lookup(codes[c] >> (8 * i + c % PAIR * 4));
                });
        } else {
            constexpr auto MASK = static_cast<std::int32_t>(0x80000000u | 127u << (23 - MANTISSA));
            // Multiplying shifts a byte, and extends its sign to a word.
            constexpr std::int32_t EVEN = ONE_WORDS << (7 - MANTISSA), ODD = EVEN << 8;
            Ints even[COLUMNS], odd[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) {
                even[c] = Dot::byte_products(all(EVEN), codes[c]);
                odd[c] = Dot::byte_products(all(ODD), codes[c]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < QUAD; ++i)
                take(i, [&](int c) __attribute__((always_inline)) {
                    const Ints words = i % 2 == 0 ? even[c] : odd[c];
                    return same_bits<Floats>((i < 2 ? words << 16 : words) & MASK);
                });
        }
    }

    template <int HALF, int COLUMNS>
    PENSTOCK_INLINE void unpack(const std::uint8_t* quad, Quad<COLUMNS>& to) const {
        unpack<HALF, COLUMNS>(quad, [&](int i, const auto& weight) __attribute__((always_inline)) {
            for (int c = 0; c < COLUMNS; ++c) to[i][c] = weight(c);
        });
    }

    static PENSTOCK_INLINE void add(Floats& sum, const Floats& weights, const Floats& x) {
#if defined(__AVX512F__)
        sum = (Floats)_mm512_fmadd_ps((__m512)weights, (__m512)x, (__m512)sum);
#else
        sum = add_float_products(sum, weights, x);
#endif
    }

    template <int ROWS, int HALF, int COLUMNS, class Load>
    PENSTOCK_INLINE void add_rows(const Work& work, int row, const Load& load) const {
        const float* x = reinterpret_cast<const float*>(work.operands) + work.piece.k * work.rows + row;
        int quad = 0;
        const Part<ROWS, HALF, COLUMNS> part{work, row};
        part.template each_block<Floats>([&](std::int64_t k, std::int64_t stop, Floats (&sums)[ROWS][COLUMNS])
                                             __attribute__((always_inline)) {
            const auto take = [&](int, const auto& weight) __attribute__((always_inline)) {
                for (int pair = 0; pair < COLUMNS; pair += PAIR) {
                    const Floats weights[PAIR] = {weight(pair), weight(pair + 1)};
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r)
                        for (int c = 0; c < PAIR; ++c) add(sums[r][pair + c], weights[c], x[r] - Floats{});
                }
                x += work.rows;
            };
            for (; k < stop; k += QUAD, ++quad) load(quad, take);
            if (BITS == 8 && work.piece.last)
                for (int r = 0; r < ROWS; ++r)
                    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = sums[r][c] * factor;
        });
    }
};
