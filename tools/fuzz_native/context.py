"""Targets for the library itself, contexts, recorded programs and the machine's limits."""

import ctypes
import os
import struct

import numpy as np

from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.library import ABI_VERSION, LEVELS, MAX_ARGUMENTS, RECORDABLE, PenstockCall, PenstockSpan
from penstock.kernels.tensors import INT32, INT64, UINT8
from tools.fuzz_native.target import OK, OUT_OF_RANGE, Fuzz, same_bits


def abi_version(fuzz: Fuzz) -> None:
    assert fuzz.library.penstock_abi_version() == ABI_VERSION


def best_level(fuzz: Fuzz) -> None:
    assert 0 <= fuzz.library.penstock_best_level() < len(LEVELS)


def contexts(fuzz: Fuzz) -> None:
    """Use and free a second context between two calls with the first one."""
    other = Fuzz(fuzz.library, fuzz.level, fuzz.random.randrange(2**30), threads=fuzz.random.choice((1, 1, 2, 3)))
    assert other.context, "context_new: no context"
    _add(fuzz)
    _add(other)
    other.forget()
    other.close()
    _add(fuzz)


def context_pin(fuzz: Fuzz) -> None:
    """Pin a helper to this process's CPUs, to none, or to one that cannot exist; try other threads, too."""
    allowed, helpers = sorted(os.sched_getaffinity(0)), range(1, fuzz.threads)
    cpus = fuzz.random.choice((allowed, allowed[:1], [], [-1], [2**30]))
    thread = fuzz.random.choice((*helpers, 0, -1, fuzz.threads, 2**31 - 1))
    expected = OK if thread in helpers and cpus and cpus[0] in allowed else OUT_OF_RANGE
    fuzz.call("context_pin", thread, fuzz.array(np.array(cpus, dtype=INT32)), len(cpus), expected=expected)
    _add(fuzz)


def busy_seconds(fuzz: Fuzz) -> None:
    before = fuzz.library.penstock_busy_seconds(fuzz.context)
    _add(fuzz)
    assert 0 <= before < fuzz.library.penstock_busy_seconds(fuzz.context), "busy_seconds: no time has passed"


def trace(fuzz: Fuzz) -> None:
    capacity, calls = fuzz.random.choice((0, 1, 5)), fuzz.rows()
    spans = fuzz.out((capacity * ctypes.sizeof(PenstockSpan),), UINT8)
    fuzz.library.penstock_trace(fuzz.context, spans, capacity)
    for _ in range(calls):
        _add(fuzz)
    found = fuzz.library.penstock_trace(fuzz.context, None, 0)
    assert found == calls, f"trace: {found} calls of {calls}"
    for index in range(min(capacity, calls)):
        span = PenstockSpan.from_address(spans.address + index * ctypes.sizeof(PenstockSpan))
        name = ctypes.string_at(span.function)
        assert name == b"penstock_add", f"trace: {name!r}"
        assert span.begin <= span.end, f"trace: {span.begin} to {span.end}"


def replay(fuzz: Fuzz) -> None:
    """Replay an addition and a soft cap. An unknown function must end the program."""
    count = fuzz.size()
    x, h, unknown = fuzz.normal(count), fuzz.normal(count), fuzz.random.choice((-1, len(RECORDABLE), 2**62))
    with np.errstate(all="ignore"):
        expected = np.float32(4) * np.tanh((x.values + h.values) / np.float32(4))
    cap = struct.unpack("<q", struct.pack("<d", 4.0))[0]
    words = [("add", x.address, h.address, count), ("softcap", x.address, cap, count)]
    calls = [PenstockCall(RECORDABLE.index(f"penstock_{name}"), _words(*rest)) for name, *rest in words]
    stops = fuzz.chance(0.3)
    if stops:
        calls.insert(1, PenstockCall(unknown, _words()))
        expected = x.values + h.values
    array = (PenstockCall * len(calls))(*calls)
    fuzz.call("replay", ctypes.addressof(array), len(calls), expected=OUT_OF_RANGE if stops else OK)
    fuzz.close_to(x.values, expected.astype(np.float64))


def limit_read(fuzz: Fuzz) -> None:
    size = fuzz.random.choice((0, 1, 1023, 1024, 4096, 70000))
    pages = fuzz.out((-(-size // 64) * 64,), UINT8)  # begins at a multiple of 64
    loop = fuzz.random.randrange(ABI.constants["READ_LOOPS"])
    assert fuzz.library.penstock_limit_read(fuzz.context, loop, pages, size) >= 0


def limit_multiply(fuzz: Fuzz) -> None:
    operations, kind = fuzz.out((1,), INT64), fuzz.random.randrange(3)
    assert fuzz.library.penstock_limit_multiply(fuzz.context, kind, fuzz.size(), operations) >= 0
    assert operations.values[0] >= 0


def _words(*arguments: int) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * MAX_ARGUMENTS)(*arguments)


def _add(fuzz: Fuzz) -> None:
    x, h = fuzz.normal(100), fuzz.normal(100)
    expected = x.values + h.values
    fuzz.call("add", x, h, 100)
    same_bits(x.values, expected)


TARGETS = {
    "abi_version": abi_version, "best_level": best_level, "context_new": contexts, "context_free": contexts,
    "context_pin": context_pin, "busy_seconds": busy_seconds, "trace": trace, "replay": replay,
    "limit_read": limit_read, "limit_multiply": limit_multiply,
}  # fmt: skip
