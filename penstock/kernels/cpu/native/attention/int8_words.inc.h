// Attention with an int8 cache, computed in words of 16 bits, for levels without an exact dot product of bytes.
#include "attention/int8.inc.h"
#include "word_pairs.inc.h"

namespace penstock {
namespace {

struct WordsDot {
#if defined(__AVX2__)
    static constexpr int ZERO_POINT = penstock::ZERO_POINT;
#else
    static constexpr int ZERO_POINT = 0;  // two products of unsigned bytes would not fit into a word
#endif
    static constexpr int BLOCK = 4;  // operand rows whose sums are in registers at once

    template <int OPERANDS, int QUADS, class Find>
    static PENSTOCK_INLINE void multiply(
        int runs, std::int64_t step, const Find& find, const std::int32_t* start, I32x16 (*sums)[2]) {
        for (int i = 0; i < OPERANDS; ++i) sums[i][0] = sums[i][1] = start[i];
        constexpr int WHOLE = OPERANDS / BLOCK * BLOCK;
        for (int side = 0; side < 2; ++side)
            for (int run = 0; run < runs; ++run) {
                const Run at = find(run);
                for (int i = 0; i < WHOLE; i += BLOCK)
                    add<BLOCK, QUADS>(at.stored[side], step, at.operand + i * CHUNK, sums + i, side);
                if constexpr (OPERANDS > WHOLE)
                    add<OPERANDS - WHOLE, QUADS>(at.stored[side], step, at.operand + WHOLE * CHUNK, sums + WHOLE, side);
                for (int quad = 0; quad < QUADS; ++quad) __builtin_prefetch(at.next[side] + quad * step);
            }
    }

  private:
    template <int ROWS, int QUADS>
    static PENSTOCK_INLINE void add(
        const std::uint8_t* stored, std::int64_t step, const std::int8_t* operand, I32x16 (*sums)[2], int side) {
        constexpr int LESS = penstock::ZERO_POINT - ZERO_POINT;
        IntPart block[ROWS][PARTS];
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < PARTS; ++i) block[r][i] = sums[r][side].part[i];
        for (int quad = 0; quad < QUADS; ++quad) {
            WordPairs of_stored[PARTS];
            for (int i = 0; i < PARTS; ++i)
                of_stored[i] = split_stored<LESS>(stored + quad * step + i * PART_LANES * QUAD);
            for (int r = 0; r < ROWS; ++r) {
                const WordPairs of_row = split_row(operand + r * CHUNK + quad * QUAD);
                for (int i = 0; i < PARTS; ++i) block[r][i] += dot(of_stored[i], of_row);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < PARTS; ++i) sums[r][side].part[i] = block[r][i];
    }
};

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_INT8>() { return int8_kernel<WordsDot>(); }

}  // namespace penstock
