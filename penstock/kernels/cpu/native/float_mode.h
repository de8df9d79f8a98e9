// FloatMode: rounding to nearest, and numbers below the normal range kept, for as long as it lives. Other libraries of
// the process may have switched these off for a thread; then the bits of a row would depend on which thread ran it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace penstock {

class FloatMode {
  public:
    FloatMode() : before_(read()) { write(USUAL); }
    ~FloatMode() { write(before_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Register = std::uint32_t;
    static constexpr Register USUAL = 0x1f80;
    static Register read() { return _mm_getcsr(); }
    static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Register = std::uint64_t;
    static constexpr Register USUAL = 0;
    static Register read() {
        Register value;
        __asm__ volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Register value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
    using Register = int;
    static constexpr Register USUAL = 0;
    static Register read() { return USUAL; }
    static void write(Register) {}
#endif
    const Register before_;
};

}  // namespace penstock
