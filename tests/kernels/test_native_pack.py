"""Native packing against its twin in numpy (packed.py) and the quantisers: equal to the bit, whatever was there."""

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu.library import NOT_QUANTISABLE
from penstock.kernels.reference.quantized_weights import leaf_groups, quantize_int4, quantize_int8
from tests.kernels import packed
from tests.kernels.packed import Native, Packed

pytestmark = pytest.mark.skipif(not packed.levels(), reason="no native library")
KINDS = ("f32", "bf16", "int8", "int4", "int4_a16")


@dataclass(frozen=True)
class Shape:
    """A weight to pack."""

    n: int
    k: int
    leaf_ends: tuple[int, ...] = ()
    group_size: int = 32
    gated: bool = False


SHAPES = {
    "one row": Shape(1, 1),
    "exact panels": Shape(64, 128, group_size=128),
    "ragged": Shape(75, 203, group_size=64),
    "gated": Shape(32, 64, gated=True),
    "gated ragged": Shape(2 * 37, 100, group_size=128, gated=True),
    "leaves": Shape(40, 192, (24, 48, 72, 96, 120, 144, 168, 192)),
    "uneven leaves": Shape(33, 300, (100, 199, 300), 64),
    "an empty leaf": Shape(33, 96, (0, 96), 64),
}


