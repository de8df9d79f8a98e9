// Dot products of bytes for levels without an exact instruction for them, in words of 16 bits. Included by the file of
// a level, which defines the product of two words of stored integers with two words of a row.
#pragma once

#include "attention/int8.inc.h"

namespace penstock {
namespace {

typedef std::int16_t WordPart __attribute__((vector_size(4 * PART_LANES)));

// The lanes of a register, 4 bytes each, as two words each: those of even and those of odd elements.
struct WordPairs {
    WordPart even, odd;
};

// A Pair provides
//     static constexpr int ZERO_POINT;                               // as in Dot
//     static IntPart dot(const WordPairs& stored, const WordPairs& row);
template <class Pair>
struct WordsDot {
    static constexpr int ZERO_POINT = Pair::ZERO_POINT;
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
        IntPart block[ROWS][PARTS];
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < PARTS; ++i) block[r][i] = sums[r][side].part[i];
        for (int quad = 0; quad < QUADS; ++quad) {
            WordPairs of_stored[PARTS];
            for (int i = 0; i < PARTS; ++i) of_stored[i] = split_stored(stored + quad * step + i * PART_LANES * QUAD);
            for (int r = 0; r < ROWS; ++r) {
                const WordPairs of_row = split_row(operand + r * CHUNK + quad * QUAD);
                for (int i = 0; i < PARTS; ++i) block[r][i] += Pair::dot(of_stored[i], of_row);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < PARTS; ++i) sums[r][side].part[i] = block[r][i];
    }

    static PENSTOCK_INLINE WordPairs split_stored(const std::uint8_t* from) {
        constexpr std::int16_t DIFFERENCE = penstock::ZERO_POINT - ZERO_POINT;
        WordPart words;
        __builtin_memcpy(&words, from, sizeof words);
        return {(words & 255) - DIFFERENCE, (words >> 8 & 255) - DIFFERENCE};
    }

    // The 4 elements of one row in every lane.
    static PENSTOCK_INLINE WordPairs split_row(const std::int8_t* four) {
        std::int32_t bits;
        __builtin_memcpy(&bits, four, sizeof bits);
        const WordPart words = reinterpret_cast<WordPart>(IntPart{} + bits);
        return {words << 8 >> 8, words >> 8};
    }
};

}  // namespace
}  // namespace penstock
