// Attention over caches of bfloat16 and of float32 with AVX-512.
//
// Both kinds are processed in words of four bytes, as in products/float_avx512.cpp: a pair of bfloat16, or one float32.
// A pair is two elements of a head in q . k, and two positions in P . V. In both products every output is one
// accumulator in a register, which adds its words in ascending order. If vdpbf16ps is missing or slow, pairs are
// widened, and queries and P are float32. The number of rows is a template argument: 12 rows x 2 registers of outputs
// leave 8 for keys, values and addresses; with few rows there are 4 registers of outputs per row.

#include "attention/layout_avx512.inc.h"

namespace penstock {

namespace {

constexpr int STRIP = 12;
constexpr int WIDE = 4;           // registers of outputs per row, for few rows
constexpr int WIDE_ROWS = 6;      // the most rows that count as few
constexpr int NARROW = 2;         // registers of outputs per row, for more rows
constexpr int VALUE_DIMS = NARROW * LANES;  // how many elements of values lie together
constexpr std::int64_t LINE = 64;
static_assert(STRIP <= MAX_STRIP && ROW_CAPACITY % STRIP == 0, "operands are sized for whole strips");

// Add the products of one word of a row and some vectors. From memory, Zen 5 multiplies a word at 3/4 of its rate from
// registers.
template <class Type, int COUNT>
PENSTOCK_INLINE void multiply_add_row(__m512 (&acc)[COUNT], const __m512i (&vectors)[COUNT], const std::int32_t& word) {
    __m512i in_all_lanes;
    __asm__("vbroadcastss %1, %0" : "=v"(in_all_lanes) : "m"(word));
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) Type::multiply_add(acc[i], vectors[i], in_all_lanes);
}

template <class Type, int ROWS, int WIDTH>
PENSTOCK_INLINE void hold_all(__m512 (&acc)[ROWS][WIDTH]) {
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i) hold<typename Type::Mode>(acc[i / WIDTH][i % WIDTH]);
}

// Prefetch line `line` of four granules in TILE_GRANULES / WIDTH steps. Granules lie anywhere in memory, and reading
// them side by side is 1.3 times as fast as reading one after the other.
template <int WIDTH>
PENSTOCK_INLINE void prefetch_ahead(const char* const (&ahead)[TILE_GRANULES], std::int64_t line, int step) {
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; ++i) prefetch_to_l2(ahead[step * WIDTH + i] + line * LINE);
}

// ---- q . k

// A strip's rows with some neighbouring granules.
struct KeyPass {
    const std::int32_t* queries;         // [words][TERMS][STRIP]
    const char* keys[TILE_GRANULES];     // keys of the granules
    const char* ahead[TILE_GRANULES];    // where prefetching begins
    std::int64_t words;
    float* scores;                       // out: [rows][TILE], at the first granule's column
};

template <class Type, int ROWS, int GRANULES>
void multiply_keys(const KeyPass& pass) {
    __m512 acc[ROWS][GRANULES];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * GRANULES; ++i) acc[i / GRANULES][i % GRANULES] = _mm512_setzero_ps();
    const std::int32_t* queries = pass.queries;
    constexpr int STEPS = TILE_GRANULES / GRANULES;
    {
        const typename Type::Mode mode;
        hold_all<Type>(acc);
        for (std::int64_t line = 0; line < pass.words; line += STEPS) {
#pragma GCC unroll 4
            for (int step = 0; step < STEPS; ++step) {
                prefetch_ahead<GRANULES>(pass.ahead, line / STEPS, step);
#pragma GCC unroll 2
                for (int i = 0; i < Type::TERMS; ++i) {
                    const int term = Type::of_step(i);
                    __m512i keys[GRANULES];
#pragma GCC unroll 4
                    for (int g = 0; g < GRANULES; ++g) keys[g] = Type::term(pass.keys[g] + (line + step) * LINE, term);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r) multiply_add_row<Type>(acc[r], keys, queries[term * STRIP + r]);
                }
                queries += Type::TERMS * STRIP;
            }
        }
        hold_all<Type>(acc);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int g = 0; g < GRANULES; ++g) _mm512_store_ps(pass.scores + r * TILE + g * LANES, acc[r][g]);
}

