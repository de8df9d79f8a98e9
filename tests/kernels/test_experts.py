"""Mixtures of experts through CpuOps at their edges, for every scheme: experts that nobody chose, one that all chose,
one alone and 128 of them. test_native_experts.py has the arithmetic; here it is held against the reference."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.kernels.cpu.ops import REMEMBERED_EXPERTS, CpuOps
from penstock.kernels.cpu.packed import CpuLinear
from penstock.kernels.metadata import RouterParams
from penstock.kernels.ops import Ops, PackedLinear, Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import SLICES, Scheme
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

HIDDEN, INNER, ROWS = 48, 40, 20
BF16 = torch.bfloat16
SCHEMES = {"none": None, **{name: Scheme.parse(name, 32 if "int4" in name else None) for name in SLICES}}
# Which experts each row chooses, [ROWS, k], and how many there are.
CHOICES: dict[str, tuple[Tensor, int]] = {
    "one expert": (torch.zeros(ROWS, 1, dtype=torch.int64), 1),
    "top-1": (torch.arange(ROWS)[:, None] * 3 % 8, 8),
    "all rows to one": (torch.full((ROWS, 1), 5), 8),
    "some without tokens": (torch.tensor([[6, 1], [1, 4]] * (ROWS // 2)), 8),
    "all experts": (torch.arange(8).flip(0).repeat(ROWS, 1), 8),
    "top-8 of 128": (torch.arange(ROWS * 8).view(ROWS, 8) * 37 % 128, 128),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)))


def make(ops: Ops, count: int, scheme: Scheme | None = None) -> tuple[list[PackedLinear], list[PackedLinear]]:
    gates = [
        ops.pack_linear(draw(2 * INNER, HIDDEN, seed=e) * HIDDEN**-0.5, packing=Packing(scheme=scheme, gated=True))
        for e in range(count)
    ]
    downs = [
        ops.pack_linear(draw(HIDDEN, INNER, seed=e + 999) * INNER**-0.5, packing=Packing(scheme=scheme))
        for e in range(count)
    ]
    return gates, downs


def operands(dtype: torch.dtype, top_k: int) -> tuple[Tensor, Tensor]:
    """x [ROWS, HIDDEN], weights [ROWS, top_k] float32."""
    return draw(ROWS, HIDDEN, seed=1).to(dtype), draw(ROWS, top_k, seed=2).softmax(-1)


@pytest.mark.covers("M16", "M18")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_scheme_is_the_reference(scheme: str, choice: str) -> None:
    """Guards against an expert without rows that is not skipped, a group's scales of the next expert, and results that
    are added to the wrong row."""
    ids, count = CHOICES[choice]
    results = []
    for ops in (CpuOps(BF16, threads=2), ReferenceOps(BF16)):
        gates, downs = make(ops, count, SCHEMES[scheme])
        x, weights = operands(BF16, ids.shape[1])
        results.append(ops.experts(x, gates, downs, (ids, weights), "silu"))
    # Between the products both round to bfloat16, and one int8 slice then to 1/127: a sum in another order may fall on
    # the other side of an edge, which moves a result by a part of one of its INNER terms.
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=2.0**-7 * float(results[1].abs().max()))


@pytest.mark.covers("M18")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_does_not_know_the_others(scheme: str) -> None:
    """Guards against a result that depends on how many rows an expert got: alone, in another order, by more threads."""
    ids, count = CHOICES["top-8 of 128"]
    x, weights = operands(BF16, 8)
    one, many = CpuOps(BF16), CpuOps(BF16, threads=3)
    gates, downs = make(one, count, SCHEMES[scheme])
    together = many.experts(x, gates, downs, (ids, weights), "gelu")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    assert torch.equal(many.experts(x[order], gates, downs, (ids[order], weights[order]), "gelu"), together[order])
    for row in range(ROWS):
        at = slice(row, row + 1)
        assert torch.equal(one.experts(x[at], gates, downs, (ids[at], weights[at]), "gelu"), together[at])


def test_no_rows() -> None:
    """Guards against a step in which nobody is routed here."""
    ops = CpuOps(BF16)
    gates, downs = make(ops, 4)
    none = torch.empty(0, 2)
    x, chosen = none.new_empty(0, HIDDEN).to(BF16), (none.long(), none)
    assert ops.experts(x, gates, downs, chosen, "silu").shape == (0, HIDDEN)


@pytest.mark.covers("M18")
def test_the_reference_multiplies_by_chosen_experts_only() -> None:
    """Guards against a mixture that computes all experts and masks: top_k of count, by torch's own counter."""
    ops, (ids, count) = ReferenceOps(BF16), CHOICES["top-8 of 128"]
    gates, downs = make(ops, count)
    x, weights = operands(BF16, 8)
    with FlopCounterMode(display=False) as counter:
        ops.experts(x, gates, downs, (ids, weights), "silu")
    assert counter.get_total_flops() == 2 * ROWS * 8 * (2 * INNER * HIDDEN + HIDDEN * INNER)


