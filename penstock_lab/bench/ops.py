"""Compare each kernel with the machine's limits and with torch.

The rounds of one run time the kernel, torch and the machine's limits (machine.py). Times are medians. Shares compare
each sample with the limits probed before and after it (samples.py). products.py, experts.py and attention.py define
what their figures count.
"""

import contextlib
import gc
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config import TRITON, NumericsConfig
from penstock.errors import check_choice, check_int, fail, invalid
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.host import free_memory_bytes
from penstock.kernels.cpu.library import chosen_level
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import MAX_INTEGER_LEAF
from penstock.kernels.metadata import Heads
from penstock.kernels.triton import device as gpu
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.weights.hub import resolve_model
from penstock_lab.bench import attention, available_threads, machine
from penstock_lab.bench.attention import AttentionCase, decode_cases, prefill_cases
from penstock_lab.bench.experts import ExpertsCase, expert_cases
from penstock_lab.bench.machine import MachineLimits, Progress
from penstock_lab.bench.products import CODINGS, DTYPES, ROWS, SHAPES, ProductCase, product_cases

OPS = ("linear", "experts", "attend_decode", "attend_prefill")

Case = ProductCase | ExpertsCase | AttentionCase


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of the table to measure.

    Attributes:
        rows, shapes: of products; shapes are (n, k).
        heads: of attention; empty for the defaults of bench.attention.
        threads: None for all available cores.
        device: "cpu", or a GPU, which measures neither experts nor codes.

    Raises:
        InvalidRequestError: a value is unknown or out of range, the cases do not fit into memory, or none is left.
    """

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = DTYPES
    rows: Sequence[int] = ROWS
    shapes: Sequence[tuple[int, int]] = SHAPES
    heads: Sequence[Heads] = ()
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for option, names, known in (("op", self.ops, OPS), ("dtype", self.dtypes, (*DTYPES, *CODINGS))):
            for name in names:
                check_choice(option, name, known)
        check_int("threads", self.threads, 1, 1024, optional=True)
        if self.device != "cpu":
            self._check_gpu()
        if "linear" in self.ops:
            self._check_products()
        case_bytes = [case.operand_bytes for case in self.cases()]
        if not case_bytes:
            raise invalid("dtype", f"experts and attention support only {', '.join(attention.DTYPES)} (prefill: bf16)")
        largest, free = max(case_bytes) + 3 * machine.RING_BYTES, free_memory_bytes()
        if largest > free:
            message = f"the largest case needs {largest / 2**20:,.0f} MiB, but only {free / 2**20:,.0f} MiB are free"
            raise invalid("shape", message)

    def _check_gpu(self) -> None:
        experts = ["experts"] if "experts" in self.ops and self.ops != OPS else []
        given: dict[str, Sequence[Any]] = {
            "op": experts,
            "dtype": sorted({*CODINGS} & {*self.dtypes}),
            "threads": [self.threads],
        }
        for option, values in given.items():
            for value in values:
                if value is not None:
                    raise fail(option, value, f"left out with device = {self.device}")

    def _check_products(self) -> None:
        for name, values in (("rows", self.rows), ("shape", [side for shape in self.shapes for side in shape])):
            if not values or min(values) < 1 or max(values) > 2**20:
                raise invalid(name, f"numbers must be from 1 to {2**20}")
        if max(k for _, k in self.shapes) > MAX_INTEGER_LEAF and not {"bf16", "f32"}.issuperset(self.dtypes):
            message = f"k of an integer product is at most {MAX_INTEGER_LEAF}; use --dtype bf16 f32 for more"
            raise invalid("shape", message)

    def cases(self) -> Iterator[Case]:
        if "linear" in self.ops:
            yield from product_cases(self.shapes, self.dtypes, self.rows)
        if "experts" in self.ops and self.device == "cpu":
            yield from expert_cases(self.dtypes)
        if "attend_decode" in self.ops:
            yield from decode_cases(self.dtypes, self.heads)
        if "attend_prefill" in self.ops:
            yield from prefill_cases(self.dtypes, self.heads)


def model_operands(model: str) -> tuple[list[tuple[int, int]], list[Heads]]:
    """List the distinct (n, k) of a model's products, and its attention heads, for a Selection.

    Args:
        model: a directory, a hub name or demo.
    """
    config = load_model_config(resolve_model(model))
    parameters = find_model(config.architecture).read_table().parameters(config)
    shapes = ((item.shape[0], item.shape[1]) for item in parameters.values() if item.quant)
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return list(dict.fromkeys(shapes)), [heads]


def measure_ops(selection: Selection, *, progress: Progress) -> dict[str, Any]:
    """Measure the selection. Return the machine's limits and the rows of all cases.

    Raises:
        InvalidRequestError: the native library is missing.
    """
    backends, limits, about = _on_cpu(selection) if selection.device == "cpu" else on_gpu(selection.device)
    cases = list(selection.cases())
    rows: list[dict[str, Any]] = []
    with progress("cases", len(cases)) as advance, torch.inference_mode():
        for case in cases:
            rows.extend(case.measure(backends, limits))
            gc.collect()
            advance(1)
    return {"machine": {**limits.figures(), **about}, "torch": torch.__version__, "rows": rows}


def _on_cpu(selection: Selection) -> tuple[dict[torch.dtype, Any], MachineLimits, dict[str, Any]]:
    """Make the native backends by type, measure the limits of the machine, and describe both."""
    level = chosen_level()
    if level is None:
        raise invalid("kernels", "the native library is missing; install Penstock with a C++ compiler")
    threads = selection.threads or available_threads()
    torch.set_num_threads(threads)
    backends = {dtype: CpuOps(dtype, threads=threads) for dtype in (torch.bfloat16, torch.float32)}
    about = {"level": level, "threads": threads, "processor": _processor_name()}
    return backends, MachineLimits(backends[torch.bfloat16]), about


def on_gpu(device: str) -> tuple[dict[torch.dtype, Any], MachineLimits, dict[str, Any]]:
    """Make a GPU's backends by type, measure its limits, and describe both. The memory is what engines can have."""
    from penstock_lab.bench.device import DeviceLimits

    NumericsConfig(device=device)  # checks the name
    where = None if gpu.is_interpreted() else device
    backends = {dtype: load_ops(TRITON, dtype, where) for dtype in (torch.bfloat16, torch.float32)}
    place = torch.device(backends[torch.bfloat16].device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else _processor_name()
    about = {"level": gpu.describe(device), "threads": torch.get_num_threads(), "processor": name}
    about["memory_bytes"] = backends[torch.bfloat16].free_bytes()
    return backends, DeviceLimits(place), about


def _processor_name() -> str:
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