// ---- P . V, folded into the state

// A strip's rows with some neighbouring registers of a head's elements.
struct ValuePass {
    const std::int32_t* p;               // [rows][words of a tile][TERMS]
    const char* values[TILE_GRANULES];   // at the first element
    const char* ahead[TILE_GRANULES];    // where prefetching begins
    const StripFold* fold;
    float* accumulator;                  // the state's o, [rows][dim], at the first element
    std::int64_t dim;
};

// There is no branch, because GCC would then keep the sums in memory. Full stores are cheaper than masked stores.
template <int ROWS, int WIDTH>
PENSTOCK_INLINE void fold_accumulator(const ValuePass& pass, const __m512 (&acc)[ROWS][WIDTH]) {
    const StripFold& fold = *pass.fold;
    const std::uint32_t rows = fold.rows;
    float* accumulator = pass.accumulator;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
        const __mmask16 folds = static_cast<__mmask16>(-(rows >> r & 1));
        const __m512 keep = _mm512_set1_ps(fold.keep[r]), add = _mm512_set1_ps(fold.add[r]);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
            const __m512 state = _mm512_load_ps(accumulator + i * LANES);
            const __m512 kept = _mm512_mul_ps(state, keep), part = _mm512_mul_ps(acc[r][i], add);
            _mm512_store_ps(accumulator + i * LANES, _mm512_mask_add_ps(state, folds, kept, part));
        }
        accumulator += pass.dim;
    }
}

template <class Type, int ROWS, int WIDTH>
void multiply_values(const ValuePass& pass) {
    constexpr int WORDS = GRANULE / Type::ELEMENTS;  // words of a granule
    constexpr int ROW_WORDS = TILE_GRANULES * WORDS * Type::TERMS;
    __m512 acc[ROWS][WIDTH];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * WIDTH; ++i) acc[i / WIDTH][i % WIDTH] = _mm512_setzero_ps();
    const std::int32_t* p = pass.p;
    constexpr int STEPS = TILE_GRANULES / WIDTH;
    {
        const typename Type::Mode mode;
        hold_all<Type>(acc);
        for (int g = 0; g < TILE_GRANULES; ++g) {
            const char* from = pass.values[g];
            for (int word = 0; word < WORDS; word += STEPS) {
#pragma GCC unroll 4
                for (int step = 0; step < STEPS; ++step) {
                    prefetch_ahead<WIDTH>(pass.ahead, (g * WORDS + word) / STEPS, step);
#pragma GCC unroll 2
                    for (int i = 0; i < Type::TERMS; ++i) {
                        const int term = Type::of_step(i);
                        __m512i values[WIDTH];
#pragma GCC unroll 4
                        for (int j = 0; j < WIDTH; ++j)
                            values[j] = Type::term(from + (j / NARROW * WORDS * NARROW + j % NARROW) * LINE, term);
#pragma GCC unroll 12
                        for (int r = 0; r < ROWS; ++r) multiply_add_row<Type>(acc[r], values, p[r * ROW_WORDS + term]);
                    }
                    p += Type::TERMS;
                    from += NARROW * LINE;
                }
            }
        }
        hold_all<Type>(acc);
    }
    fold_accumulator<ROWS, WIDTH>(pass, acc);
}

// ---- The kernels by the number of rows

using KeyKernel = void (*)(const KeyPass&);
using ValueKernel = void (*)(const ValuePass&);

struct StripKernels {
    KeyKernel keys;
    ValueKernel values;       // for `width` registers
    ValueKernel last_values;  // for the rest of a head, 2 registers
    int width;
};

template <class Type, int ROWS>
constexpr StripKernels kernels_for() {
    constexpr int WIDTH = ROWS <= WIDE_ROWS ? WIDE : NARROW;
    return {multiply_keys<Type, ROWS, WIDTH>, multiply_values<Type, ROWS, WIDTH>, multiply_values<Type, ROWS, NARROW>,
            WIDTH};
}

// ---- A tile

