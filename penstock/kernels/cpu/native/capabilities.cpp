// What this processor can do, asked at run time: the library is built once for every x86-64 and chooses among
// instruction levels when it is loaded.

#include "abi.h"
#include "context.h"

// Goes up whenever a function of the C ABI changes its meaning; the loader refuses any other number.
PENSTOCK_EXPORT std::int32_t penstock_abi_version() { return 5; }

// The highest instruction level that this library and this processor have: 0 portable, 1 avx2, 2 avx512, 3 amx.
PENSTOCK_EXPORT std::int32_t penstock_best_level() { return penstock::best_level(); }
