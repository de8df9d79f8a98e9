"""LoRA on a GPU: the adapter of each row, whatever rows are beside it, and while adapters come and go."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.ops import AdaptingOps, LoraTable, Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import Array, Slot
from penstock.kernels.triton import lora
from penstock.kernels.triton.ops import TritonOps
from penstock.kernels.triton.sizes import count_items, group_rows, item_rows
from penstock.layers.lora import AdapterPart, LoraLinear, LoraSlots, LoraSpec
from tests.kernels.triton.compare import DEVICE, bits, close, draw

BF16, F32 = torch.bfloat16, torch.float32
K, N = 70, 45  # no size fills a tile
ENDS = {1: (N,), 3: (20, 24, N)}  # of pieces; a tile has columns of all three
LEAVES = {1: (K,), 8: (8, 16, 16, 30, 40, 50, 60, K)}
RANKS = 17, 1, 0  # the last slot only multiplies and adds
SLOTS = np.array([1, 0, -1, 2, 0, 1, 0], np.int32)


def table(dtype: torch.dtype, pieces: int, leaves: int) -> LoraTable:
    """What does not count is NaN."""
    a, b = (
        draw(len(RANKS), pieces, max(RANKS), K, dtype=dtype),
        draw(len(RANKS), -(-N // 16), max(RANKS), 16, dtype=dtype),
    )
    for slot, rank in enumerate(RANKS):
        a[slot, :, rank:] = b[slot, :, rank:] = float("nan")
    scales = draw(len(RANKS), N, seed=1), draw(len(RANKS), N, seed=2)
    scales[0][1] = scales[1][1] = float("nan")
    words = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (RANKS, (1, 0, 1)))
    return LoraTable(a, b, *scales, *words, ENDS[pieces], LEAVES[leaves])


def adapt(ops: AdaptingOps, adapters: LoraTable, x: Tensor, y: Tensor, slots: Array) -> Tensor:
    chosen = ops.tensor(ops.group_rows(slots))
    hidden = torch.full((len(x), len(adapters.piece_ends), max(RANKS)), float("nan"))
    return ops.lora_expand(ops.lora_shrink(x, adapters, chosen, out=hidden), adapters, chosen, y.clone())


@pytest.mark.parametrize(("dtype", "pieces", "leaves"), [(BF16, 3, 1), (BF16, 1, 8), (F32, 3, 8)])
def test_rows(dtype: torch.dtype, pieces: int, leaves: int) -> None:
    """Guards against wrong sums, values of a slot beyond its rank, columns of another piece, and bits that depend on
    the rows beside a row, one of them NaN, on their order or on their number. A row without an adapter keeps its bits.
    """
    ops, adapters = TritonOps(dtype, DEVICE), table(dtype, pieces, leaves)
    x, y = draw(len(SLOTS), K, dtype=dtype), draw(len(SLOTS), N)
    found = adapt(ops, adapters, x, y, SLOTS)
    exact = replace(adapters, a=adapters.a.double(), b=adapters.b.double())
    torch.testing.assert_close(found, adapt(ReferenceOps(F32, DEVICE), exact, x, y, SLOTS), rtol=1e-4, atol=1e-4)
    assert torch.equal(bits(found[SLOTS < 0]), bits(y[SLOTS < 0]))
    order = np.random.default_rng(0).permutation(len(SLOTS))
    assert torch.equal(bits(adapt(ops, adapters, x[order], y[order], SLOTS[order])), bits(found[order]))
    for row in range(4):
        some = slice(row, row + 1)
        assert torch.equal(bits(adapt(ops, adapters, x[some], y[some], SLOTS[some])), bits(found[some]))
    adapters.a[0, 0, 0] = float("inf")  # of one piece: the others' columns stay what they are
    rest = slice(ENDS[pieces][0], N)
    assert torch.equal(bits(adapt(ops, adapters, x, y, SLOTS)[:, rest]), bits(found[:, rest]))
    adapters.a[0, 0, 0] = 0.0
    found = adapt(ops, adapters, x, y, SLOTS)
    spoilt = x.clone()
    spoilt[1] = float("nan")
    assert torch.equal(bits(adapt(ops, adapters, spoilt, y, SLOTS)[2:]), bits(found[2:]))


def test_groups_of_rows() -> None:
    """Guards against a row that is in no item or in two, an item of two adapters, and more items than are launched."""
    random = np.random.default_rng(0)
    for tokens, slots in ((1, 1), (16, 16), (256, 3), (257, 3), (1000, 30)):
        chosen = random.integers(-1, slots, tokens).astype(np.int32)
        found, seen = group_rows(chosen), list[int]()
        for slot, first, count in found[: count_items(tokens, slots), 1:].tolist():
            rows = found[first : first + count, 0].tolist()
            assert count <= item_rows(tokens)
            assert set(chosen[rows].tolist()) <= {slot}
            seen += rows
        assert sorted(seen) == np.flatnonzero(chosen >= 0).tolist()
    assert not group_rows(np.full(9, -1, np.int32)).any()


@pytest.mark.parametrize(("activation", "scheme"), [("silu", None), ("gelu_tanh", "int8"), ("clamped_silu", "int4")])
def test_an_activation_of_its_own(activation: str, scheme: str | None) -> None:
    """Guards against rows without an adapter whose bits are not those of an engine without LoRA."""
    ops, x, size = TritonOps(BF16, DEVICE), draw(3, 40, dtype=BF16), 32 if scheme == "int4" else None
    packing = Packing((), Scheme.parse(scheme, size), gated=True)
    weight = ops.pack_linear(draw(24, 40) * 0.2, draw(24), packing)
    sums = ops.linear(x, weight)
    gated = ops.activate(sums, activation, gated=True)
    assert torch.equal(bits(gated), bits(ops.gated_linear(x, weight, activation)))
    assert torch.equal(bits(ops.activate(sums, activation)), bits(ops.activated_linear(x, weight, activation)))
    close(gated, ReferenceOps(BF16, DEVICE).activate(sums, activation, gated=True))


class Stream(TorchDispatchMode):
    """A stream of a device that has not begun: kernels, and what torch writes, wait for `run`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._queue: list[Callable[[], Any]] = []
        launch = lora.launch
        monkeypatch.setattr(
            lora, "launch", lambda *args, **options: self._queue.append(partial(launch, *args, **options))
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        self._queue.append(partial(func, *args, **(kwargs or {})))
        return args[0]

    def run(self) -> None:
        for work in self._queue:
            work()


@pytest.mark.skipif(DEVICE != "cpu", reason="a stream of its own")
def test_adapters_come_and_go_behind_the_steps_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slot, or the slots of rows, that the host changes at once, while a step that reads them has yet
    to be computed; and against recorded steps whose slots are somewhere else."""
    ops = TritonOps(F32, DEVICE)
    slots = LoraSlots(ops, 2, 4, 8)
    x, y, rows = draw(3, K), draw(3, N), np.array([0, -1, 1], np.int32)
    spec = LoraSpec(slots, (N,), (), Slot((1, 4), "float32", ops.empty, 3))
    linear = LoraLinear(ops, spec, (N, K))
    linear.allocate()

    def part(seed: int, rank: int, **terms: Any) -> AdapterPart:
        random = np.random.default_rng(seed)
        a, b = random.standard_normal((1, rank, K)), random.standard_normal((N, rank))
        return AdapterPart(a.astype(np.float32), b.astype(np.float32), **terms)

    old, new, other = part(0, 4), part(1, 2, offsets=np.ones(N, np.float32)), part(2, 3)

    def steps(*, late: bool) -> list[Tensor]:
        """A step with the old adapter in the first slot, then one with the new one there, and with other rows."""
        linear.load(0, old)
        linear.load(1, other)
        found = [y.clone(), y.clone()]
        with Stream(monkeypatch) if late else nullcontext() as stream:
            slots.choose(rows)
            linear.add(x, found[0])
            linear.load(0, new)
            slots.choose(rows[::-1].copy())
            linear.add(x, found[1])
        if stream is not None:
            assert torch.equal(found[0], y), "nothing has run yet"
            stream.run()
        return found

    expected = steps(late=False)
    assert not torch.equal(expected[0], expected[1])
    assert all(map(torch.equal, steps(late=True), expected))
