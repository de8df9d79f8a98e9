"""Call every entry point of the native library with random shapes, each operand next to a page that may not be touched.

    python -m tools.fuzz_native [CALLS] [NAME ..]      CALLS per entry point, 300 if absent; NAMES: only these

Sizes are edge cases: 0, 1, odd, one more or less than a vector. Some values are NaN, infinite or denormal. An operand
ends where its page ends, so a read or write beyond it ends the process; bytes before it are compared afterwards.
Results are compared with numpy's where that is cheap, the bits of a row with those of the row computed alone, and
invalid calls must be refused. `make sanitize` runs this under the sanitizers. tests/kernels/test_fuzz_native.py checks
that TARGETS has all functions of native/abi.h.
"""
