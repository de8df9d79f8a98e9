#include "context.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penstock {

namespace {

constexpr std::int64_t PAGE = 4096, HUGE_PAGE = std::int64_t{2} << 20;

#if defined(__x86_64__) && defined(__GNUC__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512f() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }

bool has_avx512() { return has_avx512f() && has_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Whether there are AMX tiles of bf16 and int8, and the system permits this process to use them.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
    constexpr int LEAF = 7, BF16_BIT = 22, TILE_BIT = 24, INT8_BIT = 25;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned eax = LEAF, ebx = 0, ecx = 0, edx = 0;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const unsigned needed = 1u << BF16_BIT | 1u << TILE_BIT | 1u << INT8_BIT;
    return (edx & needed) == needed && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

#endif

// Whether this processor can run the integer products of a level. If not, those of the level below remain in use.
template <Level LEVEL>
bool multiplies_integers() {
#if defined(PENSTOCK_HAVE_AVX512F)
    if constexpr (LEVEL == LEVEL_AVX512F) return has_vnni();
#endif
    return true;
}

#if defined(PENSTOCK_HAVE_AVX512)

// Multiply float32 instead of pairs of bfloat16, with the same bits.
void use_fma(Context& context) {
    context.products[KIND_BF16] = product_kernel<LEVEL_AVX512FMA, KIND_BF16>();
    context.products[KIND_INT4_A16] = product_kernel<LEVEL_AVX512FMA, KIND_INT4_A16>();
    context.caches[CACHE_BF16] = cache_kernel<LEVEL_AVX512FMA, CACHE_BF16>();
    context.limits.multiply[KIND_BF16] = context.limits.multiply[KIND_F32];
}

#endif

// Replace kernels of lower levels by those of this one.
template <Level LEVEL>
void use_level(Context& context) {
    if constexpr (LEVEL < LEVEL_AMX) {
        context.products[KIND_F32] = product_kernel<LEVEL, KIND_F32>();
        context.products[KIND_INT4_A16] = product_kernel<LEVEL, KIND_INT4_A16>();
        context.products[KIND_CODED_FLOAT] = product_kernel<LEVEL, KIND_CODED_FLOAT>();
        context.caches[CACHE_F32] = cache_kernel<LEVEL, CACHE_F32>();
        context.rows = row_kernels<LEVEL>();
        context.pack = pack_kernels<LEVEL>();
        context.sampler = sampler_kernels<LEVEL>();
        context.fold = fold_kernel<LEVEL>();
    }
    context.products[KIND_BF16] = product_kernel<LEVEL, KIND_BF16>();
    context.caches[CACHE_BF16] = cache_kernel<LEVEL, CACHE_BF16>();
    const LimitLoop integers = context.limits.multiply[KIND_INT8];
    set_limits<LEVEL>(context.limits);
    if (multiplies_integers<LEVEL>()) {
        context.products[KIND_INT8] = product_kernel<LEVEL, KIND_INT8>();
        if constexpr (LEVEL < LEVEL_AMX) {
            context.products[KIND_INT4] = product_kernel<LEVEL, KIND_INT4>();
            context.products[KIND_CODED] = product_kernel<LEVEL, KIND_CODED>();
        }
        context.caches[CACHE_INT8] = cache_kernel<LEVEL, CACHE_INT8>();
    } else {
        context.limits.multiply[KIND_INT8] = integers;
    }
}

// The highest level that this build has and this processor can run.
Level best_level() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#if defined(PENSTOCK_HAVE_AMX)
    if (has_avx512() && has_amx()) return LEVEL_AMX;
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    if (has_avx512()) {
        LimitLoops loops = {};
        set_limits<LEVEL_AVX512>(loops);
        return multiplies_floats_faster(loops) ? LEVEL_AVX512FMA : LEVEL_AVX512;
    }
#endif
#if defined(PENSTOCK_HAVE_AVX512F)
    if (has_avx512f()) return LEVEL_AVX512F;
#endif
#if defined(PENSTOCK_HAVE_AVX2)
    if (has_avx2()) return LEVEL_AVX2;
#endif
#endif
    return LEVEL_PORTABLE;
}

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(std::int64_t bytes) {
    if (bytes > capacity_) {
        std::free(memory_);
        capacity_ = 0;
        const std::int64_t page = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE;
        const std::int64_t rounded = divide_up(bytes, page) * page;
        memory_ = std::aligned_alloc(static_cast<std::size_t>(page), static_cast<std::size_t>(rounded));
        if (memory_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (page == HUGE_PAGE) madvise(memory_, static_cast<std::size_t>(rounded), MADV_HUGEPAGE);  // may be refused
#endif
        capacity_ = rounded;
    }
    return memory_;
}

Context::Context(std::int32_t level, int threads) : pool(threads), per_thread(new Scratch[threads]) {
    use_level<LEVEL_PORTABLE>(*this);
    (void)level;
#if defined(PENSTOCK_HAVE_AVX2)
    if (level >= LEVEL_AVX2) use_level<LEVEL_AVX2>(*this);
#endif
#if defined(PENSTOCK_HAVE_AVX512F)
    if (level >= LEVEL_AVX512F) use_level<LEVEL_AVX512F>(*this);
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    if (level >= LEVEL_AVX512) use_level<LEVEL_AVX512>(*this);
    if (level >= LEVEL_AVX512FMA) use_fma(*this);
#endif
#if defined(PENSTOCK_HAVE_AMX)
    if (level >= LEVEL_AMX) use_level<LEVEL_AMX>(*this);
#endif
}

void Context::reserve_per_thread(std::int64_t bytes) {
    for (int thread = 0; thread < pool.threads(); ++thread) per_thread[thread].reserve(bytes);
}

}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_abi_version() { return PENSTOCK_ABI_VERSION; }

extern "C" std::int32_t penstock_best_level() {
    static const Level best = best_level();
    return best;
}

extern "C" Context* penstock_context_new(std::int32_t level, std::int32_t threads) {
    if (level < LEVEL_PORTABLE || level > penstock_best_level() || threads < 1) return nullptr;
    try {
        return new Context(level, threads);
    } catch (...) {
        return nullptr;
    }
}

extern "C" void penstock_context_free(Context* context) { delete context; }

extern "C" std::int32_t penstock_context_pin(
    Context* context, std::int32_t thread, const std::int32_t* cpus, std::int64_t count) {
    if (thread < 1 || thread >= context->pool.threads()) return STATUS_OUT_OF_RANGE;
    const std::lock_guard<std::mutex> lock(context->in_use);
    return context->pool.pin(thread, cpus, count) ? STATUS_OK : STATUS_OUT_OF_RANGE;
}

extern "C" double penstock_busy_seconds(Context* context) {
    const std::lock_guard<std::mutex> lock(context->in_use);
    return static_cast<double>(context->busy_nanoseconds) * 1e-9;
}

extern "C" std::int64_t penstock_trace(Context* context, PenstockSpan* spans, std::int64_t capacity) {
    const std::lock_guard<std::mutex> lock(context->in_use);
    const std::int64_t calls = context->trace.calls;
    context->trace = {spans, capacity, 0};
    return calls;
}
