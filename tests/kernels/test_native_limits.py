"""The measured limits of the machine: that each loop runs, and counts what it does."""

import ctypes
import itertools
import time

import numpy as np
import pytest

from penstock.kernels.cpu.library import ABI, PenstockSpan
from tests.kernels.packed import Native, aligned, levels

pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")


def rate(native: Native, kind: int, iterations: int) -> float:
    """Operations a second, the best of five."""
    operations = ctypes.c_int64()
    address = ctypes.addressof(operations)
    seconds = [native.library.penstock_limit_multiply(native.context, kind, iterations, address) for _ in range(5)]
    return operations.value / min(seconds)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_loops_do_work(level: int, kind: int) -> None:
    """Guards against a loop that the compiler shortened: its time grows with its iterations, within any processor."""
    native = Native(level)
    assert 1e9 < rate(native, kind, 40_000) < 1e13
    ratio = rate(native, kind, 400_000) / rate(native, kind, 40_000)
    assert 0.2 < ratio < 5


def test_a_higher_level_multiplies_no_slower() -> None:
    """Guards against a level that measures the loop of a lower one."""
    contexts = [Native(level) for level in levels()]
    turns = [
        [rate(native, 0, 400_000) for native in contexts] for _ in range(10)
    ]  # others may take the machine for one
    rates = np.max(turns, axis=0)
    assert all(higher > 0.8 * lower for lower, higher in itertools.pairwise(rates))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("loop", range(ABI.constants["READ_LOOPS"]))
@pytest.mark.parametrize("num_bytes", [0, 1023, 1024, (5 << 20) + 1030])
def test_reading_any_size(level: int, loop: int, num_bytes: int) -> None:
    """Guards against reading behind the end, and against a time that is no time."""
    native = Native(level)
    memory = aligned(np.zeros(max(num_bytes, 1), dtype=np.uint8))
    seconds = native.library.penstock_limit_read(native.context, loop, memory.ctypes.data, num_bytes)
    assert 0 <= seconds < 10


def test_calls_are_traced_in_order() -> None:
    """Guards against: spans of calls before the trace began or beyond its memory, a wrong name, and a clock that is
    not Python's."""
    native, spans, x = Native(0), (PenstockSpan * 2)(), np.ones(64, dtype=np.float32)

    def add() -> None:
        assert native.library.penstock_add(native.context, x.ctypes.data, x.ctypes.data, len(x)) == 0

    add()
    started = time.perf_counter_ns()
    assert native.library.penstock_trace(native.context, ctypes.addressof(spans), len(spans)) == 0
    add()
    native.library.penstock_limit_read(native.context, 0, x.ctypes.data, 0)
    add()
    assert native.library.penstock_trace(native.context, None, 0) == 3
    add()
    assert native.library.penstock_trace(native.context, None, 0) == 0
    names = [ctypes.string_at(span.function).decode() for span in spans]
    times = [at for span in spans for at in (span.begin, span.end)]
    assert names == ["penstock_add", "penstock_limit_read"]
    assert times == sorted(times)
    assert started <= times[0]
    assert times[-1] <= time.perf_counter_ns()
