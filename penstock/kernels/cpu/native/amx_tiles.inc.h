// The configuration of AMX tiles, which is a state of the thread. Internal linkage, for files of the AMX level.
#pragma once

#include <cstdint>

#include "avx512.inc.h"

namespace penstock {
namespace {

constexpr int AMX_ROWS = 16;   // rows of a tile
constexpr int AMX_BYTES = 64;  // bytes of a row of a tile

// The operand of ldtilecfg. After the last use of tiles, _tile_release() must be called.
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

    // In assembly, because GCC 12 assumes that _tile_loadconfig reads only the first eight bytes, and drops other
    // stores.
    void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

static_assert(sizeof(AmxConfig) == 64, "the size that ldtilecfg reads");

}  // namespace
}  // namespace penstock
