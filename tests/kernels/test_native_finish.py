"""What follows a product: scales, bias, activations, gates, rounding. With K = 1 the sums are known: one weight
a column."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from .packed import ACTIVATIONS, TYPES, Native, Packed, levels, pack

DTYPES = [torch.float32, torch.bfloat16]
GATES = ["silu", "gelu", "gelu_tanh", "clamped_silu", "relu2", "relu", "tanh"]
INFINITY = float("inf")


def normal(t: Tensor) -> Tensor:
    """The normal distribution's probability of less than t."""
    return torch.special.erfc(-t / 2**0.5) / 2


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda t: t * torch.sigmoid(t),
    "gelu": lambda t: t * normal(t),
    "gelu_tanh": lambda t: t * torch.sigmoid((8 / torch.pi) ** 0.5 * (t + 0.044715 * t**3)),
    "clamped_silu": lambda t: t.clamp(max=7) * torch.sigmoid(1.702 * t.clamp(max=7)),
    "relu2": lambda t: torch.relu(t).square(),
    "relu": torch.relu,
    "tanh": torch.tanh,
}


def multiplied(up: Tensor, activation: str | None) -> Tensor:
    """Compute what the activated gate is multiplied by, from `up`."""
    return up.clamp(-7, 7) + 1 if activation == "clamped_silu" else up


def one(activation: str) -> float:
    """Return the `up` by which an activated gate stays as it is."""
    return 0.0 if activation == "clamped_silu" else 1.0


@pytest.fixture(params=levels())
def native(request: pytest.FixtureRequest) -> Native:
    return Native(request.param)


def column(values: np.ndarray, **options: object) -> Packed:
    """A weight [n, 1] of float32."""
    return pack(values.astype(np.float32)[:, None], "f32", **options)  # type: ignore[arg-type]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def bits(x: Tensor) -> Tensor:
    """Equal where the values are, down to the sign of zero; all NaN are one."""
    x = torch.where(x.isnan(), torch.nan, x)
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def gated(
    native: Native, gate: np.ndarray, up: np.ndarray, activation: str | None, x: Tensor, dtype: torch.dtype
) -> Tensor:
    weight = column(np.concatenate([gate, up]), gated=True)
    return native.linear(weight, x, out_dtype=dtype, activation=activation)


@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 100, 160])
@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scale_then_bias_by_the_formula(native: Native, n: int, with_scales: bool, with_bias: bool) -> None:
    """Guards against a bias that is scaled, another panel's columns, or a fused rounding: all bits are known."""
    values, x = draw(n), draw(5, 1, seed=1)
    scales = draw(n, seed=2) if with_scales else None
    bias = draw(n, seed=3) if with_bias else None
    expected = x * values
    expected = expected if scales is None else expected * scales
    expected = expected if bias is None else expected + bias
    weight = column(values, column_scales=scales, bias=bias)
    result = native.linear(weight, torch.from_numpy(x))
    assert torch.equal(result, torch.from_numpy(expected))
    rounded = native.linear(weight, torch.from_numpy(x), out_dtype=torch.bfloat16)
    assert torch.equal(bits(rounded), bits(result.bfloat16()))


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_a_gate_is_scaled_and_biased_first(native: Native, activation: str, n: int) -> None:
    """Guards against gate and up swapped, and against an activation taken before scale and bias, or of up."""
    values, scales, bias = draw(2 * n), np.abs(draw(2 * n, seed=1)), draw(2 * n, seed=2)
    x = draw(3, 1, seed=3)
    weight = column(values, column_scales=scales, bias=bias, gated=True)
    result = native.linear(weight, torch.from_numpy(x), activation=activation)
    gate, up = torch.from_numpy(x * values * scales + bias).chunk(2, dim=1)
    exact = EXACT[activation](gate.double()) * multiplied(up.double(), activation)
    torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=1e-7)
    rounded = native.linear(weight, torch.from_numpy(x), out_dtype=torch.bfloat16, activation=activation)
    assert torch.equal(bits(rounded), bits(result.bfloat16()))


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 50, 160])
def test_an_activation_without_a_gate(native: Native, activation: str, n: int) -> None:
    """Guards against an activation that is left out where results go straight to memory, one before the bias, and a
    second way to compute it: it is that of a gate whose other half is one, to the bit."""
    values, x = draw(n) * 3, torch.from_numpy(draw(40, 1, seed=3))
    for bias in (None, draw(n, seed=2)):
        result = native.linear(column(values, bias=bias), x, activation=activation)
        sums = native.linear(column(values, bias=bias), x)
        torch.testing.assert_close(result.double(), EXACT[activation](sums.double()), rtol=2e-5, atol=1e-7)
        ones = np.concatenate([np.zeros(n) if bias is None else bias, np.full(n, one(activation))])
        weight = column(np.concatenate([values, np.zeros(n)]), bias=ones, gated=True)
        assert torch.equal(bits(result), bits(native.linear(weight, x, activation=activation)))
        rounded = native.linear(column(values, bias=bias), x, out_dtype=torch.bfloat16, activation=activation)
        assert torch.equal(bits(rounded), bits(result.bfloat16()))


