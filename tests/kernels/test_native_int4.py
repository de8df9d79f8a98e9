"""Products with int4 weights: exact for integer activations, within rounding for bfloat16 ones, on every level."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.coded import as_tree, sliced
from tests.kernels.packed import Native, Packed, levels, pack, rounded

LEVELS = levels()
GROUP_SIZES = (32, 64, 128)
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native library is not built")


@pytest.fixture(scope="module")
def natives() -> list[Native]:
    """One context a level, the portable one first."""
    return [Native(level) for level in LEVELS]


class Weight:
    """A random int4 weight [n, k], packed as both kinds, and what it stands for."""

    def __init__(self, n: int, ends: Sequence[int], group_size: int, slices: int = 1, magnitude: float = 0.01) -> None:
        rng = np.random.default_rng([n, *ends, group_size])
        self.ends, self.group_size, self.slices = list(ends), group_size, slices
        self.values = rng.integers(-8, 8, (n, ends[-1]))
        unit = max(64, group_size)
        self.leaf_groups = [-(-int(length) // unit) * unit // group_size for length in np.diff([0, *ends])]
        self.scales = rounded(rng.uniform(0.5, 2, (n, sum(self.leaf_groups))).astype(np.float32) * magnitude)

    def packed(self, kind: str) -> Packed:
        slices = self.slices if kind == "int4" else 0
        return pack(
            self.values, kind, leaf_ends=self.ends, slices=slices, group_size=self.group_size, group_scales=self.scales
        )

    def groups(self) -> Iterator[list[tuple[slice, np.ndarray]]]:
        """Leaf by leaf, the groups that hold something: their elements of K, and their scales [n]."""
        first = 0
        for start, end, count in zip([0, *self.ends[:-1]], self.ends, self.leaf_groups, strict=True):
            begins = range(start, end, self.group_size)
            yield [(slice(b, min(b + self.group_size, end)), self.scales[:, first + i]) for i, b in enumerate(begins)]
            first += count

    def floats(self) -> np.ndarray:
        """The weight [n, k] as float64."""
        result = self.values.astype(np.float64)
        for where, scales in itertools.chain(*self.groups()):
            result[:, where] *= scales[:, None]
        return result


def activations(rows: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_definition(x: torch.Tensor, weight: Weight) -> np.ndarray:
    """native/products.h step by step, each in float32."""
    rows = x.float().numpy()
    leaves = []
    for start, end, groups in zip([0, *weight.ends[:-1]], weight.ends, weight.groups(), strict=True):
        parts, row_scale = sliced(rows[:, start:end], weight.slices)
        totals = []
        for part in parts:
            total = np.zeros((len(rows), len(weight.values)), dtype=np.float32)
            for where, scales in groups:
                inside = slice(where.start - start, where.stop - start)
                total += (part[:, inside] @ weight.values[:, where].T).astype(np.float32) * scales
            totals.append(total)
        leaf = totals[0]
        for total, ratio in zip(totals[1:], (254, 254 * 254), strict=False):
            leaf = leaf + total * (np.float32(1) / np.float32(ratio))
        leaves.append(leaf * row_scale)
    return as_tree(leaves)


def bits(result: torch.Tensor) -> np.ndarray:
    return result.view(torch.int32).numpy()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_integer_products_follow_the_definition(natives: list[Native], group_size: int, slices: int) -> None:
    """Guards against any other order, rounding or layout: short leaves and groups, empty leaves, padded columns."""
    cases = [(33, [1]), (64, [128]), (130, [200, 200, 333]), (95, [0, 96, 130, 386, 386, 650, 651, 700])]
    for n, ends in cases:
        weight = Weight(n, ends, group_size, slices)
        packed = weight.packed("int4")
        for rows, dtype in ((1, torch.bfloat16), (3, torch.float32), (14, torch.bfloat16)):
            x = activations(rows, ends[-1], dtype)
            want = by_definition(x, weight).view(np.int32)
            for native in natives:
                assert np.array_equal(bits(native.linear(packed, x)), want)


@pytest.mark.parametrize("leaves", range(1, 9))
def test_any_number_of_leaves_makes_a_tree(natives: list[Native], leaves: int) -> None:
    """Guards against a partial sum that is forgotten or added in another order."""
    weight = Weight(40, [70 * (leaf + 1) for leaf in range(leaves)], 64)
    x = activations(5, weight.ends[-1])
    want = by_definition(x, weight).view(np.int32)
    for native in natives:
        assert np.array_equal(bits(native.linear(weight.packed("int4"), x)), want)


@pytest.mark.parametrize("magnitude", [2.0**-132, 2.0**100])
def test_extreme_group_scales_are_not_rounded(natives: list[Native], magnitude: float) -> None:
    """Guards against factors folded into a scale that then leaves the range of float32."""
    weight = Weight(64, [256], 128, magnitude=magnitude)
    x = activations(3, 256)
    want = by_definition(x, weight)
    assert np.isfinite(want).all()
    assert np.any(want)
    for native in natives:
        assert np.array_equal(bits(native.linear(weight.packed("int4"), x)), want.view(np.int32))


def test_greatest_sums_do_not_overflow(natives: list[Native]) -> None:
    """Guards against 16-bit sums that saturate: all weights and activations at the ends of their ranges."""
    weight = Weight(64, [512], 128)
    for low, high in ((-8, -8), (7, 7), (-8, 7)):
        weight.values = np.where(np.arange(512) % 2, low, high) * np.ones((64, 1), dtype=np.int64)
        for signs in (torch.ones(512), -torch.ones(512), 1 - 2 * (torch.arange(512) % 2).float()):
            x = signs.expand(2, -1).contiguous()
            want = by_definition(x, weight).view(np.int32)
            for native in natives:
                assert np.array_equal(bits(native.linear(weight.packed("int4"), x)), want)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_bfloat16_products_are_within_rounding(natives: list[Native], group_size: int) -> None:
    """Guards against wrong elements: a chain of additions in float32 errs by 2^-24 of the terms' sum an addition."""
    for n, ends in [(33, [1]), (96, [1024]), (95, [0, 96, 130, 386, 386, 650, 651, 700])]:
        weight = Weight(n, ends, group_size)
        for dtype in (torch.bfloat16, torch.float32):
            x = activations(14, ends[-1], dtype)
            rows = x.bfloat16().double().numpy()
            want = rows @ weight.floats().T
            additions = group_size + sum(weight.leaf_groups) + len(ends)
            bound = additions * 2.0**-24 * (np.abs(rows) @ np.abs(weight.floats()).T)
            for native in natives:
                assert np.all(np.abs(native.linear(weight.packed("int4_a16"), x).numpy() - want) <= bound)


