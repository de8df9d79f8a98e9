"""Targets for the library itself, contexts, recorded programs and the machine's limits."""

import ctypes
import os
import struct

import numpy as np

from penstock.kernels.cpu.library import (
    ABI,
    ABI_VERSION,
    LEVELS,
    MAX_ARGUMENTS,
    RECORDABLE,
    PenstockAttentionStep,
    PenstockCall,
    PenstockSpan,
)
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


def decode(fuzz: Fuzz) -> None:
    """Decode with a pass that adds to the logits. An unknown function must end the program after some steps."""
    rows, steps, vocab, groups = fuzz.rows(), fuzz.random.randrange(5), fuzz.size(1, 129), fuzz.random.randrange(3)
    stride, token_stride = vocab + fuzz.random.choice((0, 3)), steps + 1 + fuzz.random.choice((0, 2))
    logits, added = fuzz.normal(rows, stride), fuzz.normal(rows, stride)
    if rows and fuzz.chance(0.2):
        logits.values[0] = fuzz.random.choice((np.nan, -np.inf))
    first = fuzz.array(fuzz.numbers.integers(0, 1000, rows, dtype=INT64))
    start, input_ids = first.values.copy(), fuzz.out((rows,), INT64)
    tokens = fuzz.array(fuzz.numbers.integers(-2, vocab, (rows, token_stride), dtype=INT64))
    tokens.values[:, :1] = abs(tokens.values[:, :1])
    expected, sums = tokens.values.copy(), logits.values.copy()
    slots = [fuzz.array(start + 100 * group) for group in range(groups)]
    lengths, positions = fuzz.out((rows,), INT32), [fuzz.out((rows,), INT32) for _ in range(groups)]
    attention = (PenstockAttentionStep * groups)(
        *(
            PenstockAttentionStep(seq_lens=lengths.address, slot_mapping=slot.address, positions=position.address)
            for slot, position in zip(slots, positions, strict=True)
        )
    )
    words = _words(logits.address, added.address, rows * stride)
    calls = [PenstockCall(RECORDABLE.index("penstock_add"), words)]
    stops = steps > 0 and fuzz.chance(0.2)
    if stops:
        calls.append(PenstockCall(len(RECORDABLE), _words()))
    array = (PenstockCall * len(calls))(*calls)
    fuzz.call(
        "decode", ctypes.addressof(array), len(calls), ctypes.addressof(attention), groups, logits, stride, vocab, rows,
        input_ids, first, tokens, token_stride, steps, expected=OUT_OF_RANGE if stops else OK,
    )  # fmt: skip
    if stops:
        same_bits(first.values, start)
        return
    for step in range(steps):
        sums += added.values
        for row in range(rows):
            if expected[row, step + 1] < 0:
                seen = sums[row, :vocab]
                expected[row, step + 1] = 0 if np.isnan(seen).all() else np.nanargmax(seen)
    same_bits(tokens.values, expected)
    same_bits(first.values, start + steps)
    for group, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        same_bits(slot.values, start + 100 * group + steps)
        if steps:
            same_bits(position.values, (start + steps - 1).astype(np.int32))
            same_bits(lengths.values, (start + steps).astype(np.int32))
    if steps:
        same_bits(input_ids.values, expected[:, steps - 1])


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
    "decode": decode,
    "limit_read": limit_read, "limit_multiply": limit_multiply,
}  # fmt: skip
