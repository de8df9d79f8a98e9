"""int8 keys and values: the integers and their bounds, and products of integers against dequantising first."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.quant.int8 import SMALLEST
from penstock.quant.kv import dequantize, quantize_channels, quantize_tokens, slices, split

GRANULARITIES = ["tensor", "channel", "token"]
SLICES = [1, 2, 3]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(x: Tensor, granularity: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [S, D] -> values, scales and offsets, as wide as `dequantize` wants them."""
    if granularity == "token":
        values, scales, offsets = quantize_tokens(x)
        return values, scales[:, None], offsets[:, None]
    width = 1 if granularity == "tensor" else x.shape[1]
    scales = (0.02 + 0.02 * normal(seed, width).abs()).expand(x.shape[1])
    offsets = (5 * normal(seed + 1, width)).expand(x.shape[1])
    return quantize_channels(x, scales, offsets), scales, offsets


def scores(q: Tensor, stored: tuple[Tensor, Tensor, Tensor], count: int) -> Tensor:
    """q [D] . keys [S] by products of integers: [S] float64 of float32 scales."""
    values, scales, offsets = stored
    by_channel = scales.ndim == 1
    x = q * scales if by_channel else q
    rows, scale = split(x, count)
    weights = torch.tensor([254.0**-i for i in range(count)], dtype=torch.float64)
    v = (rows.long() @ values.T.long()).double().T @ weights * scale.double()
    if by_channel:
        return v + (x.double() * offsets).sum()
    total = rows.double().sum(dim=1) @ weights * scale.double()
    return (v + offsets[:, 0].double() * total) * scales[:, 0].double()


def mixed(p: Tensor, stored: tuple[Tensor, Tensor, Tensor], count: int) -> Tensor:
    """p [S] . values [S, D], likewise."""
    values, scales, offsets = stored
    by_channel = scales.ndim == 1
    x = p if by_channel else p * scales[:, 0]
    rows, scale = split(x, count)
    weights = torch.tensor([254.0**-i for i in range(count)], dtype=torch.float64)
    v = (rows.long() @ values.long()).double().T @ weights * scale.double()
    if by_channel:
        return (v + offsets.double() * p.double().sum()) * scales.double()
    return v + (x.double() * offsets[:, 0].double()).sum()


def exact(values: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """What is stored, in float64."""
    return (values.double() + offsets.double()) * scales.double()


def error(result: Tensor, reference: Tensor) -> float:
    """The worst, relative to the greatest of the reference."""
    return ((result - reference).abs().max() / reference.abs().max()).item()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 130),
    exponent=st.integers(-95, 78),  # below 2^100 with any shift
    shift=st.sampled_from([0.0, 3.0, -1000.0, 1e6]),
)
def test_tokens_keep_their_bound(seed: int, dim: int, exponent: int, shift: float) -> None:
    """Guards against a step too wide, an integer beyond -127 .. 127, and a middle that swallows the rest."""
    x = (normal(seed, 6, dim) + shift) * 2.0**exponent
    values, scales, offsets = quantize_tokens(x)
    assert values.min() >= -127
    middle = ((x.amin(1) + x.amax(1)) / 2).abs().double()
    bound = scales.double() * (0.5 + 2**-15) + middle * 2**-22 + SMALLEST
    assert ((x - dequantize(values, scales[:, None], offsets[:, None])).abs().amax(1) <= bound).all()
    if dim > 1:  # and no step is wider than it needs to be
        assert (scales <= (x.amax(1) - x.amin(1)) / 254 * 1.001 + middle * 2**-23).all()


def test_tokens_that_are_all_alike_come_back_exactly() -> None:
    """Guards against 0 / 0, for rows of one number, of zeros, and of one element."""
    x = torch.tensor([[3.0, 3.0], [-0.1, -0.1], [0.0, 0.0], [1e-38, 1e-38], [-(2.0**99), -(2.0**99)]])
    for rows in (x, x[:, :1]):
        values, scales, offsets = quantize_tokens(rows)
        assert not values.any()
        assert torch.equal(dequantize(values, scales[:, None], offsets[:, None]), rows)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**100, -(2.0**101)])
def test_a_token_that_cannot_be_quantised_is_nan_and_no_other_is(bad: float) -> None:
    """Guards against a NaN that becomes a plausible integer, or that spreads to another token or head."""
    x = normal(0, 3, 2, 16)
    want = quantize_tokens(x)
    x[1, 1, 7] = bad
    got = quantize_tokens(x)
    assert got[1][1, 1].isnan()
    assert not got[0][1, 1].any()
    assert got[2][1, 1] == 0
    for now, before in zip(got, want, strict=True):
        now[1, 1] = before[1, 1] = 0
        assert torch.equal(now, before)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60), shift=st.sampled_from([0.0, 40.0, -1000.0]))
