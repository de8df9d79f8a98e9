"""The element-wise operations and products of the reference backend: formulas, rounding points, buffers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidRequestError
from penstock.kernels.backends import load_ops
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, RotaryParams
from penstock.kernels.ops import Packing
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme

T, H, HKV, D, HIDDEN = 5, 4, 2, 6, 24
HEADS = Heads(H, HKV, D)
DTYPES = [torch.float32, torch.bfloat16]
PARAMS = AttentionParams(scale=0.5)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


def table(positions: int) -> Tensor:
    angles = torch.outer(torch.arange(positions).double(), 100.0 ** -(torch.arange(0, D, 2).double() / D))
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def meta() -> AttentionMetadata:
    return AttentionMetadata(
        torch.tensor([0, 2, T], dtype=torch.int32),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([[1], [0]], dtype=torch.int32),
        torch.tensor([4, 5, 0, 1, 2]),
        4,
        None,
    )


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each operation with an `out=`, and arguments for it."""
    ops = ReferenceOps(dtype)
    weight, bias = draw(16, HIDDEN), draw(16)
    x = draw(T, HIDDEN, dtype=dtype)
    q, k, v = (draw(T, heads, D, dtype=dtype) for heads in (H, HKV, HKV))
    cache = ops.new_kv_cache(CacheSpec(2, 4, HKV, D, dtype))
    packed, norm = ops.pack_linear(weight, bias), {"x": draw(T, HIDDEN), "weight": draw(HIDDEN), "eps": 1e-5}
    rotary = RotaryParams(HEADS, table(T), draw(D), draw(D), 1e-6)
    return {
        "linear": (ops.linear, {"x": x, "weight": packed}),
        "activated_linear": (ops.activated_linear, {"x": x, "weight": packed, "activation": "gelu"}),
        "gated_linear": (ops.gated_linear, {"x": x, "weight": packed, "activation": "silu"}),
        "embedding": (ops.embedding, {"ids": torch.tensor([3, 0, 3]), "weight": weight.to(dtype), "scale": 4.9}),
        "rms_norm": (ops.rms_norm, norm),
        "rms_norm in float32": (ops.rms_norm, norm | {"dtype": torch.float32}),
        "layer_norm": (ops.layer_norm, norm | {"bias": draw(HIDDEN, seed=1)}),
        "round": (ops.round, {"x": draw(T, HIDDEN)}),
        "rotary_qkv": (
            ops.rotary_qkv,
            {"qkv": draw(T, (H + 2 * HKV) * D), "positions": torch.arange(T), "params": rotary},
        ),
        "attend": (ops.attend, {"q": q, "k_new": k, "v_new": v, "cache": cache, "meta": meta(), "params": PARAMS}),
    }


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", calls(torch.float32))
def test_out_is_filled_and_returned(name: str, dtype: torch.dtype) -> None:
    """Guards against a buffer that is ignored: a recorded program of native calls reads it, not the return value.
    And no argument is written to."""
    function, arguments = calls(dtype)[name]
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    expected = as_tuple(function(**arguments))
    buffers = tuple(torch.full_like(item, 99.0) for item in expected)
    returned = as_tuple(function(**arguments, out=buffers if len(buffers) > 1 else buffers[0]))
    for buffer, item, value in zip(buffers, returned, expected, strict=True):
        assert item is buffer
        assert torch.equal(buffer, value)
        assert value.is_contiguous()
    for key, value in before.items():
        assert torch.equal(arguments[key], value), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_of_the_results(dtype: torch.dtype) -> None:
    """Guards against a rounding point that moves: the contract lists which results are float32."""
    wide = {"linear", "embedding", "rms_norm in float32"}
    for name, (function, arguments) in calls(dtype).items():
        for item in as_tuple(function(**arguments)):
            assert item.dtype == (torch.float32 if name in wide else dtype), name


def test_add_rms_norm_adds_in_place_and_norms_the_sum() -> None:
    """Guards against a residual stream that is copied, or normed before it is added."""
    ops = ReferenceOps(torch.bfloat16)
    x, h, weight = draw(T, HIDDEN), draw(T, HIDDEN, seed=9), draw(HIDDEN)
    total = x + h
    out = torch.empty(T, HIDDEN, dtype=torch.bfloat16)
    stream, normed = ops.add_rms_norm(x, h, weight, 1e-5, out=out)
    assert stream is x
    assert torch.equal(x, total)
    assert normed is out
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


def test_bfloat16_products_round_the_operands_and_nothing_else() -> None:
    """Guards against a rounded product or a rounded bias: against float64 only the float32 sum may differ."""
    ops = ReferenceOps(torch.bfloat16)
    weight, bias, x = draw(64, 256), draw(64), draw(3, 256, dtype=torch.bfloat16)
    exact = x.double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, bias)).double(), exact, atol=1e-4, rtol=1e-5)


