"""Products with int8 weights: every level gives, bit for bit, what native/products.h defines."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.coded import as_tree
from tests.kernels.packed import Native, Packed, levels, pack

LEVELS = levels()
SMALLEST = np.float32(2.0**-118)  # rows whose greatest magnitude is below it count as zeros
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native library is not built")


@pytest.fixture(scope="module")
def natives() -> list[Native]:
    """One context a level, the portable one first."""
    return [Native(level) for level in LEVELS]


class Weight:
    """A random int8 weight [n, k] in leaves, and its columns' scales."""

    def __init__(self, n: int, ends: Sequence[int], values: np.ndarray | None = None) -> None:
        rng = np.random.default_rng([n, *ends])
        self.ends = list(ends)
        self.values = rng.integers(-127, 128, (n, ends[-1])) if values is None else values
        self.scales = rng.uniform(0.5, 2, n).astype(np.float32)

    def packed(self, slices: int) -> Packed:
        return pack(self.values, "int8", leaf_ends=self.ends, slices=slices, column_scales=self.scales)

    def floats(self) -> np.ndarray:
        """[n, k] as float64."""
        return self.values * self.scales[:, None].astype(np.float64)


def activations(rows: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sliced(x: np.ndarray, slices: int) -> tuple[list[np.ndarray], np.ndarray]:
    """One leaf of rows [m, ..] -> integers, slice after slice, and the rows' scales [m, 1]."""
    greatest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    usable = np.isfinite(greatest) & (greatest >= SMALLEST)
    divisor = np.where(usable, greatest, np.float32(1))
    rest = np.where(usable, x, 0).astype(np.float32) * (np.float32(127) / divisor)
    scale = np.where(usable, greatest / np.float32(127), np.where(np.isfinite(greatest), 0, np.nan))
    parts = []
    for _ in range(slices):
        parts.append(np.rint(rest))
        rest = (rest - parts[-1]) * np.float32(254)
    return [part.astype(np.int64) for part in parts], scale.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # a result beyond float32 is infinite, or NaN, on both sides
def by_definition(x: torch.Tensor, weight: Weight, slices: int) -> np.ndarray:
    """native/products.h step by step, each in float32, and then the columns' scales."""
    rows, leaves = x.float().numpy(), []
    for start, end in zip([0, *weight.ends[:-1]], weight.ends, strict=True):
        parts, scale = sliced(rows[:, start:end], slices)
        dots = [(part @ weight.values[:, start:end].T).astype(np.float32) for part in parts]
        leaf = dots[0]
        for dot, ratio in zip(dots[1:], (254, 254 * 254), strict=False):
            leaf = leaf + dot * (np.float32(1) / np.float32(ratio))
        leaves.append(leaf * scale)
    return as_tree(leaves) * weight.scales


def bits(result: torch.Tensor | np.ndarray) -> np.ndarray:
    """Bits, the same ones for every NaN."""
    values = result.numpy() if isinstance(result, torch.Tensor) else result
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def check(natives: list[Native], x: torch.Tensor, weight: Weight, slices: int) -> None:
    want = bits(by_definition(x, weight, slices))
    for native in natives:
        np.testing.assert_array_equal(bits(native.linear(weight.packed(slices), x)), want)


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_products_follow_the_definition(natives: list[Native], slices: int) -> None:
    """Guards against another order, rounding or layout: short and empty leaves, padded columns, all sizes of a tile."""
    cases = [(1, [1]), (33, [64]), (130, [130, 200, 333]), (95, [0, 96, 130, 386, 386, 450, 500, 501])]
    for n, ends in cases:
        weight = Weight(n, ends)
        for rows in (*range(1, 14), 25, 39):
            check(natives, activations(rows, ends[-1], (torch.float32, torch.bfloat16)[rows % 2]), weight, slices)


@pytest.mark.parametrize("leaves", range(1, 9))
def test_any_number_of_leaves_makes_a_tree(natives: list[Native], leaves: int) -> None:
    """Guards against a partial sum that is forgotten or added in another order, with one tile and with several."""
    weight = Weight(40, [70 * (leaf + 1) for leaf in range(leaves)])
    for rows in (2, 40):
        check(natives, activations(rows, weight.ends[-1]), weight, 2)


@settings(max_examples=25)
@given(
    n=st.integers(1, 100),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    rows=st.integers(1, 30),
    slices=st.integers(1, 3),
    exponent=st.integers(-140, 120),
)
def test_random_shapes_and_magnitudes(
    natives: list[Native], n: int, lengths: list[int], rows: int, slices: int, exponent: int
) -> None:
    """Guards against a shape nobody thought of, and against scales that leave the range of float32."""
    weight = Weight(n, [int(end) for end in np.cumsum(lengths)])
    x = torch.from_numpy(activations(rows, weight.ends[-1]).numpy() * np.float32(2.0**exponent))
    check(natives, x, weight, slices)


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("ends", [[200], [64, 128, 129, 192, 200, 250, 300, 333]])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_knows_nothing_of_the_others(slices: int, ends: list[int], threads: int) -> None:
    """Guards against bits that depend on the number of rows, on their order, or on the thread."""
    weight = Weight(200, ends)
    packed = weight.packed(slices)
    x = activations(70, ends[-1], torch.bfloat16)
    rng = np.random.default_rng(slices)
    for level in LEVELS:
        native = Native(level, threads)
        every = bits(native.linear(packed, x))
        for count in range(1, 71):
            chosen = rng.permutation(70)[:count]
            np.testing.assert_array_equal(bits(native.linear(packed, x[chosen].contiguous())), every[chosen])


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_spoils_its_row_only(natives: list[Native], slices: int, dtype: torch.dtype) -> None:
    """Guards against a NaN or infinity that is lost in the quantisation, or that reaches a neighbour."""
    weight = Weight(70, [70, 200])
    packed = weight.packed(slices)
    clean = activations(20, 200, dtype)
    spoilt = clean.clone()
    where = {1: (0, float("nan")), 4: (199, float("inf")), 5: (69, -float("inf")), 12: (130, -float("nan"))}
    for row, (column, value) in where.items():
        spoilt[row, column] = value
    others = [row for row in range(20) if row not in where]
    for native in natives:
        before, after = native.linear(packed, clean), native.linear(packed, spoilt)
        assert torch.isnan(after[list(where)]).all()
        np.testing.assert_array_equal(bits(after[others]), bits(before[others]))


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_zeros_and_the_smallest_numbers(natives: list[Native], slices: int) -> None:
    """Guards against a division by zero, and against factors that overflow for tiny rows."""
    weight = Weight(40, [64, 100])
    pattern = activations(1, 100)
    pattern /= pattern.abs().max()
    magnitudes = [0.0, -0.0, 1e-45, 2.0**-130, 2.0**-119, 2.0**-118, 2.0**-117, 2.0**-100, 2.0**100]
    x = torch.cat([pattern * magnitude for magnitude in magnitudes])
    check(natives, x, weight, slices)
    for native in natives:
        assert (bits(native.linear(weight.packed(slices), x))[:5] == 0).all()


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_extreme_integers(natives: list[Native], slices: int) -> None:
    """Guards against 16-bit sums that saturate, and against int32 sums that overflow in the longest leaf."""
    k, n = 65536, 34
    signs = np.where(np.arange(n)[:, None] & 1 << np.arange(k) % 6, -1, 1)
    values = 127 * signs
    values[0], values[1] = 127, -127
    weight = Weight(n, [k], values)
    x = torch.ones(14, k)
    x[1] = -1
    x[2:] = torch.from_numpy(signs[2:14].astype(np.float32))
    x[3:] += torch.linspace(-0.002, 0.002, k)  # so that the later slices are large too
    check(natives, x, weight, slices)


@pytest.mark.covers("A15")
def test_every_slice_brings_a_row_closer(natives: list[Native]) -> None:
    """Guards against slices that are added with a wrong weight: two beat activations in bfloat16, three are float32."""
    weight = Weight(96, [2048])
    x = activations(24, 2048)
    want = x.numpy().astype(np.float64) @ weight.floats().T

    def error(result: np.ndarray) -> float:
        return float(np.abs(result - want).max() / np.abs(want).max())

    in_bf16 = error(x.bfloat16().double().numpy() @ weight.floats().T)
    for native in natives:
        errors = [error(native.linear(weight.packed(slices), x).numpy()) for slices in (1, 2, 3)]
        assert errors[0] < 3e-2
        assert errors[1] < min(errors[0] / 50, in_bf16 / 5)
        assert errors[2] < min(errors[1] / 50, 2e-6)
