"""The limits of a GPU, and calls that are timed on it: what machine.py does for processors.

A copy of memory is the limit of reading, counted as read and written; products by cuBLAS are those of multiplying.
Calls are timed by events on the device's stream, with all operands of a ring in one CUDA graph, so that no launch is
waited for. Without CUDA, in Triton's interpreter, functions are timed as they are: only to test what is around them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from penstock_lab.bench.machine import CALIBRATIONS, FIGURES, KINDS, MachineLimits, TimedCall
from penstock_lab.bench.samples import READ, Rates

COPIED_BYTES = 2**31  # of the memory that a probe copies; larger than caches
SIDE = 8192  # of the matrices that a probe multiplies
Work = Callable[[], Any]


def elapsed(device: torch.device, work: Work) -> float:
    """Time what a function puts on the device's stream, in seconds."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def recorded(device: torch.device, work: Work) -> Work:
    """Record a function as a CUDA graph, which computes it again."""
    work()  # compiles what is missing
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        work()
    replay: Work = graph.replay
    replay()
    return replay


def seconds(device: torch.device, calls: Sequence[Work], repeats: int) -> float:
    """Time calls as one graph: the median seconds of one of them."""
    run = recorded(device, lambda: [call() for call in calls])
    return statistics.median(elapsed(device, run) for _ in range(repeats)) / len(calls)


class DeviceCall(TimedCall):
    """A call that is timed with all operands of a ring at once."""

    def __init__(self, device: torch.device, call: Callable[[Any], Any], ring: Sequence[Any]) -> None:
        self._device, self._calls = device, len(ring)
        self._run = recorded(device, lambda: [call(operand) for operand in ring])

    def sample(self) -> float:
        return elapsed(self._device, self._run) / self._calls


class DeviceLimits(MachineLimits):
    """The limits of a GPU, as probed so far."""

    rest_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source = torch.ones(COPIED_BYTES // 4, dtype=torch.int32, device=device)
        self._target = torch.empty_like(self._source)
        side = torch.rand(SIDE, SIDE, device=device) - 0.5
        pair = {"f32": side, "bf16": side.to(torch.bfloat16)}
        whole = (side * 254).to(torch.int8)
        self._products: dict[str, Work] = {kind: partial(functional.linear, x, x) for kind, x in pair.items()}
        self._products["int8"] = partial(torch._int_mm, whole, whole.T)
        self.seen = {name: [] for name in FIGURES}
        for _ in range(CALIBRATIONS):
            self.probe(*KINDS)

    def probe(self, *kinds: str) -> Rates:
        """Measure copying once, and multiplying once per kind."""
        copied = elapsed(self._device, partial(torch.neg, self._source, out=self._target))
        rates = {READ: 2 * self._source.nbytes / copied / 1e9}
        rates |= {kind: 2 * SIDE**3 / elapsed(self._device, self._products[kind]) / 1e9 for kind in kinds}
        for name, rate in rates.items():
            self.seen[name].append(rate)
        return rates

    def timed(self, call: Callable[[Any], Any], ring: Sequence[Any]) -> TimedCall:
        return DeviceCall(self._device, call, ring)

    @property
    def num_bytes(self) -> int:
        return 0  # of the host's memory
