"""Call every entry point of the native library with random shapes, each operand against a page that may not be touched.

    python -m tools.fuzz_native [CALLS] [NAME ..]      CALLS per entry point, 300 if absent; NAMES: only these

Sizes are at edges: 0, 1, odd, one more or less than a vector; values are now and then NaN, infinite or denormal. An
operand ends where its page ends, so a read or write beyond it ends the process; bytes before it are compared
afterwards. Results are compared with numpy's where that is cheap, a row's bits with those of the row alone, and what
has to be refused is refused. `make sanitize` runs it under the sanitizers. tests/kernels/test_fuzz_native.py holds
TARGETS to the functions of native/abi.h.
"""
