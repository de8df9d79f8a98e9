"""Levels that share their bits: whatever one computes, the other computes, bit for bit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu import library
from penstock.kernels.cpu.library import LEVELS, SAME_BITS
from tests.kernels.attention import Attention, Rules, Run, Sequences, Shape
from tests.kernels.packed import KINDS, Native, Packed, levels, pack

PAIRS = [(LEVELS.index(one), LEVELS.index(other)) for one, other in SAME_BITS.items() if LEVELS.index(one) in levels()]
GROUP = 64

pytestmark = pytest.mark.skipif(not PAIRS, reason="no level of this machine has the bits of another one")


@pytest.fixture(params=PAIRS, ids=lambda pair: LEVELS[pair[0]], scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Attention, Attention]:
    first, second = (Attention(level) for level in request.param)
    return first, second


def weight(kind: str, n: int, k: int, ends: Sequence[int], seed: int) -> Packed:
    rng = np.random.default_rng(seed)
    if kind in ("f32", "bf16"):
        return pack(rng.standard_normal((n, k)).astype(np.float32), kind, leaf_ends=ends)
    scales = rng.random(n).astype(np.float32)
    if kind == "int8":
        return pack(rng.integers(-127, 128, (n, k)), kind, leaf_ends=ends, slices=2, column_scales=scales)
    groups = sum(-(-(end - begin) // GROUP) for begin, end in zip([0, *ends[:-1]], ends, strict=True))
    return pack(
        rng.integers(-8, 8, (n, k)), kind, leaf_ends=ends, slices=int(kind == "int4"), group_size=GROUP,
        group_scales=rng.random((n, groups)).astype(np.float32),
    )  # fmt: skip


def activations(rows: int, k: int, seed: int) -> np.ndarray:
    """Of all magnitudes, with zeros of both signs, subnormal numbers and ties of rounding to bfloat16 among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-40, 20, (rows, 1))
    special = [0.0, -0.0, 1e-40, -1e-45, 1.00390625, 1.01171875]
    return np.where(rng.random(x.shape) < 0.1, rng.choice(special, x.shape), x).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    rows=st.one_of(st.integers(1, 30), st.just(130)), n=st.integers(1, 140), k=st.integers(1, 400),
    leaves=st.sampled_from([1, 8]), is_f32=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_products(
    pair: tuple[Native, Native], kind: str, rows: int, n: int, k: int, leaves: int, is_f32: bool, seed: int
) -> None:
    """Guards against another order of a sum, a product that is fused on one side only, and other rounding."""
    packed = weight(kind, n, k, [k * (i + 1) // leaves for i in range(leaves)], seed)
    x = torch.from_numpy(activations(rows, k, seed))
    x = x if is_f32 else x.bfloat16()
    first, second = (native.linear(packed, x) for native in pair)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_a_long_k(pair: tuple[Native, Native], kind: str) -> None:
    """Guards against blocks of K that begin a sum anew: K is longer than two blocks of any kernel."""
    packed = weight(kind, 40, 5000, [5000], 1)
    x = torch.from_numpy(activations(40, 5000, 2))
    first, second = (native.linear(packed, x) for native in pair)
    assert torch.equal(first, second)


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("kind", ["f32", "bf16", "int4_a16"])
def test_products_near_the_subnormal_numbers(pair: tuple[Native, Native], kind: str, leaves: int) -> None:
    """Guards against subnormal operands, sums or results that only one side takes for zeros, or everywhere."""
    ends = [300 * (i + 1) // leaves for i in range(leaves)]
    rng = np.random.default_rng(5)
    if kind == "int4_a16":
        packed, size = weight(kind, 40, 300, ends, 5), 2.0**-126
    else:
        packed, size = (
            pack((rng.standard_normal((40, 300)) * 2.0**-64).astype(np.float32), kind, leaf_ends=ends),
            2.0**-64,
        )
    x = torch.from_numpy((rng.standard_normal((20, 300)) * size).astype(np.float32))
    first, second = (native.linear(packed, x) for native in pair)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert first.count_nonzero() > 0


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_sums_that_underflow_to_a_negative_zero(pair: tuple[Native, Native], kind: str, k: int, leaves: int) -> None:
    """Guards against padding that is left out on one side only: its products turn a sum of -0 into 0."""
    ends = [k * (i + 1) // leaves for i in range(leaves)]
    packed = pack(np.full((40, k), 2.0**-60, np.float32), kind, leaf_ends=ends)
    for rows in (1, 2, 3, 7, 30):
        x = torch.full((rows, k), -(2.0**-100))
        first, second = (native.linear(packed, x) for native in pair)
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert first.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_products_that_are_not_finite(pair: tuple[Native, Native], kind: str, value: float) -> None:
    """Guards against a NaN or an infinity that rounding to bfloat16 makes a number on one side."""
    x = torch.from_numpy(activations(5, 100, 3))
    x[2, 70] = value
    x[3, 1] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN whose upper half is infinity
    first, second = (native.linear(weight(kind, 40, 100, [100], 4), x) for native in pair)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert first[3].isnan().all()


RULES = {
    "plain": Rules(),
    "window": Rules(window=70, kept=5),
    "softcap": Rules(scale=2.0, softcap=3.0),
    "alibi": Rules(slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625] * 4), sink_logits=torch.linspace(-1, 2, 16)),
}


def test_attention_near_the_subnormal_numbers(pair: tuple[Attention, Attention]) -> None:
    """Guards against values, or sums of them, that only one side takes for zeros."""
    sequences = Sequences([200], Shape(16, 4, 64, "bf16"), torch.bfloat16, seed=1)
    sequences.v[0] *= 2.0**-126
    results = []
    for native in pair:
        run = Run(native, sequences, RULES["plain"])
        run.put(0, 170)
        results.append(run.step({0: 30})[0])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert first.count_nonzero() > 0


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
def test_attention(pair: tuple[Attention, Attention], kind: str, dtype: torch.dtype, rules: str) -> None:
    """Guards against an exponential, a sum of probabilities or a fold of another order, for full and partial strips."""
    for heads, head_dim, new in ((16, 64, 1), (16, 90, 3), (16, 32, 29)):
        shape = Shape(heads, 4, head_dim, kind, slices=2 if kind == "int8" else 0)
        sequences = Sequences([2100, 150], shape, dtype, seed=head_dim)
        results = []
        for native in pair:
            run = Run(native, sequences, RULES[rules])
            for row, length in enumerate(sequences.lengths):
                run.put(row, length - new)
            results.append(run.step({0: new, 1: new}))
        for row in range(2):
            for first, second in zip(results[0][row], results[1][row], strict=True):
                assert first.isfinite().all()
                assert torch.equal(first, second)


def test_the_name_of_the_bits_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against streams that end because a machine with more instructions took over from one with fewer."""
    for first, second in PAIRS:
        names = []
        for level in (first, second):
            monkeypatch.setenv(library.LEVEL_VARIABLE, LEVELS[level])
            names.append(library.level_of_bits())
        assert names == [LEVELS[second]] * 2
