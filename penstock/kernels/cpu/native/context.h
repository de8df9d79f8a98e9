// Context: the kernels of one instruction level, a thread pool and scratch memory. Each engine has one; nothing is
// global.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "abi.h"
#include "attention/attention.h"
#include "elements.inc.h"
#include "float_mode.h"
#include "limits/limits.h"
#include "products/pack_kernels.h"
#include "products/products.h"
#include "rows/row_kernels.h"
#include "sampling/sampler_kernels.h"
#include "threads/thread_pool.h"

namespace penstock {

inline std::int64_t divide_up(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

// Memory that grows on demand and is kept until the object is destroyed. It is not initialised.
class Scratch {
  public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Return at least `bytes`, 64-aligned, in huge pages if large; growing loses the contents. Throws std::bad_alloc.
    void* reserve(std::int64_t bytes);
    void* data() const { return memory_; }

  private:
    void* memory_ = nullptr;
    std::int64_t capacity_ = 0;
};

// Allocates arrays from a block of memory, each at a multiple of 64 bytes. If the block is null, only counts the bytes.
class BumpAllocator {
  public:
    explicit BumpAllocator(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <class Element>
    Element* allocate(std::int64_t count) {
        char* array = memory_ == nullptr ? nullptr : memory_ + bytes_;
        bytes_ += divide_up(count * static_cast<std::int64_t>(sizeof(Element)), 64) * 64;
        return reinterpret_cast<Element*>(array);
    }
    std::int64_t bytes() const { return bytes_; }

  private:
    char* memory_;
    std::int64_t bytes_ = 0;
};

// Where the spans of calls are written; nowhere if spans is null.
struct Trace {
    PenstockSpan* spans = nullptr;
    std::int64_t capacity = 0, calls = 0;  // calls: including those beyond the capacity

    void add(const char* function, std::int64_t begin, std::int64_t end) {
        if (calls++ < capacity) spans[calls - 1] = {function, begin, end};
    }
};

struct Context {
    Context(std::int32_t level, int threads);

    // Reserve scratch memory for every thread, so that no thread has to allocate inside a parallel loop.
    void reserve_per_thread(std::int64_t bytes);

    std::mutex in_use;                  // held by the running call
    std::int64_t busy_nanoseconds = 0;  // spent in calls so far
    std::int64_t experts_read = 0;      // experts whose weights were read so far, each counted once per call
    std::int64_t expert_rows = 0;       // (row, expert) pairs computed so far
    ProductKernel products[NUM_KINDS] = {};
    CacheKernel caches[NUM_CACHE_KINDS] = {};
    RowKernels rows = {};
    PackKernels pack = {};
    SamplerKernels sampler = {};
    FoldKernel fold = {};
    LimitLoops limits = {};
    Trace trace;
    ThreadPool pool;
    Scratch operands;             // packed activations of the running product
    Scratch workspace;            // other memory that threads share
    const std::unique_ptr<Scratch[]> per_thread;  // [pool.threads()]
};

// The scope of one call of the C interface: waits until no other call runs, measures the time, and computes in the
// default float mode, whatever mode the calling thread has set.
class CallScope {
  public:
    // function: the name for traces, by default that of the calling function.
    explicit CallScope(Context* context, const char* function = __builtin_FUNCTION())
        : context_(context), function_(function), lock_(context->in_use), start_(now()) {}
    ~CallScope() {
        const std::int64_t end = now();
        context_->busy_nanoseconds += end - start_;
        if (context_->trace.spans != nullptr) context_->trace.add(function_, start_, end);
    }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;

  private:
    static std::int64_t now() {
        return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    Context* context_;
    const char* function_;
    std::lock_guard<std::mutex> lock_;
    std::int64_t start_;
    FloatMode mode_;
};

// Run the body of a function of the C interface, which returns its Status. The only exception that it may throw is that
// of a failed allocation. function: as in CallScope.
template <class Body>
Status run_call(Context* context, const Body& body, const char* function = __builtin_FUNCTION()) try {
    const CallScope scope(context, function);
    return body();
} catch (...) {
    return STATUS_NO_MEMORY;
}

}  // namespace penstock
