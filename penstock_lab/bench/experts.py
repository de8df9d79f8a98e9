"""Compare mixtures of experts with the machine's limits and with torch, as the `experts` rows of bench.ops.

The layer has Mixtral's shape, with all of its experts in memory. Rows choose experts at random, and each call chooses
others than the call before, so that no cache keeps an expert. `gb_s` counts the experts that some row chose, `gflop_s`
only the products of the rows with the experts that they chose. `torch_ms` is the time of the same work in bfloat16 with
F.linear, which takes the experts one after the other, each with its rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import REDUCTION_LEAVES
from penstock_lab.bench.machine import MachineLimits, TimedCall, time_in_rounds
from penstock_lab.bench.products import packed_copies, uniform
from penstock_lab.bench.samples import Work

DTYPES = ("bf16", "int8")  # of weights
ROWS = (1, 8, 32, 128, 512)
HIDDEN, INNER, COUNT, TOP_K = 4096, 14336, 8, 2  # Mixtral 8x7B
TORCH_COPIES = 2  # copies of an expert's weights that torch's experts share; each copy is larger than most caches


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """A layer of `count` experts [hidden] -> [inner] -> [hidden]. Each row chooses top_k of them."""

    hidden: int
    inner: int
    count: int
    top_k: int
    dtype: str
    rows: Sequence[int]

    @property
    def expert_elements(self) -> int:
        """Elements of the weights of one expert (gate, up and down)."""
        return 3 * self.hidden * self.inner

    @property
    def operand_bytes(self) -> int:
        """Approximate bytes of the operands and results of both sides."""
        results = max(self.rows) * self.top_k * (self.hidden + self.inner)
        return 2 * (self.count + TORCH_COPIES + 2) * self.expert_elements + 12 * results

    def measure(self, backends: dict[torch.dtype, CpuOps], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield one row per number of rows."""
        layer = LayerUnderTest(self, backends[torch.bfloat16])
        for m in self.rows:
            ours, torchs, ids = layer.calls(m)
            chosen = len(set(ids[0].flatten().tolist()))
            operations = 2 * m * self.top_k * self.expert_elements
            work = Work(chosen * layer.expert_bytes, Counter({self.dtype: operations}))
            (measured,) = time_in_rounds([TimedCall(ours, ids), TimedCall(torchs, ids)], work, limits)
            case = {"op": "experts", "dtype": self.dtype, "leaves": REDUCTION_LEAVES, "m": m}
            shape = {"n": self.hidden, "k": self.inner, "experts": self.count, "top_k": self.top_k, "chosen": chosen}
            yield {**case, **shape, **measured.figures(work.read_bytes, operations, limits)}


def expert_cases(dtypes: Sequence[str]) -> Iterator[ExpertsCase]:
    for dtype in DTYPES:
        if dtype in dtypes:
            yield ExpertsCase(HIDDEN, INNER, COUNT, TOP_K, dtype, ROWS)


class LayerUnderTest:
    """The experts of a case: packed copies of one expert for the kernels, plain copies for torch."""

    def __init__(self, case: ExpertsCase, ops: CpuOps) -> None:
        self._case, self._ops = case, ops
        generator = torch.Generator().manual_seed(case.hidden + case.inner)
        gate_up = uniform((2 * case.inner, case.hidden), ops.dtype, generator)
        down = uniform((case.hidden, case.inner), ops.dtype, generator)
        self._gate_up = packed_copies(ops, gate_up, case.dtype, gated=True, count=case.count)
        self._down = packed_copies(ops, down, case.dtype, leaves=REDUCTION_LEAVES, count=case.count)
        self.expert_bytes = self._gate_up[0].num_bytes + self._down[0].num_bytes
        self._plain = [(gate_up.clone(), down.clone()) for _ in range(TORCH_COPIES)]

    def calls(self, m: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[Tensor]]:
        """Make the kernels' call and torch's for m rows, and a ring of expert ids [m, top_k] to pass to them.

        Each entry of the ring chooses different experts, but the same number of them.
        """
        case = self._case
        generator = torch.Generator().manual_seed(m)
        x = uniform((m, case.hidden), self._ops.dtype, generator)
        first = torch.rand((m, case.count), generator=generator).argsort(dim=1)[:, : case.top_k]
        weights = torch.full((m, case.top_k), 1 / case.top_k)
        out = torch.empty((m, case.hidden))

        def ours(ids: Tensor) -> Tensor:
            self._ops.experts(x, self._gate_up, self._down, (ids, weights), "silu", out=out)
            return out

        def torchs(ids: Tensor) -> Tensor:
            total = torch.zeros((m, case.hidden))
            for expert in sorted(set(ids.flatten().tolist())):
                gate_up, down = self._plain[expert % TORCH_COPIES]
                rows, places = (ids == expert).nonzero(as_tuple=True)
                gate, up = functional.linear(x[rows], gate_up).chunk(2, dim=-1)
                branch = functional.linear(functional.silu(gate) * up, down)
                total.index_add_(0, rows, weights[rows, places, None] * branch)
            return total

        return ours, torchs, [(first + shift) % case.count for shift in range(case.count)]
