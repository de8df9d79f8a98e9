"""Measure the machine's limits, and calls in turns with them.

The speed of a shared machine drifts from minute to minute. So calls that are compared take turns, the machine's limits
are probed in between, and the best limit seen is the denominator. Operands rotate over a ring that is larger than the
processor's caches, as the layers of a model do.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.tensors import empty

READ_BYTES = 512 * 2**20  # more than the cache available to one user of a machine
MULTIPLY_SECONDS = 0.01  # target length of one probe of a multiply rate
KINDS = ("f32", "bf16", "int8")  # in the order of native/abi.h
RING_BYTES = 256 * 2**20  # size of a ring of operands
ROUNDS = 5
ROUND_SECONDS = 0.04  # target length of one turn of a call

# Called with the name and the number of the things counted; yields `advance(count)`.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class MachineLimits:
    """The best rates seen so far, with all threads of a backend.

    Attributes:
        read_gb_s: 10^9 bytes read from memory per second.
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
        """Measure reading once, and multiplying once per kind."""
        self.read_gb_s = max(self.read_gb_s, READ_BYTES / self._ops.limit_read(self._memory) / 1e9)
        for kind in kinds:
            operations, seconds = self._ops.limit_multiply(KINDS.index(kind), self._iterations[kind])
            self.multiply_gop_s[kind] = max(self.multiply_gop_s[kind], operations / seconds / 1e9)

    def figures(self) -> dict[str, float]:
        """Return the limits under their names in the benchmarks' JSON."""
        return {
            "read_gb_s": self.read_gb_s,
            "f32_gflop_s": self.multiply_gop_s["f32"],
            "bf16_gflop_s": self.multiply_gop_s["bf16"],
            "int8_gop_s": self.multiply_gop_s["int8"],
        }


class Turn:
    """A call that is timed in batches; it takes one operand of a ring after the other."""

    def __init__(self, call: Callable[[Any], Any], ring: Sequence[Any]) -> None:
        self._call, self._ring, self._next, self._calls = call, ring, 0, 1
        once = self.take()  # also touches the memory for the first time
        self._calls = max(1, min(int(ROUND_SECONDS / max(once, 1e-7)), 4 * len(ring)))

    def take(self) -> float:
        """Return the seconds per call in one batch."""
        started = time.perf_counter()
        for index in range(self._next, self._next + self._calls):
            self._call(self._ring[index % len(self._ring)])
        self._next += self._calls
        return (time.perf_counter() - started) / self._calls


def take_turns(turns: Sequence[Turn], limits: MachineLimits, kind: str) -> list[float]:
    """Return the median seconds per call of each turn; the machine's limits are probed in between."""
    rounds = []
    for _ in range(ROUNDS):
        limits.probe(kind)
        rounds.append([turn.take() for turn in turns])
    return [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]


def ring_length(operand_bytes: int) -> int:
    """Return how many operands of that size make a ring."""
    return RING_BYTES // operand_bytes + 1


def uniform(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random operands in [-0.5, 0.5)."""
    return torch.rand(tuple(shape), generator=generator).sub_(0.5).to(dtype)


def rates(seconds: float, read_bytes: float, operations: float, torch_seconds: float) -> dict[str, float]:
    """Return the figures that every row of `bench ops` has."""
    return {
        "ms": 1e3 * seconds,
        "gb_s": read_bytes / seconds / 1e9,
        "gflop_s": operations / seconds / 1e9,
        "torch_ms": 1e3 * torch_seconds,
    }
