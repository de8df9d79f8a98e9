// The configuration of AMX tiles, which is a state of the thread. Internal linkage, for files of the AMX level.
#pragma once

#include <cstdint>

#include "avx512.inc.h"

namespace penstock {
namespace {

constexpr int AMX_ROWS = 16;   // of a tile
constexpr int AMX_BYTES = 64;  // of a row of a tile

// The operand of ldtilecfg. Whoever loads one calls _tile_release() when done.
struct alignas(64) AmxConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};  // of tiles 0 .. 7; the rest stay zero
    std::uint8_t rows[16] = {};

    void set(int tile, int tile_rows) {
        row_bytes[tile] = AMX_BYTES;
        rows[tile] = static_cast<std::uint8_t>(tile_rows);
    }

    // _tile_loadconfig tells GCC 12 of the first eight bytes only, and the stores to the others are left out.
    void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

static_assert(sizeof(AmxConfig) == 64, "what ldtilecfg reads");

}  // namespace
}  // namespace penstock