@pytest.mark.parametrize("kind", ["int4", "int4_a16"])
@settings(max_examples=12)
@given(
    rows=st.integers(1, 70),
    group_size=st.sampled_from(GROUP_SIZES),
    ends=st.lists(st.integers(0, 300), min_size=1, max_size=8).map(lambda n: [*np.cumsum([*n[:-1], n[-1] + 1])]),
    n=st.integers(1, 200),
    slices=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 999),
)
def test_a_row_depends_on_itself_only(
    natives: list[Native], kind: str, rows: int, group_size: int, ends: list[int], n: int, slices: int, seed: int
) -> None:
    """Guards against bits that depend on the number of rows, their order, or a row's place in its tile."""
    packed = Weight(n, ends, group_size, slices).packed(kind)
    x = activations(rows, ends[-1], seed=seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for native in natives:
        together = bits(native.linear(packed, x))
        alone = np.concatenate([bits(native.linear(packed, x[row : row + 1])) for row in range(rows)])
        assert np.array_equal(together, alone)
        assert np.array_equal(bits(native.linear(packed, x[order])), together[order.numpy()])


@pytest.mark.parametrize("kind", ["int4", "int4_a16"])
@pytest.mark.parametrize("ends", [[70], [70, 140, 300]])
def test_a_row_that_is_not_finite_spoils_no_other(natives: list[Native], kind: str, ends: list[int]) -> None:
    """Guards against padding that reads a neighbour, and against a NaN that a quantiser makes a number."""
    packed = Weight(40, ends, 32).packed(kind)
    x = activations(14, ends[-1])
    spoilt = x.clone()
    spoilt[3, 0], spoilt[7, ends[0] - 1], spoilt[8] = float("nan"), float("inf"), -float("inf")
    bad, good = [3, 7, 8], [row for row in range(14) if row not in (3, 7, 8)]
    for native in natives:
        result = native.linear(packed, spoilt)
        assert not result[bad].isfinite().any()
        assert np.array_equal(bits(result[good]), bits(native.linear(packed, x)[good]))


def test_rows_of_zeros_give_zeros(natives: list[Native]) -> None:
    """Guards against a division by the greatest value of a row that has none."""
    for kind in ("int4", "int4_a16"):
        packed = Weight(40, [70, 140], 32).packed(kind)
        for native in natives:
            assert not native.linear(packed, torch.zeros(3, 140)).any()
