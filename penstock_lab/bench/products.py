"""Compare products with a weight with the machine's limits and with torch's F.linear: the `linear` rows of bench.ops.

`gb_s` counts the bytes of the packed weight. `gflop_s` counts 2 M N K, while `flop_fraction` compares the operations
performed (two int8 slices are two products) with the peak of the type that multiplies. `torch_ms` is F.linear of that
shape, in float32 for f32 and in bfloat16 for every other type.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.coding import CodedRows, Coding
from penstock.kernels.ops import REDUCTION_LEAVES, Ops, PackedLinear, Packing, TensorRows
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import NAMES
from penstock.spec.param_table import leaf_bounds
from penstock_lab.bench.machine import MachineLimits, ring_length, time_in_rounds
from penstock_lab.bench.samples import Work

DTYPES = ("bf16", "f32", "int8", "int8-x2", "int4", "int4-a16")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
UP_1B, DOWN_1B, O_PROJ_1B = (5632, 2048), (2048, 5632), (2048, 2048)  # (n, k) in a 1.1B Llama
UP_7B, DOWN_7B = (14336, 4096), (4096, 14336)
SHAPES = (O_PROJ_1B, UP_1B, DOWN_1B, UP_7B, DOWN_7B, (32000, 2048))
LEAF_SHAPES = (O_PROJ_1B, DOWN_1B, DOWN_7B)  # measured with leaves as well
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves
E4M3 = tuple((code % 8 / 8 + (code > 7)) * 2.0 ** (max(code // 8, 1) - 7) for code in range(127))
CODINGS = {  # measured on request; their activations are two int8 slices, or bfloat16 for fp8
    "q4_0": Coding("Q4_0", 4, zero=8),
    "q8_0": Coding("Q8_0", 8, zero=128),
    "q4_k": Coding("Q4_K", 4, 32, 256, steps=True, mins=True, step_mins=True),
    "q5_k": Coding("Q5_K", 6, 32, 256, steps=True, mins=True, step_mins=True),
    "q6_k": Coding("Q6_K", 6, 16, 256, zero=32, steps=True),
    "awq": Coding("AWQ", 4, 128, 128, mins=True),
    "mxfp4": Coding("MXFP4", 4, levels=(*E2M1, *(-level for level in E2M1)), scale_dtype="bfloat16"),
    "fp8": Coding(
        "FP8", 8, 128, 128, levels=(*E4M3, math.nan, *(-level for level in E4M3), math.nan), scale_dtype="float32"
    ),
}
MULTIPLIES_IN = {"bf16": "bf16", "f32": "f32", "int8": "int8", "int8-x2": "int8", "int4": "int8", "int4-a16": "bf16"}


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A weight [n, k] of one type, summed over k in `leaves` leaves and multiplied with each number of rows."""

    n: int
    k: int
    dtype: str
    leaves: int
    rows: Sequence[int]

    @property
    def operand_bytes(self) -> int:
        """Approximate bytes of the operands and results of both sides."""
        return 8 * self.n * self.k + max(self.rows) * 4 * (self.n + 2 * self.k)

    def measure(self, backends: dict[torch.dtype, Any], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield one row per number of rows."""
        ops = backends[torch.float32 if self.dtype == "f32" else torch.bfloat16]
        generator = torch.Generator().manual_seed(self.n + self.k)
        weight = uniform((self.n, self.k), ops.dtype, generator).to(ops.device)
        packed = packed_copies(ops, weight, self.dtype, leaves=self.leaves)
        plain = [weight.clone() for _ in range(ring_length(weight.nbytes))]
        for m in self.rows:
            x, out = uniform((m, self.k), ops.dtype, generator).to(ops.device), ops.empty((m, self.n), "float32")
            timed = [
                limits.timed(partial(ops.linear, x, out=out), packed),
                limits.timed(partial(functional.linear, x), plain),
            ]
            coded = self.dtype in CODINGS and CODINGS[self.dtype].is_integer
            operations, slices = 2 * m * self.n * self.k, 2 if coded or self.dtype == "int8-x2" else 1
            multiplies_in = MULTIPLIES_IN.get(self.dtype, "int8" if coded else "f32")
            work = Work(packed[0].num_bytes, Counter({multiplies_in: operations * slices}))
            (measured,) = time_in_rounds(timed, work, limits)
            shape = {"op": "linear", "dtype": self.dtype, "leaves": self.leaves, "m": m, "n": self.n, "k": self.k}
            yield {**shape, **measured.figures(work.read_bytes, operations, limits)}


def product_cases(
    shapes: Sequence[tuple[int, int]], dtypes: Sequence[str], rows: Sequence[int]
) -> Iterator[ProductCase]:
    for n, k in shapes:
        for dtype in dtypes:
            yield ProductCase(n, k, dtype, 1, rows)
            if (n, k) in LEAF_SHAPES:
                yield ProductCase(n, k, dtype, REDUCTION_LEAVES, rows)


def packed_copies(
    ops: Ops, weight: Tensor, dtype: str, *, leaves: int = 1, gated: bool = False, count: int | None = None
) -> list[PackedLinear]:
    """Pack a weight [n, k] once, and return `count` copies of it; by default, as many as make a ring."""
    coding = CODINGS.get(dtype)
    scheme = None if coding or dtype in ("bf16", "f32") else Scheme.parse(dtype)
    unit = 1 if coding is None else coding.block or 1
    leaf_ends = (*(round(end / unit) * unit for _, end in leaf_bounds(weight.shape[1], leaves)[:-1]), weight.shape[1])
    packing = Packing(leaf_ends, scheme, gated, coding)
    first = ops.pack_linear(weight if coding is None else random_codes(coding, *weight.shape), packing=packing)
    copies = [first]
    for _ in range(1, count or ring_length(first.num_bytes)):
        state = {name: _copy(ops, tensor) for name, tensor in first.state().items()}
        copies.append(ops.restore_linear(weight.shape, state, packing))
    return copies


def _copy(ops: Ops, tensor: Tensor) -> Tensor:
    copy: Tensor = ops.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return copy.copy_(tensor)


def uniform(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw operands in [-0.5, 0.5)."""
    return torch.rand(tuple(shape), generator=generator).sub_(0.5).to(dtype)


def random_codes(coding: Coding, n: int, k: int) -> CodedRows:
    """Make a weight of random codes, and of scales that make its values about as great as those of a model."""
    rng, parts = np.random.default_rng(n + k), {}
    for name, (shape, dtype) in coding.parts((n, k)).items():
        high = {"codes": min(2**coding.bits, 127 if coding.bits == 8 else 32), "steps": 64, "step_mins": 64}.get(name)
        values = rng.uniform(2.0**-12, 2.0**-11, shape) if high is None else rng.integers(0, high, shape, np.uint8)
        parts[name] = TensorRows(values.astype(NAMES[dtype]))
    return CodedRows(coding, parts)
