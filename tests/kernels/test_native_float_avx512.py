"""Products in bfloat16 and float32 at the levels of AVX-512, against float64 and against themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu.library import LEVELS
from tests.kernels.packed import Native, levels, pack, rounded

WITH_AVX512 = [level for level in levels() if LEVELS[level] in ("avx512f", "avx512")]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

pytestmark = pytest.mark.skipif(not WITH_AVX512, reason="this machine has no AVX-512")


@pytest.fixture(params=WITH_AVX512, ids=lambda level: LEVELS[level], scope="module")
def native(request: pytest.FixtureRequest) -> Native:
    return Native(request.param)


def as_stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 -> what the weight or operand of this kind holds, float64."""
    return (rounded(values) if kind == "bf16" else values).astype(np.float64)


def assert_close(out: torch.Tensor, x: np.ndarray, weight: np.ndarray, kind: str) -> None:
    """Within the bound of a sum of k products in float32, whatever its order: (k + 3) * 2^-24 * sum of |x| |w|."""
    exact_x, exact_w = as_stored(x, kind), as_stored(weight, kind)
    bound = (x.shape[1] + 3) * 2.0**-24 * (np.abs(exact_x) @ np.abs(exact_w).T)
    assert np.all(np.abs(out.numpy() - exact_x @ exact_w.T) <= bound)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", DTYPES)
@settings(max_examples=15)
@given(
    rows=st.integers(1, 30), n=st.integers(1, 200), k=st.integers(1, 300), is_f32=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_equals_float64(native: Native, kind: str, rows: int, n: int, k: int, is_f32: bool, seed: int) -> None:
    """Guards against a lane, a panel's tail or a padded element of K in the wrong place, for both types of x."""
    weight, x = random(seed, n, k), random(seed + 1, rows, k)
    if not is_f32:
        x = as_stored(x, "bf16").astype(np.float32)
    given_x = torch.from_numpy(x) if is_f32 else torch.from_numpy(x).bfloat16()
    assert_close(native.linear(pack(weight, kind), given_x), x, weight, kind)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_leaves_are_added_as_a_tree(native: Native, kind: str, leaves: int) -> None:
    """Guards against leaves added one after the other: each leaf is a product of its own here, added by the test."""
    weight, x = random(1, 70, 700), random(2, 17, 700)
    ends = [700 * (i + 1) // leaves for i in range(leaves)]
    sums = [
        native.linear(pack(weight[:, a:b], kind), torch.from_numpy(x[:, a:b].copy()))
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(native.linear(pack(weight, kind, leaf_ends=ends), torch.from_numpy(x)), sums[0])


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("ends", [[0, 0, 5, 5, 70, 70, 100, 100], [100] * 8, [0] * 7 + [100]])
def test_empty_leaves(native: Native, kind: str, ends: list[int]) -> None:
    """Guards against an empty leaf that leaves its sum, or its place in the tree, as it was."""
    weight, x = random(3, 40, 100), random(4, 13, 100)
    assert_close(native.linear(pack(weight, kind, leaf_ends=ends), torch.from_numpy(x)), x, weight, kind)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("ends", [[], [100, 200, 200, 340, 341, 500, 600, 650]])
def test_a_row_never_depends_on_its_neighbours(native: Native, kind: str, ends: list[int]) -> None:
    """Guards against kernels of different numbers of rows or panels that add up in different orders."""
    weight, x = random(5, 170, 650), torch.from_numpy(random(6, 70, 650)).to(DTYPES[kind])
    packed = pack(weight, kind, leaf_ends=ends)
    alone = torch.cat([native.linear(packed, x[i : i + 1]) for i in range(70)])
    for rows in range(1, 71):
        assert torch.equal(native.linear(packed, x[70 - rows :]), alone[70 - rows :]), rows


@pytest.mark.parametrize("kind", DTYPES)
def test_blocks_of_k_change_no_bit(native: Native, kind: str) -> None:
    """Guards against a block that drops, or begins anew, the sums of the one before: K is longer than two blocks."""
    k = 5000
    packed, x = pack(random(7, 40, k), kind), torch.from_numpy(random(8, 40, k)).to(DTYPES[kind])
    alone = torch.cat([native.linear(packed, x[i : i + 1]) for i in range(40)])
    assert torch.equal(native.linear(packed, x), alone)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_spoilt_row_spoils_no_other(native: Native, kind: str, value: float) -> None:
    """Guards against a value that is not finite reaching the sums of its tile."""
    packed, x = pack(random(9, 64, 130), kind), torch.from_numpy(random(10, 14, 130))
    clean = native.linear(packed, x)
    x[5, 129] = value
    spoilt = native.linear(packed, x)
    others = torch.arange(14) != 5
    assert torch.equal(spoilt[others], clean[others])
    assert not torch.isfinite(spoilt[5]).any()
