// Products in bfloat16 and int8 with AMX tiles.
//
// A step of K is 64 bytes of a row. A packed tile of activations is [steps][operand rows][64 bytes], and 16 of its rows
// are an A operand. A step of a panel in memory is two B operands: 16 rows, 128 bytes apart, with columns 0..15 in the
// first half of each row. Of the eight AMX tiles, four hold sums (for up to 32 rows of one panel, or 16 rows of two
// panels), two hold A operands and two hold B operands.

#include "amx_tiles.inc.h"
#include "products/leaves.inc.h"
#include "slices.inc.h"

namespace penstock {

namespace {

#include "products/quantize_rows.inc.h"

constexpr int TILE_ROWS = 2 * AMX_ROWS;
constexpr std::int64_t LINE = 64;
constexpr std::int64_t STEP_BYTES = AMX_BYTES * PANEL;  // bytes of a step of a panel
constexpr std::int64_t BLOCK_STEPS = 8;                 // steps of operands that stay in the L1 for several panels
constexpr int MANY_TILES = 3;                           // this many tiles take longer than reading their weights

// Tiles 0 and 1 hold the sums of the columns of a panel. The use of tiles 2 and 3:
enum class Form {
    TALL,  // the same columns, for rows 16..31
    WIDE,  // the same rows, for the next panel
    HALF   // unused
};

// The prefetch distance of a single stream: short enough that lines are requested in order, which keeps the hardware
// prefetcher active. With a longer distance the hardware prefetcher stops, and these prefetches alone are slower.
constexpr std::int64_t ahead_bytes(Form form) { return form == Form::TALL ? STEP_BYTES : STEP_BYTES / 2; }

// Tiles: 0 .. 3 sums; 4 and 5 operands, 6 and 7 weights.
void load_config(int operand_rows) {
    AmxConfig config;
    const int upper = operand_rows < AMX_ROWS ? operand_rows : AMX_ROWS;
    const int lower = operand_rows > AMX_ROWS ? operand_rows - AMX_ROWS : upper;
    const int rows[] = {upper, upper, lower, lower, upper, lower, AMX_ROWS, AMX_ROWS};
    for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile]);
    config.load();
}

// The sums of a leaf and one tile, and where its results go.
struct LeafSums {
    const void* sums;            // float or int32 [operand rows][width]
    int rows;
    std::int64_t width;          // columns per row of sums and tree
    std::int64_t first_column, end_column;
    int slices;                  // int8 only
    const float* scales;         // int8 only: [rows]
    const std::int32_t* totals;  // int8 only: sums of the operands, [operand rows]
    const float* tree;           // sums of earlier leaves
    std::int64_t tree_stride;    // per level
    unsigned levels;             // bit l: level l of the tree is to be added
    float* to;                   // may be `sums`
    std::int64_t to_row;         // elements between rows of `to`
};

#define PENSTOCK_TILE_PRODUCTS(instruction)    \
    static inline void multiply_upper() {      \
        instruction(0, 4, 6);                  \
        instruction(1, 4, 7);                  \
    }                                          \
    static inline void multiply_lower() {      \
        instruction(2, 5, 6);                  \
        instruction(3, 5, 7);                  \
    }                                          \
    static inline void multiply_next_panel() { \
        instruction(2, 4, 6);                  \
        instruction(3, 4, 7);                  \
    }

struct Bf16 {
    static constexpr int STEP = 32;  // elements of K
    PENSTOCK_TILE_PRODUCTS(_tile_dpbf16ps)

    static __m512 value(const LeafSums& leaf, int row, std::int64_t column) {
        return _mm512_load_ps(static_cast<const float*>(leaf.sums) + row * leaf.width + column);
    }
};

struct Int8 {
    static constexpr int STEP = 64;
    PENSTOCK_TILE_PRODUCTS(_tile_dpbsud)

    static __m512 product(const LeafSums& leaf, int operand_row, std::int64_t column) {
        const std::int32_t* sums = static_cast<const std::int32_t*>(leaf.sums) + operand_row * leaf.width + column;
        const __m512i excess = _mm512_set1_epi32(ZERO_POINT * leaf.totals[operand_row]);
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), excess));
    }

    static __m512 value(const LeafSums& leaf, int row, std::int64_t column) {
        const int first = row * leaf.slices;
        __m512 value = product(leaf, first, column);
        if (leaf.slices > 1) value += product(leaf, first + 1, column) * _mm512_set1_ps(SECOND_SLICE);
        if (leaf.slices > 2) value += product(leaf, first + 2, column) * _mm512_set1_ps(THIRD_SLICE);
        return value * _mm512_set1_ps(leaf.scales[row]);
    }
};

