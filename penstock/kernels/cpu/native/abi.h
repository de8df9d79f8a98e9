// The C interface between Python and the native kernels. It is declared only here: the C++ compiler checks every
// definition against this file, and kernels/cpu/library.py reads the same text. The file may therefore contain only
// constants, enums, structs and functions in the forms used below.
//
// A function that computes takes a Context (context.h) first, reads and writes memory that the caller owns, keeps no
// pointer after it returns, and returns a Status unless declared otherwise. Arrays are contiguous. A Context runs one
// call at a time.
//
// Two rules hold for every file in this folder.
//   - A row of a result is a function of that row's inputs only. It never depends on the number of rows, on its place
//     among them, or on the thread that computed it.
//   - A file compiled for an instruction level (its name ends in _avx2, _avx512 or _amx) exports its table of kernels
//     and nothing else, and calls no inline function or template of the standard library that might not be inlined.
//     The linker would keep one copy for all levels, possibly one that this processor cannot run.
#pragma once

#include <cstdint>

#define PENSTOCK_API __attribute__((visibility("default")))

namespace penstock {

struct Context;

constexpr int PANEL = 32;              // output columns that are packed together
constexpr int K_UNIT = 64;             // every leaf of K is zero-padded to a multiple of this (or of the int4 group)
constexpr int MAX_LEAVES = 8;          // pieces of K that are summed separately and added as a binary tree
constexpr int MAX_LEVELS = 16;         // levels of a coded weight that are a table
constexpr int MAX_PIECES = 4;          // products of a checkpoint that are computed as one, such as q, k and v
constexpr int MAX_CALL_ARGUMENTS = 21;
constexpr int READ_LOOPS = 4;          // ways to read memory (limits/reads.inc.h)

// Instruction levels in ascending order; each includes the ones before it.
enum Level : std::int32_t {
    LEVEL_PORTABLE = 0,  // plain C++
    LEVEL_AVX2 = 1,      // AVX2 and FMA
    LEVEL_AVX512F = 2,   // AVX-512 F, BW, DQ and VL, and VNNI if the processor has it; same bits as AVX2
    LEVEL_AVX512 = 3,    // AVX-512 F, BW, DQ, VL, VNNI and BF16
    LEVEL_AVX512FMA = 4, // same bits as AVX512, for processors with float32 multiply-adds faster than vdpbf16ps
    LEVEL_AMX = 5        // AVX512 and AMX tiles of bf16 and int8
};

enum Status : std::int32_t {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = -1,
    STATUS_NOT_QUANTISABLE = -2,  // a weight is not finite, or its magnitude is 2^100 or more
    STATUS_OUT_OF_RANGE = -3      // an id, position or slot is outside its table
};

enum DataType : std::int32_t { TYPE_F32 = 0, TYPE_BF16 = 1 };

enum Activation : std::int32_t {
    ACT_NONE = 0, ACT_SILU = 1, ACT_GELU = 2, ACT_GELU_TANH = 3,
    ACT_CLAMPED_SILU = 4,  // of a gated product: it clamps the other half, and adds 1 to it, too
    ACT_RELU2 = 5, ACT_RELU = 6, ACT_TANH = 7
};

// How a router's logits become scores (RouterParams in kernels/metadata.py).
enum RouterScores : std::int32_t {
    SCORES_SOFTMAX = 0, SCORES_SIGMOID = 1, SCORES_SPARSEMIXER = 2, SCORES_CHOSEN_SIGMOID = 3
};

// How a weight is stored and what it is multiplied with.
enum Kind : std::int32_t {
    KIND_F32 = 0,       // float32 x float32
    KIND_BF16 = 1,      // bfloat16 x bfloat16
    KIND_INT8 = 2,      // int8, one scale per column; activations as 1, 2 or 3 int8 slices
    KIND_INT4 = 3,      // int4, one scale per group of K and column; activations as for int8
    KIND_INT4_A16 = 4,  // stored as KIND_INT4; activations bfloat16
    KIND_CODED = 5,     // codes of a checkpoint's own format (kernels/coding.py), whose levels are integers
    KIND_CODED_FLOAT = 6,  // the same with other levels; activations float32 or bfloat16
    NUM_KINDS = 7
};

enum ScaleType : std::int32_t { SCALE_F16 = 0, SCALE_BF16 = 1, SCALE_F32 = 2 };

enum CacheKind : std::int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_INT8 = 2, NUM_CACHE_KINDS = 3 };