def rounded_once(result: Tensor, exact: Tensor) -> None:
    """`result` bfloat16 is `exact` float64 rounded once, except where float32 noise meets the edge between two values:
    at most one in a thousand. A second rounding on the way changes far more than that."""
    assert result.dtype == torch.bfloat16
    wrong = (result != exact.bfloat16()).double().mean().item()
    assert wrong <= 1e-3, f"{wrong:.2%} of the values are not the exact ones rounded once"


def test_gated_linear_rounds_once() -> None:
    """Guards against gate, up or the activation rounded to bfloat16 before they are multiplied."""
    ops = ReferenceOps(torch.bfloat16)
    weight, bias, x = draw(256, 64), draw(256), draw(50, 64, dtype=torch.bfloat16)
    gate, up = (x.double() @ weight.bfloat16().double().T + bias.bfloat16().double()).chunk(2, dim=-1)
    result = ops.gated_linear(x, ops.pack_linear(weight, bias), "silu")
    rounded_once(result, gate * torch.sigmoid(gate) * up)


def test_add_rms_norm_rounds_once() -> None:
    """Guards against a residual stream, or a norm before its weight, that is rounded to bfloat16."""
    ops = ReferenceOps(torch.bfloat16)
    x, h, weight = draw(50, 96), draw(50, 96, seed=9), draw(96).abs()
    total = x.double() + h.double()
    stream, normed = ops.add_rms_norm(x, h, weight, 1e-5)
    assert torch.equal(stream, total.float())
    rounded_once(normed, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_silu", "relu2", "relu", "tanh"])
def test_activated_linear_rounds_once(activation: str) -> None:
    """Guards against a product that is rounded before its activation, and one activation taken for another."""
    ops = ReferenceOps(torch.bfloat16)
    # Not far below zero, where torch's gelu has no digits left.
    weight, bias, x = draw(128, 64) / 20, draw(128) / 4, draw(50, 64, dtype=torch.bfloat16)
    product = x.double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    exact = {
        "silu": product * torch.sigmoid(product),
        "gelu": product * torch.special.ndtr(product),
        "gelu_tanh": product * torch.sigmoid(math.sqrt(8 / math.pi) * (product + 0.044715 * product**3)),
        "clamped_silu": product.clamp(max=7) * torch.sigmoid(1.702 * product.clamp(max=7)),
        "relu2": product.clamp(min=0).square(),
        "relu": product.clamp(min=0),
        "tanh": product.tanh(),
    }
    rounded_once(ops.activated_linear(x, ops.pack_linear(weight, bias), activation), exact[activation])


def test_layer_norm_rounds_once() -> None:
    """Guards against a variance around zero, and a norm that is rounded before its weight or its bias."""
    ops = ReferenceOps(torch.bfloat16)
    x, h, weight, bias = draw(50, 96) + 3.0, draw(50, 96, seed=9), draw(96).abs(), draw(96, seed=2)
    total = x.double() + h.double()
    deviation = total.float().double() - total.float().double().mean(-1, keepdim=True)
    exact = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    rounded_once(ops.layer_norm(total.float(), weight, None, 1e-5), exact)
    stream, normed = ops.add_layer_norm(x, h, weight, bias, 1e-5)
    assert stream is x
    assert torch.equal(stream, total.float())
    rounded_once(normed, exact + bias.double())


def test_what_is_done_element_by_element() -> None:
    """Guards against a scale that is rounded to the model's type, a result beside the argument, and a cap without its
    factor."""
    ops, x, h = ReferenceOps(torch.bfloat16), draw(T, HIDDEN), draw(T, HIDDEN, seed=9)
    weight = draw(9, HIDDEN, dtype=torch.bfloat16)
    scaled = ops.embedding(torch.tensor([3, 0]), weight, scale=math.sqrt(2048))
    assert torch.equal(scaled, (weight[[3, 0]].double() * torch.tensor(math.sqrt(2048)).double()).float())
    assert torch.equal(ops.round(x), x.bfloat16())
    total, capped = x.clone(), 40 * x
    assert ops.add(total, h) is total
    assert torch.equal(total, x + h)
    assert ops.softcap(capped, 30.0) is capped
    torch.testing.assert_close(capped.double(), 30 * torch.tanh(40 * x.double() / 30), atol=1e-6, rtol=1e-5)


def test_a_norm_of_all_heads_together() -> None:
    """Guards against a mean over each head where the weight has all heads' elements."""
    ops, qkv = ReferenceOps(torch.float32), draw(T, (H + 2 * HKV) * D)
    weights = draw(H * D), draw(HKV * D)
    q, k, _ = ops.rotary_qkv(qkv, torch.arange(T), RotaryParams(HEADS, None, *weights, 1e-6))
    for found, row, weight in ((q, qkv[:, : H * D], weights[0]), (k, qkv[:, H * D : (H + HKV) * D], weights[1])):
        exact = row.double() / (row.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        torch.testing.assert_close(found.flatten(1).double(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_qkv_rounds_once(scaled: bool) -> None:
    """Guards against q, k or v rounded to bfloat16 between the norm, the factor of q and the rotation."""
    ops, tokens, head_dim = ReferenceOps(torch.bfloat16), 60, 16
    qkv, q_norm, k_norm = draw(tokens, (H + 2 * HKV) * head_dim), draw(head_dim).abs(), draw(head_dim, seed=4).abs()
    angles = torch.outer(torch.arange(tokens).double(), 100.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    factors = draw(tokens, seed=5).abs() if scaled else torch.ones(tokens)
    params = RotaryParams(Heads(H, HKV, head_dim), cos_sin, q_norm, k_norm, 1e-6, factors if scaled else None)
    q, k, v = ops.rotary_qkv(qkv, torch.arange(tokens), params)
    heads = qkv.view(tokens, -1, head_dim).double().split([H, HKV, HKV], dim=1)
    ones = torch.ones(tokens)
    for result, before, norm, factor in ((q, heads[0], q_norm, factors), (k, heads[1], k_norm, ones)):
        normed = before / (before.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
        cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
        a, b = (normed * factor.double()[:, None, None]).chunk(2, dim=-1)
        rounded_once(result, torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    assert torch.equal(v, heads[2].bfloat16())


def test_load_ops_takes_a_device() -> None:
    """Guards against a device that is accepted and ignored."""
    assert load_ops("reference", torch.bfloat16, "meta").device == torch.device("meta")
    assert load_ops("reference", torch.bfloat16).device == torch.device("cpu")


def test_norm_and_rotary_by_the_formula() -> None:
    """Guards against eps inside the wrong root, a turned sign, or pairs taken as neighbours instead of halves."""
    ops = ReferenceOps(torch.float32)
    x, weight = draw(T, HIDDEN).double(), draw(HIDDEN).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x.float(), weight.float(), 0.1).double(), expected, atol=1e-6, rtol=1e-6)

    qkv, positions = draw(T, (H + 2 * HKV) * D), torch.tensor([0, 3, 1, 7, 7])
    q, k, v = ops.rotary_qkv(qkv, positions, RotaryParams(HEADS, table(8)))
    heads = qkv.view(T, H + 2 * HKV, D)
    for t, position in enumerate(positions.tolist()):
        for pair in range(D // 2):
            turn = torch.polar(torch.tensor(1.0), torch.tensor(position * 100.0 ** (-2 * pair / D)))
            before = torch.complex(heads[t, :, pair], heads[t, :, pair + D // 2]) * turn
            after = torch.cat([q[t], k[t]])
            torch.testing.assert_close(after[:, pair], before[: H + HKV].real, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after[:, pair + D // 2], before[: H + HKV].imag, atol=1e-5, rtol=1e-5)
    assert torch.equal(v, heads[:, H + HKV :])


def test_rotary_leaves_what_its_table_does_not_cover() -> None:
    """Guards against models that rotate a part of each head, and models that rotate nothing."""
    ops = ReferenceOps(torch.float32)
    qkv = draw(T, (H + 2 * HKV) * D)
    part = ops.rotary_qkv(qkv, torch.arange(T), RotaryParams(HEADS, table(T)[:, [0, 3]]))[0]
    assert torch.equal(part[..., 2:], qkv.view(T, -1, D)[:, :H, 2:])
    none = ops.rotary_qkv(qkv, torch.arange(T), RotaryParams(HEADS))[0]
    assert torch.equal(none, qkv.view(T, -1, D)[:, :H])


def test_rows_near_zero_are_zero_in_int8_products() -> None:
    """Guards against NaN where the specification of slices (quantized_kv.py) says zero: 127 / 1e-39 is infinite."""
    ops = ReferenceOps(torch.float32)
    packed = ops.pack_linear(torch.eye(16), None, Packing(scheme=Scheme.parse("int8", None)))
    rows = torch.tensor([1e-39, 0.0, 1.0])[:, None].expand(3, 16).contiguous()
    assert torch.equal(ops.linear(rows, packed)[:2], torch.zeros(2, 16))


def test_an_unbuilt_backend_is_refused_by_name() -> None:
    """Guards against a silent fallback."""
    assert load_ops("reference", torch.float32).name == "reference"
    with pytest.raises(InvalidRequestError, match="there are no kernels 'tpu'"):
        load_ops("tpu", torch.float32)