void pack_bf16(const OperandArgs& a) {
    char* tile = static_cast<char*>(a.tile);
    each_leaf(*a.weight, [&](const LeafRange& leaf) {
        for (std::int64_t at = 0; at < leaf.padded; at += Bf16::STEP)
            for (int r = 0; r < a.rows; ++r, tile += AMX_BYTES) {
                const std::int64_t left = leaf.count - at;
                _mm512_store_si512(
                    tile, left > 0 ? load_bf16(row_address(a, r, leaf.first + at), left, a.x_type) : __m512i{});
            }
    });
}

void pack_int8(const OperandArgs& a) {
    const int rows = a.rows * a.weight->slices;
    char* tile = static_cast<char*>(a.tile);
    static_assert(CHUNK == Int8::STEP, "quantize_tile passes whole steps");
    quantize_tile(a, 0, [=](std::int64_t k, int, const std::int8_t* slices) {
        __builtin_memcpy(tile + k * rows, slices, static_cast<std::size_t>(rows) * CHUNK);
    });
}

// The product of some steps of one tile with one or two panels.
struct Piece {
    const char* operands;
    int operand_rows;
    const char* weights;
    std::int64_t panel_bytes;  // per panel
    std::int64_t steps;
    const char* ahead;         // weights to prefetch
    std::int64_t ahead_step;   // bytes prefetched per step
    bool continues;            // start from the sums of the previous piece at `sums`
    const char* sums;          // four bytes per sum
    std::int64_t sums_row;     // bytes between rows
    char* to;                  // destination of the sums, may be `sums`
    std::int64_t to_row;       // bytes between rows
};

// The offset in bytes from the sums of tiles 0 and 1 to those of tiles 2 and 3.
template <Form FORM>
inline std::int64_t to_second(std::int64_t row) {
    return FORM == Form::TALL ? AMX_ROWS * row : 2 * AMX_BYTES;
}

template <Form FORM>
inline void begin_sums(const Piece& piece) {
    if (!piece.continues) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (FORM != Form::HALF) _tile_zero(2);
        if constexpr (FORM != Form::HALF) _tile_zero(3);
        return;
    }
    const char* second = piece.sums + to_second<FORM>(piece.sums_row);
    _tile_loadd(0, piece.sums, piece.sums_row);
    _tile_loadd(1, piece.sums + AMX_BYTES, piece.sums_row);
    if constexpr (FORM != Form::HALF) _tile_loadd(2, second, piece.sums_row);
    if constexpr (FORM != Form::HALF) _tile_loadd(3, second + AMX_BYTES, piece.sums_row);
}

template <Form FORM>
inline void store_sums(const Piece& piece) {
    char* second = piece.to + to_second<FORM>(piece.to_row);
    _tile_stored(0, piece.to, piece.to_row);
    _tile_stored(1, piece.to + AMX_BYTES, piece.to_row);
    if constexpr (FORM != Form::HALF) _tile_stored(2, second, piece.to_row);
    if constexpr (FORM != Form::HALF) _tile_stored(3, second + AMX_BYTES, piece.to_row);
}

inline void load_weights(const char* weights) {
    _tile_loadd(6, weights, 2 * AMX_BYTES);
    _tile_loadd(7, weights + AMX_BYTES, 2 * AMX_BYTES);
}

template <class Type, Form FORM>
void multiply_piece(const Piece& piece) {
    begin_sums<FORM>(piece);
    const char* operands = piece.operands;
    const char* weights = piece.weights;
    const char* ahead = piece.ahead;
    for (std::int64_t step = 0; step < piece.steps; ++step) {
        for (const char* const end = ahead + piece.ahead_step; ahead < end; ahead += LINE) {
            prefetch_to_l2(ahead);
            if constexpr (FORM == Form::WIDE) prefetch_to_l2(ahead + piece.panel_bytes);
        }
        _tile_loadd(4, operands, AMX_BYTES);
        load_weights(weights);
        Type::multiply_upper();
        if constexpr (FORM == Form::TALL) {
            _tile_loadd(5, operands + AMX_ROWS * AMX_BYTES, AMX_BYTES);
            Type::multiply_lower();
        }
        if constexpr (FORM == Form::WIDE) {
            load_weights(weights + piece.panel_bytes);
            Type::multiply_next_panel();
        }
        operands += piece.operand_rows * AMX_BYTES;
        weights += STEP_BYTES;
    }
    store_sums<FORM>(piece);
}

