"""Attention with an int8 cache: what is stored, how close the products of slices come, and who spoils whom."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.items import GRANULE, padded_head_dim
from penstock.kernels.cpu import library
from penstock.kernels.reference.quantized_kv import dequantize, quantize_channels, quantize_tokens
from tests.kernels.attention import Attention, PagedCache, Rules, Run, Sequences, Shape, oracle
from tests.kernels.packed import levels

LEVELS = levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native library is not built")

Scales = Sequence[Tensor] | None  # keys' scales, offsets, values' scales, offsets, [Hkv, D] each; None: of tokens


@pytest.fixture(scope="module")
def natives() -> list[Attention]:
    """One context a level, the portable one first."""
    return [Attention(level) for level in LEVELS]


def int8(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 32, slices: int = 2, block_size: int = 16) -> Shape:
    return Shape(num_heads, num_kv_heads, head_dim, "int8", block_size, slices)


def channel_scales(shape: Shape, seed: int = 0, *, per_tensor: Sequence[bool] = (False, False)) -> list[Tensor]:
    """Of keys and of values, each of channels or, with equal numbers, of the tensor."""
    generator = torch.Generator().manual_seed(seed)
    scales = []
    for whole in per_tensor:
        wide = shape.num_kv_heads, shape.head_dim
        narrow = (1, 1) if whole else wide
        scales.append((0.02 + 0.02 * torch.rand(narrow, generator=generator)).expand(wide).contiguous())
        scales.append((4 * torch.randn(narrow, generator=generator)).expand(wide).contiguous())
    return scales


def as_stored(x: Tensor, scales: Scales, of_values: bool) -> Tensor:
    """x [.., Hkv, D] -> what the cache makes of it, float32."""
    if scales is None:
        values, scale, offset = quantize_tokens(x)
        return dequantize(values, scale[..., None], offset[..., None])
    scale, offset = scales[2:] if of_values else scales[:2]
    return dequantize(quantize_channels(x, scale, offset), scale, offset)


def stored_sequences(sequences: Sequences, scales: Scales) -> Sequences:
    """The same queries with the keys and values of the cache, for the oracle."""
    result = Sequences(sequences.lengths, sequences.shape, torch.float32)
    result.q = [q.float() for q in sequences.q]
    result.k = [as_stored(k, scales, False) for k in sequences.k]
    result.v = [as_stored(v, scales, True) for v in sequences.v]
    return result


def bits(x: Tensor) -> np.ndarray:
    """Bits, the same ones for every NaN and for both zeros."""
    values = x.float().numpy() + np.float32(0)
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def worst(result: Tensor, reference: Tensor) -> float:
    """The worst error, relative to the greatest of the reference."""
    return ((result.double() - reference).abs().max() / reference.abs().max()).item()


# ---- What is stored


def awkward(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [24, Hkv, D]: ordinary ones, and all that the specification has a rule for."""
    generator = torch.Generator().manual_seed(shape.head_dim)
    parts = []
    for _ in range(2):
        x = torch.randn(24, shape.num_kv_heads, shape.head_dim, generator=generator)
        x[1], x[2], x[3] = 0.0, -3.0, 2.0**-110
        x[4] *= 2.0**-98
        x[5] *= 2.0**90
        x[6] = x[6] * 2.0**-20 + 5
        x[7, 0, 3], x[8, 0, 0], x[9, 0, -1], x[10, 0, 1] = torch.nan, torch.inf, -torch.inf, 2.0**100
        parts.append(x.to(dtype))
    return parts[0], parts[1]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("head_dim", [32, 40, 80, 128, 512])
def test_store_keeps_what_the_specification_says(natives: list[Attention], head_dim: int, by_channel: bool) -> None:
    """Guards against another integer, scale or offset on any level, a token's row or head mixed up, and padding."""
    shape = int8(head_dim=head_dim)
    scales = channel_scales(shape) if by_channel else None
    for native in natives:
        for dtype in (torch.float32, torch.bfloat16):
            cache = PagedCache(shape, 4, scales)
            k, v = awkward(shape, dtype)
            slots = torch.tensor(random.Random(head_dim).sample(range(64), len(k)))
            assert native.store(cache, k, v, slots) == 0
            for got, want in zip(native.load(cache, slots), (k, v), strict=True):
                expected = as_stored(want, scales, want is v)
                np.testing.assert_array_equal(bits(got), bits(expected))


