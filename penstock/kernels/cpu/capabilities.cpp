// What this processor can do, asked at run time: the library is built once for every x86-64 and chooses among
// instruction levels when it is loaded. Knows nothing of models or tensors.

#include <cstdint>

#define PENSTOCK_EXPORT extern "C" __attribute__((visibility("default")))

// Goes up whenever a function of the C ABI changes its meaning; the loader refuses any other number.
PENSTOCK_EXPORT std::int32_t penstock_abi_version() { return 1; }

// Instruction sets as bits: 1 AVX2 with FMA, 2 AVX-512 (F, BW, DQ, VL), 4 AVX-512 VNNI, 8 AVX-512 BF16.
PENSTOCK_EXPORT std::int32_t penstock_cpu_features() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    std::int32_t bits = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) bits |= 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        bits |= 2;
    if (__builtin_cpu_supports("avx512vnni")) bits |= 4;
    if (__builtin_cpu_supports("avx512bf16")) bits |= 8;
    return bits;
#else
    return 0;
#endif
}
