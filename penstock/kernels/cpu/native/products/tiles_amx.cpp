// Products in bfloat16 and int8 with AMX tiles.
//
// A step of K is 64 bytes of a row. A tile of activations is [steps][operand rows][64 bytes]: 16 rows of it are an A
// operand. A panel is a B operand as it lies in memory: 16 rows of a step, 128 bytes apart, columns 0..15 in the first
// half of each. Four tiles hold sums, up to 32 rows of one panel or 16 rows of two panels; two hold A and two B: all
// eight there are.

#include "amx_tiles.inc.h"
#include "products/operands_avx512.inc.h"
#include "products/leaves.inc.h"
#include "products/products.h"

namespace penstock {

namespace {

#include "products/quantize_rows.inc.h"

constexpr int TILE_ROWS = 2 * AMX_ROWS;
constexpr std::int64_t LINE = 64;
constexpr std::int64_t STEP_BYTES = AMX_BYTES * PANEL;  // of a panel
constexpr std::int64_t BLOCK_STEPS = 8;                // operands of so many steps stay in the L1 while panels pass
constexpr int MANY_TILES = 3;                           // that take longer than to read their weights from memory
constexpr std::int32_t WEIGHT_OFFSET = 128;             // int8 weights are stored unsigned
constexpr float SECOND_SLICE = 1.0f / 254.0f;
constexpr float THIRD_SLICE = 1.0f / 64516.0f;

// What the four tiles of sums stand for: the columns of a panel in tiles 0 and 1, and in 2 and 3
enum class Form {
    TALL,  // the same columns for rows 16..31
    WIDE,  // the same rows with the next panel
    HALF   // nothing
};

// How far a single stream is prefetched ahead of itself: just so far that the lines are asked for in order, which keeps
// the processor's own prefetching running. Further ahead it stops, and alone these prefetches are slower.
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

// A leaf of one tile, all of its sums taken.
struct Leaf {
    const void* sums;            // float or int32 [operand rows][width]
    int rows;
    std::int64_t width;          // columns of a row in sums and tree
    std::int64_t first_column;   // those to finish,
    std::int64_t last_column;    // and the one behind them
    int slices;                  // int8 only, as are
    const float* scales;         // [rows] and
    const std::int32_t* totals;  // of the operands, [operand rows]
    const float* tree;           // where earlier leaves wait,
    std::int64_t tree_stride;    // from one level to the next, and
    unsigned levels;             // which of them to add
    float* to;                   // perhaps `sums` itself,
    std::int64_t to_row;         // from one row to the next
};

struct Bf16 {
    static constexpr int STEP = 32;  // elements of K

    static inline void multiply_upper() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }

    static inline void multiply_lower() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    static inline void multiply_next_panel() {
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }

    static __m512 value(const Leaf& leaf, int row, std::int64_t column) {
        return _mm512_load_ps(static_cast<const float*>(leaf.sums) + row * leaf.width + column);
    }
};

struct Int8 {
    static constexpr int STEP = 64;

    static inline void multiply_upper() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }

    static inline void multiply_lower() {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }

    static inline void multiply_next_panel() {
        _tile_dpbsud(2, 4, 6);
        _tile_dpbsud(3, 4, 7);
    }

    static __m512 product(const Leaf& leaf, int operand_row, std::int64_t column) {
        const std::int32_t* sums = static_cast<const std::int32_t*>(leaf.sums) + operand_row * leaf.width + column;
        const __m512i excess = _mm512_set1_epi32(WEIGHT_OFFSET * leaf.totals[operand_row]);
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), excess));
    }

    static __m512 value(const Leaf& leaf, int row, std::int64_t column) {
        const int first = row * leaf.slices;
        __m512 value = product(leaf, first, column);
        if (leaf.slices > 1) value += product(leaf, first + 1, column) * _mm512_set1_ps(SECOND_SLICE);
        if (leaf.slices > 2) value += product(leaf, first + 2, column) * _mm512_set1_ps(THIRD_SLICE);
        return value * _mm512_set1_ps(leaf.scales[row]);
    }
};

void pack_bf16(const OperandArgs& a) {
    const PenstockWeight& weight = *a.weight;
    char* tile = static_cast<char*>(a.tile);
    std::int64_t first = 0, padded_first = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        const std::int64_t count = weight.leaf_ends[leaf] - first;
        const std::int64_t padded = weight.padded_leaf_ends[leaf] - padded_first;
        for (std::int64_t at = 0; at < padded; at += Bf16::STEP)
            for (int r = 0; r < a.rows; ++r, tile += AMX_BYTES) {
                const bool real = at < count;
                _mm512_store_si512(
                    tile, real ? load_bf16(row_address(a, r, first + at), count - at, a.x_type) : __m512i{});
            }
        first = weight.leaf_ends[leaf];
        padded_first = weight.padded_leaf_ends[leaf];
    }
}

void pack_int8(const OperandArgs& a) {
    const int rows = a.rows * a.weight->slices;
    char* tile = static_cast<char*>(a.tile);
    static_assert(CHUNK == Int8::STEP, "quantize_tile delivers whole steps");
    quantize_tile(a, 0, [=](std::int64_t k, int, const std::int8_t* slices) {
        __builtin_memcpy(tile + k * rows, slices, static_cast<std::size_t>(rows) * CHUNK);
    });
}

