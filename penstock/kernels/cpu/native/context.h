// Context: an instruction level, its kernels, a thread pool and scratch memory. One for each engine; nothing is global.
#pragma once

#include <cstdint>

#include "abi.h"
#include "products.h"
#include "row_kernels.h"
#include "thread_pool.h"

namespace penstock {

// In ascending order; each can do all that the ones before can.
enum Level : std::int32_t {
    LEVEL_PORTABLE = 0,  // plain C++
    LEVEL_AVX2 = 1,      // AVX2 and FMA
    LEVEL_AVX512 = 2,    // AVX-512 F, BW, DQ, VL, VNNI and BF16
    LEVEL_AMX = 3        // and AMX tiles of bf16 and int8
};

// The highest level that this build has and this processor can run.
Level best_level();

// Memory that grows when more is asked for and is kept until the end. Not initialised.
class Scratch {
  public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // At least `bytes`, 64-aligned; what it held before is lost when it grows. Throws std::bad_alloc.
    void* take(std::int64_t bytes);

  private:
    void* memory_ = nullptr;
    std::int64_t capacity_ = 0;
};

struct Context {
    Context(Level level, int threads);

    const Level level;
    ProductKernel products[NUM_KINDS];
    RowKernels rows;
    ThreadPool pool;
    Scratch operands;             // activation tiles of the product under way
    Scratch workspace;            // whatever else an operation shares among its threads
    Scratch* const per_thread;    // [pool.threads()]
    ~Context();
};

}  // namespace penstock
