"""Products with a weight against the machine's limits and torch's F.linear: the rows `linear` of bench.ops.

`gb_s` counts the bytes of the packed weight. `gflop_s` counts 2 M N K, while `flop_fraction` counts what is really
multiplied (two int8 slices are two products) against the peak of the type that multiplies. `torch_ms` is F.linear of
that shape, in float32 for f32 and in bfloat16 for every other type.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.machine import MachineLimits
from penstock.bench.turns import Turn, ring_length, take_turns
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import empty
from penstock.kernels.ops import REDUCTION_LEAVES, PackedLinear
from penstock.quant.scheme import Scheme
from penstock.spec.param_table import leaf_bounds

DTYPES = ("bf16", "f32", "int8", "int8-x2", "int4", "int4-a16")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (14336, 4096), (4096, 14336), (32000, 2048))  # (n, k)
LEAF_SHAPES = ((2048, 2048), (2048, 5632), (4096, 14336))  # o_proj and down_proj: measured with leaves as well
MULTIPLIES_IN = {"bf16": "bf16", "f32": "f32", "int8": "int8", "int8-x2": "int8", "int4": "int8", "int4-a16": "bf16"}


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A weight [n, k] of a type, whose k is summed in so many leaves, at some numbers of rows."""

    n: int
    k: int
    dtype: str
    leaves: int
    rows: Sequence[int]

    def measure(self, backends: dict[torch.dtype, CpuOps], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        weight = _Weight(self, backends[torch.float32 if self.dtype == "f32" else torch.bfloat16])
        for m in self.rows:
            yield weight.measure(m, limits)


def product_cases(
    shapes: Sequence[tuple[int, int]], dtypes: Sequence[str], rows: Sequence[int]
) -> Iterator[ProductCase]:
    """In the order of measuring."""
    for n, k in shapes:
        for dtype in dtypes:
            yield ProductCase(n, k, dtype, 1, rows)
            if (n, k) in LEAF_SHAPES:
                yield ProductCase(n, k, dtype, REDUCTION_LEAVES, rows)


class _Weight:
    """Enough packed copies to defeat the caches, and torch's own."""

    def __init__(self, case: ProductCase, ops: CpuOps) -> None:
        self._case, self._ops = case, ops
        shape = (case.n, case.k)
        scheme = None if case.dtype in ("bf16", "f32") else Scheme.parse(case.dtype)
        leaf_ends = [end for _, end in leaf_bounds(case.k, case.leaves)] if case.leaves > 1 else []
        generator = torch.Generator().manual_seed(case.n + case.k)
        weight = (torch.rand(shape, generator=generator) - 0.5).to(ops.dtype)
        first = ops.pack_linear(weight, leaf_ends=leaf_ends, scheme=scheme)
        self._num_bytes = first.num_bytes
        self._packed: list[PackedLinear] = [first]
        for _ in range(ring_length(first.num_bytes) - 1):
            copy = {name: empty(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in first.state().items()}
            self._packed.append(ops.restore_linear(shape, copy, leaf_ends=leaf_ends, scheme=scheme))
        self._plain = [weight.clone() for _ in range(ring_length(weight.numel() * weight.element_size()))]

    def measure(self, m: int, limits: MachineLimits) -> dict[str, Any]:
        """One row of the table, without the fraction of the bandwidth."""
        case = self._case
        x = torch.rand((m, case.k)).sub_(0.5).to(self._ops.dtype)
        out = torch.empty((m, case.n))

        def ours(index: int) -> None:
            self._ops.linear(x, self._packed[index % len(self._packed)], out=out)

        def torchs(index: int) -> Tensor:
            return functional.linear(x, self._plain[index % len(self._plain)])

        turns = [Turn(ours, len(self._packed)), Turn(torchs, len(self._plain))]
        seconds, torch_seconds = take_turns(turns, limits, MULTIPLIES_IN[case.dtype])
        return {
            "op": "linear",
            "dtype": case.dtype,
            "leaves": case.leaves,
            "m": m,
            "n": case.n,
            "k": case.k,
            "ms": 1e3 * seconds,
            "gb_s": self._num_bytes / seconds / 1e9,
            "gflop_s": 2e-9 * m * case.n * case.k / seconds,
            "torch_ms": 1e3 * torch_seconds,
        }
