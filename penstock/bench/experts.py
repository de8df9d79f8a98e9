"""Mixtures of experts against the machine's limits and torch: the rows `experts` of bench.ops.

A layer of Mixtral's shape, all of its experts in memory. Rows choose at random; from call to call they choose others,
so that no cache keeps an expert. `gb_s` counts the experts that some row chose, `gflop_s` only what those rows multiply
with them. `torch_ms` is the same in bfloat16 by F.linear, expert after expert, over the rows of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.machine import MachineLimits
from penstock.bench.turns import Turn, take_turns
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import empty
from penstock.kernels.ops import REDUCTION_LEAVES, PackedLinear
from penstock.quant.scheme import Scheme
from penstock.spec.param_table import leaf_bounds

DTYPES = ("bf16", "int8")  # of weights
ROWS = (1, 8, 32, 128, 512)
HIDDEN, INNER, COUNT, TOP_K = 4096, 14336, 8, 2  # Mixtral 8x7B
TORCH_COPIES = 2  # of torch's weights, which its experts share: each alone is more than most caches hold


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """A layer of `count` experts of a type, [hidden] -> [inner] -> [hidden], of which a row chooses top_k."""

    hidden: int
    inner: int
    count: int
    top_k: int
    dtype: str
    rows: Sequence[int]

    @property
    def expert_elements(self) -> int:
        """Of the weights of one expert: gate, up, down."""
        return 3 * self.hidden * self.inner

    def measure(self, backends: dict[torch.dtype, CpuOps], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        layer = LayerUnderTest(self, backends[torch.bfloat16])
        for m in self.rows:
            yield layer.measure(m, limits)


def expert_cases(dtypes: Sequence[str]) -> Iterator[ExpertsCase]:
    """In the order of measuring."""
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
        leaf_ends = [end for _, end in leaf_bounds(case.inner, REDUCTION_LEAVES)]
        self.gate_up = _copies(ops, gate_up, case, gated=True)
        self.down = _copies(ops, down, case, leaf_ends=leaf_ends)
        self._expert_bytes = self.gate_up[0].num_bytes + self.down[0].num_bytes
        self._plain = [(gate_up.clone(), down.clone()) for _ in range(TORCH_COPIES)]

    def measure(self, m: int, limits: MachineLimits) -> dict[str, Any]:
        """One row of the table, without the fraction of the bandwidth."""
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
            "ms": 1e3 * seconds,
            "gb_s": chosen * self._expert_bytes / seconds / 1e9,
            "gflop_s": 2e-9 * m * case.top_k * case.expert_elements / seconds,
            "torch_ms": 1e3 * torch_seconds,
        }

    def calls(self, m: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], int]:
        """What is measured, ours and torch's, for m rows; and how many experts they choose in any call."""
        case = self._case
        generator = torch.Generator().manual_seed(m)
        x = (torch.rand((m, case.hidden), generator=generator) - 0.5).to(self._ops.dtype)
        first = torch.rand((m, case.count), generator=generator).argsort(dim=1)[:, : case.top_k]
        ids = [(first + shift) % case.count for shift in range(case.count)]  # others, but as many
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


def _copies(
    ops: CpuOps, weight: Tensor, case: ExpertsCase, *, leaf_ends: Sequence[int] = (), gated: bool = False
) -> tuple[PackedLinear, ...]:
    """The weight packed once, and as often in memory as there are experts."""
    shape = (weight.shape[0], weight.shape[1])
    scheme = None if case.dtype == "bf16" else Scheme.parse(case.dtype)
    state = ops.pack_linear(weight, leaf_ends=leaf_ends, scheme=scheme, gated=gated).state()
    return tuple(
        ops.restore_linear(
            shape,
            {name: empty(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in state.items()},
            leaf_ends=leaf_ends,
            scheme=scheme,
            gated=gated,
        )
        for _ in range(case.count)
    )
