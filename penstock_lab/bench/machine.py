"""Measure the machine's limits, and time calls in rounds with them.

Every timed batch of calls stands between two probes of the limits (samples.py says why). Operands rotate over a ring
that is larger than the processor's caches, like the layers of a model. The memory that probes read rotates as well.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from penstock.kernels.cpu.library import ABI
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.tensors import UINT8, address_of, empty
from penstock_lab.bench.native import limit_multiply, limit_read
from penstock_lab.bench.samples import READ, Rates, Sample, Work, settled, spread, summary

READ_BYTES = 512 * 2**20  # size of the ring of memory to read; larger than the cache available to one user of a machine
READ_UNIT = 2**20  # a probe reads a multiple of this
READ_SECONDS = 0.002  # target duration of the reading in a probe
MULTIPLY_SECONDS = 0.001  # target duration of the multiplying in a probe, per kind
KINDS = ("f32", "bf16", "int8")  # in the order of native/abi.h
READ_LOOPS = ABI.constants["READ_LOOPS"]
CALIBRATIONS = 15
RING_BYTES = 256 * 2**20  # size of a ring of operands
ROUNDS = 9
ROUND_SECONDS = 0.02  # target duration of one sample of a call
TORCH_REST_SECONDS = 0.02  # torch's threads spin for up to 10 ms after a call, which halves the speed of multiplying
FIGURES = {READ: "read_gb_s", "f32": "f32_gflop_s", "bf16": "bf16_gflop_s", "int8": "int8_gop_s"}  # names in JSON

# Called with the name and the number of the things to be counted; yields `advance(count)`.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class MachineLimits:
    """The machine's limits with all threads of a backend, as probed so far.

    Attributes:
        rest_seconds: how long torch's threads need before the next probe.
        seen: all rates probed: READ in 10^9 bytes per second, KINDS in 10^9 operations per second, where a multiply-add
            counts as two.
    """

    rest_seconds = TORCH_REST_SECONDS

    def __init__(self, ops: CpuOps) -> None:
        """Choose the fastest way to read and the lengths of probes, then probe every limit CALIBRATIONS times."""
        self._ops = ops
        self._memory = empty((READ_BYTES,), UINT8)  # in huge pages, like weights
        self._memory.fill(1)
        self._place = 0
        self.seen: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._read_bytes, self._loop = READ_BYTES // 8, 0
        self._loop, seconds = self._fastest_loop()
        wanted = int(self._read_bytes * READ_SECONDS / seconds)
        self._read_bytes = min(max(wanted // READ_UNIT, 1) * READ_UNIT, READ_BYTES)
        self._iterations = {kind: self._calibrated(kind) for kind in KINDS}
        for _ in range(CALIBRATIONS):
            self.probe(*KINDS)

    def _fastest_loop(self) -> tuple[int, float]:
        """Find the loop with the shortest median time, and that time. Each round times every loop once."""
        rounds = [[self._read(loop) for loop in range(READ_LOOPS)] for _ in range(CALIBRATIONS)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return medians.index(min(medians)), min(medians)

    def _calibrated(self, kind: str) -> int:
        """Find the number of iterations that take MULTIPLY_SECONDS."""
        iterations, seconds = 1000, 0.0
        while seconds < MULTIPLY_SECONDS:
            iterations *= 2
            seconds = limit_multiply(self._ops, KINDS.index(kind), iterations)[1]
        return iterations

    def _read(self, loop: int) -> float:
        """Read the next part of the ring, and return the seconds it took."""
        if self._place + self._read_bytes > READ_BYTES:
            self._place = 0
        seconds = limit_read(self._ops, loop, address_of(self._memory) + self._place, self._read_bytes)
        self._place += self._read_bytes
        return seconds

    def probe(self, *kinds: str) -> Rates:
        """Measure reading once, and multiplying once per kind."""
        rates = {READ: self._read_bytes / self._read(self._loop) / 1e9}
        for kind in kinds:
            operations, seconds = limit_multiply(self._ops, KINDS.index(kind), self._iterations[kind])
            rates[kind] = operations / seconds / 1e9
        for name, rate in rates.items():
            self.seen[name].append(rate)
        return rates

    def timed(self, call: Callable[[Any], Any], ring: Sequence[Any]) -> "TimedCall":
        """Make a call that is timed with the operands of a ring."""
        return TimedCall(call, ring)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that probes read."""
        return READ_BYTES

    @property
    def best(self) -> dict[str, float]:
        return {name: max(rates) for name, rates in self.seen.items()}

    def figures(self) -> dict[str, Any]:
        """Put the limits under their names in the benchmarks' JSON: the best seen, and the spread of all probes."""
        best = {FIGURES[name]: rate for name, rate in self.best.items()}
        return {**best, "spread": {FIGURES[name]: spread(rates) for name, rates in self.seen.items()}}


class TimedCall:
    """A call that is timed in batches, and takes the operands of a ring one after the other."""

    def __init__(self, call: Callable[[Any], Any], ring: Sequence[Any]) -> None:
        self._call, self._ring, self._next, self._calls = call, ring, 0, 1
        once = self.sample()  # also touches the memory for the first time
        self._calls = max(1, min(int(ROUND_SECONDS / max(once, 1e-7)), 4 * len(ring)))

    def sample(self) -> float:
        """Time one batch, and return the seconds per call."""
        started = time.perf_counter()
        for index in range(self._next, self._next + self._calls):
            self._call(self._ring[index % len(self._ring)])
        self._next += self._calls
        return (time.perf_counter() - started) / self._calls


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of one call, and torch's samples from the same rounds."""

    samples: Sequence[Sample]
    torch_samples: Sequence[Sample]

    @property
    def seconds(self) -> float:
        """Median seconds per call, over the settled samples."""
        return _median_seconds(self.samples)

    def figures(self, read_bytes: float, operations: float, limits: MachineLimits) -> dict[str, Any]:
        """Compute the figures of every row of `bench ops`. operations: those that the result needs."""
        seconds, found = self.seconds, summary(self.samples, limits.best)
        shares = found["spread"]
        pairs = zip(self.samples, self.torch_samples, strict=True)
        return {
            "ms": 1e3 * seconds,
            "gb_s": read_bytes / seconds / 1e9,
            "gflop_s": operations / seconds / 1e9,
            "bw_fraction": shares["bw_fraction"]["p50"],
            "flop_fraction": shares["flop_fraction"]["p50"],
            "torch_ms": 1e3 * _median_seconds(self.torch_samples),
            "times_torch": statistics.median(torchs.seconds / ours.seconds for ours, torchs in pairs),
            **found,
        }


def _median_seconds(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.seconds for sample in settled(samples))


def time_in_rounds(calls: Sequence[TimedCall], work: Work, limits: MachineLimits) -> list[Measured]:
    """Time one batch of each call per round, with probes between. All do the same work; the last is torch's."""
    kinds = sorted(work.operations)
    samples: list[list[Sample]] = [[] for _ in calls]
    before = limits.probe(*kinds)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            seconds = call.sample()
            if index == len(calls) - 1:
                time.sleep(limits.rest_seconds)
            after = limits.probe(*kinds)
            samples[index].append(Sample(seconds, work, before, after))
            before = after
    return [Measured(ours, samples[-1]) for ours in samples[:-1]]


def ring_length(operand_bytes: int) -> int:
    """Compute how many operands of this size make a ring."""
    return RING_BYTES // operand_bytes + 1
