// Multiply-adds of AVX2 whose sums stay in their registers. Included by files that are compiled for that level.
//
// In assembly: with intrinsics, GCC 12 makes several products first or lets sums change registers, and spills them,
// which takes up to 1.5 times as long.
#pragma once

#include "elements.inc.h"

namespace penstock {
namespace {

// Add the products of eight float32 in one rounding.
template <class Floats>
PENSTOCK_INLINE Floats add_float_products(Floats sums, Floats a, Floats b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
}

// Add the products of two int16 to each of eight int32.
template <class Sums, class Words>
PENSTOCK_INLINE Sums add_word_products(Sums sums, Words a, Words b) {
    Sums products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(a), "x"(b));
    return sums;
}

// Add the products of two bytes, unsigned and signed, to each of sixteen int16; the sum of the two saturates.
template <class Ints>
PENSTOCK_INLINE Ints add_byte_products(Ints sums, Ints unsigned_bytes, Ints signed_bytes) {
    Ints products;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
            : "+x"(sums), "=&x"(products)
            : "x"(unsigned_bytes), "x"(signed_bytes));
    return sums;
}

}  // namespace
}  // namespace penstock