// Some steps of one tile and one panel, or two.
struct Piece {
    const char* operands;
    int operand_rows;
    const char* weights;
    std::int64_t panel_bytes;  // from one panel to the next
    std::int64_t steps;
    const char* ahead;         // weights to fetch meanwhile, and
    std::int64_t ahead_step;   // how many bytes of them at every step
    bool continues;            // the piece before, whose sums are at `sums`
    const char* sums;          // four bytes each
    std::int64_t sums_row;     // bytes from one row to the next
    char* to;                  // where the sums go, perhaps `sums` itself, and
    std::int64_t to_row;       // likewise
};

// Bytes from the sums of tiles 0 and 1 to those of tiles 2 and 3.
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
            _mm_prefetch(ahead, _MM_HINT_T1);
            if constexpr (FORM == Form::WIDE) _mm_prefetch(ahead + piece.panel_bytes, _MM_HINT_T1);
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
void finish_leaf(const Leaf& leaf) {
    for (int row = 0; row < leaf.rows; ++row)
        for (std::int64_t column = leaf.first_column; column < leaf.last_column; column += LANES) {
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

// One tile with every panel of the range, `block` being that tile's with the first panel of the call. Prefetches
// `behind` bytes behind the weights of each, or where that is negative a little ahead of them.
template <class Type, Form FORM>
void multiply_panels(Range range, const Piece& block, std::int64_t behind) {
    constexpr int STRIDE = FORM == Form::WIDE ? 2 : 1;
    Piece piece = block;
    for (int panel = range.first_panel; panel < range.last_panel; panel += STRIDE) {
        piece.weights = block.weights + panel * block.panel_bytes;
        piece.ahead = piece.weights + (behind < 0 ? ahead_bytes(FORM) : behind);
        piece.sums = block.sums + panel * PANEL * 4;
        piece.to = block.to + panel * PANEL * 4;
        multiply_piece<Type, FORM>(piece);
    }
}

// One block of K: every tile meets every panel of the range. Many tiles fetch the block that comes `next` (bytes behind
// this one) while they pass, each its share; of a few, the first fetches a little ahead of itself.
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

template <class Type>
void multiply_range(const MultiplyArgs& a, Range range, int slices) {
    const PenstockWeight& weight = *a.weight;
    const int operand_rows = a.rows * slices;
    const std::int64_t width = a.panels * PANEL;
    const std::int64_t panel_bytes = weight.padded_k / Type::STEP * STEP_BYTES;
    const std::int64_t tree_floats = TREE_LEVELS * MAX_TILE_ROWS * width;
    Leaf done = {};
    done.rows = a.rows;
    done.width = width;
    done.first_column = range.first_panel * PANEL;
    done.last_column = range.last_panel * PANEL;
    done.slices = slices;
    done.tree_stride = a.rows * width;
    Piece block = {};
    block.operand_rows = operand_rows;
    block.panel_bytes = panel_bytes;
    block.sums_row = width * 4;
    std::int64_t step = 0;
    for (int leaf = 0; leaf < weight.leaves; ++leaf) {
        const bool last_leaf = leaf + 1 == weight.leaves;
        const std::int64_t end = weight.padded_leaf_ends[leaf] / Type::STEP;
        float* to = last_leaf ? a.out : a.tree + level_to_keep(leaf) * done.tree_stride;
        const std::int64_t to_stride = last_leaf ? a.rows * a.out_stride : tree_floats;
        // With several slices there are more sums than results; the tree, then narrow, leaves its last third free.
        float* sums = slices > 1 ? a.tree + 2 * MAX_TILE_ROWS * width : last_leaf ? a.partial : to;
        const std::int64_t sums_stride = slices == 1 && last_leaf ? a.rows * width : tree_floats;
        done.levels = levels_to_add(leaf, weight.leaves);
        done.to_row = last_leaf ? a.out_stride : width;
        const bool to_finish = done.levels != 0 || Type::STEP == Int8::STEP;
        block.sums = reinterpret_cast<const char*>(sums);
        block.continues = false;
        for (std::int64_t left = end - step; left > 0 || !block.continues; block.continues = true, left = end - step) {
            const std::int64_t blocks = a.tiles > 1 ? (left + BLOCK_STEPS - 1) / BLOCK_STEPS : 1;
            block.steps = blocks > 1 ? left / blocks : left;
            block.operands = static_cast<const char*>(a.tile) + step * operand_rows * AMX_BYTES;
            block.weights = static_cast<const char*>(weight.values) + a.first_panel * panel_bytes + step * STEP_BYTES;
            step += block.steps;
            const bool results = step == end && !to_finish;
            block.to = reinterpret_cast<char*>(results ? to : sums);
            block.to_row = 4 * (results ? done.to_row : width);
            const bool last_block = last_leaf && step == end;
            const std::int64_t next = block.steps * STEP_BYTES + (last_block ? (a.panels - 1) * panel_bytes : 0);
            multiply_block<Type>(a, range, block, next, sums_stride, results ? to_stride : sums_stride);
        }
        if (!to_finish) continue;
        for (int tile = 0; tile < a.tiles; ++tile) {
            done.sums = sums + tile * sums_stride;
            done.scales = a.scales + tile * a.scales_stride + leaf * a.rows;
            done.totals = a.sums + tile * a.sums_stride + leaf * operand_rows;
            done.tree = a.tree + tile * tree_floats;
            done.to = to + tile * to_stride;
            finish_leaf<Type>(done);
        }
    }
}

// A single tile takes one or two panels after the other, so that weights are read from front to back.
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

ProductKernel amx_bf16() { return {TILE_ROWS, max_panels, pack_bf16, multiply<Bf16>, true}; }
ProductKernel amx_int8() { return {TILE_ROWS, max_panels, pack_int8, multiply<Int8>, true}; }

}  // namespace penstock
