"""Each kernel against the machine's own limits, and against torch.

Operands rotate over more memory than the caches hold, as the layers of a model do. Kernel, torch and the machine's
limits take turns in one run; times are medians, limits the best seen. products.py, experts.py and attention.py say what
their figures count.
"""

import gc
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock import validation as check
from penstock.bench import attention, machine, products
from penstock.bench.attention import AttentionCase, decode_cases, prefill_cases
from penstock.bench.experts import ExpertsCase, expert_cases
from penstock.bench.machine import MachineLimits, Progress, no_progress
from penstock.bench.products import DTYPES, ROWS, SHAPES, ProductCase, product_cases
from penstock.config import available_threads
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.library import chosen_level
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import MAX_INTEGER_LEAF
from penstock.kernels.metadata import Heads
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.planner.memory import free_memory_bytes
from penstock.weights.hub import resolve_model

OPS = ("linear", "experts", "attend_decode", "attend_prefill")

Case = ProductCase | ExpertsCase | AttentionCase


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of the table to measure.

    Attributes:
        rows, shapes: of products; shapes are (n, k).
        heads: of attention; empty for those of bench.attention.
    """

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = DTYPES
    rows: Sequence[int] = ROWS
    shapes: Sequence[tuple[int, int]] = SHAPES
    heads: Sequence[Heads] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, names, known in (("op", self.ops, OPS), ("dtype", self.dtypes, DTYPES)):
            for name in names:
                if name not in known:
                    message = f"{option}: {check.shown(name)} is not one of {', '.join(known)}"
                    raise InvalidRequestError(message, param=option)
        check.check_int("threads", self.threads, 1, 1024, optional=True)
        if "linear" in self.ops:
            self._check_products()
        self._check_memory()
        if not any(True for _ in self.cases()):
            message = f"dtype: experts and attention have {', '.join(attention.DTYPES)} (prefill: bf16)"
            raise InvalidRequestError(message, param="dtype")

    def _check_products(self) -> None:
        for name, values in (("rows", self.rows), ("shape", [side for shape in self.shapes for side in shape])):
            if not values or min(values) < 1 or max(values) > 2**20:
                raise InvalidRequestError(f"{name}: numbers must be from 1 to {2**20}", param=name)
        if max(k for _, k in self.shapes) > MAX_INTEGER_LEAF and not {"bf16", "f32"}.issuperset(self.dtypes):
            message = f"shape: integer products sum at most k = {MAX_INTEGER_LEAF}; choose --dtype bf16 f32 beyond"
            raise InvalidRequestError(message, param="shape")

    def _check_memory(self) -> None:
        largest = max((case.operand_bytes for case in self.cases()), default=0) + 3 * machine.RING_BYTES
        free = free_memory_bytes()
        if largest > free:
            raise InvalidRequestError(
                f"shape: the largest case needs {largest / 2**20:,.0f} MiB; {free / 2**20:,.0f} MiB are free",
                param="shape",
            )

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of measuring."""
        if "linear" in self.ops:
            yield from product_cases(self.shapes, self.dtypes, self.rows)
        if "experts" in self.ops:
            yield from expert_cases(self.dtypes)
        if "attend_decode" in self.ops:
            yield from decode_cases(self.dtypes, self.heads)
        if "attend_prefill" in self.ops:
            yield from prefill_cases(self.dtypes, self.heads)


def model_shapes(model: str) -> list[tuple[int, int]]:
    """Return the distinct (n, k) of a model's products with a weight; `model` is a directory, a hub name or demo."""
    config = load_model_config(resolve_model(model))
    parameters = find_model(config.architecture).read_table().parameters(config)
    shapes = ((item.shape[0], item.shape[1]) for item in parameters.values() if item.quant)
    return list(dict.fromkeys(shapes))


def model_heads(model: str) -> list[Heads]:
    """Return the heads of a model's attention."""
    config = load_model_config(resolve_model(model))
    return [Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)]


def measure_ops(selection: Selection, *, progress: Progress = no_progress) -> dict[str, Any]:
    """Measure the selection, and return the machine's limits and the rows of each case.

    Raises:
        InvalidRequestError: there are no native kernels to measure.
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
    with progress("cases", len(cases)) as advance, torch.inference_mode():
        for case in cases:
            rows.extend(case.measure(backends, limits))
            gc.collect()
            advance(1)
    for row in rows:
        passes = row.get("slices") or (2 if row["dtype"] == "int8-x2" else 1)  # once, or once per slice
        row["bw_fraction"] = row["gb_s"] / limits.read_gb_s
        row["flop_fraction"] = row["gflop_s"] * passes / limits.multiply_gop_s[products.MULTIPLIES_IN[row["dtype"]]]
    return {
        "machine": {**limits.figures(), "level": level, "threads": threads, "processor": processor_name()},
        "torch": torch.__version__,
        "rows": rows,
    }


def processor_name() -> str:
    """Return the processor's model name, as the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        found = None
    return found or platform.processor() or platform.machine()