def test_channels_keep_their_bound(seed: int, exponent: int, shift: float) -> None:
    """Guards against scales or offsets of the wrong head or element, and against rounding the offset away."""
    scales = (0.01 + normal(seed, 2, 24).abs()) * 2.0**exponent
    offsets = normal(seed + 1, 2, 24) + shift
    x = (normal(seed + 2, 5, 2, 24).clamp(-3, 3) * 40 + offsets) * scales
    values = quantize_channels(x, scales, offsets)
    bound = scales.double() * (0.5 + 2**-15 + offsets.double().abs() * 2**-22)
    assert ((x.double() - exact(values, scales, offsets)).abs() <= bound).all()


def test_channels_are_held_to_their_range() -> None:
    """Guards against integers that wrap around, and against the -128 that kernels have no room for."""
    x = torch.tensor([[[1000.0, -1000.0, torch.inf, -torch.inf, torch.nan, 127.5, -127.5]]])
    values = quantize_channels(x, torch.ones(1, 7), torch.zeros(1, 7))
    assert values.flatten().tolist() == [127, -127, 127, -127, 0, 127, -127]


@pytest.mark.parametrize("count", SLICES)
def test_slices_keep_their_bound(count: int) -> None:
    """Guards against a slice in the wrong unit, and one beyond -127 .. 127; rows of nothing and of NaN included."""
    for exponent in (-110, -20, 0, 100):
        x = normal(count, 8, 300) * 2.0**exponent
        greatest = x.abs().amax(1, keepdim=True).double()
        assert ((slices(x, count) - x.double()).abs() <= greatest * (254.0**-count + 2**-22)).all()
        assert split(x, count)[0].min() >= -127
    x = torch.tensor([[0.0, 0.0], [2.0**-119, 0.0], [torch.nan, 1.0], [1.0, -torch.inf]])
    assert torch.equal(slices(x, count)[:2], torch.zeros(2, 2))
    assert slices(x, count)[2:].isnan().all()


@pytest.mark.covers("A14")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_products_against_rational_numbers(granularity: str) -> None:
    """Guards against offsets that are scaled twice or not at all: C = A (B + offset) scale, without any rounding."""
    q, stored = normal(0, 12), quantized(normal(1, 5, 12), granularity)
    values, scales, offsets = (part.expand(5, 12).tolist() for part in stored)
    want = [
        sum(
            Fraction(a) * (b + Fraction(offset)) * Fraction(scale)
            for a, b, scale, offset in zip(q.tolist(), *row, strict=True)
        )
        for row in zip(values, scales, offsets, strict=True)
    ]
    got = scores(q, stored, 3).tolist()
    assert max(abs(Fraction(a) - b) for a, b in zip(got, want, strict=True)) < 1e-6 * float(max(map(abs, want)))


@pytest.mark.covers("A15", "A18")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scores_of_slices(granularity: str) -> None:
    """Guards against a slice that adds nothing: 2 beat a bfloat16 query, 3 reach float32, each beats the one before."""
    for seed in range(5):
        stored = quantized(normal(seed, 2048, 128), granularity)
        keys, q = exact(*stored), normal(seed + 50, 128)
        want = keys @ q.double()
        errors = [error(scores(q, stored, count), want) for count in SLICES]
        assert errors[0] > 10 * errors[1]
        assert errors[1] > 10 * errors[2]
        assert errors[1] < error(keys @ q.bfloat16().double(), want)
        assert errors[2] < 1e-6


@pytest.mark.covers("A16", "A18")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_mixed_by_slices(granularity: str) -> None:
    """Guards against the same in the product with values: bfloat16 probabilities are the ones to beat."""
    for seed in range(5):
        stored = quantized(normal(seed, 2048, 128), granularity)
        values, p = exact(*stored), torch.softmax(normal(seed + 50, 2048), 0)
        want = p.double() @ values
        errors = [error(mixed(p, stored, count), want) for count in SLICES]
        assert errors[0] > 10 * errors[1]
        assert errors[1] > 10 * errors[2]
        assert errors[1] < error(p.bfloat16().double() @ values, want)
        assert errors[2] < 1e-6


@pytest.mark.covers("A17")
@pytest.mark.parametrize(("of_keys", "of_values"), list(product(GRANULARITIES, repeat=2)))
def test_every_granularity_of_keys_and_values(of_keys: str, of_values: str) -> None:
    """Guards against keys and values that share a scale: attention by integers is attention on what was dequantised."""
    q, keys, values = normal(0, 64), quantized(normal(1, 300, 64), of_keys), quantized(normal(2, 300, 64), of_values, 9)
    want = torch.softmax(exact(*keys) @ q.double() / 8, 0) @ exact(*values)
    p = torch.softmax(scores(q, keys, 3) / 8, 0)
    assert error(mixed(p.float(), values, 3), want) < 2e-6
