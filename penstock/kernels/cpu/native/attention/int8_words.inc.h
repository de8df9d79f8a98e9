// Attention with an int8 cache, computed in words of 16 bits, for levels without an exact dot product of bytes.
//
// Slices are written as words, because each is multiplied with many stored integers. These are split in registers. The
// sums of some operands with one vector stay in registers over all runs.
#include "attention/int8.inc.h"
#include "word_pairs.inc.h"

namespace penstock {
namespace {

struct WordsDot {
    using Operand = std::int16_t;
    static constexpr int ZERO_POINT = penstock::ZERO_POINT;
    static constexpr int MOST = 6;  // operands whose sums are in registers at once

    template <int OPERANDS, int QUADS, class Find>
    static PENSTOCK_INLINE void multiply(
        int runs, std::int64_t step, const Find& find, const std::int32_t* start, I32x16 (*sums)[2]) {
        constexpr int BLOCKS = (OPERANDS + MOST - 1) / MOST, BLOCK = (OPERANDS + BLOCKS - 1) / BLOCKS;
        for (int side = 0; side < 2; ++side) {
            for (int run = 0; run < runs; ++run) {
                const Run<Operand> at = find(run);
                for (int quad = 0; quad < QUADS; ++quad) prefetch_to_l2(at.next[side] + quad * step);
            }
            for (int i = 0; i + BLOCK <= OPERANDS; i += BLOCK)
                add<BLOCK, QUADS>(runs, step, find, side, i, start + i, sums + i);
            if constexpr (constexpr int LEFT = OPERANDS % BLOCK, FIRST = OPERANDS - LEFT; LEFT > 0)
                add<LEFT, QUADS>(runs, step, find, side, FIRST, start + FIRST, sums + FIRST);
        }
    }

  private:
    // The sums of ROWS of the operands, from operand `first` on, with the vectors of one side.
    template <int ROWS, int QUADS, class Find>
    static PENSTOCK_INLINE void add(int runs, std::int64_t step, const Find& find, int side, int first,
                                    const std::int32_t* start, I32x16 (*sums)[2]) {
        constexpr int AT_ONCE = 2;  // registers
        static_assert(PARTS % AT_ONCE == 0);
        for (int part = 0; part < PARTS; part += AT_ONCE) {
            IntPart block[ROWS][AT_ONCE];
            for (int r = 0; r < ROWS; ++r)
                for (int p = 0; p < AT_ONCE; ++p) block[r][p] = IntPart{} + start[r];
            for (int run = 0; run < runs; ++run) {
                const Run<Operand> at = find(run);
                const std::uint8_t* stored = at.stored[side] + part * PART_LANES * QUAD;
                const Operand* row = at.operand + first * CHUNK;
#pragma GCC unroll 4
                for (int quad = 0; quad < QUADS; ++quad, stored += step, row += QUAD) {
                    const WordPairs left = split_stored<0>(stored);
                    const WordPairs right = split_stored<0>(stored + PART_LANES * QUAD);
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r) {
                        const WordPairs of_row{pair_of(row + r * CHUNK), pair_of(row + r * CHUNK + 2)};
                        block[r][0] = add_products(block[r][0], left, of_row);
                        block[r][1] = add_products(block[r][1], right, of_row);
                    }
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int p = 0; p < AT_ONCE; ++p) sums[r][side].part[part + p] = block[r][p];
        }
    }
};

}  // namespace

template <> CacheKernel cache_kernel<THIS_LEVEL, CACHE_INT8>() { return int8_kernel<WordsDot>(); }

}  // namespace penstock