UNCHOSEN = """
import torch
from penstock.kernels.cpu.ops import CpuOps
from tests.kernels.test_experts import BF16, CHOICES, SCHEMES, make, operands

ids, count = CHOICES["some without tokens"]
for level in ("portable", None):
    ops = CpuOps(BF16, threads=2, level=level)
    for scheme in SCHEMES.values():
        gates, downs = make(ops, count, scheme)
        for expert in set(range(count)) - set(ids.unique().tolist()):
            for weight in (gates[expert].weight, downs[expert].weight):
                weight.values = weight.column_scales = weight.group_scales = 8  # no process has memory there
        x, weights = operands(BF16, ids.shape[1])
        assert ops.experts(x, gates, downs, (ids, weights), "silu").isfinite().all()
"""


@pytest.mark.covers("M18")
def test_nobody_reads_the_weights_of_an_expert_without_tokens() -> None:
    """Guards against the bandwidth, and the multiplications, of experts that no row has chosen."""
    done = subprocess.run([sys.executable, "-c", UNCHOSEN], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"


@pytest.mark.parametrize("renormalize", [False, True])
def test_ties_of_the_router_go_to_the_lowest_ids(renormalize: bool) -> None:
    """Guards against a choice that depends on the backend where logits are equal, as they are for repeated experts."""
    logits = torch.zeros(3, 128)
    logits[1, 100:] = 1.0
    logits[2, [127, 3, 64, 65]] = torch.tensor([2.0, 2.0, 5.0, 5.0])
    for ops in (CpuOps(BF16), ReferenceOps(BF16)):
        ids, weights = ops.route(logits, RouterParams(8, renormalize=renormalize))
        assert ids.tolist() == [[*range(8)], [*range(100, 108)], [64, 65, 3, 127, 0, 1, 2, 4]]
        assert bool((weights[:2] == weights[:2, :1]).all())
        if renormalize:
            torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    ids, weights = CpuOps(BF16).route(logits[:, :1].contiguous(), RouterParams(1, renormalize=renormalize))
    assert (ids.tolist(), weights.tolist()) == ([[0]] * 3, [[1.0]] * 3)


# --- the arrays that native code reads --------------------------------------------------------------------------------


def test_weights_that_are_exchanged_are_seen() -> None:
    """Guards against arrays that are kept by the list they came from: a list may change, another get its address."""
    ops, (ids, count) = CpuOps(BF16), CHOICES["top-1"]
    gates, downs = make(ops, count)
    x, weights = operands(BF16, 1)
    before = ops.experts(x, gates, downs, (ids, weights), "silu")
    gates[3], gates[6] = gates[6], gates[3]
    after = ops.experts(x, gates, downs, (ids, weights), "silu")
    moved = ((ids == 3) | (ids == 6))[:, 0]
    assert torch.equal(before[~moved], after[~moved])
    assert bool((before[moved] != after[moved]).any(dim=1).all())
    assert torch.equal(ops.experts(x, tuple(gates), tuple(downs), (ids, weights), "silu"), after)
    with pytest.raises(ValueError, match="do not follow"):
        ops.experts(x, gates, [*downs[:-1], ops.pack_linear(draw(HIDDEN, INNER + 1))], (ids, weights), "silu")
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ops.experts(x, gates, downs[:-1], (ids, weights), "silu")
    with pytest.raises(ValueError, match="without a gate"):
        ops.experts(x, downs, downs, (ids, weights), "silu")
    with pytest.raises(TypeError, match="another backend"):
        ops.experts(x, make(ReferenceOps(BF16), count)[0], downs, (ids, weights), "silu")


def test_arrays_are_made_once_and_not_kept_for_ever() -> None:
    """Guards against 256 structures copied in each layer of each step, and memory that grows with the layers."""
    ops, (ids, count) = CpuOps(BF16), CHOICES["one expert"]
    x, weights = operands(BF16, 1)
    layer = make(ops, count)
    for _ in range(3):
        ops.experts(x, *layer, (ids, weights), "silu")
    assert len(ops._experts) == 1
    down = layer[1][0]
    assert isinstance(down, CpuLinear)
    for number in range(REMEMBERED_EXPERTS + 3):
        copy = [down] if number % 2 else [CpuLinear(down.layout, down.state())]
        ops.experts(x, layer[0], copy, (ids, weights), "silu")
    assert len(ops._experts) <= REMEMBERED_EXPERTS


def test_a_program_keeps_its_experts() -> None:
    """Guards against a replay that reads the arrays, or weights, of a layer that everybody else has let go."""
    ops, (ids, count) = CpuOps(BF16), CHOICES["some without tokens"]
    x, weights = operands(BF16, 2)
    layer = [make(ops, count)]
    result, program = ops.record(lambda _: ops.experts(x, *layer[0], (ids, weights), "silu"), ())
    expected = result.clone()
    ops._experts.clear()
    layer.clear()
    gc.collect()
    ctypes.memset(result.data_ptr(), 0xFF, result.nbytes)
    assert program is not None
    assert torch.equal(program.run(()), expected)
