"""Each kernel against the machine's own limits, and against torch.

Weights rotate over more memory than the caches hold, as the layers of a model do. Kernel, torch and the machine's
limits take turns in the same run, so that what is compared was measured under the same conditions; times are medians,
limits the best seen. `gb_s` counts the bytes of the packed weight. `gflop_s` counts 2 M N K, while `flop_fraction`
counts what is really multiplied (two int8 slices are two products) against the peak of the type that multiplies.
`torch_ms` is torch's F.linear of that shape, in float32 for f32 and in bfloat16 for every other type.
"""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock import validation as check
from penstock.bench.machine import MachineLimits
from penstock.bench.offline import no_progress
from penstock.config import available_threads
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.library import chosen_level
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import MAX_INTEGER_LEAF, empty
from penstock.kernels.ops import REDUCTION_LEAVES, PackedLinear
from penstock.model_config import ModelConfig
from penstock.models.param_table import leaf_bounds
from penstock.models.registry import lookup
from penstock.planner.memory import free_memory_bytes
from penstock.quant.scheme import Scheme
from penstock.weights.hub import resolve_model

DTYPES = ("bf16", "f32", "int8", "int8-x2", "int4", "int4-a16")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (14336, 4096), (4096, 14336), (32000, 2048))  # (n, k)
LEAF_SHAPES = ((2048, 2048), (2048, 5632), (4096, 14336))  # o_proj and down_proj: measured with leaves as well
MULTIPLIES_IN = {"bf16": "bf16", "f32": "f32", "int8": "int8", "int8-x2": "int8", "int4": "int8", "int4-a16": "bf16"}
RING_BYTES = 256 * 2**20  # weights that are gone through before one comes again
ROUNDS = 5
ROUND_SECONDS = 0.04  # that one turn of a kernel should take


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of the table to measure."""

    dtypes: Sequence[str] = DTYPES
    rows: Sequence[int] = ROWS
    shapes: Sequence[tuple[int, int]] = SHAPES
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in DTYPES:
                raise InvalidRequestError(
                    f"dtype: {check.shown(name)} is not one of {', '.join(DTYPES)}", param="dtype"
                )
        for name, values in (("rows", self.rows), ("shape", [side for shape in self.shapes for side in shape])):
            if not values or min(values) < 1 or max(values) > 2**20:
                raise InvalidRequestError(f"{name}: numbers must be from 1 to {2**20}", param=name)
        if max(k for _, k in self.shapes) > MAX_INTEGER_LEAF and not {"bf16", "f32"}.issuperset(self.dtypes):
            message = f"shape: integer products sum at most k = {MAX_INTEGER_LEAF}; choose --dtype bf16 f32 beyond"
            raise InvalidRequestError(message, param="shape")
        check.check_int("threads", self.threads, 1, 1024, optional=True)
        self._check_memory()

    def _check_memory(self) -> None:
        """Weights of two kinds, activations and results of the largest case."""
        largest = max(8 * n * k + max(self.rows) * 4 * (n + 2 * k) for n, k in self.shapes) + 3 * RING_BYTES
        free = free_memory_bytes()
        if largest > free:
            raise InvalidRequestError(
                f"shape: the largest case needs {largest / 2**20:,.0f} MiB; {free / 2**20:,.0f} MiB are free",
                param="shape",
            )

    def cases(self) -> Iterator[tuple[int, int, str, int]]:
        """(n, k, dtype, leaves), in the order of measuring."""
        for n, k in self.shapes:
            for dtype in self.dtypes:
                yield n, k, dtype, 1
                if (n, k) in LEAF_SHAPES:
                    yield n, k, dtype, REDUCTION_LEAVES


def model_shapes(model: str) -> list[tuple[int, int]]:
    """(n, k) of every product with a weight in a model (a directory, a hub name or demo), each once."""
    config = ModelConfig.from_directory(resolve_model(model))
    parameters = lookup(config.architecture).read_table().parameters(config)
    shapes = ((item.shape[0], item.shape[1]) for item in parameters.values() if item.quant)
    return list(dict.fromkeys(shapes))


def measure_ops(
    selection: Selection,
    *,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]] = no_progress,
) -> dict[str, Any]:
    """Measure, and return the machine's limits and one row for each case and number of rows.

    Raises:
        InvalidRequestError: there are no native kernels to measure, or not the memory for a case.
    """
    level = chosen_level()
    if level is None:
        raise InvalidRequestError("kernels: there is no native library; install with a C++ compiler", param="kernels")
    threads = selection.threads or available_threads()
    torch.set_num_threads(threads)
    backends = {dtype: CpuOps(dtype, threads=threads) for dtype in (torch.bfloat16, torch.float32)}
    limits = MachineLimits(backends[torch.bfloat16])
    cases = list(selection.cases())
    rows: list[dict[str, Any]] = []
    with progress("cases", len(cases) * len(selection.rows)) as advance, torch.inference_mode():
        for n, k, dtype, leaves in cases:
            ops = backends[torch.float32 if dtype == "f32" else torch.bfloat16]
            case = _Case(ops, n, k, dtype, leaves)
            for m in selection.rows:
                rows.append(case.measure(m, limits))
                advance(1)
            del case
            gc.collect()
    machine = limits.figures()
    for row in rows:
        row["bw_fraction"] = row["gb_s"] / machine["read_gb_s"]
        executed = row["gflop_s"] * (2 if row["dtype"] == "int8-x2" else 1)
        row["flop_fraction"] = executed / limits.multiply_gop_s[MULTIPLIES_IN[row["dtype"]]]
    return {
        "machine": {**machine, "level": level, "threads": threads, "processor": processor_name()},
        "torch": torch.__version__,
        "rows": rows,
    }


class _Case:
    """One weight shape in one type: enough packed copies to defeat the caches, and torch's own."""

    def __init__(self, ops: CpuOps, n: int, k: int, dtype: str, leaves: int) -> None:
        self.n, self.k, self.dtype, self.leaves = n, k, dtype, leaves
        self._ops = ops
        scheme = None if dtype in ("bf16", "f32") else Scheme.parse(dtype)
        leaf_ends = [end for _, end in leaf_bounds(k, leaves)] if leaves > 1 else []
        generator = torch.Generator().manual_seed(n + k)
        weight = (torch.rand((n, k), generator=generator) - 0.5).to(ops.dtype)
        first = ops.pack_linear(weight, leaf_ends=leaf_ends, scheme=scheme)
        self._num_bytes = first.num_bytes
        self._packed: list[PackedLinear] = [first]
        for _ in range(RING_BYTES // first.num_bytes):
            copy = {name: empty(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in first.state().items()}
            self._packed.append(ops.restore_linear((n, k), copy, leaf_ends=leaf_ends, scheme=scheme))
        self._plain = [weight.clone() for _ in range(RING_BYTES // (weight.numel() * weight.element_size()) + 1)]

    def measure(self, m: int, limits: MachineLimits) -> dict[str, Any]:
        """One row of the table, without the fractions."""
        x = torch.rand((m, self.k)).sub_(0.5).to(self._ops.dtype)
        out = torch.empty((m, self.n))

        def ours(index: int) -> None:
            self._ops.linear(x, self._packed[index % len(self._packed)], out=out)

        def torchs(index: int) -> Tensor:
            return functional.linear(x, self._plain[index % len(self._plain)])

        turns = [_Turn(ours, len(self._packed)), _Turn(torchs, len(self._plain))]
        for _ in range(ROUNDS):
            limits.probe(MULTIPLIES_IN[self.dtype])
            for turn in turns:
                turn.take()
        seconds, torch_seconds = (turn.median() for turn in turns)
        return {
            "op": "linear",
            "dtype": self.dtype,
            "leaves": self.leaves,
            "m": m,
            "n": self.n,
            "k": self.k,
            "ms": 1e3 * seconds,
            "gb_s": self._num_bytes / seconds / 1e9,
            "gflop_s": 2e-9 * m * self.n * self.k / seconds,
            "torch_ms": 1e3 * torch_seconds,
        }


class _Turn:
    """A call that is measured again and again, a batch of calls at a time."""

    def __init__(self, call: Callable[[int], Any], ring: int) -> None:
        self._call = call
        self._next = 0
        self._seconds: list[float] = []
        once = self._time(1)  # also the first touch of the memory
        self._calls = max(1, min(int(ROUND_SECONDS / max(once, 1e-7)), ring * 4))

    def take(self) -> None:
        self._seconds.append(self._time(self._calls))

    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self._seconds)

    def _time(self, calls: int) -> float:
        started = time.perf_counter()
        for index in range(self._next, self._next + calls):
            self._call(index)
        self._next += calls
        return (time.perf_counter() - started) / calls


def processor_name() -> str:
    """The processor's model name, as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        found = None
    return found or platform.processor() or platform.machine()
