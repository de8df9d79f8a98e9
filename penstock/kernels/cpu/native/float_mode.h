// FloatMode: rounding to nearest with subnormal numbers, for the lifetime of the object. Other libraries in the process
// may have changed the mode of a thread, and the bits of a row would then depend on the thread that computed it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace penstock {

class FloatMode {
  public:
    FloatMode() : before_(read()) { write(DEFAULT); }
    ~FloatMode() { write(before_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Register = std::uint32_t;
    static constexpr Register DEFAULT = 0x1f80;
    static Register read() { return _mm_getcsr(); }
    static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
    using Register = std::uint64_t;
    static constexpr Register DEFAULT = 0;
    static Register read() {
        Register value;
        __asm__ volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Register value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
    using Register = int;
    static constexpr Register DEFAULT = 0;
    static Register read() { return DEFAULT; }
    static void write(Register) {}
#endif
    const Register before_;
};

}  // namespace penstock
