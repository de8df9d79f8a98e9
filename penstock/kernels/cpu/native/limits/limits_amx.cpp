// The limits of a core with AMX: products of whole tiles.

#include "amx_tiles.inc.h"
#include "limits/limits.h"

namespace penstock {

namespace {

constexpr int NUM_CHAINS = 6;  // tiles 0 .. 5; 6 and 7 are the operands

// Tile products are volatile assembly, so the compiler keeps the loop without using its result.
#define PENSTOCK_LOOP(instruction)                                       \
    AmxConfig config;                                                    \
    for (int tile = 0; tile < 8; ++tile) config.set(tile, AMX_ROWS);     \
    config.load();                                                       \
    _tile_zero(0);                                                       \
    _tile_zero(1);                                                       \
    _tile_zero(2);                                                       \
    _tile_zero(3);                                                       \
    _tile_zero(4);                                                       \
    _tile_zero(5);                                                       \
    _tile_zero(6);                                                       \
    _tile_zero(7);                                                       \
    for (std::int64_t i = 0; i < iterations; ++i) {                      \
        instruction(0, 6, 7);                                            \
        instruction(1, 6, 7);                                            \
        instruction(2, 6, 7);                                            \
        instruction(3, 6, 7);                                            \
        instruction(4, 6, 7);                                            \
        instruction(5, 6, 7);                                            \
    }                                                                    \
    _tile_release();                                                     \
    return 0

float multiply_bf16(std::int64_t iterations) { PENSTOCK_LOOP(_tile_dpbf16ps); }
float multiply_int8(std::int64_t iterations) { PENSTOCK_LOOP(_tile_dpbsud); }

}  // namespace

template <> void set_limits<THIS_LEVEL>(LimitLoops& loops) {
    constexpr std::int64_t OUTPUTS = AMX_ROWS * 16;
    loops.multiply[KIND_BF16] = {multiply_bf16, NUM_CHAINS * OUTPUTS * 32 * 2};
    loops.multiply[KIND_INT8] = {multiply_int8, NUM_CHAINS * OUTPUTS * 64 * 2};
}

}  // namespace penstock
