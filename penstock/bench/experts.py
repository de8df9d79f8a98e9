"""Mixtures of experts against the machine's limits and torch: the rows `experts` of bench.ops.

A layer of Mixtral's shape with all of its experts in memory. Rows choose experts at random, and other ones in the next
call, so that no cache keeps an expert. `gb_s` counts the experts that some row chose, `gflop_s` only what those rows
multiply with them. `torch_ms` is the same in bfloat16 by F.linear, one expert after the other, over the rows of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.machine import MachineLimits, Turn, rates, take_turns
from penstock.bench.products import packed_copies
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import REDUCTION_LEAVES

DTYPES = ("bf16", "int8")  # of weights
ROWS = (1, 8, 32, 128, 512)
HIDDEN, INNER, COUNT, TOP_K = 4096, 14336, 8, 2  # Mixtral 8x7B
TORCH_COPIES = 2  # of torch's weights, shared by its experts: each alone is larger than most caches


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """A layer of `count` experts of a type, [hidden] -> [inner] -> [hidden], of which each row chooses top_k."""

    hidden: int
    inner: int
    count: int
    top_k: int
    dtype: str
    rows: Sequence[int]

    @property
    def expert_elements(self) -> int:
        """Elements of the weights of one expert: gate, up, down."""
        return 3 * self.hidden * self.inner

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands of both sides and their results, roughly."""
        results = max(self.rows) * self.top_k * (self.hidden + self.inner)
        return 2 * (self.count + TORCH_COPIES + 2) * self.expert_elements + 12 * results

    def measure(self, backends: dict[torch.dtype, CpuOps], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield one row per number of rows, without the fractions."""
        layer = LayerUnderTest(self, backends[torch.bfloat16])
        for m in self.rows:
            yield layer.measure(m, limits)


def expert_cases(dtypes: Sequence[str]) -> Iterator[ExpertsCase]:
    """Yield the cases in the order of measuring."""
    for dtype in DTYPES:
        if dtype in dtypes:
            yield ExpertsCase(HIDDEN, INNER, COUNT, TOP_K, dtype, ROWS)


class LayerUnderTest:
    """The experts of a case, packed, and torch's own."""

    def __init__(self, case: ExpertsCase, ops: CpuOps) -> None:
        self._case, self._ops = case, ops
        generator = torch.Generator().manual_seed(case.hidden + case.inner)
        sides = (2 * case.inner, case.hidden), (case.hidden, case.inner)
        gate_up, down = ((torch.rand(side, generator=generator) - 0.5).to(ops.dtype) for side in sides)
        self.gate_up = packed_copies(ops, gate_up, case.dtype, gated=True, count=case.count)
        self.down = packed_copies(ops, down, case.dtype, leaves=REDUCTION_LEAVES, count=case.count)
        self._expert_bytes = self.gate_up[0].num_bytes + self.down[0].num_bytes
        self._plain = [(gate_up.clone(), down.clone()) for _ in range(TORCH_COPIES)]

    def measure(self, m: int, limits: MachineLimits) -> dict[str, Any]:
        """Return one row of the table, without the fractions."""
        case = self._case
        ours, torchs, chosen = self.calls(m)
        turns = [Turn(ours, case.count), Turn(torchs, case.count)]
        seconds, torch_seconds = take_turns(turns, limits, case.dtype)
        return {
            "op": "experts",
            "dtype": case.dtype,
            "leaves": REDUCTION_LEAVES,
            "m": m,
            "n": case.hidden,
            "k": case.inner,
            "experts": case.count,
            "top_k": case.top_k,
            "chosen": chosen,
            **rates(seconds, chosen * self._expert_bytes, 2 * m * case.top_k * case.expert_elements, torch_seconds),
        }

    def calls(self, m: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], int]:
        """Return our call and torch's for m rows, and the number of experts that they choose in every call."""
        case = self._case
        generator = torch.Generator().manual_seed(m)
        x = (torch.rand((m, case.hidden), generator=generator) - 0.5).to(self._ops.dtype)
        first = torch.rand((m, case.count), generator=generator).argsort(dim=1)[:, : case.top_k]
        ids = [(first + shift) % case.count for shift in range(case.count)]  # other experts, but as many
        weights = torch.full((m, case.top_k), 1 / case.top_k)
        out = torch.empty((m, case.hidden))

        def ours(index: int) -> Tensor:
            chosen = ids[index % case.count]
            return self._ops.experts(x, self.gate_up, self.down, chosen, weights, "silu", out=out)

        def torchs(index: int) -> Tensor:
            return self._by_torch(x, ids[index % case.count], weights)

        return ours, torchs, len(set(first.flatten().tolist()))

    def _by_torch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros((len(x), self._case.hidden))
        for expert in sorted(set(ids.flatten().tolist())):
            gate_up, down = self._plain[expert % TORCH_COPIES]
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(x[rows], gate_up).chunk(2, dim=-1)
            branch = functional.linear(functional.silu(gate) * up, down)
            out.index_add_(0, rows, weights[rows, places, None] * branch)
        return out
