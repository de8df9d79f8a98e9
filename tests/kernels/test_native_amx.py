"""Products with AMX tiles: bfloat16 against float64, int8 against its definition in numpy, both against themselves."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu.library import LEVELS
from tests.kernels.packed import Native, Packed, levels, pack, rounded

PORTABLE, AMX = 0, LEVELS.index("amx")
LEAVES = [100, 200, 200, 340, 341, 500, 600, 650]  # lengths that fill no step of K, and an empty one

pytestmark = pytest.mark.skipif(AMX not in levels(), reason="this machine has no AMX, or does not let us use it")


@pytest.fixture(scope="module")
def native() -> Native:
    return Native(AMX)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_int8(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape)


def random_packed(kind: str, n: int, k: int, leaf_ends: Sequence[int] = ()) -> Packed:
    """kind: bf16, or int8-x1, -x2, -x3 with its slices."""
    if kind == "bf16":
        return pack(random(n, n, k), "bf16", leaf_ends=leaf_ends)
    scales = np.abs(random(k, n)) + 0.1
    slices = int(kind[-1])
    return pack(random_int8(n, n, k), "int8", leaf_ends=leaf_ends, slices=slices, column_scales=scales)


def add_as_tree(sums: list[np.ndarray]) -> np.ndarray:
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def int8_leaf(x: np.ndarray, weight: np.ndarray, slices: int) -> np.ndarray:
    """x [M, k] float32 times weight [n, k] as products.h has it: every operation in float32 and rounded by itself."""
    one = np.float32(1)
    greatest = np.abs(x).max(axis=1, initial=0)[:, None]
    safe = np.where(greatest == 0, one, greatest)
    scale = np.where(greatest == 0, np.float32(0), safe / np.float32(127))
    rest = x * (np.float32(127) / safe)
    leaf = np.zeros((len(x), len(weight)), dtype=np.float32)
    for factor in [one, one / np.float32(254), one / np.float32(254 * 254)][:slices]:
        part = np.rint(rest)
        product = part.astype(np.int64) @ weight.T
        leaf = leaf + product.astype(np.float32) * factor
        rest = (rest - part) * np.float32(254)
    return leaf * scale


@settings(max_examples=20)
@given(
    rows=st.integers(1, 70), n=st.integers(1, 200), k=st.integers(1, 300), is_f32=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_bf16_equals_float64(native: Native, rows: int, n: int, k: int, is_f32: bool, seed: int) -> None:
    """Guards against a misplaced row, column or element of K, by the bound of any order of a sum of k products."""
    weight, x = rounded(random(seed, n, k)), rounded(random(seed + 1, rows, k))
    given_x = torch.from_numpy(x) if is_f32 else torch.from_numpy(x).bfloat16()
    out = native.linear(pack(weight, "bf16"), given_x).numpy()
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    bound = (k + 3) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T)
    assert np.all(np.abs(out - exact) <= bound)


@pytest.mark.parametrize("leaves", [2, 8])
def test_bf16_leaves_are_added_as_a_tree(native: Native, leaves: int) -> None:
    """Guards against leaves added in another order: each leaf is a product of its own here, added by the test."""
    weight, x = random(1, 170, 700), random(2, 40, 700)
    ends = [700 * (i + 1) // leaves for i in range(leaves)]
    sums = [
        native.linear(pack(weight[:, a:b], "bf16"), torch.from_numpy(x[:, a:b].copy())).numpy()
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]
    out = native.linear(pack(weight, "bf16", leaf_ends=ends), torch.from_numpy(x))
    assert np.array_equal(out.numpy(), add_as_tree(sums))


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 11, 17, 40])
@pytest.mark.parametrize("ends", [[650], LEAVES])
def test_int8_equals_its_specification(native: Native, slices: int, rows: int, ends: list[int]) -> None:
    """Guards against a wrong slice, sum, scale or leaf, and against a fused or reordered operation: equal bits."""
    weight, x = random_int8(3, 170, 650), random(4, rows, 650)
    scales = np.abs(random(5, 170)) + np.float32(0.1)
    packed = pack(weight, "int8", leaf_ends=ends, slices=slices, column_scales=scales)
    starts = [0, *ends[:-1]]
    sums = [int8_leaf(x[:, a:b], weight[:, a:b], slices) for a, b in zip(starts, ends, strict=True)]
    assert np.array_equal(native.linear(packed, torch.from_numpy(x)).numpy(), add_as_tree(sums) * scales)


@pytest.mark.parametrize("kind", ["bf16", "int8-x1", "int8-x2", "int8-x3"])
@pytest.mark.parametrize("ends", [[], LEAVES])
def test_a_row_never_depends_on_its_neighbours(native: Native, kind: str, ends: list[int]) -> None:
    """Guards against bits that depend on how many rows a tile has: one of its two halves, a part, or all of it."""
    packed, x = random_packed(kind, 170, 650, ends), torch.from_numpy(random(6, 70, 650))
    alone = torch.cat([native.linear(packed, x[i : i + 1]) for i in range(70)])
    for rows in range(1, 71):
        assert torch.equal(native.linear(packed, x[70 - rows :]), alone[70 - rows :]), rows


@pytest.mark.parametrize("kind", ["bf16", "int8-x1", "int8-x2", "int8-x3"])
@pytest.mark.parametrize("leaves", [1, 8])
def test_blocks_of_k_change_no_bit(native: Native, kind: str, leaves: int) -> None:
    """Guards against a block of K that begins anew, or is cut where the weights are not: leaves longer than a block."""
    k = 9000
    packed = random_packed(kind, 40, k, [k * (i + 1) // leaves for i in range(leaves)])
    x = torch.from_numpy(random(8, 100, k))
    alone = torch.cat([native.linear(packed, x[i : i + 1]) for i in range(100)])
    assert torch.equal(native.linear(packed, x), alone)


@pytest.mark.parametrize("kind", ["bf16", "int8-x1", "int8-x2"])
@pytest.mark.parametrize("ends", [[0, 0, 5, 5, 70, 70, 100, 100], [100] * 8, [0] * 7 + [100]])
def test_empty_leaves(native: Native, kind: str, ends: list[int]) -> None:
    """Guards against an empty leaf that leaves its sum as it was: other products run before, in the same scratch."""
    x = torch.from_numpy(random(9, 33, 100))
    native.linear(random_packed(kind, 40, 100), x)
    out = native.linear(random_packed(kind, 40, 100, ends), x)
    whole = native.linear(random_packed(kind, 40, 100), x)
    assert torch.allclose(out, whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))


@pytest.mark.parametrize("kind", ["bf16", "int8-x1", "int8-x3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_spoilt_row_spoils_no_other(native: Native, kind: str, value: float) -> None:
    """Guards against a value that is not finite reaching another row of its tile."""
    packed, x = random_packed(kind, 64, 130), torch.from_numpy(random(10, 20, 130))
    clean = native.linear(packed, x)
    x[5, 129] = value
    spoilt = native.linear(packed, x)
    others = torch.arange(20) != 5
    assert torch.equal(spoilt[others], clean[others])
    assert not torch.isfinite(spoilt[5]).any()


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("ends", [[], LEAVES])
def test_int8_equals_the_portable_level(native: Native, slices: int, ends: list[int]) -> None:
    """Guards against levels that quantise or add up differently: the answer of a machine would name its processor."""
    packed, x = random_packed(f"int8-x{slices}", 170, 650, ends), torch.from_numpy(random(11, 40, 650)).bfloat16()
    assert torch.equal(native.linear(packed, x), Native(PORTABLE).linear(packed, x))
