"""What the machine can do, and calls measured in turns with it.

A shared machine drifts from minute to minute. So what is compared takes turns under the same conditions, the machine's
limits are probed again in between, and the best limit ever seen is the denominator. Operands rotate over a ring, so
that no cache keeps them from one call to the next.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import empty

READ_BYTES = 512 * 2**20  # more than any cache that one user of a machine gets
MULTIPLY_SECONDS = 0.01  # aimed at for one probe of a multiply rate
KINDS = ("f32", "bf16", "int8")  # in the order of native/abi.h
RING_BYTES = 256 * 2**20  # of different operands, before one is used again
ROUNDS = 5
ROUND_SECONDS = 0.04  # aimed at for one turn of a call

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing. A Progress takes what is counted and how many, and yields `advance(count)`."""
    return nullcontext(lambda count: None)


class MachineLimits:
    """Best rates seen so far, with all threads of a backend.

    Attributes:
        read_gb_s: memory read, in 10^9 bytes per second.
        multiply_gop_s: 10^9 operations per second for each of KINDS; a multiply-add counts as two.
    """

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._memory = empty((READ_BYTES,), torch.uint8).fill_(1)  # in huge pages, as weights are
        self._iterations = dict.fromkeys(KINDS, 1000)
        self.read_gb_s = 0.0
        self.multiply_gop_s = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            seconds = 0.0
            while seconds < MULTIPLY_SECONDS:
                self._iterations[kind] *= 2
                seconds = self._ops.limit_multiply(KINDS.index(kind), self._iterations[kind])[1]
        self.probe(*KINDS)

    def probe(self, *kinds: str) -> None:
        """Measure reading once, and multiplying in these kinds."""
        self.read_gb_s = max(self.read_gb_s, READ_BYTES / self._ops.limit_read(self._memory) / 1e9)
        for kind in kinds:
            operations, seconds = self._ops.limit_multiply(KINDS.index(kind), self._iterations[kind])
            self.multiply_gop_s[kind] = max(self.multiply_gop_s[kind], operations / seconds / 1e9)

    def figures(self) -> dict[str, float]:
        """Return the limits by their names in the benchmarks' JSON."""
        return {
            "read_gb_s": self.read_gb_s,
            "f32_gflop_s": self.multiply_gop_s["f32"],
            "bf16_gflop_s": self.multiply_gop_s["bf16"],
            "int8_gop_s": self.multiply_gop_s["int8"],
        }


class Turn:
    """A call that is timed in batches; the call takes its number, which picks the operands in a ring of that length."""

    def __init__(self, call: Callable[[int], Any], ring: int) -> None:
        self._call = call
        self._next = 0
        self._seconds: list[float] = []
        once = self._time(1)  # also the first touch of the memory
        self._calls = max(1, min(int(ROUND_SECONDS / max(once, 1e-7)), ring * 4))

    def take(self) -> None:
        self._seconds.append(self._time(self._calls))

    def median(self) -> float:
        """Return the median seconds of one call."""
        return statistics.median(self._seconds)

    def _time(self, calls: int) -> float:
        started = time.perf_counter()
        for index in range(self._next, self._next + calls):
            self._call(index)
        self._next += calls
        return (time.perf_counter() - started) / calls


def take_turns(turns: Sequence[Turn], limits: MachineLimits, kind: str) -> list[float]:
    """Return the median seconds of each call; the machine's limits are probed in between."""
    for _ in range(ROUNDS):
        limits.probe(kind)
        for turn in turns:
            turn.take()
    return [turn.median() for turn in turns]


def ring_length(operand_bytes: int) -> int:
    """Return how many operands of that size make a ring."""
    return RING_BYTES // operand_bytes + 1


def rates(seconds: float, read_bytes: float, operations: float, torch_seconds: float) -> dict[str, float]:
    """Return the figures of one call that every row of `bench ops` has."""
    return {
        "ms": 1e3 * seconds,
        "gb_s": read_bytes / seconds / 1e9,
        "gflop_s": operations / seconds / 1e9,
        "torch_ms": 1e3 * torch_seconds,
    }