def test_bytes_lie_where_the_layout_says(natives: list[Attention]) -> None:
    """Guards against store and load that agree with each other and with nobody else."""
    shape = int8(num_heads=1, num_kv_heads=1, head_dim=40)
    padded = padded_head_dim(40)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(GRANULE, 1, 40, generator=generator) for _ in range(2))
    for native in natives:
        cache = PagedCache(shape, 1)
        native.store(cache, k, v, torch.arange(GRANULE))
        halves = cache.memory[: 2 * GRANULE * padded].reshape(2, -1).astype(np.int32) - 128
        keys = halves[0].reshape(padded // 4, GRANULE, 4).transpose(1, 0, 2).reshape(GRANULE, padded)
        values = halves[1].reshape(GRANULE // 4, padded, 4).transpose(0, 2, 1).reshape(GRANULE, padded)
        floats = cache.memory[2 * GRANULE * padded :].view(np.float32).reshape(4, GRANULE)
        for x, integers, numbers in ((k, keys, floats[:2]), (v, values, floats[2:])):
            want = quantize_tokens(x[:, 0])
            np.testing.assert_array_equal(integers[:, :40], want[0].numpy())
            assert not integers[:, 40:].any()
            np.testing.assert_array_equal(numbers, torch.stack(want[1:]).numpy())


# ---- How close the products come


@pytest.mark.covers("A14", "A17")
@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("granularity", ["tokens", (False, False), (True, False), (False, True), (True, True)], ids=str)
def test_attention_on_what_is_stored(
    natives: list[Attention], granularity: str | tuple[bool, bool], slices: int
) -> None:
    """Guards against a scale or an offset that is missing, doubled or of another head: float64 attention on what the
    cache's integers stand for, for every granularity, odd head dims, groups beyond a strip, masks and several spans."""
    tolerance = {2: 2e-4, 3: 1e-6}[slices]
    for shape, length in (
        (int8(10, 2, 40, slices), 150),
        (int8(2, 2, 128, slices), 90),
        (int8(7, 1, 64, slices), 2300),
    ):
        scales = None if isinstance(granularity, str) else channel_scales(shape, per_tensor=granularity)
        sequences = Sequences([length], shape)
        stored = stored_sequences(sequences, scales)
        rules = Rules(scale=shape.head_dim**-0.5)
        first = max(length - 70, 0)
        want, lse = oracle(stored, rules, 0, slice(first, length))
        for native in natives[-2:] if length > 1000 else natives:
            run = Run(native, sequences, rules, channel_scales=scales)
            run.put(0, first)
            got, got_lse = run.step({0: length - first})[0]
            assert worst(got, want) < tolerance
            assert (got_lse - lse).abs().max() < tolerance * max(1, lse.abs().max().item())


@pytest.mark.skipif(library.LEVELS.index("amx") not in LEVELS, reason="the processor has no AMX")
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 160, 512])
def test_tiles_give_the_bits_of_vectors(natives: list[Attention], head_dim: int, slices: int, by_channel: bool) -> None:
    """Guards against a product of tiles that loses an element, slice, granule or row: strips that are full and not,
    head dims that are no multiple of a tile's 64 elements. AMX and AVX-512 share all steps but the exact products."""
    for group, new in ((1, 1), (3, 3), (4, 1), (8, 2), (11, 5)):
        shape = int8(2 * group, 2, head_dim, slices)
        scales = channel_scales(shape) if by_channel else None
        sequences, rules = Sequences([100], shape), Rules(window=70, kept=5)
        results = []
        for native in natives[-2:]:
            run = Run(native, sequences, rules, channel_scales=scales)
            run.put(0, 100 - new)
            results.append(run.step({0: new})[0])
        for vectors, tiles in zip(*results, strict=True):
            assert torch.equal(vectors, tiles)
            assert vectors.isfinite().all()


def lone_scores(native: Attention, sequences: Sequences, scales: Scales) -> Tensor:
    """Of each token the score of its own key, which is all that it sees: [T, H]."""
    return Run(native, sequences, Rules(scale=1.0, window=1), channel_scales=scales).step({0: sequences.lengths[0]})[0][
        1
    ]


@pytest.mark.covers("A15")
@pytest.mark.parametrize("by_channel", [False, True])
def test_scores_are_closer_than_a_bfloat16_query(natives: list[Attention], by_channel: bool) -> None:
    """Guards against a slice that the kernel loses: 2 beat a bfloat16 query, 3 reach float32, alike on all levels."""
    errors = {}
    for slices in (2, 3):
        shape = int8(1, 1, 128, slices)
        scales = channel_scales(shape) if by_channel else None
        sequences = Sequences([2048], shape)
        stored = stored_sequences(sequences, scales)
        q, k = (part[0][:, 0].double() for part in (stored.q, stored.k))
        want = (q * k).sum(1)
        got = [lone_scores(native, sequences, scales)[:, 0] for native in natives]
        errors[slices] = worst(got[-1], want)
        errors["bfloat16"] = worst((q.bfloat16().double() * k).sum(1), want)
        for other in got[:-1]:
            assert torch.equal(other, got[-1])
    assert errors[2] < errors["bfloat16"]
    assert errors[3] < 1e-6