// The type of the probabilities: bfloat16 on levels with BF16; otherwise float32, as AVX2 multiplies them.
#if defined(__AVX512BF16__)
template <class Type> using Probability = typename Type::Element;
#else
template <class Type> using Probability = typename Type::Operand::Element;
#endif

// Choose the keys that a strip prefetches: its part of the next tile's granules or, if there are none, those it reads.
void choose_ahead(const TileArgs& a, int strip, int strips, const char* (&ahead)[TILE_GRANULES]) {
    for (int g = 0; g < TILE_GRANULES; ++g) {
        const bool mine = a.next[g] != nullptr && g * strips / TILE_GRANULES == strip;
        ahead[g] = mine ? a.next[g] : a.granules[g];
    }
}

template <class Type>
void attend_strip(const TileArgs& a, int first, int rows, const char* const (&ahead)[TILE_GRANULES]) {
    const std::int64_t dim = a.cache->padded_dim;
    const std::int64_t words = dim / Type::ELEMENTS;
    const StripKernels kernels =
        with_constant<STRIP>(rows, [](auto count) { return kernels_for<Type, count.value>(); });
    alignas(64) float s[STRIP * TILE];
    alignas(64) Probability<Type> p[STRIP * TILE];
    StripParts parts;
    StripFold fold;

    // The values are prefetched while keys are multiplied, and the keys of the next tile while values are multiplied.
    const std::int64_t half = words * LINE;  // bytes of the keys of a granule, or of its values
    for (int g = 0; g < TILE_GRANULES; g += kernels.width) {
        KeyPass pass;
        pass.queries = static_cast<const std::int32_t*>(a.operand) + first * words * Type::TERMS;
        for (int i = 0; i < kernels.width; ++i) pass.keys[i] = a.granules[g + i];
        for (int i = 0; i < TILE_GRANULES; ++i) pass.ahead[i] = a.granules[i] + half + half / TILE_GRANULES * g;
        pass.words = words;
        pass.scores = s + g * GRANULE;
        kernels.keys(pass);
    }
    softmax(a, first, rows, s, p, parts);
    fold_sums(a, first, rows, parts, fold);
    const void* operands = p;
    if constexpr (sizeof *p < sizeof(typename Type::Operand::Element)) {  // widen p into s, which is free now
        for (int i = 0; i < rows * TILE; i += LANES) store(s + i, load(p + i));
        operands = s;
    }
    for (std::int64_t d = 0; d < dim;) {
        const bool whole = dim - d >= kernels.width * LANES;
        const std::int64_t done = half / dim * d;
        ValuePass pass;
        pass.p = static_cast<const std::int32_t*>(operands);
        for (int g = 0; g < TILE_GRANULES; ++g) {
            pass.values[g] = a.granules[g] + half + done;
            pass.ahead[g] = ahead[g] + done;
        }
        pass.fold = &fold;
        pass.accumulator = a.state.accumulator + first * dim + d;
        pass.dim = dim;
        (whole ? kernels.values : kernels.last_values)(pass);
        d += (whole ? kernels.width : NARROW) * LANES;
    }
}

template <class Type>
void attend_rows(const TileArgs& a) {
    const int strips = (a.rows + STRIP - 1) / STRIP;
    for (int strip = 0; strip < strips; ++strip) {
        const int first = strip * STRIP;
        const char* ahead[TILE_GRANULES];
        choose_ahead(a, strip, strips, ahead);
        attend_strip<Type>(a, first, a.rows - first < STRIP ? a.rows - first : STRIP, ahead);
    }
}

template <class Type>
CacheKernel words_kernel() {
    return {pack_query_words<Type, STRIP>, attend_rows<Type>, store_granule_words<Type, VALUE_DIMS>,
            load_granule<typename Type::Element, VALUE_DIMS>};
}

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_F32>() { return words_kernel<F32Words>(); }
template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_BF16>() { return words_kernel<Bf16Words>(); }
#if defined(__AVX512BF16__)
template <> CacheKernel cache_kernel<LEVEL_AVX512FMA, CACHE_BF16>() { return words_kernel<WideBf16Words>(); }
#endif

}  // namespace penstock
