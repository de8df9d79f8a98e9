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

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// AMX tiles of bf16 and int8, which the system has to permit for this process.
bool has_amx() {
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

// For each kind the kernel of the highest level up to `level` that has one.
template <class Kernel, std::size_t LEVELS, std::size_t KINDS>
void choose_by_kind(Level level, const Kernel (&by_level)[LEVELS][KINDS], Kernel (&chosen)[KINDS]) {
    for (int at = 0; at <= level; ++at)
        for (std::size_t kind = 0; kind < KINDS; ++kind)
            if (by_level[at][kind]) chosen[kind] = by_level[at][kind];
}

void choose_products(Level level, ProductKernel (&products)[NUM_KINDS]) {
    const ProductKernel by_level[][NUM_KINDS] = {
        {portable_f32(), portable_bf16(), portable_int8(), portable_int4(), portable_int4_a16()},
#if defined(PENSTOCK_HAVE_AVX2)
        {avx2_f32(), avx2_bf16(), avx2_int8(), avx2_int4(), avx2_int4_a16()},
#endif
#if defined(PENSTOCK_HAVE_AVX512)
        {avx512_f32(), avx512_bf16(), avx512_int8(), avx512_int4(), avx512_int4_a16()},
#endif
#if defined(PENSTOCK_HAVE_AMX)
        {{}, amx_bf16(), amx_int8(), {}, {}},
#endif
    };
    choose_by_kind(level, by_level, products);
}

void choose_caches(Level level, CacheKernel (&caches)[NUM_CACHE_KINDS]) {
    const CacheKernel by_level[][NUM_CACHE_KINDS] = {
        {portable_cache_f32(), portable_cache_bf16(), portable_cache_int8()},
#if defined(PENSTOCK_HAVE_AVX2)
        {avx2_cache_f32(), avx2_cache_bf16(), avx2_cache_int8()},
#endif
#if defined(PENSTOCK_HAVE_AVX512)
        {avx512_cache_f32(), avx512_cache_bf16(), avx512_cache_int8()},
#endif
#if defined(PENSTOCK_HAVE_AMX)
        {{}, amx_cache_bf16(), amx_cache_int8()},
#endif
    };
    choose_by_kind(level, by_level, caches);
}

#if defined(PENSTOCK_HAVE_AVX2)
#define IF_AVX2(function) function
#else
#define IF_AVX2(function) nullptr
#endif
#if defined(PENSTOCK_HAVE_AVX512)
#define IF_AVX512(function) function
#else
#define IF_AVX512(function) nullptr
#endif

// The table of the highest level up to `level` that this build has.
template <class Table>
Table choose(Level level, Table (*portable)(), Table (*avx2)(), Table (*avx512)()) {
    if (level >= LEVEL_AVX512 && avx512 != nullptr) return avx512();
    if (level >= LEVEL_AVX2 && avx2 != nullptr) return avx2();
    return portable();
}

// The highest level that this build has and this processor can run.
Level best_level() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#if defined(PENSTOCK_HAVE_AMX)
    if (has_avx512() && has_amx()) return LEVEL_AMX;
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    if (has_avx512()) return LEVEL_AVX512;
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

Context::Context(Level chosen, int threads)
    : level(chosen),
      products{},
      rows(choose(chosen, portable_rows, IF_AVX2(avx2_rows), IF_AVX512(avx512_rows))),
      pack(choose(chosen, portable_pack, IF_AVX2(avx2_pack), IF_AVX512(avx512_pack))),
      sampler(choose(chosen, portable_sampler, IF_AVX2(avx2_sampler), IF_AVX512(avx512_sampler))),
      caches{},
      fold(choose(chosen, portable_fold, IF_AVX2(avx2_fold), IF_AVX512(avx512_fold))),
      pool(threads),
      per_thread(new Scratch[threads]) {
    choose_products(chosen, products);
    choose_caches(chosen, caches);
}

Context::~Context() { delete[] per_thread; }

void Context::reserve_per_thread(std::int64_t bytes) {
    for (int thread = 0; thread < pool.threads(); ++thread) per_thread[thread].reserve(bytes);
}

}  // namespace penstock

using namespace penstock;

extern "C" std::int32_t penstock_abi_version() { return ABI_VERSION; }

extern "C" std::int32_t penstock_best_level() { return best_level(); }

extern "C" Context* penstock_context_new(std::int32_t level, std::int32_t threads) {
    if (level < LEVEL_PORTABLE || level > best_level() || threads < 1) return nullptr;
    try {
        return new Context(static_cast<Level>(level), threads);
    } catch (...) {
        return nullptr;
    }
}

extern "C" void penstock_context_free(Context* context) { delete context; }

extern "C" double penstock_busy_seconds(Context* context) {
    const std::lock_guard<std::mutex> lock(context->in_use);
    return static_cast<double>(context->busy_nanoseconds) * 1e-9;
}