template <class Type>
void finish_leaf(const LeafSums& leaf) {
    for (int row = 0; row < leaf.rows; ++row)
        for (std::int64_t column = leaf.first_column; column < leaf.end_column; column += LANES) {
            const std::int64_t at = row * leaf.width + column;
            __m512 value = Type::value(leaf, row, column);
            for (unsigned levels = leaf.levels; levels != 0; levels &= levels - 1)
                value = _mm512_load_ps(leaf.tree + __builtin_ctz(levels) * leaf.tree_stride + at) + value;
            _mm512_store_ps(leaf.to + row * leaf.to_row + column, value);
        }
}

// The panels first_panel .. last_panel-1 of a call.
struct Range {
    int first_panel, last_panel;
};

// Multiply one tile with every panel of the range; `block` is that tile with the first panel of the call. Prefetches
// weights `distance` bytes after those of each panel or, if `distance` is negative, a little ahead.
template <class Type, Form FORM>
void multiply_panels(Range range, const Piece& block, std::int64_t distance) {
    constexpr int STRIDE = FORM == Form::WIDE ? 2 : 1;
    Piece piece = block;
    for (int panel = range.first_panel; panel < range.last_panel; panel += STRIDE) {
        piece.weights = block.weights + panel * block.panel_bytes;
        piece.ahead = piece.weights + (distance < 0 ? ahead_bytes(FORM) : distance);
        piece.sums = block.sums + panel * PANEL * 4;
        piece.to = block.to + panel * PANEL * 4;
        multiply_piece<Type, FORM>(piece);
    }
}

// Multiply one block of K: every tile with every panel of the range. Many tiles each prefetch a part of the block that
// is `next` bytes after this one; with few tiles, the first tile prefetches a little ahead.
template <class Type>
void multiply_block(
    const MultiplyArgs& a, Range range, const Piece& block, std::int64_t next, std::int64_t sums_stride,
    std::int64_t to_stride) {
    const bool wide = (range.last_panel - range.first_panel) % 2 == 0;
    const auto kernel = block.operand_rows > AMX_ROWS ? multiply_panels<Type, Form::TALL>
                        : wide                        ? multiply_panels<Type, Form::WIDE>
                                                      : multiply_panels<Type, Form::HALF>;
    const bool shared = a.tiles >= MANY_TILES;
    Piece piece = block;
    for (int tile = 0; tile < a.tiles; ++tile) {
        piece.ahead_step = shared ? (STEP_BYTES / LINE + a.tiles - 1) / a.tiles * LINE : tile == 0 ? STEP_BYTES : 0;
        kernel(range, piece, shared ? next + tile * piece.steps * piece.ahead_step : -1);
        piece.operands += a.tile_stride;
        piece.sums += 4 * sums_stride;
        piece.to += 4 * to_stride;
    }
}

// Where the sums of a leaf are collected and where its results go, for the first tile. Strides are in elements.
struct Destination {
    float* sums;
    std::int64_t sums_stride;  // per tile
    float* to;
    std::int64_t to_stride;    // per tile
    std::int64_t to_row;       // per row
    bool finish;               // whether finish_leaf computes the results from the sums
};

std::int64_t tree_floats(const MultiplyArgs& a) { return TREE_LEVELS * MAX_TILE_ROWS * a.panels * PANEL; }

template <class Type>
Destination destination_of(const MultiplyArgs& a, int leaf, int slices) {
    const bool last = leaf + 1 == a.weight->leaves;
    const std::int64_t width = a.panels * PANEL;
    Destination d;
    d.to = last ? a.out : a.tree + level_to_keep(leaf) * a.rows * width;
    d.to_stride = last ? a.rows * a.out_stride : tree_floats(a);
    d.to_row = last ? a.out_stride : width;
    // With several slices there are more sums than results; the tree is then narrow and leaves its last third free.
    d.sums = slices > 1 ? a.tree + 2 * MAX_TILE_ROWS * width : last ? a.partial : d.to;
    d.sums_stride = slices == 1 && last ? a.rows * width : tree_floats(a);
    d.finish = Type::STEP == Int8::STEP || levels_to_add(leaf, a.weight->leaves) != 0;
    return d;
}

