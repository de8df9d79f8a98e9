"""int8 keys and values: the integers and their bounds, and products of integers against dequantising first."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.metadata import CacheSpec, KVScales
from penstock.kernels.reference.attention import Int8KVCache
from penstock.kernels.reference.quantized_kv import dequantize, quantize_channels, quantize_tokens, slices, split
from penstock.kernels.reference.quantized_weights import SMALLEST

GRANULARITIES = ["tensor", "channel", "token"]
SLICES = [1, 2, 3]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache_of(x: Tensor, granularity: str, slices: int = 3, seed: int = 0) -> Int8KVCache:
    """x [S, D] as the keys and as the values of one head, each with scales of its own."""
    channels = None
    if granularity != "token":
        width = 1 if granularity == "tensor" else x.shape[1]
        scales = [(0.02 + 0.02 * normal(seed + i, width).abs()).expand(1, x.shape[1]) for i in range(2)]
        offsets = [(5 * normal(seed + 2 + i, width)).expand(1, x.shape[1]) for i in range(2)]
        channels = KVScales(scales[0], offsets[0], scales[1], offsets[1])
    cache = Int8KVCache(CacheSpec(1, len(x), 1, x.shape[1], torch.int8, slices, channels), x.device)
    cache.store(x[:, None], x[:, None], torch.arange(len(x)))
    return cache


def stored(cache: Int8KVCache, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The integers of "key" or "value" [S, D], and their scales and offsets as wide."""
    values = getattr(cache, f"{name}s")[0, :, 0]
    if cache.channels is None:
        scales, offsets = getattr(cache, f"{name}_scales")[0, :, 0].unbind(-1)
        return values, scales[:, None].expand(values.shape), offsets[:, None].expand(values.shape)
    channels = cache.channels[name == "value"]
    return values, *(part.expand(values.shape) for part in channels)


def scores(q: Tensor, cache: Int8KVCache) -> Tensor:
    """q [D] float32 . keys [S] as the cache rounds both, summed in float64."""
    keys, _ = cache.read(torch.arange(cache.keys.shape[1]))
    return keys[:, 0].double() @ cache.rounded_queries(q.double()[None])[0]


def exact(values: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """What is stored, in float64."""
    return (values.double() + offsets.double()) * scales.double()


def error(result: Tensor, reference: Tensor) -> float:
    """The worst, relative to the greatest of the reference."""
    return ((result - reference).abs().max() / reference.abs().max()).item()


@settings(max_examples=80)
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


@settings(max_examples=60)
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
    """Guards against offsets that are scaled twice or not at all, and against a query divided by other scales than it
    was multiplied with: C = A (B + offset) scale, without any rounding."""
    q, cache = normal(0, 12), cache_of(normal(1, 5, 12), granularity)
    values, scales, offsets = (part.tolist() for part in stored(cache, "key"))
    want = [
        sum(
            Fraction(a) * (b + Fraction(offset)) * Fraction(scale)
            for a, b, scale, offset in zip(q.tolist(), *row, strict=True)
        )
        for row in zip(values, scales, offsets, strict=True)
    ]
    got = scores(q, cache).tolist()
    assert max(abs(Fraction(a) - b) for a, b in zip(got, want, strict=True)) < 1e-6 * float(max(map(abs, want)))


@pytest.mark.covers("A15", "J22")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scores_of_slices(granularity: str) -> None:
    """Guards against a slice that adds nothing: 2 beat a bfloat16 query, 3 reach float32, each beats the one before."""
    for seed in range(5):
        caches = [cache_of(normal(seed, 2048, 128), granularity, count) for count in SLICES]
        keys, q = exact(*stored(caches[0], "key")), normal(seed + 50, 128)
        want = keys @ q.double()
        errors = [error(scores(q, cache), want) for cache in caches]
        assert errors[0] > 10 * errors[1]
        assert errors[1] > 10 * errors[2]
        assert errors[1] < error(keys @ q.bfloat16().double(), want)
        assert errors[2] < 1e-6


@pytest.mark.covers("A16", "J22")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_mixed_by_slices(granularity: str) -> None:
    """Guards against the same in the product with values: bfloat16 probabilities are the ones to beat. Scales of tokens
    go into the probabilities before these are sliced; the sums are the test's own, in float64."""
    for seed in range(5):
        values, scales, offsets = stored(cache_of(normal(seed, 2048, 128), granularity), "value")
        p = torch.softmax(normal(seed + 50, 2048), 0)
        own = p * scales[:, 0] if granularity == "token" else p
        left = (values.double() + offsets.double()) * (1 if granularity == "token" else scales.double())
        want = p.double() @ exact(values, scales, offsets)
        errors = [error(slices(own, count).double() @ left, want) for count in SLICES]
        assert errors[0] > 10 * errors[1]
        assert errors[1] > 10 * errors[2]
        assert errors[1] < error(p.bfloat16().double() @ exact(values, scales, offsets), want)
        assert errors[2] < 1e-6


@pytest.mark.covers("A17")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_keys_and_values_have_their_own_scales(granularity: str) -> None:
    """Guards against keys read with the scales of values, or of another token or element; and against a rounding of
    what is attended to now that is not the one of what is read later."""
    x = normal(1, 300, 64)
    cache = cache_of(x, granularity)
    found, rounded = cache.read(torch.arange(300)), cache.rounded(x[:, None], x[:, None])
    for name, read, seen in zip(("key", "value"), found, rounded, strict=True):
        want = exact(*stored(cache, name))
        assert error(read[:, 0].double(), want) < 2.0**-22
        assert torch.equal(read, seen)
    assert torch.equal(*found) == (granularity == "token")  # the same numbers only where they come from x alone