// Functions that a recorded program may call: RECORD_X is penstock_x.
enum Recordable : std::int64_t {
    RECORD_LINEAR,
    RECORD_EXPERTS,
    RECORD_RMS_NORM,
    RECORD_ADD_RMS_NORM,
    RECORD_LAYER_NORM,
    RECORD_ADD_LAYER_NORM,
    RECORD_ADD,
    RECORD_ROUND,
    RECORD_SOFTCAP,
    RECORD_ROTARY_QKV,
    RECORD_EMBEDDING,
    RECORD_ROUTE,
    RECORD_ATTEND,
    RECORD_PACKED_EMBEDDING,
    RECORD_SCALE,
    RECORD_ADD_GATED,
    RECORD_XIELU,
    RECORD_NORM_HEADS,
    RECORD_LORA_SHRINK,
    RECORD_LORA_EXPAND,
    RECORD_ACTIVATE
};

}  // namespace penstock

extern "C" {

// A packed weight [n, k]. K is laid out leaf after leaf, each padded: position padded_leaf_ends[l-1] + j holds element
// leaf_ends[l-1] + j. Columns come in panels of 32: column c of panel p is row 32 p + c of the weight. In a gated
// weight (n/2 gate rows, then n/2 up rows), columns 0..15 of panel p are the gate rows from 16 p on, and columns 16..31
// are the up rows from 16 p on. Padding is a weight of zero. All arrays begin at a multiple of 64 bytes.
//
//   kind       values, panel after panel                            bytes per panel
//   f32        [padded_k][32] float                                 128 padded_k
//   bf16       [padded_k / 2][32][2] bfloat16                        64 padded_k
//   int8       [padded_k / 4][32][4] uint8, weight + 128             32 padded_k
//   int4       [padded_k / 4][16][4] bytes: low nibble weight + 8    16 padded_k
//              of columns 0..15, high nibble of columns 16..31
//   coded      8 bits as int8, 4 bits as int4                        4 padded_k bits
//              6 bits: [padded_k / 4][96] bytes: the low four bits
//              as int4, then [8][4] bytes of the high two bits:
//              bits 2i and 2i + 1 are those of columns 8i .. 8i + 7
//
// A coded weight has blocks of block_size elements, which begin anew in each leaf, and groups of group_size elements
// (16 or 32) that divide a block. Its other arrays are scales and mins [panels][blocks][32], steps [panels][groups][32]
// and step_mins [panels][groups / 2][32][2]; those that the format lacks are null. Padding is blocks and steps of zero.
struct PenstockWeight {
    std::int64_t n, k;
    std::int64_t padded_k;
    std::int64_t panels;
    std::int32_t kind;
    std::int32_t slices;      // int8, int4, coded: int8 rows per activation row
    std::int32_t group_size;  // int4: 32, 64 or 128, and a divisor of every padded leaf; coded: 16 or 32; else 0
    std::int32_t gated;
    std::int32_t leaves;
    std::int32_t block_size;  // coded: a multiple of group_size, or 0: the whole row, which has no scale; else 0
    std::int64_t leaf_ends[penstock::MAX_LEAVES];
    std::int64_t padded_leaf_ends[penstock::MAX_LEAVES];
    void* values;
    float* column_scales;         // int8, coded: [panels * 32]; else null
    std::uint16_t* group_scales;  // int4: bfloat16 [panels][padded_k / group_size][32]; else null
    const float* bias;            // [panels * 32] in column order, or null
    void* scales;                 // of scale_type, as are mins
    void* mins;
    std::int8_t* steps;
    std::uint8_t* step_mins;
    const std::int32_t* order;    // [k] column of each stored column, or null
    std::int32_t scale_type;      // ScaleType
    std::int32_t code_bits;       // 4, 6 or 8
    std::int32_t joined;          // coded: whether the two slices of a row are multiplied as one integer (coding.py)
    std::int32_t zero;            // coded: the code of 0; with levels, a number that makes each level a byte, 0 .. 255
    std::int32_t has_levels;      // 4 bits: whether levels are the values of the codes, which else are code - zero
    std::int32_t largest_code;    // without the sign of a float of 8 bits; larger ones are not packed
    std::int32_t mantissa_bits;   // coded_float of 8 bits: sign, exponent and so many bits of a mantissa
    float factor;                 // the value of such a code, less its sign: its bits, as a float32's exponent and
                                  // mantissa, times factor
    float levels[penstock::MAX_LEVELS];
};

// Bits of neighbouring bytes of a block and the values that they belong to, as kernels/coding.py describes them.
struct PenstockBits {
    std::int32_t first, count, to, stride, right, left, mask;
};

// How a file stores the blocks of a coded weight that has float16 scales, or exponents as scales.
struct PenstockBlockForm {
    const PenstockBits* bits;               // of codes, then of steps, then of step_mins
    std::int32_t codes, steps, step_mins;   // how many there are
    std::int32_t code_offset, step_offset;  // what is added to each, modulo 256
    std::int32_t bytes;                     // of a block
    std::int32_t scale, min;                // their first bytes
    std::int32_t is_exponent, is_subtracted;
};

// The LoRA adapters of a product x [.., k] -> [.., n], in `slots` slots (LoraTable in kernels/ops.py). A row with the
// adapter of slot s gets, in the columns up to piece_ends[p] and from the piece before on,
//
//   hidden[p] = x a[s][p]^T;    y = y * factors[s] + offsets[s] + hidden[p] b[s]
struct PenstockLora {
    std::int64_t n, k;
    std::int64_t max_rank;
    std::int32_t slots, pieces;
    std::int32_t leaves;
    std::int32_t type;            // DataType of a and b
    std::int64_t piece_ends[penstock::MAX_PIECES];
    std::int64_t leaf_ends[penstock::MAX_LEAVES];
    const void* a;                // [slots][pieces][max_rank][k]
    const void* b;                // [slots][n / 16, rounded up][max_rank][16]
    const float* factors;         // [slots][n], as offsets
    const float* offsets;
    const std::int32_t* ranks;    // [slots] rows of a and b that count
    const std::int32_t* scaled;   // [slots] whether factors and offsets count
};

// The keys and values of one layer. attention/attention.h describes the layout.
struct PenstockCache {
    void* memory;
    std::int64_t blocks, block_size;  // block_size: a multiple of 16
    std::int64_t kv_heads, head_dim, padded_dim;
    std::int32_t kind;                // CacheKind
    std::int32_t slices;              // int8: int8 rows per query row and per row of probabilities
    const float* key_scales;          // int8: [kv heads][padded_dim]; all four null: one scale and offset per token
    const float* key_offsets;
    const float* value_scales;
    const float* value_offsets;
};

// How one layer computes its scores.
struct PenstockAttention {
    float scale;
    float softcap;             // 0: none
    const float* slopes;       // ALiBi, [query heads], or null
    const float* sink_logits;  // [query heads], or null
    const float* distance_bias;  // [query heads][2 bias_reach + 31]: attention/attention.h; or null
    std::int32_t bias_before_scale;
    std::int32_t bias_reach;
};

// A unit of work of an attention plan (kernels/attention/plan.py).
struct PenstockAttentionItem {
    std::int32_t sequence;              // the sequence whose block table is read
    std::int32_t head_begin, head_end;  // kv heads
    std::int32_t row_begin, row_end;    // rows of the packed step: token * group + g
    std::int32_t span_begin, span_end;
    std::int32_t partial;               // -1: results are final; else the first partial row that the item writes
};

// A result that several items contribute to.
struct PenstockAttentionCombine {
    std::int32_t head_begin, head_end;
    std::int32_t row_begin, row_end;
    std::int32_t reference_begin, reference_end;  // into references: items, spans ascending
};

// One step for the layers of one cache group: its sequences (AttentionMetadata in kernels/metadata.py) and its plan.
// Python rewrites it before each step; recorded programs keep its address. Only penstock_decode writes to its arrays.
struct PenstockAttentionStep {
    std::int64_t sequences, tokens;
    const std::int32_t* query_start_loc;  // [sequences + 1]
    std::int32_t* seq_lens;               // [sequences]
    const std::int32_t* block_table;      // [sequences][max_blocks]
    std::int64_t max_blocks;
    std::int64_t* slot_mapping;           // [tokens]
    std::int32_t* positions;              // [tokens]
    std::int64_t sliding_window;          // 0: none
    std::int64_t chunked;                 // 1: the text is cut into windows; 0: the window slides
    std::int64_t bidirectional;           // 1: a row also sees what is behind it, within the window
    std::int64_t num_sink_tokens;
    std::int64_t items, combines;
    const PenstockAttentionItem* item;
    const std::int64_t* item_starts;      // [threads + 1]: the first item of each thread, then the number of items
    const PenstockAttentionCombine* combine;
    const std::int32_t* references;
    const std::int32_t* staged;           // [sequences + 1]: first staged granule (of each head) of each sequence
    std::int64_t partial_rows;
};

// Sampling parameters of M rows. kernels/sampling.py explains the fields; a null pointer stands for None.
struct PenstockSampling {
    const float* temperature;              // [M]
    const std::int64_t* top_k;             // [M]
    const float* top_p;                    // [M]
    const float* min_p;                    // [M]
    const std::int64_t* noise_key;         // [M, 3]
    const std::int64_t* masked;            // [num_masked, 2]
    std::int64_t num_masked;
    const std::int64_t* bias_pairs;        // [num_bias, 2]
    const float* bias_values;              // [num_bias]
    std::int64_t num_bias;
    const float* repetition;               // [M]
    const std::int64_t* repetition_pairs;  // [num_repetition, 2]
    std::int64_t num_repetition;
    const float* frequency;                // [M]
    const float* presence;                 // [M]
    const std::int64_t* count_pairs;       // [num_counts, 2]
    const float* count_values;             // [num_counts]
    std::int64_t num_counts;
};

// One call of a recorded program.
struct PenstockCall {
    std::int64_t function;                                 // Recordable
    std::int64_t arguments[penstock::MAX_CALL_ARGUMENTS];  // those after the context; a float as the bits of a double
};

// When a call ran. Times are nanoseconds of the steady clock, which is that of Python's time.perf_counter_ns on Linux.
struct PenstockSpan {
    const char* function;  // its name in this file
    std::int64_t begin, end;
};

// ---- Library and context

// Return the beginning of the SHA-256 of this file, as it was when the library was compiled (CMakeLists.txt).
PENSTOCK_API std::int32_t penstock_abi_version();

// Return the highest Level that this library and this processor support.
PENSTOCK_API std::int32_t penstock_best_level();

// Create a context for `threads` computing threads, the caller's included, at a level up to penstock_best_level().
// Return null if memory or threads cannot be allocated. Free it with penstock_context_free.
PENSTOCK_API penstock::Context* penstock_context_new(std::int32_t level, std::int32_t threads);
PENSTOCK_API void penstock_context_free(penstock::Context* context);

// Let helper `thread` (1 .. threads - 1) run only on cpus [count]. Thread 0, the caller, sets its own affinity.
PENSTOCK_API std::int32_t penstock_context_pin(
    penstock::Context* context, std::int32_t thread, const std::int32_t* cpus, std::int64_t count);

// Return the seconds spent in calls of this context so far, not counting time spent waiting for another call.
PENSTOCK_API double penstock_busy_seconds(penstock::Context* context);

// Write the spans of all calls until the next penstock_trace to spans [capacity], or write nothing if spans is null.
// Return the number of calls since the previous penstock_trace; spans beyond its capacity were not written.
PENSTOCK_API std::int64_t penstock_trace(penstock::Context* context, PenstockSpan* spans, std::int64_t capacity);

// Run recorded calls in order. Stop at the first that fails, and return its status.
PENSTOCK_API std::int32_t penstock_replay(
    penstock::Context* context, const PenstockCall* calls, std::int64_t count);

// Decode greedily with the recorded calls of a pass over one token of each of `rows` sequences: `steps` times, run the
// pass, choose each row's likeliest token, and go on to the next position.
//
// tokens [rows][at least steps + 1], token_stride elements from row to row: a row's token in each step, and after them.
// The first is given. Of the others, those that are negative are replaced with the likeliest token, or with 0 if no
// logit is a number. The pass reads input_ids [rows], positions [rows] and `groups` attention steps [num_groups], whose
// plans must hold for all these steps; it writes logits [rows][at least vocab]. `positions`, and the slots of the
// attention steps, are advanced in place; from `positions`, the lengths and positions of the attention steps are
// written before each step. Stop at the first call that fails.
PENSTOCK_API std::int32_t penstock_decode(
    penstock::Context* context, const PenstockCall* calls, std::int64_t count, PenstockAttentionStep* groups,
    std::int64_t num_groups, const float* logits, std::int64_t logits_stride, std::int64_t vocab, std::int64_t rows,
    std::int64_t* input_ids, std::int64_t* positions, std::int64_t* tokens, std::int64_t token_stride,
    std::int64_t steps);

// ---- Products. kernels/ops.py specifies the operations here and below.

// Pack rows [num_rows, k] as rows first_row .. first_row + num_rows - 1 of a weight, into its arrays. Every row must be
// packed exactly once, in any order. Only quantised kinds return STATUS_NOT_QUANTISABLE. magnitudes: null, or for an
// int8 weight that is a part of a wider one: [n], the largest absolute value of each row of the whole weight.
PENSTOCK_API std::int32_t penstock_pack_rows(
    penstock::Context* context, PenstockWeight* weight, const void* rows, std::int32_t type, std::int64_t first_row,
    std::int64_t num_rows, const float* magnitudes);

// Pack rows of a coded weight, or of an int8 weight that has given codes: as penstock_pack_rows, from the arrays that
// kernels/coding.py describes, each [num_rows, ..]; those that the format lacks are null. blocks and groups: the second
// dimensions of scales and steps. Return STATUS_NOT_QUANTISABLE if a number is not finite.
PENSTOCK_API std::int32_t penstock_pack_codes(
    penstock::Context* context, PenstockWeight* weight, const std::uint8_t* codes, const void* scales,
    const void* mins, const std::int8_t* steps, const std::uint8_t* step_mins, const float* column_scales,
    std::int64_t blocks, std::int64_t groups, std::int64_t first_row, std::int64_t num_rows);

// The same from blocks as a file stores them: [num_rows, k / block_size, bytes of a block].
PENSTOCK_API std::int32_t penstock_pack_blocks(
    penstock::Context* context, PenstockWeight* weight, const std::uint8_t* blocks, const PenstockBlockForm* form,
    std::int64_t first_row, std::int64_t num_rows);

// x [rows, k] -> out [rows, n], or [rows, n / 2] if the weight is gated and there is an activation, which applies to
// the gate; without one, the columns of gate come first, then those of up. out_stride is the number of elements from
// one row of out to the next.
PENSTOCK_API std::int32_t penstock_linear(
    penstock::Context* context, const PenstockWeight* weight, const void* x, std::int32_t x_type, std::int64_t rows,
    void* out, std::int64_t out_stride, std::int32_t out_type, std::int32_t activation);

// LoRA: x [rows, k] of lora->type -> hidden [rows][pieces][max_rank], of the slots[row] of each row; -1: none, and
// nothing is written. The sums of K are those of leaves, which are added as a binary tree.
PENSTOCK_API std::int32_t penstock_lora_shrink(
    penstock::Context* context, const PenstockLora* lora, const std::int32_t* slots, std::int64_t rows, const void* x,
    float* hidden);

// Change out [rows, n] as PenstockLora says, with what penstock_lora_shrink has written.
PENSTOCK_API std::int32_t penstock_lora_expand(
    penstock::Context* context, const PenstockLora* lora, const std::int32_t* slots, std::int64_t rows,
    const float* hidden, float* out, std::int64_t out_stride);

// The activation of x [rows, n] -> out [rows, n]; gated: of its first half, times the second, [rows, n / 2]. After
// penstock_linear without an activation, the bits are those of one with it.
PENSTOCK_API std::int32_t penstock_activate(
    penstock::Context* context, const float* x, std::int64_t rows, std::int64_t n, std::int32_t activation,
    std::int32_t gated, void* out, std::int32_t out_type);

// Mixture of experts. gate_up and down are arrays [experts]; all weights of an array have one shape. x [rows, k] is of
// x_type, as are the inner activations; ids and weights [rows, top_k]; out [rows, n]. weigh_inputs: weights multiply
// the rows of x, not the results. Ids are checked before anything is written.
PENSTOCK_API std::int32_t penstock_experts(
    penstock::Context* context, const PenstockWeight* gate_up, const PenstockWeight* down, std::int64_t experts,
    const void* x, std::int32_t x_type, std::int64_t rows, std::int64_t top_k, const std::int64_t* ids,
    const float* weights, std::int32_t activation, std::int32_t weigh_inputs, float* out);

// counts [2], over all calls so far: experts whose weights were read, each counted once per call, and (row, expert)
// pairs computed.
PENSTOCK_API void penstock_expert_counts(penstock::Context* context, std::int64_t* counts);

// ---- Rows

PENSTOCK_API std::int32_t penstock_rms_norm(
    penstock::Context* context, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n,
    void* out, std::int32_t out_type);

// x += h, then the norm of x.
PENSTOCK_API std::int32_t penstock_add_rms_norm(
    penstock::Context* context, float* x, const float* h, const float* weight, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type);

// bias may be null, here and in penstock_add_layer_norm.
PENSTOCK_API std::int32_t penstock_layer_norm(
    penstock::Context* context, const float* x, const float* weight, const float* bias, float eps, std::int64_t rows,
    std::int64_t n, void* out, std::int32_t out_type);

PENSTOCK_API std::int32_t penstock_add_layer_norm(
    penstock::Context* context, float* x, const float* h, const float* weight, const float* bias, float eps,
    std::int64_t rows, std::int64_t n, void* out, std::int32_t out_type);

// x += h, element by element.
PENSTOCK_API std::int32_t penstock_add(penstock::Context* context, float* x, const float* h, std::int64_t count);

// x += sigmoid(gates) * h for x and h [rows, n], gates [rows].
PENSTOCK_API std::int32_t penstock_add_gated(
    penstock::Context* context, float* x, const float* h, const float* gates, std::int64_t rows, std::int64_t n);

PENSTOCK_API std::int32_t penstock_round(
    penstock::Context* context, const float* x, std::int64_t count, void* out, std::int32_t out_type);

// x *= factor.
PENSTOCK_API std::int32_t penstock_scale(penstock::Context* context, float* x, float factor, std::int64_t count);

// x = cap * tanh(x / cap).
PENSTOCK_API std::int32_t penstock_softcap(penstock::Context* context, float* x, float cap, std::int64_t count);

// xIELU: x > 0 gives convex x^2 + linear x; other x give concave (e^min(x, bound) - 1 - x) + linear x.
PENSTOCK_API std::int32_t penstock_xielu(
    penstock::Context* context, const float* x, std::int64_t count, float convex, float concave, float linear,
    float bound, void* out, std::int32_t out_type);

// The layer norms of the first `heads` heads in each row of x [rows, columns], in place; weight [heads, head_dim].
PENSTOCK_API std::int32_t penstock_norm_heads(
    penstock::Context* context, float* x, const float* weight, float eps, std::int64_t rows, std::int64_t columns,
    std::int64_t heads, std::int64_t head_dim);

// cos_sin [num_positions, rotary_dim] or null. q_scale [num_positions], the factors of q, or null. q_norm and k_norm
// may be null; else they have head_dim elements (each head is normed by itself) or the elements of all heads. v_norm
// [head_dim] norms each head of v, or is null. values_are_keys: qkv has no columns for v, which is k before its norm.
// Positions are checked before anything is written. If k and v are null, only q is made; a position after the last one
// of the tables then counts as the last one.
PENSTOCK_API std::int32_t penstock_rotary_qkv(
    penstock::Context* context, const float* qkv, const std::int64_t* positions, const float* cos_sin,
    const float* q_scale, std::int64_t num_positions, std::int64_t rotary_dim, std::int64_t rows, std::int64_t heads,
    std::int64_t kv_heads, std::int64_t head_dim, const float* q_norm, std::int64_t q_norm_size, const float* k_norm,
    std::int64_t k_norm_size, const float* v_norm, std::int32_t values_are_keys, float eps, void* q, void* k, void* v,
    std::int32_t out_type);

// table [table_rows, n] -> out [rows, n]. Ids are checked before anything is written.
PENSTOCK_API std::int32_t penstock_embedding(
    penstock::Context* context, const std::int64_t* ids, const void* table, std::int32_t table_type,
    std::int64_t table_rows, std::int64_t rows, std::int64_t n, float scale, float* out);

// The same from rows of a packed weight [table_rows, n], a tied LM head, which is float or coded and not
// gated.
PENSTOCK_API std::int32_t penstock_packed_embedding(
    penstock::Context* context, const std::int64_t* ids, const PenstockWeight* weight, std::int64_t rows, float scale,
    float* out);

// Router logits [rows, experts] -> ids and weights [rows, top_k], with the numbers of RouterParams. bias and
// expert_scale [experts] may be null.
PENSTOCK_API std::int32_t penstock_route(
    penstock::Context* context, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
    std::int32_t scores, const float* bias, std::int64_t groups, std::int64_t top_groups, std::int64_t group_top,
    std::int32_t renormalize, float min_sum, float scale, const float* expert_scale, float threshold, std::int64_t* ids,
    float* weights);

// ---- Attention

// q [tokens, heads, D], k_new and v_new [tokens, Hkv, D] of `type` -> out [tokens, heads * D] of `type`, and lse
// [tokens, heads] unless lse is null. sink_q: the queries for the step's sink tokens, as q; null: q.
PENSTOCK_API std::int32_t penstock_attend(
    penstock::Context* context, const PenstockAttentionStep* step, const PenstockCache* cache,
    const PenstockAttention* params, const void* q, const void* sink_q, const void* k_new, const void* v_new,
    std::int32_t type, std::int64_t heads, void* out, float* lse);

// Reserve `workspace` bytes for the workspace that threads share, and `scratch` bytes for each thread.
PENSTOCK_API std::int32_t penstock_attention_reserve(
    penstock::Context* context, std::int64_t workspace, std::int64_t scratch);

// bytes [2]: workspace and scratch memory that a step needs.
PENSTOCK_API std::int32_t penstock_attention_bytes(
    const PenstockAttentionStep* step, const PenstockCache* cache, std::int64_t* bytes);

// Write k and v [tokens, Hkv, D] to slots [tokens]; negative slots are skipped.
PENSTOCK_API std::int32_t penstock_cache_store(
    penstock::Context* context, const PenstockCache* cache, const void* k, const void* v, std::int32_t type,
    const std::int64_t* slots, std::int64_t tokens);

// Read slots [tokens], none of them negative, into k and v [tokens, Hkv, D].
PENSTOCK_API std::int32_t penstock_cache_load(
    penstock::Context* context, const PenstockCache* cache, const std::int64_t* slots, std::int64_t tokens, float* k,
    float* v);

// ---- Sampling. Logits are [rows, vocab].

// out [rows, vocab] may be `logits`.
PENSTOCK_API std::int32_t penstock_log_softmax(
    penstock::Context* context, const float* logits, std::int64_t rows, std::int64_t vocab, float* out);

// out [rows]: 1 if no value is NaN or +inf and some value is above -inf, else 0.
PENSTOCK_API std::int32_t penstock_finite_rows(
    penstock::Context* context, const float* logits, std::int64_t rows, std::int64_t vocab, std::uint8_t* out);

// out [rows]: the chosen ids, -1 if no id may be chosen.
PENSTOCK_API std::int32_t penstock_sample(
    penstock::Context* context, const float* logits, std::int64_t rows, std::int64_t vocab,
    const PenstockSampling* params, std::int64_t* out);

// ---- Limits of the machine, with all threads of the context. Both return seconds.

// Read memory once, except for a tail of less than 1024 bytes; the memory must begin at a multiple of 64. loop: 0 ..
// READ_LOOPS - 1; which loop is the fastest depends on the processor.
PENSTOCK_API double penstock_limit_read(
    penstock::Context* context, std::int32_t loop, const void* memory, std::int64_t bytes);

// Multiply in registers about `iterations` times per thread, as KIND_F32, KIND_BF16 or KIND_INT8 products do, and write
// the number of operations.
PENSTOCK_API double penstock_limit_multiply(
    penstock::Context* context, std::int32_t kind, std::int64_t iterations, std::int64_t* operations);
}