// Multiply all blocks of K of one leaf, steps step .. end - 1.
template <class Type>
void multiply_leaf(const MultiplyArgs& a, Range range, std::int64_t step, std::int64_t end, int slices,
                   const Destination& d) {
    const PenstockWeight& weight = *a.weight;
    const std::int64_t width = a.panels * PANEL, panel_bytes = weight.padded_k / Type::STEP * STEP_BYTES;
    Piece block = {};
    block.operand_rows = a.rows * slices;
    block.panel_bytes = panel_bytes;
    block.sums_row = width * 4;
    block.sums = reinterpret_cast<const char*>(d.sums);
    for (std::int64_t left = end - step; left > 0 || !block.continues; block.continues = true, left = end - step) {
        const std::int64_t blocks = a.tiles > 1 ? (left + BLOCK_STEPS - 1) / BLOCK_STEPS : 1;
        block.steps = blocks > 1 ? left / blocks : left;
        block.operands = static_cast<const char*>(a.tile) + step * block.operand_rows * AMX_BYTES;
        block.weights = static_cast<const char*>(weight.values) + a.first_panel * panel_bytes + step * STEP_BYTES;
        step += block.steps;
        const bool results = step == end && !d.finish;
        block.to = reinterpret_cast<char*>(results ? d.to : d.sums);
        block.to_row = 4 * (results ? d.to_row : width);
        const bool last_block = step * Type::STEP == weight.padded_k;
        const std::int64_t next = block.steps * STEP_BYTES + (last_block ? (a.panels - 1) * panel_bytes : 0);
        multiply_block<Type>(a, range, block, next, d.sums_stride, results ? d.to_stride : d.sums_stride);
    }
}

template <class Type>
void finish_tiles(const MultiplyArgs& a, Range range, int leaf, int slices, const Destination& d) {
    LeafSums sums = {};
    sums.rows = a.rows;
    sums.width = a.panels * PANEL;
    sums.first_column = range.first_panel * PANEL;
    sums.end_column = range.last_panel * PANEL;
    sums.slices = slices;
    sums.tree_stride = a.rows * sums.width;
    sums.levels = levels_to_add(leaf, a.weight->leaves);
    sums.to_row = d.to_row;
    for (int tile = 0; tile < a.tiles; ++tile) {
        sums.sums = d.sums + tile * d.sums_stride;
        sums.scales = a.scales + tile * a.scales_stride + leaf * a.rows;
        sums.totals = a.sums + tile * a.sums_stride + leaf * a.rows * slices;
        sums.tree = a.tree + tile * tree_floats(a);
        sums.to = d.to + tile * d.to_stride;
        finish_leaf<Type>(sums);
    }
}

template <class Type>
void multiply_range(const MultiplyArgs& a, Range range, int slices) {
    std::int64_t step = 0;
    for (int leaf = 0; leaf < a.weight->leaves; ++leaf) {
        const std::int64_t end = a.weight->padded_leaf_ends[leaf] / Type::STEP;
        const Destination d = destination_of<Type>(a, leaf, slices);
        multiply_leaf<Type>(a, range, step, end, slices, d);
        if (d.finish) finish_tiles<Type>(a, range, leaf, slices, d);
        step = end;
    }
}

// A single tile is multiplied with one or two panels at a time, so that weights are read in memory order.
template <class Type>
void multiply(const MultiplyArgs& a) {
    const int slices = a.weight->slices > 1 ? a.weight->slices : 1;
    const int at_once = a.tiles > 1 ? a.panels : a.rows * slices > AMX_ROWS ? 1 : 2;
    load_config(a.rows * slices);
    for (int panel = 0; panel < a.panels; panel += at_once) {
        const int end = panel + at_once < a.panels ? panel + at_once : a.panels;
        multiply_range<Type>(a, {panel, end}, slices);
    }
    _tile_release();
}

int max_panels(int) { return MAX_PANELS; }

}  // namespace

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_BF16>() {
    return {TILE_ROWS, 2, max_panels, pack_bf16, multiply<Bf16>, true};
}

template <> ProductKernel product_kernel<THIS_LEVEL, KIND_INT8>() {
    return {TILE_ROWS, 1, max_panels, pack_int8, multiply<Int8>, true};
}

}  // namespace penstock
