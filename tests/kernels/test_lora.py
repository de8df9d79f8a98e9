"""The operations of LoRA adapters: against float64, on every level, and each row by itself."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.cpu.library import LEVELS as NAMES
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import LoraTable, Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.tensors import BFLOAT16, FLOAT32, Array, as_torch
from tests.kernels.packed import levels

LEVELS = [NAMES[level] for level in levels()]
SLOTS, MAX_RANK, K, N = 3, 9, 203, 301  # no size fills a vector, or an item of 256 columns
ENDS = {1: (N,), 3: (24, 270, N)}  # of pieces, which end inside a vector
LEAVES = {1: (K,), 8: (24, 48, 48, 100, 130, 150, 177, K)}  # one of them is empty
RANKS = np.array([9, 4, 1], np.int32)

pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library")


def table(dtype: np.dtype, pieces: int, leaves: int) -> LoraTable:
    """Adapters of different ranks, of which the second has factors and offsets; what does not count is NaN."""
    draw = np.random.default_rng(pieces + leaves)
    a = draw.standard_normal((SLOTS, pieces, MAX_RANK, K)).astype(dtype)
    b = draw.standard_normal((SLOTS, -(-N // 16), MAX_RANK, 16)).astype(dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, :, rank:], b[slot, :, rank:] = np.nan, np.nan
    factors, offsets = (draw.standard_normal((SLOTS, N)).astype(FLOAT32) for _ in range(2))
    return LoraTable(a, b, factors, offsets, RANKS, np.array([0, 1, 0], np.int32), ENDS[pieces], LEAVES[leaves])


def computed(ops: CpuOps, adapters: LoraTable, x: Array, y: Array, slots: Array) -> Array:
    hidden = np.full((len(x), len(adapters.piece_ends), MAX_RANK), np.nan, FLOAT32)
    y = np.pad(y, ((0, 0), (0, 5)))[:, : y.shape[1]]  # rows of a wider array
    return ops.lora_expand(ops.lora_shrink(x, adapters, slots, out=hidden), adapters, slots, y)


def exact(adapters: LoraTable, x: Array, y: Array, slots: Array) -> Array:
    """The same in float64."""
    found = y.astype(np.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        rank = RANKS[slot]
        if adapters.scaled[slot]:
            found[row] = found[row] * adapters.factors[slot] + adapters.offsets[slot]
        b = adapters.b[slot, :, :rank].astype(np.float64).transpose(0, 2, 1).reshape(-1, rank)
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *adapters.piece_ends))):
            hidden = adapters.a[slot, piece, :rank].astype(np.float64) @ x[row].astype(np.float64)
            found[row, begin:end] += b[begin:end] @ hidden
    return found


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("pieces", ENDS)
@pytest.mark.parametrize("leaves", LEAVES)
def test_rows(dtype: np.dtype, pieces: int, leaves: int) -> None:
    """Guards against wrong sums, a slot's values beyond its rank, a row that depends on the rows beside it (one of them
    NaN), on the threads or on its place, and a level with bits of its own."""
    adapters, draw = table(dtype, pieces, leaves), np.random.default_rng(5)
    count = 150  # more than a block of rows for one slot
    x, y = draw.standard_normal((count, K)).astype(dtype), draw.standard_normal((count, N)).astype(FLOAT32)
    slots = draw.integers(-1, SLOTS, count).astype(np.int32)
    slots[:80] = 0
    first = computed(CpuOps(dtype, threads=2, level=LEVELS[0]), adapters, x, y, slots)
    expected = exact(adapters, x, y, slots)
    assert np.abs(first - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.array_equal(first[slots < 0], y[slots < 0])
    for level in LEVELS:
        ops = CpuOps(dtype, threads=1, level=level)
        assert np.array_equal(computed(ops, adapters, x, y, slots), first)
        x[0] = np.nan
        order = draw.permutation(count)
        again = computed(ops, adapters, x[order], y[order], slots[order])
        assert np.array_equal(again[order != 0], first[order[order != 0]])
        x[0] = 0
        for row in (1, 99, 149):
            some = slice(row, row + 1)
            assert np.array_equal(computed(ops, adapters, x[some], y[some], slots[some]), first[some])
        x[0] = draw.standard_normal(K).astype(dtype)
        first[0] = computed(ops, adapters, x[:1], y[:1], slots[:1])[0]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_ranks_add_what_one_process_adds(dtype: np.dtype) -> None:
    """Guards against leaves that are added in an order which two ranks, each with half of them, cannot keep."""
    adapters, draw = table(dtype, 3, 8), np.random.default_rng(8)
    x, slots, cut = draw.standard_normal((5, K)).astype(dtype), np.array([0, 1, 2, 0, -1], np.int32), LEAVES[8][3]
    for level in LEVELS:
        ops, found = CpuOps(dtype, level=level), []
        for begin, end in ((0, K), (0, cut), (cut, K)):
            leaves = tuple(leaf - begin for leaf in LEAVES[8] if begin < leaf <= end)
            part = replace(adapters, a=np.ascontiguousarray(adapters.a[..., begin:end]), leaf_ends=leaves)
            hidden = np.zeros((len(x), 3, MAX_RANK), FLOAT32)
            found.append(ops.lora_shrink(np.ascontiguousarray(x[:, begin:end]), part, slots, out=hidden))
        assert np.array_equal(found[0], found[1] + found[2])


def test_the_reference() -> None:
    """Guards against a specification that says something else."""
    adapters, draw = table(FLOAT32, 3, 1), np.random.default_rng(6)
    x, y = draw.standard_normal((9, K)).astype(FLOAT32), draw.standard_normal((9, N)).astype(FLOAT32)
    slots = np.array([0, -1, 1, 2, 0, 1, -1, 2, 1], np.int32)
    names = ("a", "b", "factors", "offsets")
    tensors = LoraTable(
        *(as_torch(getattr(adapters, name)) for name in names), RANKS, adapters.scaled, adapters.piece_ends, (K,)
    )
    ops, hidden = ReferenceOps(torch.float32), torch.zeros((9, 3, MAX_RANK))
    rows = as_torch(slots)
    found = ops.lora_expand(ops.lora_shrink(as_torch(x), tensors, rows, out=hidden), tensors, rows, as_torch(y.copy()))
    np.testing.assert_allclose(found.numpy(), exact(adapters, x, y, slots), atol=1e-3)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_silu", "relu2", "relu", "tanh"])
def test_an_activation_of_its_own(dtype: np.dtype, activation: str) -> None:
    """Guards against rows without an adapter whose bits are not those of an engine without LoRA."""
    draw = np.random.default_rng(7)
    weight, bias = draw.standard_normal((2 * N, K)).astype(FLOAT32), draw.standard_normal(2 * N).astype(FLOAT32)
    x = draw.standard_normal((37, K)).astype(dtype)
    for level in LEVELS:
        ops = CpuOps(dtype, threads=2, level=level)
        gated, plain = ops.pack_linear(weight, bias, Packing(gated=True)), ops.pack_linear(weight, bias)
        sums = ops.linear(x, gated)
        assert sums.tobytes() == ops.linear(x, plain).tobytes()  # gate's columns, then up's
        together = ops.gated_linear(x, gated, activation)
        assert ops.activate(sums, activation, gated=True).tobytes() == together.tobytes()
        together = ops.activated_linear(x, plain, activation)
        assert ops.activate(sums, activation).tobytes() == together.tobytes()
        assert ops.activate(sums[:, :0], activation).shape == (37, 0)  # no division by the number of columns


def test_what_is_not_a_slot() -> None:
    """Guards against memory that is read beyond the table."""
    adapters, ops = table(FLOAT32, 1, 1), CpuOps(FLOAT32)
    x, y, hidden = np.zeros((1, K), FLOAT32), np.zeros((1, N), FLOAT32), np.zeros((1, 1, MAX_RANK), FLOAT32)
    for slot in (SLOTS, -2):
        slots = np.array([slot], np.int32)
        with pytest.raises(ValueError, match="outside of its table"):
            ops.lora_shrink(x, adapters, slots, out=hidden)
        with pytest.raises(ValueError, match="outside of its table"):
            ops.lora_expand(hidden, adapters, slots, y)
