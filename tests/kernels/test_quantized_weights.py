"""The quantisers: their stated bounds, their rules for groups, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.reference.quantized_weights import (
    SMALLEST,
    dequantize_int4,
    dequantize_int8,
    leaf_groups,
    quantize_int4,
    quantize_int8,
)


def weights(seed: int, shape: tuple[int, int], exponent: int, outlier: float) -> Tensor:
    """Random rows around 2^exponent, with an outlier in each."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[:, int(torch.randint(shape[1], (1,), generator=generator))] *= outlier
    return weight * 2.0**exponent


cases = given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 8), st.integers(1, 300)),
    exponent=st.integers(-105, 85),
    outlier=st.sampled_from([0.0, 1.0, 30.0, -1000.0]),
)


@settings(max_examples=60)
@cases
def test_int8_keeps_its_bound(seed: int, shape: tuple[int, int], exponent: int, outlier: float) -> None:
    """Guards against a step too wide, a value beyond -127 .. 127, and tiny rows whose quotient overflows."""
    weight = weights(seed, shape, exponent, outlier)
    values, scales = quantize_int8(weight)
    assert values.dtype == torch.int8
    assert values.min() >= -127
    error = (weight.double() - values.double() * scales.double()[:, None]).abs().amax(dim=1)
    assert (error <= (scales.double() * (0.5 + 2**-15)).clamp(min=SMALLEST)).all()
    torch.testing.assert_close(dequantize_int8(values, scales), values.float() * scales[:, None], atol=0, rtol=0)


@settings(max_examples=60)
@cases
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_keeps_its_bound(
    group_size: int, seed: int, shape: tuple[int, int], exponent: int, outlier: float
) -> None:
    """Guards against a search that ends with something worse than plain rounding."""
    weight = weights(seed, shape, exponent, outlier)
    leaf_ends = (shape[1] // 3, shape[1])
    values, scales = quantize_int4(weight, group_size, leaf_ends)
    assert torch.equal(scales, scales.bfloat16().float())
    assert values.min() >= -8
    assert values.max() <= 7
    error = weight.double() - dequantize_int4(values, scales, group_size, leaf_ends).double()
    for start, end in leaf_groups(shape[1], group_size, leaf_ends):
        rms = error[:, start:end].square().mean(dim=1).sqrt()
        greatest = weight[:, start:end].double().abs().amax(dim=1)
        # A short group is judged over all of its places, of which the missing ones have no error.
        share = (group_size / (end - start)) ** 0.5
        assert (rms <= (greatest / 14 * (1 + 2**-7) * share).clamp(min=SMALLEST)).all()


def test_int4_is_better_than_plain_rounding() -> None:
    """Guards against a search that finds nothing: 20 % less squared error than absmax / 7 on normal weights."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_int4(weight, 32)
    found = (dequantize_int4(values, scales, 32) - weight).square().sum()
    groups = weight.view(64, -1, 32)
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    plain = ((groups / scale).round() * scale - groups).square().sum()
    assert found < 0.8 * plain


def test_int4_uses_minus_eight_for_an_extreme_of_either_sign() -> None:
    """Guards against a scale whose sign is lost, which would mirror a group."""
    for sign in (1.0, -1.0):
        weight = sign * torch.tensor([[8.0, *range(-7, 8), *([3.0] * 16)]])
        values, scales = quantize_int4(weight, 32)
        assert torch.equal(dequantize_int4(values, scales, 32), weight)
        assert scales.item() == -sign


def test_int4_groups_end_with_their_leaves() -> None:
    """Guards against a group that reaches into the next leaf, whose products are summed elsewhere."""
    assert leaf_groups(100, 32, (40, 40, 100)) == [(0, 32), (32, 40), (40, 72), (72, 100)]
    weight = torch.ones(1, 100)
    weight[0, 40:] = 1000.0
    values, scales = quantize_int4(weight, 32, (40, 100))
    torch.testing.assert_close(dequantize_int4(values, scales, 32, (40, 100)), weight, atol=0, rtol=2**-8)


@pytest.mark.parametrize("quantize", [quantize_int8, lambda weight: quantize_int4(weight, 32)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(quantize: Callable[[Tensor], object], bad: float) -> None:
    """Guards against a NaN that becomes a plausible integer."""
    weight = torch.ones(3, 40)
    weight[2, 39] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight)


@pytest.mark.parametrize("size", [0.0, SMALLEST / 2])
def test_rows_of_nothing(size: float) -> None:
    """Guards against 0 / 0, and against 127 / absmax beyond float32."""
    weight = torch.full((2, 40), size)
    for values, scales in (quantize_int8(weight), quantize_int4(weight, 32)):
        assert not values.any()
        assert not scales.any()
