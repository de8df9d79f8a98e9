// The machine's limits: how fast it reads memory and how fast it multiplies. No product uses these loops.

#include <algorithm>
#include <chrono>

#include "context.h"
#include "limits/chains.inc.h"
#include "limits/reads.inc.h"

namespace penstock {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

typedef std::int64_t Words __attribute__((vector_size(16)));

constexpr int NUM_CHAINS = 12;

// Plain C++ has no fused multiply-add and no bfloat16 products: its kernels widen bfloat16 to float32.
float multiply_floats(std::int64_t iterations) {
    typedef float Floats __attribute__((vector_size(16)));
    const Floats factor = {0.5f, 0.5f, 0.5f, 0.5f}, addend = {1, 2, 3, 4};
    return run_chains<NUM_CHAINS>(
        iterations, [&](int i) { return addend * static_cast<float>(i); },
        PENSTOCK_STEP(Floats) { sum = sum * factor + addend; });
}

float multiply_integers(std::int64_t iterations) {
    typedef std::uint16_t Integers __attribute__((vector_size(16)));
    const Integers factor = {3, 5, 7, 9, 11, 13, 15, 17};
    return run_chains<NUM_CHAINS>(
        iterations, [&](int i) { return factor * static_cast<std::uint16_t>(i); },
        PENSTOCK_STEP(Integers) { sum = sum * factor + factor; });
}

}  // namespace

template <> void set_limits<LEVEL_PORTABLE>(LimitLoops& loops) {
    loops.multiply[KIND_F32] = loops.multiply[KIND_BF16] = {multiply_floats, NUM_CHAINS * 4 * 2};
    loops.multiply[KIND_INT8] = {multiply_integers, NUM_CHAINS * 8 * 2};
    set_reads<Words>(loops);
}

bool multiplies_floats_faster(const LimitLoops& loops) {
    constexpr int ROUNDS = 5;
    constexpr std::int64_t OPERATIONS = 1 << 20;
    constexpr double MARGIN = 1.25;
    double best[] = {1.0, 1.0};  // seconds, KIND_F32 and KIND_BF16
    volatile float sink = 0;
    for (int round = 0; round < ROUNDS; ++round)
        for (const int kind : {KIND_F32, KIND_BF16}) {
            const LimitLoop& loop = loops.multiply[kind];
            const Clock::time_point start = Clock::now();
            sink = loop.run(OPERATIONS / loop.operations);
            best[kind] = std::min(best[kind], seconds_since(start));
        }
    (void)sink;
    return best[KIND_F32] * MARGIN < best[KIND_BF16];
}

}  // namespace penstock

using namespace penstock;

extern "C" double penstock_limit_read(
    Context* context, std::int32_t loop, const void* memory, std::int64_t bytes) {
    const CallScope scope(context);
    constexpr std::int64_t RANGE = 1 << 20;
    const ReadLoop read = context->limits.read[loop];
    const std::int64_t whole = bytes / READ_UNIT * READ_UNIT;
    volatile std::int64_t sink = 0;
    const Clock::time_point start = Clock::now();
    context->pool.parallel_for_blocks(whole, RANGE, [&](std::int64_t first, std::int64_t size, int) {
        sink = read(static_cast<const char*>(memory) + first, size);
    });
    return seconds_since(start);
}

extern "C" double penstock_limit_multiply(
    Context* context, std::int32_t kind, std::int64_t iterations, std::int64_t* operations) {
    const CallScope scope(context);
    constexpr int PIECES = 16;  // per thread, so that a thread that starts late does not delay the others
    const LimitLoop loop = context->limits.multiply[kind];
    const std::int64_t pieces = static_cast<std::int64_t>(context->pool.threads()) * PIECES;
    const std::int64_t piece = (iterations + PIECES - 1) / PIECES;
    volatile float sink = 0;
    const Clock::time_point start = Clock::now();
    context->pool.parallel_for(pieces, [&](std::int64_t, int) { sink = loop.run(piece); });
    const double seconds = seconds_since(start);
    *operations = pieces * piece * loop.operations;
    return seconds;
}
