"""Mixtures of experts against their definition: linear products of single rows, added up in ascending expert id."""

import ctypes
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu.library import OUT_OF_RANGE, PenstockWeight
from tests.kernels.packed import ACTIVATIONS, KINDS, TYPES, Native, Packed, levels
from tests.kernels.test_native_linear import Contexts, assert_same_bits, contexts, normal, random_weight

__all__ = ["contexts"]  # the fixture

pytestmark = pytest.mark.skipif(not levels(), reason="built without a C++ compiler")


class Experts:
    """Weights of a mixture: gate and up [2 * inner, hidden], down [hidden, inner], of every expert."""

    def __init__(self, kind: str, seed: int, count: int, hidden: int, inner: int, leaves: int = 1) -> None:
        ends = [inner * (leaf + 1) // leaves for leaf in range(leaves)]
        self.hidden = hidden
        self.gate_up = [random_weight(kind, seed + e, 2 * inner, hidden, [hidden], gated=True) for e in range(count)]
        self.down = [random_weight(kind, seed + 50 + e, hidden, inner, ends) for e in range(count)]

    def run(
        self, native: Native, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """-> status, out [rows, hidden], NaN where nothing was written."""
        out = torch.full((len(x), self.hidden), float("nan"))
        gate_up, down = _array(self.gate_up), _array(self.down)
        status = native.library.penstock_experts(
            native.context, ctypes.addressof(gate_up), ctypes.addressof(down),
            len(self.down), x.data_ptr(), TYPES[x.dtype], len(x), ids.shape[1], ids.data_ptr(), weights.data_ptr(),
            ACTIVATIONS["silu"], 0, out.data_ptr(),
        )  # fmt: skip
        return status, out

    def row_alone(self, native: Native, x: torch.Tensor, ids: Sequence[int], weights: Sequence[float]) -> torch.Tensor:
        """x [1, hidden] -> [1, hidden] as kernels/ops.py defines it."""
        total = torch.zeros(1, self.hidden)
        for expert, weight in sorted(zip(ids, weights, strict=True)):
            inner = native.linear(self.gate_up[expert], x, out_dtype=x.dtype, activation="silu")
            total = total + np.float32(weight) * native.linear(self.down[expert], inner)
        return total


def _array(weights: list[Packed]) -> ctypes.Array[PenstockWeight]:
    return (PenstockWeight * len(weights))(*(packed.weight for packed in weights))


def random_routes(seed: int, rows: int, count: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [rows, top_k], distinct in a row and in no order, and their weights."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((rows, count)), axis=1)[:, :top_k].copy()
    return torch.from_numpy(ids), torch.from_numpy(random.random((rows, top_k)).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    rows=st.integers(1, 60), count=st.integers(1, 9), top_k=st.integers(1, 9), hidden=st.integers(1, 200),
    inner=st.integers(1, 150), leaves=st.sampled_from([1, 8]), threads=st.integers(1, 4), is_f32=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_equals_its_definition_row_by_row(
    contexts: Contexts, kind: str, rows: int, count: int, top_k: int, hidden: int, inner: int, leaves: int,
    threads: int, is_f32: bool, seed: int,
) -> None:  # fmt: skip
    """Guards against a row at the wrong expert, another order of the sum, and rows that see each other."""
    experts = Experts(kind, seed, count, hidden, inner, leaves)
    ids, weights = random_routes(seed, rows, count, min(top_k, count))
    x = torch.from_numpy(normal(seed + 200, rows, hidden)).to(torch.float32 if is_f32 else torch.bfloat16)
    for level in levels():
        single = contexts(level, 1)
        alone = [
            experts.row_alone(single, x[row : row + 1], ids[row].tolist(), weights[row].tolist()) for row in range(rows)
        ]
        status, out = experts.run(contexts(level, threads), x, ids, weights)
        assert status == 0
        assert_same_bits(out, torch.cat(alone))


def test_many_rows_in_several_passes(contexts: Contexts) -> None:
    """Guards against a pass that reads or writes another one's rows, ids or weights."""
    experts = Experts("bf16", 1, 4, 96, 64)
    ids, weights = random_routes(2, 1_300, 4, 2)
    x = torch.from_numpy(normal(3, 1_300, 96)).bfloat16()
    native = contexts(levels()[-1], 2)
    status, out = experts.run(native, x, ids, weights)
    assert status == 0
    for row in (0, 511, 512, 1_023, 1_024, 1_299):
        alone = experts.row_alone(native, x[row : row + 1], ids[row].tolist(), weights[row].tolist())
        assert_same_bits(out[row : row + 1], alone)


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_an_id_that_is_no_expert_is_refused(contexts: Contexts, bad: int) -> None:
    """Guards against reading a weight that is not there."""
    experts = Experts("f32", 1, 3, 64, 32)
    ids, weights = random_routes(2, 5, 3, 2)
    ids[4, 1] = bad
    status, out = experts.run(contexts(0, 1), torch.ones(5, 64), ids, weights)
    assert status == OUT_OF_RANGE
    assert out.isnan().all()


def test_a_row_of_nan_stays_alone(contexts: Contexts) -> None:
    """Guards against a sum that takes in the results of other rows times zero."""
    experts = Experts("bf16", 1, 3, 64, 32)
    ids, weights = random_routes(2, 20, 3, 2)
    x = torch.from_numpy(normal(3, 20, 64)).bfloat16()
    x[7, 3] = float("nan")
    for level in levels():
        status, out = experts.run(contexts(level, 2), x, ids, weights)
        assert status == 0
        assert out.isnan().all(dim=1).tolist() == [row == 7 for row in range(20)]


OUT_OF_MEMORY = """
import resource, sys
import torch
from tests.kernels.test_native_experts import Experts, random_routes
from tests.kernels.packed import Native

experts, native = Experts("f32", 1, 4, 4_096, 32), Native(0, 2)
ids, weights = random_routes(2, 512, 4, 4)
x = torch.ones(512, 4_096)
experts.run(native, x[:1], ids[:1], weights[:1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), before[1]))  # out takes 8 MB, the results 32
refused = experts.run(native, x, ids, weights)[0]
resource.setrlimit(resource.RLIMIT_AS, before)
again = experts.run(native, x, ids, weights)[0]
sys.exit(f"status {refused}, then {again}" if (refused, again) != (-1, 0) else 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits the address space")
def test_too_little_memory_is_an_error_and_not_the_end() -> None:
    """Guards against an exception that leaves the library, and against a context that is broken afterwards."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
