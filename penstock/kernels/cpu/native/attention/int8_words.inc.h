// Attention with an int8 cache, computed in words of 16 bits, for levels without an exact dot product of bytes.
//
// Operands are widened to words first, because each is multiplied with many stored integers, which are split in
// registers. The sums of some operands with one vector stay in registers over all runs.
#include "attention/int8.inc.h"
#include "word_pairs.inc.h"

namespace penstock {
namespace {

struct WordsDot {
    static constexpr int ZERO_POINT = penstock::ZERO_POINT;
    static constexpr int MOST = 6;  // operands whose sums are in registers at once
    static constexpr int MAX_QUADS = MAX_HEAD_DIM / QUAD;
    static constexpr int QUADS_AT_ONCE = 4;

    template <int OPERANDS, int QUADS, class Find>
    static PENSTOCK_INLINE void multiply(
        int runs, std::int64_t step, const Find& find, const std::int32_t* start, I32x16 (*sums)[2]) {
        constexpr int BLOCKS = (OPERANDS + MOST - 1) / MOST, BLOCK = (OPERANDS + BLOCKS - 1) / BLOCKS;
        alignas(64) std::int16_t words[MAX_QUADS * OPERANDS * QUAD];  // runs * QUADS is at most MAX_QUADS
        for (int run = 0; run < runs; ++run)
            store_words<OPERANDS, QUADS>(find(run).operand, words + run * QUADS * OPERANDS * QUAD);
        for (int side = 0; side < 2; ++side) {
            for (int run = 0; run < runs; ++run) {
                const Run at = find(run);
                for (int quad = 0; quad < QUADS; ++quad) __builtin_prefetch(at.next[side] + quad * step);
            }
            for (int i = 0; i + BLOCK <= OPERANDS; i += BLOCK)
                add<BLOCK, OPERANDS, QUADS>(runs, step, find, side, words + i * QUAD, start + i, sums + i);
            if constexpr (constexpr int LEFT = OPERANDS % BLOCK; LEFT > 0)
                add<LEFT, OPERANDS, QUADS>(runs, step, find, side, words + (OPERANDS - LEFT) * QUAD,
                                           start + OPERANDS - LEFT, sums + OPERANDS - LEFT);
        }
    }

  private:
    // The operands of a run as [quad][operand], each two even, then two odd elements.
    template <int OPERANDS, int QUADS>
    static PENSTOCK_INLINE void store_words(const std::int8_t* operand, std::int16_t* words) {
        static_assert(QUADS % QUADS_AT_ONCE == 0);
        typedef std::int8_t Bytes __attribute__((vector_size(QUADS_AT_ONCE * QUAD)));
        typedef std::int16_t Wide __attribute__((vector_size(2 * QUADS_AT_ONCE * QUAD)));
        for (int i = 0; i < OPERANDS; ++i)
            for (int quad = 0; quad < QUADS; quad += QUADS_AT_ONCE) {
                Bytes bytes;
                __builtin_memcpy(&bytes, operand + i * CHUNK + quad * QUAD, sizeof bytes);
                const Wide in_order = __builtin_convertvector(bytes, Wide);
                const Wide paired = __builtin_shufflevector(
                    in_order, in_order, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
                std::int16_t of_quad[QUADS_AT_ONCE][QUAD];
                __builtin_memcpy(of_quad, &paired, sizeof of_quad);
                for (int q = 0; q < QUADS_AT_ONCE; ++q)
                    __builtin_memcpy(words + ((quad + q) * OPERANDS + i) * QUAD, of_quad[q], sizeof of_quad[q]);
            }
    }

    // The sums of ROWS of the operands with the vectors of one side.
    template <int ROWS, int OPERANDS, int QUADS, class Find>
    static PENSTOCK_INLINE void add(int runs, std::int64_t step, const Find& find, int side, const std::int16_t* words,
                                    const std::int32_t* start, I32x16 (*sums)[2]) {
        constexpr int AT_ONCE = 2;  // registers
        static_assert(PARTS % AT_ONCE == 0);
        for (int part = 0; part < PARTS; part += AT_ONCE) {
            IntPart block[ROWS][AT_ONCE];
            for (int r = 0; r < ROWS; ++r)
                for (int p = 0; p < AT_ONCE; ++p) block[r][p] = IntPart{} + start[r];
            const std::int16_t* row = words;
            for (int run = 0; run < runs; ++run) {
                const std::uint8_t* stored = find(run).stored[side] + part * PART_LANES * QUAD;
#pragma GCC unroll 4
                for (int quad = 0; quad < QUADS; ++quad, stored += step, row += OPERANDS * QUAD) {
                    const WordPairs left = split_stored<0>(stored);
                    const WordPairs right = split_stored<0>(stored + PART_LANES * QUAD);
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r) {
                        const WordPairs of_row{pair_of(row + r * QUAD), pair_of(row + r * QUAD + 2)};
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