@pytest.mark.parametrize("activation", GATES)
def test_activations_within_their_bounds(native: Native, activation: str) -> None:
    """Guards against a wrong coefficient or a cancellation: a sample of all float32 values against float64."""
    sample = np.arange(0, 2**32, 65_537 * 3, dtype=np.uint64).astype(np.uint32).view(np.float32)
    gate = np.concatenate([sample[np.isfinite(sample)], np.linspace(-110, 20, 20_000, dtype=np.float32)])
    result = gated(native, gate, np.full_like(gate, one(activation)), activation, torch.ones(1, 1), torch.float32)[
        0
    ].double()
    t = torch.from_numpy(gate).double()
    exact = EXACT[activation](t)
    ulp = torch.from_numpy(np.spacing(exact.abs().clamp(max=3e38).float().numpy())).double()
    exact = exact.clamp(max=float(np.finfo(np.float32).max)) if activation == "relu2" else exact
    result = result.clamp(max=float(np.finfo(np.float32).max)) if activation == "relu2" else result
    allowed = {"silu": 4 * ulp, "relu2": ulp}.get(activation, (10 + 2 * t.square().clamp(max=1e6)) * ulp)
    allowed = torch.where(exact.abs() < 2e-36, 2e-36, allowed)
    assert bool(((result - exact).abs() <= allowed).all())


@pytest.mark.parametrize("activation", GATES)
def test_activations_at_their_limits(native: Native, activation: str) -> None:
    """Guards against inf * 0: far below zero a gate is shut, far above it is open, and NaN stays NaN. The infinities
    come through the bias, because an infinite weight would meet the padding's zeros."""
    gate = np.array([-INFINITY, -3e38, -1000, -0.0, 0.0, 1000, 3e38, INFINITY, np.nan], dtype=np.float32)
    n = len(gate)
    weight = column(np.zeros(2 * n), bias=np.concatenate([gate, np.full(n, one(activation))]), gated=True)
    result = native.linear(weight, torch.ones(1, 1), activation=activation)[0]
    open_gate = [1000, torch.tensor(3e38).item(), INFINITY]
    if activation in ("clamped_silu", "relu2", "tanh"):
        open_gate = EXACT[activation](torch.tensor(open_gate)).tolist()
    shut = [-1.0] * 3 if activation == "tanh" else [0.0] * 3
    torch.testing.assert_close(result[:8], torch.tensor([*shut, 0.0, 0.0, *open_gate]), rtol=1e-6, atol=0)
    assert bool(result[8].isnan())


def test_both_halves_of_a_clamped_gate_are_clamped(native: Native) -> None:
    """Guards against a limit on one side of up only, one below the gate, and a NaN that is clamped away."""
    gate = np.array([9, -9, 7, 1, 1, 1, 1, np.nan], dtype=np.float32)
    up = np.array([1, 1, 1, 8, -8, 7, np.nan, 1], dtype=np.float32)
    result = gated(native, gate, up, "clamped_silu", torch.ones(1, 1), torch.float32)[0]
    exact = EXACT["clamped_silu"](torch.from_numpy(gate).double()) * multiplied(torch.from_numpy(up), "clamped_silu")
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("activation", [None, *GATES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_agree_to_the_bit(activation: str | None, dtype: torch.dtype) -> None:
    """Guards against a fused multiply-add, or another polynomial, on one level."""
    gate, up, x = draw(1000) * 20, draw(1000, seed=1), torch.from_numpy(draw(3, 1, seed=2))
    results = []
    for level in levels():
        native = Native(level)
        results.append(bits(gated(native, gate, up, activation, x, dtype)))
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_the_others(native: Native, dtype: torch.dtype) -> None:
    """Guards against a result that depends on the tile a row lies in."""
    gate, up, x = draw(100) * 5, draw(100, seed=1), torch.from_numpy(draw(70, 1, seed=2))
    together = gated(native, gate, up, "silu", x, dtype)
    for row in (0, 1, 11, 12, 31, 33, 69):
        assert torch.equal(bits(together[row]), bits(gated(native, gate, up, "silu", x[row : row + 1], dtype)[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_nothing_is_written_behind_the_last_column(native: Native, dtype: torch.dtype, is_gated: bool) -> None:
    """Guards against a last panel that is stored whole."""
    n, rows = 37, 3
    weight = column(draw(2 * n if is_gated else n), gated=is_gated)
    memory = torch.full((rows * n + 64,), 7.0, dtype=dtype)
    x = torch.from_numpy(draw(rows, 1))
    status = native.library.penstock_linear(
        native.context, weight.address, x.data_ptr(), TYPES[x.dtype], rows, memory.data_ptr(), n, TYPES[dtype],
        ACTIVATIONS["silu"],
    )  # fmt: skip
    assert status == 0
    assert bool((memory[rows * n :] == 7.0).all())
    assert not bool((memory[: rows * n] == 7.0).any())


def test_every_bfloat16_is_rounded_as_torch_does(native: Native) -> None:
    """Guards against truncation, ties away from even, and a carry that turns NaN into infinity."""
    high = np.arange(0, 2**16, 7, dtype=np.uint32)[:, None] << 16
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = (high | low).ravel().view(np.float32)
    weight = column(np.zeros(len(values)), bias=values)  # 0 + value: every value but -0 as it is
    result = native.linear(weight, torch.ones(1, 1), out_dtype=torch.bfloat16)[0]
    assert torch.equal(bits(result), bits((torch.from_numpy(values) + 0.0).bfloat16()))