@pytest.mark.covers("A16")
@pytest.mark.parametrize("by_channel", [False, True])
def test_probabilities_are_closer_than_bfloat16_ones(natives: list[Attention], by_channel: bool) -> None:
    """Guards against the same in the product with values. Scores come from a bias alone, so they are not in play."""
    slopes = torch.tensor([0.002])
    rules = Rules(slopes=slopes)
    errors = {}
    for slices in (2, 3):
        shape = int8(1, 1, 128, slices)
        scales = channel_scales(shape) if by_channel else None
        sequences = Sequences([2048], shape)
        sequences.q[0].zero_()
        v = stored_sequences(sequences, scales).v[0][:, 0].double()
        p = torch.exp(slopes.double() * (torch.arange(2048) - 2047))
        want = p @ v / p.sum()
        errors["bfloat16"] = worst(p.bfloat16().double() @ v / p.sum(), want)
        for native in natives:
            run = Run(native, sequences, rules, channel_scales=scales)
            run.put(0, 2047)
            errors[slices] = max(errors.get(slices, 0), worst(run.step({0: 1})[0][0][0, 0], want))
    assert errors[2] < errors["bfloat16"]
    assert errors[3] < 1e-6


# ---- Who depends on what


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("slices", [2, 3])
def test_bits_do_not_depend_on_company(natives: list[Attention], slices: int, by_channel: bool) -> None:
    """Guards against bits that depend on chunks, on plans, on strips of rows, or on stale memory behind a window."""
    shape = int8(6, 2, 40, slices)
    scales = channel_scales(shape) if by_channel else None
    sequences, rules = Sequences([90, 75], shape), Rules(window=40, kept=3)
    for native in natives:
        alone = Run(native, sequences, rules, channel_scales=scales).finish({0: [1] * 90, 1: [1] * 75})
        rng = random.Random(slices)
        together = Run(native, sequences, rules, rng=rng, channel_scales=scales)
        results = together.finish({0: [50, 1, 20, 19], 1: [3, 71, 1]})
        for row, (out, lse) in alone.items():
            assert torch.equal(out, results[row][0])
            assert torch.equal(lse, results[row][1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_spoilt_token_spoils_whoever_sees_it(natives: list[Attention], where: str, bad: float) -> None:
    """Guards against a NaN that vanishes in an integer, and against one that reaches rows that do not see it."""
    shape, rules = int8(4, 2, 40), Rules(window=20)
    for native in natives:
        sequences = Sequences([100], shape)
        clean = Run(native, sequences, rules).finish({0: [60, 40]})[0][0]
        getattr(sequences, where)[0][50, 1, 7] = bad
        spoilt = Run(native, sequences, rules).finish({0: [60, 40]})[0][0]
        sees = torch.zeros(100, 4, dtype=torch.bool)
        sees[50:70, 2:] = True  # the query heads of the second kv head
        assert spoilt[sees].isnan().all()
        assert torch.equal(spoilt[~sees], clean[~sees])


def test_a_query_of_nan_spoils_itself_only(natives: list[Attention]) -> None:
    """Guards against a NaN query that becomes zeros, and against one that spoils its strip."""
    shape, rules = int8(4, 2, 32), Rules()
    for native in natives:
        sequences = Sequences([30], shape)
        clean = Run(native, sequences, rules).finish({0: [30]})[0][0]
        sequences.q[0][12, 1, 5] = torch.nan
        spoilt = Run(native, sequences, rules).finish({0: [30]})[0][0]
        assert spoilt[12, 1].isnan().all()
        spoilt[12, 1] = clean[12, 1]
        assert torch.equal(spoilt, clean)


def test_extremes_of_the_integers_are_exact(natives: list[Attention]) -> None:
    """Guards against sums of bytes that saturate: all queries and keys at an end of their range, 256 elements long."""
    shape = int8(2, 2, 256, 2)
    sequences = Sequences([64], shape)
    ones = torch.where(torch.arange(256) % 64 < 63, 1.0, -1.0)  # nearly all at one end
    for part in (sequences.q, sequences.k, sequences.v):
        part[0][:] = ones
        part[0][:, 1] *= -1
    scales = [torch.full((2, 256), 1 / 127), torch.zeros(2, 256)] * 2
    for native in natives:
        for channels in (None, scales):
            got = lone_scores(native, sequences, channels)
            torch.testing.assert_close(got, torch.full((64, 2), 256.0), rtol=1e-6, atol=0)