def random_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, zeros and ties among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 10.0 ** torch.randint(-6, 7, (n, 1), generator=generator)
    weight[n // 2] = 0
    weight[n // 3, ::2] = -1.5
    return weight


def expected(weight: torch.Tensor, kind: str, shape: Shape) -> Packed:
    """What the specification makes of a weight, packed in numpy."""
    options: dict[str, Any] = {"leaf_ends": shape.leaf_ends, "gated": shape.gated}
    if kind in ("f32", "bf16"):
        return packed.pack(weight.numpy(), kind, **options)
    if kind == "int8":
        values, scales = quantize_int8(weight)
        return packed.pack(values.numpy(), kind, slices=1, column_scales=scales.numpy(), **options)
    values, scales = quantize_int4(weight, shape.group_size, shape.leaf_ends)
    spread = padded_scales(scales.numpy(), shape)
    return packed.pack(values.numpy(), kind, group_size=shape.group_size, group_scales=spread, **options)


def padded_scales(scales: np.ndarray, shape: Shape) -> np.ndarray:
    """[n, groups] -> [n, padded groups]: zeros for the groups that are nothing but padding."""
    unit = max(packed.K_UNIT, shape.group_size)
    ends = [0, *(shape.leaf_ends or (shape.k,))]
    columns, begin = [], 0
    for start, end in pairwise(ends):
        count = len(leaf_groups(end - start, shape.group_size)) if end > start else 0
        total = -(-(end - start) // unit) * unit // shape.group_size
        leaf = np.zeros((len(scales), total), dtype=np.float32)
        leaf[:, :count] = scales[:, begin : begin + count]
        columns.append(leaf)
        begin += count
    return np.concatenate(columns, axis=1)


def dirty_copy(like: Packed) -> Packed:
    """A weight of the same shape over memory that holds something."""
    rng = np.random.default_rng(0)
    arrays = {
        name: packed.aligned(rng.integers(0, 256, array.nbytes, dtype=np.uint8).view(array.dtype).reshape(array.shape))
        for name, array in like.arrays.items()
    }
    weight = type(like.weight).from_buffer_copy(like.weight)
    for name, array in arrays.items():
        setattr(weight, name, array.ctypes.data)
    return Packed(weight, arrays)


def pack_rows(native: Native, target: Packed, weight: torch.Tensor, first: int = 0) -> int:
    rows = weight.contiguous()
    status = native.library.penstock_pack_rows(
        native.context, target.address, rows.data_ptr(), packed.TYPES[rows.dtype], first, len(rows), None
    )
    return int(status)


def assert_same(got: Packed, want: Packed) -> None:
    for name, array in want.arrays.items():
        np.testing.assert_array_equal(got.arrays[name].view(np.uint8), array.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("level", packed.levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_over_dirty_memory(kind: str, dtype: torch.dtype, level: int) -> None:
    """Guards against a value, a scale or a padded column that differs from the specification or was never written."""
    native = Native(level)
    for name, shape in SHAPES.items():
        weight = random_weight(shape.n, shape.k).to(dtype)
        want = expected(weight.float(), kind, shape)
        got = dirty_copy(want)
        assert pack_rows(native, got, weight) == 0, name
        assert_same(got, want)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    gated=st.booleans(),
    n=st.integers(1, 80),
    k=st.integers(1, 140),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_rows_may_come_in_any_pieces(
    kind: str, gated: bool, n: int, k: int, threads: int, cuts: list[float], order: Any
) -> None:
    """Guards against a piece that spoils its neighbours' columns or nibbles, and against padding that is forgotten
    because the last rows came first."""
    n = 2 * n if gated else n
    shape = Shape(n, k, gated=gated)
    weight = random_weight(n, k)
    want = expected(weight, kind, shape)
    got = dirty_copy(want)
    borders = [0, *sorted(int(cut * n) for cut in cuts), n]
    pieces = list(pairwise(borders))
    order.shuffle(pieces)
    native = Native(packed.levels()[-1], threads)
    for first, end in pieces:
        assert pack_rows(native, got, weight[first:end], first) == 0
    assert_same(got, want)


@settings(max_examples=25)
@given(
    exponent=st.integers(-110, 90),
    group_size=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**31),
    level=st.sampled_from(packed.levels()),
)
def test_quantised_values_at_any_magnitude(exponent: int, group_size: int, seed: int, level: int) -> None:
    """Guards against an order of sums or a rounding in which native code and specification differ."""
    shape = Shape(32, 300, (150, 300), group_size)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 300, generator=generator) * torch.rand(32, 1, generator=generator) * 2.0**exponent
    native = Native(level)
    for kind in ("int8", "int4"):
        want = expected(weight, kind, shape)
        got = dirty_copy(want)
        assert pack_rows(native, got, weight) == 0
        assert_same(got, want)


@pytest.mark.parametrize("level", packed.levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4", "int4_a16"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf"), -(2.0**100)])
def test_weights_that_cannot_be_quantised_are_told(bad: float, kind: str, dtype: torch.dtype, level: int) -> None:
    """Guards against a damaged checkpoint that becomes plausible nonsense, and scales that levels read apart."""
    native, shape = Native(level), Shape(40, 70)
    weight = random_weight(40, 70)
    target = dirty_copy(expected(weight, kind, shape))
    weight[37, 69] = bad
    assert pack_rows(native, target, weight.to(dtype)) == NOT_QUANTISABLE


def test_float_kinds_keep_what_is_not_finite() -> None:
    """Guards against a NaN that rounding turns into infinity or zero, and so into an answer."""
    native = Native(packed.levels()[-1])
    weight = torch.tensor([[float("nan"), float("inf"), 3.4e38, 1.0]]).repeat(3, 1)
    weight[1, 0] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    target = dirty_copy(expected(weight, "bf16", Shape(3, 4)))
    assert pack_rows(native, target, weight) == 0
    bits = torch.from_numpy(target.arrays["values"].view(np.int16)).view(torch.bfloat16)[0, :2, :3].float()
    assert bits[0, :, 0].isnan().all()
    assert (bits[0, :, 1] == float("inf")).all()
    assert (bits[1, :, 0] == float("inf")).all()  # beyond bfloat16's range, as torch rounds it
    assert (bits[1, :, 1] == 1).all()


def test_the_structure_has_the_size_that_c_gives_it() -> None:
    """Guards against fields that Python and C place differently."""
    assert ctypes.sizeof(packed.PenstockWeight) == 4 * 8 + 6 * 4 + 16 * 8 + 9 * 8 + 6 * 4 + 17 * 4 + 4
