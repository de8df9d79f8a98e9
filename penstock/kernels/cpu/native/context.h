// Context: an instruction level, its kernels, a thread pool and scratch memory. One for each engine; nothing is global.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "abi.h"
#include "attention/attention.h"
#include "float_mode.h"
#include "products/pack_kernels.h"
#include "products/products.h"
#include "rows/row_kernels.h"
#include "sampling/sampler_kernels.h"
#include "threads/thread_pool.h"

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

    // At least `bytes`, 64-aligned, in big pages where it is large; what it held before is lost when it grows. Throws
    // std::bad_alloc.
    void* take(std::int64_t bytes);

  private:
    void* memory_ = nullptr;
    std::int64_t capacity_ = 0;
};

// Cuts memory into arrays that begin at multiples of 64 bytes. From null it only counts the bytes.
class Carver {
  public:
    explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <class Element>
    Element* cut(std::int64_t count) {
        char* array = memory_ == nullptr ? nullptr : memory_ + bytes_;
        bytes_ += (count * static_cast<std::int64_t>(sizeof(Element)) + 63) / 64 * 64;
        return reinterpret_cast<Element*>(array);
    }
    std::int64_t bytes() const { return bytes_; }

  private:
    char* memory_;
    std::int64_t bytes_ = 0;
};

struct Context {
    Context(Level level, int threads);

    std::mutex in_use;                  // held by the call that is carried out
    std::int64_t busy_nanoseconds = 0;  // that calls have taken so far
    std::int64_t experts_read = 0;      // by mixtures of experts so far, once a call
    std::int64_t expert_rows = 0;       // rows that went through an expert, once for each
    const Level level;
    ProductKernel products[NUM_KINDS];
    const RowKernels rows;
    const PackKernels pack;
    const SamplerKernels sampler;
    CacheKernel caches[NUM_CACHE_KINDS];
    const FoldKernel fold;
    ThreadPool pool;
    Scratch operands;             // activation tiles of the product under way
    Scratch workspace;            // whatever else an operation shares among its threads
    Scratch* const per_thread;    // [pool.threads()]
    ~Context();
};

// One call of the C interface: it waits until no other is carried out, notes how long it took, and computes with the
// usual rounding whatever the calling thread has set.
class Turn {
  public:
    explicit Turn(Context* context) : context_(context), lock_(context->in_use), begun_(Clock::now()) {}
    ~Turn() { context_->busy_nanoseconds += std::chrono::nanoseconds(Clock::now() - begun_).count(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

  private:
    using Clock = std::chrono::steady_clock;
    Context* context_;
    std::lock_guard<std::mutex> lock_;
    Clock::time_point begun_;
    FloatMode mode_;
};

}  // namespace penstock
