"""CpuOps against ReferenceOps: every operation, its buffers, and what it refuses. The native arithmetic has tests of
its own; here a wrong address, size or type has to show."""

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu import library
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packed import MAX_INTEGER_LEAF, SLICE_BYTES, Layout
from penstock.kernels.metadata import Heads, RotaryParams, RouterParams
from penstock.kernels.ops import LoraTable, Ops, Packing, TensorRows, XieluCurve
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.ops import ACTIVATIONS
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, pack_bits
from penstock.kernels.scheme import SLICES, Scheme
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

DTYPES = [torch.float32, torch.bfloat16]
T, H, HKV, D, HIDDEN, VOCAB, EXPERTS = 5, 4, 2, 8, 24, 67, 6
HEADS = Heads(H, HKV, D)
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape))).to(dtype)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> tuple[CpuOps, ReferenceOps]:
    return CpuOps(request.param, threads=2), ReferenceOps(request.param)


def both(pair: tuple[CpuOps, ReferenceOps], call: Callable[[Ops], Any]) -> list[Any]:
    return [call(ops) for ops in pair]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to float32 rounding; a bfloat16 result may fall on the other side of an edge."""
    if found.dtype == torch.bfloat16:
        tolerance = max(tolerance, 2.0**-7)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def table(positions: int, dims: int = D) -> Tensor:
    angles = torch.outer(torch.arange(positions).double(), 100.0 ** -(torch.arange(0, dims, 2).double() / dims))
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def calls(ops: Ops) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each operation with an `out=`, and arguments for it."""
    weight, bias, x = draw(2 * HIDDEN, HIDDEN), draw(2 * HIDDEN), draw(T, HIDDEN, dtype=ops.dtype)
    gated = ops.pack_linear(weight, bias, Packing(gated=True))
    plain = ops.pack_linear(weight, bias)
    qkv = {"qkv": draw(T, (H + 2 * HKV) * D), "positions": torch.arange(T)}
    each_head = RotaryParams(HEADS, table(T), draw(D), draw(D), EPS)
    all_heads = replace(each_head, q_norm=draw(H * D), k_norm=draw(HKV * D))
    norm = {"x": draw(T, HIDDEN), "weight": draw(HIDDEN), "eps": EPS}
    experts = [ops.pack_linear(draw(2 * 20, HIDDEN, seed=e), packing=Packing(gated=True)) for e in range(EXPERTS)]
    downs = [ops.pack_linear(draw(HIDDEN, 20, seed=e)) for e in range(EXPERTS)]
    ids = torch.tensor([[0, 3], [3, 1], [5, 0], [2, 4], [1, 5]])
    return {
        "linear": (ops.linear, {"x": x, "weight": plain}),
        "activated_linear": (ops.activated_linear, {"x": x, "weight": plain, "activation": "gelu"}),
        "gated_linear": (ops.gated_linear, {"x": x, "weight": gated, "activation": "silu"}),
        "embedding": (
            ops.embedding,
            {"ids": torch.tensor([3, 0, 3]), "weight": draw(9, HIDDEN, dtype=ops.dtype), "scale": 4.9},
        ),
        "experts": (
            lambda ids, weights, **rest: ops.experts(chosen=(ids, weights), **rest),
            {"x": x, "gate_up": experts, "down": downs, "ids": ids, "weights": draw(T, 2), "activation": "gelu"},
        ),
        "rms_norm": (ops.rms_norm, norm),
        "rms_norm in float32": (ops.rms_norm, norm | {"dtype": torch.float32}),
        "layer_norm": (ops.layer_norm, norm | {"bias": draw(HIDDEN, seed=1)}),
        "round": (ops.round, {"x": draw(T, HIDDEN)}),
        "xielu": (ops.xielu, {"x": draw(T, HIDDEN), "curve": XieluCurve(0.9, 1.2, 0.5, -1e-6)}),
        "rotary_qkv": (ops.rotary_qkv, qkv | {"params": each_head}),
        "rotary_qkv, scaled": (ops.rotary_qkv, qkv | {"params": replace(each_head, q_scale=draw(T))}),
        "rotary_qkv, only scaled": (ops.rotary_qkv, qkv | {"params": RotaryParams(HEADS, q_scale=draw(T))}),
        "rotary_qkv, all heads": (ops.rotary_qkv, qkv | {"params": all_heads}),
        "log_softmax": (ops.log_softmax, {"logits": draw(T, VOCAB)}),
    }


NAMES = list(calls(ReferenceOps(torch.float32)))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", NAMES)
def test_each_operation_equals_the_reference(pair: tuple[CpuOps, ReferenceOps], name: str) -> None:
    """Guards against an argument in the wrong place. And no argument is written to."""
    results = []
    for ops in pair:
        function, arguments = calls(ops)[name]
        before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
        results.append(as_tuple(function(**arguments)))
        for key, value in before.items():
            assert torch.equal(arguments[key], value), key
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_out_is_filled_and_returned(pair: tuple[CpuOps, ReferenceOps], name: str) -> None:
    """Guards against a buffer that is ignored, or filled in part."""
    function, arguments = calls(pair[0])[name]
    expected = as_tuple(function(**arguments))
    buffers = tuple(torch.full_like(item, math.nan) for item in expected)
    returned = as_tuple(function(**arguments, out=buffers if len(buffers) > 1 else buffers[0]))
    for buffer, item, value in zip(buffers, returned, expected, strict=True):
        assert item is buffer
        assert torch.equal(buffer, value)


FREE = [
    ("log_softmax", "logits"),
    ("round", "x"),
    ("xielu", "x"),
    ("embedding", "ids"),
    ("embedding", "weight"),
]  # any length will do


def broken(tensor: Tensor) -> list[Tensor]:
    """The same tensor in every way that a native function must not see."""
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return [
        tensor.to(torch.float64 if tensor.is_floating_point() else torch.int32),
        tensor[..., :-1].contiguous(),
        tensor[None],
        wide[..., ::2],
        torch.empty_like(tensor, device="meta"),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors_are_refused(pair: tuple[CpuOps, ReferenceOps], name: str) -> None:
    """Guards against an address handed to native code that believes it: wrong type, shape, layout or device."""
    function, arguments = calls(pair[0])[name]
    expected = function(**arguments)
    for key, value in arguments.items():
        for wrong in broken(value) if isinstance(value, Tensor) else []:
            if wrong.ndim == value.ndim and wrong.shape != value.shape and (name, key) in FREE:
                continue
            with pytest.raises(ValueError, match="needed"):
                function(**{**arguments, key: wrong})
    if isinstance(expected, Tensor):
        for wrong in broken(expected):
            with pytest.raises(ValueError, match="out: "):
                function(**arguments, out=wrong)
    else:
        for wrong in broken(expected[1]):
            with pytest.raises(ValueError, match="k: "):
                function(**arguments, out=(expected[0], wrong, expected[2]))


def test_numbers_outside_of_their_table_are_refused(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against reads of foreign memory: ids, positions and experts that do not exist."""
    scaled = ("rotary_qkv, only scaled", "positions")
    for name, key in (("embedding", "ids"), ("rotary_qkv", "positions"), scaled, ("experts", "ids")):
        function, arguments = calls(pair[0])[name]
        for bad in (-1, 10**12, 9):
            wrong = arguments[key].clone()
            wrong.view(-1)[0] = bad
            with pytest.raises(ValueError, match="outside of its table"):
                function(**{**arguments, key: wrong})


@pytest.mark.parametrize("layer", [False, True])
def test_a_norm_of_a_sum_adds_in_place(pair: tuple[CpuOps, ReferenceOps], layer: bool) -> None:
    """Guards against a residual stream that is copied, or normed before it is added."""
    for ops in pair:
        x, h, weight, bias = draw(T, HIDDEN), draw(T, HIDDEN, seed=9), draw(HIDDEN), draw(HIDDEN, seed=1)
        total, out = x + h, torch.empty(T, HIDDEN, dtype=ops.dtype)
        if layer:
            stream, normed = ops.add_layer_norm(x, h, weight, bias, EPS, out=out)
            expected = ops.layer_norm(total, weight, bias, EPS)
        else:
            stream, normed = ops.add_rms_norm(x, h, weight, EPS, out=out)
            expected = ops.rms_norm(total, weight, EPS)
        assert stream is x
        assert normed is out
        assert torch.equal(x, total)
        assert torch.equal(normed, expected)
    with pytest.raises(ValueError, match="h: "):
        pair[0].add_rms_norm(x, h[:-1], weight, EPS)
    with pytest.raises(ValueError, match="h: "):
        pair[0].add_layer_norm(x, h[:-1], weight, bias, EPS)
    for key, wrong in (("weight", weight[:-1].contiguous()), ("bias", bias.double())):
        with pytest.raises(ValueError, match=f"{key}: "):
            pair[0].add_layer_norm(**{"x": x, "h": h, "weight": weight, "bias": bias, "eps": EPS, key: wrong})


def test_add_scale_softcap_and_norm_heads_work_in_place(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a result beside the argument, which the next operation would not see."""
    x, h = draw(T, HIDDEN), draw(T, HIDDEN, seed=9)
    for ops in pair:
        total, logits = x.clone(), 40.0 * x
        assert ops.add(total, h) is total
        assert torch.equal(total, x + h)
        assert ops.scale(total, 0.3) is total
        assert torch.equal(total, (x + h) * 0.3)
        assert ops.softcap(logits, 30.0) is logits
        close(logits, 30.0 * torch.tanh(40.0 * x / 30.0), 1e-5)
    qkv, weight = draw(T, (H + 2 * HKV) * D), draw(H + HKV, D)
    found, expected = (ops.norm_heads(qkv.clone(), weight, EPS) for ops in pair)
    close(found, expected, 1e-5)
    assert torch.equal(found[:, (H + HKV) * D :], qkv[:, (H + HKV) * D :])
    with pytest.raises(ValueError, match="weight: 10 heads of 8"):
        pair[0].norm_heads(qkv, draw(10, D), EPS)
    for wrong in broken(x):
        with pytest.raises(ValueError, match="needed"):
            pair[0].add(x, wrong)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="softcap"):
            pair[0].softcap(x, cap)
    with pytest.raises(ValueError, match="dtype: float16; supported are float32, bfloat16"):
        pair[0].rms_norm(x, h[0], EPS, dtype=torch.float16)


def test_round_makes_a_copy(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against the residual stream itself handed to a product while a later addition changes it."""
    x = draw(T, HIDDEN)
    rounded = pair[0].round(x)
    assert rounded.data_ptr() != x.data_ptr()
    assert torch.equal(rounded, x.to(pair[0].dtype))


def test_a_norm_of_all_heads_is_one_of_a_head_where_there_is_one(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against two ways to sum, and a weight that begins anew with each head."""
    ops, qkv, positions, weight = pair[0], draw(T, 6 * D), torch.arange(T), draw(4 * D)
    params = RotaryParams(Heads(4, 1, D), q_norm=weight, k_norm=weight[:D].clone(), eps=EPS)
    whole = ops.rotary_qkv(qkv, positions, params)
    one_head = RotaryParams(Heads(1, 1, 4 * D), q_norm=weight, eps=EPS)
    as_one = ops.rotary_qkv(qkv[:, : 4 * D].repeat(1, 3), positions, one_head)
    assert torch.equal(whole[0].flatten(1), as_one[0].flatten(1))
    assert torch.equal(whole[0].flatten(1), ops.rms_norm(qkv[:, : 4 * D].contiguous(), weight, EPS))
    for wrong in (draw(D + 1), draw(2 * D), draw(D).double()):
        with pytest.raises(ValueError, match="q_norm: "):
            ops.rotary_qkv(qkv, positions, replace(params, q_norm=wrong))


def test_a_product_fills_some_columns_of_a_wider_buffer(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a row stride taken for the width of the weight, and columns of the neighbour overwritten."""
    ops = pair[0]
    for tokens in (1, 3, 40):
        x = draw(tokens, 50, dtype=ops.dtype)
        for first, columns in ((0, 64), (64, 64), (5, 70), (33, 1)):
            wide = torch.full((tokens, 160), 7.0)
            packed = ops.pack_linear(draw(columns, 50))
            piece = wide[:, first : first + columns]
            assert ops.linear(x, packed, out=piece) is piece
            assert torch.equal(piece, ops.linear(x, packed))
            assert bool((wide[:, :first] == 7.0).all())
            assert bool((wide[:, first + columns :] == 7.0).all())
    with pytest.raises(ValueError, match="out: "):
        ops.linear(x, packed, out=wide.double()[:, :1])
    with pytest.raises(ValueError, match="out: "):
        ops.linear(x, ops.pack_linear(draw(4, 50)), out=wide[:1, :4].expand(tokens, 4))
    with pytest.raises(ValueError, match="out: "):
        ops.linear(x, ops.pack_linear(draw(40, 50)), out=wide[:, :40].T)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activated_product_is_a_product_and_an_activation(
    pair: tuple[CpuOps, ReferenceOps], activation: str
) -> None:
    """Guards against a rounding between the two, and against an activation before the bias."""
    ops, x = pair[0], draw(T, HIDDEN, dtype=pair[0].dtype)
    packed = ops.pack_linear(draw(50, HIDDEN), draw(50))
    exact = ACTIVATIONS[activation](ops.linear(x, packed).double())
    found = ops.activated_linear(x, packed, activation)
    assert found.dtype == ops.dtype
    assert torch.allclose(found.double(), exact, atol=1e-6, rtol=2.0**-8 if found.dtype == torch.bfloat16 else 1e-5)
    with pytest.raises(ValueError, match="activation 'mish' is not supported"):
        ops.activated_linear(x, packed, "mish")


def test_rotary_without_norms_tables_or_all_dimensions(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against optional arguments that are taken for others."""
    qkv, positions = draw(T, (H + 2 * HKV) * D), torch.tensor([0, 3, 1, 7, 7])
    for cos_sin in (table(8), table(8, 4), None):
        for q_norm in (None, draw(D)):
            params = RotaryParams(HEADS, cos_sin, q_norm, q_norm, EPS)
            found, expected = both(pair, lambda ops, params=params: ops.rotary_qkv(qkv, positions, params))
            for one, other in zip(found, expected, strict=True):
                close(one, other)


def test_rotary_of_values(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against values that are rotated or normed as keys are, or taken from the wrong columns."""
    positions, weight = torch.tensor([0, 3, 1, 7, 7]), torch.ones(D)
    for values_are_keys in (False, True):
        params = RotaryParams(HEADS, table(8), None, draw(D), EPS, v_norm=weight, values_are_keys=values_are_keys)
        qkv = draw(T, params.columns)
        found, expected = both(pair, lambda ops, qkv=qkv, params=params: ops.rotary_qkv(qkv, positions, params))
        for one, other in zip(found, expected, strict=True):
            close(one, other)
        stored = qkv.view(T, -1, D)[:, -HKV:]
        normed = stored / (stored.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
        close(expected[2], normed.to(expected[2].dtype))


# --- products ---------------------------------------------------------------------------------------------------------

SCHEMES = [None, *(Scheme.parse(name) for name in SLICES), Scheme.parse("int4", 32)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme and f"{scheme.name}-{scheme.group_size}")
@pytest.mark.parametrize("leaf_ends", [(), (40, 40, 130, 200)], ids=["whole", "leaves"])
def test_every_scheme_equals_the_reference(
    pair: tuple[CpuOps, ReferenceOps], scheme: Scheme | None, leaf_ends: Sequence[int]
) -> None:
    """Guards against leaves, groups, slices or a bias that native code and quantisers count differently. Rounding
    differs in float32 only, so what is quantised the same gives nearly equal results."""
    x = draw(3, 200, dtype=pair[0].dtype)
    for gated, rows in ((False, 70), (True, 76)):
        weight, bias = draw(rows, 200), draw(rows)
        packed = [
            ops.pack_linear(weight, bias, Packing(leaf_ends=leaf_ends, scheme=scheme, gated=gated)) for ops in pair
        ]
        if gated:
            found, expected = (ops.gated_linear(x, item, "silu") for ops, item in zip(pair, packed, strict=True))
        else:
            found, expected = (ops.linear(x, item) for ops, item in zip(pair, packed, strict=True))
        scale = float(expected.float().abs().max())
        close(found.float() / scale, expected.float() / scale, 1e-5 if found.dtype == torch.float32 else 2.0**-7)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme and f"{scheme.name}-{scheme.group_size}")
@pytest.mark.parametrize("gated", [False, True])
def test_a_restored_weight_is_the_packed_one(
    pair: tuple[CpuOps, ReferenceOps], scheme: Scheme | None, gated: bool
) -> None:
    """Guards against a state that leaves something out, and against tensors that are copied."""
    ops, x = pair[0], draw(3, 130, dtype=pair[0].dtype)
    settings: dict[str, Any] = {"leaf_ends": (64, 130), "scheme": scheme, "gated": gated}
    packed = ops.pack_linear(draw(70, 130), draw(70), Packing(**settings))
    copies = {name: tensor.clone() for name, tensor in packed.state().items()}
    restored = ops.restore_linear((70, 130), copies, Packing(**settings))
    assert restored.num_bytes == packed.num_bytes
    for name, tensor in restored.state().items():
        assert tensor.data_ptr() == copies[name].data_ptr()
    multiply = (lambda w: ops.gated_linear(x, w, "gelu")) if gated else (lambda w: ops.linear(x, w))
    assert torch.equal(multiply(restored), multiply(packed))
    for name, tensor in copies.items():
        for wrong in (tensor[:-1], tensor.double(), torch.empty(tensor.nbytes + 1, dtype=torch.uint8)[1:].view(-1)):
            with pytest.raises(ValueError, match=name):
                ops.restore_linear((70, 130), {**copies, name: wrong}, Packing(**settings))
    with pytest.raises(ValueError, match="packed weight"):
        ops.restore_linear((70, 130), {}, Packing(**settings))
    with pytest.raises(NotSupportedError):
        pair[1].pack_linear(draw(2, 2)).state()


class Noting:
    """A RowSource that notes what is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return self.tensor[start:stop]


@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_read_in_pieces(pair: tuple[CpuOps, ReferenceOps], gated: bool) -> None:
    """Guards against a second copy of the weight in memory, rows that are read twice or never, and pieces that mix a
    gate with what it lets through."""
    ops, k = pair[0], SLICE_BYTES // 4 // 64 + 5
    source = Noting(draw(202, 1).expand(202, k) + 1.0)
    packed = ops.pack_linear(source, packing=Packing(gated=gated))
    whole = ops.pack_linear(TensorRows(source.tensor), packing=Packing(gated=gated))
    assert len(source.reads) >= 4
    assert all((stop - start) * k * 4 <= SLICE_BYTES for start, stop in source.reads)
    assert [start for start, _ in source.reads] == [0, *(stop for _, stop in source.reads[:-1])]
    assert source.reads[-1][1] == 202
    assert not gated or any(stop == 101 for _, stop in source.reads)
    for name, tensor in whole.state().items():
        assert torch.equal(packed.state()[name], tensor)


def test_weights_are_rounded_before_they_are_quantised() -> None:
    """Guards against a bfloat16 model whose int8 weights come from the float32 ones."""
    ops, weight = CpuOps(torch.bfloat16), draw(40, 64)
    scheme = Scheme.parse("int8")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        state = ops.pack_linear(weight.to(dtype), packing=Packing(scheme=scheme)).state()
        rounded = ops.pack_linear(weight.bfloat16().float(), packing=Packing(scheme=scheme)).state()
        assert all(torch.equal(state[name], rounded[name]) for name in rounded)


def test_weights_that_cannot_be_packed() -> None:
    """Guards against an int32 sum that overflows, and against leaves or gates that make no sense."""
    int8, int4 = Scheme.parse("int8"), Scheme.parse("int4-a16")
    long = MAX_INTEGER_LEAF + 1
    with pytest.raises(NotSupportedError, match="int8 sums at most 65536") as caught:
        Layout.of((8, long), torch.bfloat16, Packing(scheme=int8))
    assert caught.value.param == "quantization"
    assert Layout.of((8, long), torch.bfloat16, Packing((5, long), int8)).k == long
    assert Layout.of((8, long), torch.bfloat16, Packing(scheme=int4)).k == long
    assert Layout.of((8, long), torch.bfloat16).k == long
    for shape, ends in (((8,), ()), ((0, 8), ()), ((8, 8), (4, 9)), ((8, 8), (6, 4, 8)), ((8, 8), (*range(1, 9), 8))):
        with pytest.raises(ValueError, match="cannot be"):
            Layout.of(shape, torch.bfloat16, Packing(ends))
    with pytest.raises(ValueError, match="for a gate"):
        Layout.of((7, 8), torch.bfloat16, Packing(gated=True))
    ops = CpuOps(torch.float32)
    with pytest.raises(ValueError, match="bias"):
        ops.pack_linear(draw(4, 4), draw(5))
    with pytest.raises(ValueError, match="not finite"):
        ops.pack_linear(torch.full((4, 4), math.nan), packing=Packing(scheme=int8))


def test_a_weight_is_used_as_it_was_packed(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against gate and up rows taken for plain ones, and weights of another backend."""
    ops, x = pair[0], draw(2, 8, dtype=pair[0].dtype)
    with pytest.raises(ValueError, match="without a gate"):
        ops.gated_linear(x, ops.pack_linear(draw(4, 8)), "silu")
    with pytest.raises(ValueError, match="with a gate"):
        ops.activated_linear(x, ops.pack_linear(draw(4, 8), packing=Packing(gated=True)), "silu")
    with pytest.raises(ValueError, match="activation 'mish' is not supported"):
        ops.gated_linear(x, ops.pack_linear(draw(4, 8), packing=Packing(gated=True)), "mish")
    with pytest.raises(TypeError, match="another backend"):
        ops.linear(x, pair[1].pack_linear(draw(4, 8)))


MANY = 24
ROUTERS = {
    "softmax": RouterParams(3),
    "renormalised": RouterParams(3, renormalize=True, scale=2.5),
    "corrected softmax": RouterParams(2, bias=draw(MANY, seed=4), renormalize=True, min_sum=1e-12),
    "a least sum": RouterParams(2, renormalize=True, min_sum=0.9),
    "sigmoid": RouterParams(3, "sigmoid"),
    "corrected sigmoid": RouterParams(4, "sigmoid", draw(MANY, seed=5), renormalize=True, min_sum=1e-20, scale=1.8),
    "groups": RouterParams(3, "sigmoid", draw(MANY, seed=6) / 3, groups=4, top_groups=2, renormalize=True),
    "groups by their best": RouterParams(2, groups=2, group_top=1),
    "sparsemixer": RouterParams(2, "sparsemixer", threshold=0.4),
    "a narrow sparsemixer": RouterParams(3, "sparsemixer", threshold=0.02),
    "a scale of each expert": RouterParams(3, scale=2.0, expert_scale=draw(MANY, seed=7)),
    "sigmoid of the chosen": RouterParams(3, "chosen_sigmoid"),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route(pair: tuple[CpuOps, ReferenceOps], name: str) -> None:
    """Guards against ids and weights that do not belong together, a bias that enters the weights, groups that end at
    the wrong expert, and ties that do not go to the lowest id."""
    params = ROUTERS[name]
    logits = draw(60, MANY)
    logits[1] = 0.25
    (ids, weights), (expected_ids, expected) = both(pair, lambda ops: ops.route(logits, params))
    assert torch.equal(ids, expected_ids)
    close(weights, expected)
    if params.bias is None:
        assert ids[1].tolist() == list(range(params.top_k))
    if params.renormalize and params.min_sum < 0.1:
        close(weights.sum(-1), torch.full((60,), params.scale))


def test_a_router_that_cannot_choose_is_refused(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against experts that are chosen twice, and groups of unequal sizes."""
    logits = draw(T, EXPERTS)
    wrong = {"top_k": [RouterParams(EXPERTS + 1), RouterParams(EXPERTS, groups=2), RouterParams(0)],
             "groups": [RouterParams(1, groups=4), RouterParams(1, groups=EXPERTS)]}  # fmt: skip
    for message, some in wrong.items():
        for params in some:
            for ops in pair:
                with pytest.raises(ValueError, match=message):
                    ops.route(logits, params)


def test_weighed_inputs(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against weights that multiply the results as well, or the row of another pair, and against a gated sum
    that forgets what it adds to."""
    x, gates = draw(T, HIDDEN, dtype=pair[0].dtype), draw(T, 1, seed=5)
    chosen = pair[0].route(draw(T, EXPERTS, seed=3), RouterParams(2, "sigmoid"))

    def compute(ops: Ops) -> Tensor:
        made = calls(ops)["experts"][1]
        found = ops.experts(x, made["gate_up"], made["down"], chosen, "silu", weigh_inputs=True)
        plain = ops.experts(x, made["gate_up"], made["down"], chosen, "silu")
        assert not torch.allclose(found, plain, rtol=0.1)
        return ops.add_gated(plain, found, gates)

    close(*both(pair, compute))


# --- logits -----------------------------------------------------------------------------------------------------------


def sampling(rows: int) -> SamplingTensors:
    """Every field in use."""
    pairs = torch.tensor([[0, 3], [rows - 1, VOCAB - 1], [1, 0]])
    values = torch.tensor([1.0, -2.0, 3.0])
    return SamplingTensors(
        temperature=torch.linspace(0, 1.5, rows),
        top_k=torch.arange(rows) + 3,
        top_p=torch.full((rows,), 0.9),
        min_p=torch.full((rows,), 0.02),
        noise_key=torch.stack([torch.arange(rows) - 2**62, torch.arange(rows), torch.arange(rows) + 7], dim=1),
        masked=pairs,
        bias=(pairs, values),
        repetition=(torch.full((rows,), 1.3), pairs),
        counts=(torch.full((rows,), 0.5), torch.full((rows,), 0.25), pairs, values.abs()),
    )


NOTHING = SamplingTensors(torch.zeros(T), None, None, None, None, None, None, None, None)


def test_choose_reads_every_field(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a parameter that does not arrive, alone or beside the others."""
    logits, full = draw(T, VOCAB) * 2, sampling(T)
    before = logits.clone()
    cases = [NOTHING, full, replace(NOTHING, temperature=full.temperature, noise_key=full.noise_key)]
    fields = ("top_k", "top_p", "min_p", "masked", "bias", "repetition", "counts")
    cases += [replace(cases[2], **{name: getattr(full, name)}) for name in fields]
    for params in cases:
        found, expected = both(pair, lambda ops, params=params: ops.choose(logits, params)[0])
        assert torch.equal(found, expected)
    assert torch.equal(logits, before)
    bits = np.stack([pack_bits(row.numpy() > 0.5) for row in draw(2, VOCAB)])
    allowed = torch.tensor([2, 0]), torch.from_numpy(bits)
    for params in (replace(NOTHING, allowed=allowed), replace(full, allowed=allowed)):
        found, expected = both(pair, lambda ops, params=params: ops.choose(logits.clone(), params)[0])
        assert torch.equal(found, expected)
    assert not torch.equal(found, pair[0].choose(logits, full)[0])


def test_choose_refuses_what_would_write_elsewhere(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a pair outside of the logits, and parameters of another number of rows."""
    logits, full = draw(T, VOCAB), sampling(T)
    for bad in ([T, 0], [-1, 0], [0, VOCAB], [0, -1]):
        with pytest.raises(ValueError, match="masked: a pair is outside"):
            pair[0].choose(logits, replace(full, masked=torch.tensor([[0, 0], bad])))
    for name in ("temperature", "top_k", "top_p", "min_p", "noise_key", "masked"):
        with pytest.raises(ValueError, match=name):
            pair[0].choose(logits, replace(full, **{name: torch.zeros(T + 1)}))
    with pytest.raises(ValueError, match="allowed"):
        pair[0].choose(logits, replace(full, allowed=(torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))))
    for name in ("bias", "repetition", "counts"):
        for index, part in enumerate(getattr(full, name)):
            wrong = list(getattr(full, name))
            wrong[index] = part[:, :1] if part.ndim == 2 else part[:-1]
            with pytest.raises(ValueError, match=name if name != "counts" else "counts|frequency|presence"):
                pair[0].choose(logits, replace(full, **{name: tuple(wrong)}))


def test_healthy_rows(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against -inf (a masked logit) taken for an error, a row of nothing but -inf taken for health, and ids or
    log-probabilities that a row takes from its neighbour's NaN."""
    inf = math.inf
    rows = torch.tensor([[0.0, -inf], [math.nan, 0.0], [inf, 0.0], [-inf, -inf], [inf, math.nan], [1.0, 2.0]])
    healthy = [True, False, False, False, False, True]
    for ops in pair:
        ids, found = ops.choose(rows, replace(NOTHING, temperature=torch.zeros(len(rows))))
        assert found.dtype == torch.bool
        assert found.tolist() == healthy
        assert ids[found].tolist() == [0, 1]
        logprobs = ops.token_scores(rows, ids.clamp(0, 1), 2).logprobs
        assert logprobs.isnan().all(dim=1).tolist() == [not item for item in healthy]
        assert not logprobs[found].isnan().any()


def test_token_scores_equal_the_reference(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against ties in another order, a rank that counts its own token, more ids than the vocabulary has, and
    NO_TOKEN, as `choose` returns it, taken for an index."""
    logits, ids = draw(T, VOCAB).round(), torch.tensor([3, 0, NO_TOKEN, VOCAB - 1, 1])
    for num_top in (0, 5, VOCAB + 3):
        found, expected = both(pair, lambda ops, num_top=num_top: ops.token_scores(logits, ids, num_top))
        chosen = ids >= 0
        assert torch.equal(found.ids[chosen], expected.ids[chosen])
        assert found.ids.shape == (T, 1 + min(num_top, VOCAB))
        assert torch.equal(found.ranks[chosen], expected.ranks[chosen])
        close(found.logprobs[chosen], expected.logprobs[chosen])


# --- recording --------------------------------------------------------------------------------------------------------


def test_every_operation_of_a_forward_pass_is_recorded(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against arguments that are written down in the wrong order or type, and against memory that is freed
    before the program runs again: arrays of experts, results that have no buffer."""
    ops, rows = pair[0], 3
    made = {name: calls(ops)[name][1] for name in ("rms_norm", "rotary_qkv", "experts")}
    gated, down = (
        ops.pack_linear(draw(2 * HIDDEN, HIDDEN), packing=Packing(gated=True)),
        ops.pack_linear(draw(HIDDEN, HIDDEN, seed=1)),
    )
    norm, whole_norm, head_norms = draw(HIDDEN, seed=7), draw(H * D, seed=8), draw(H + HKV, D, seed=10)
    table, ids = draw(9, HIDDEN, dtype=ops.dtype), torch.tensor([1, 0, 8])
    tied, router = ops.pack_linear(draw(9, HIDDEN, seed=3)), ops.pack_linear(draw(EXPERTS, HIDDEN))
    qkv, bias = ops.pack_linear(draw((H + 2 * HKV) * D, HIDDEN)), draw(EXPERTS, seed=9)
    gate = ops.pack_linear(draw(1, HIDDEN, seed=2))
    experts = made["experts"]["gate_up"], made["experts"]["down"]
    cos_sin, positions = made["rotary_qkv"]["params"].cos_sin, torch.tensor([4, 0, 2])

    slots, ones = torch.tensor([0, -1, 0], dtype=torch.int32), np.ones(1, np.int32)
    hidden = torch.zeros(rows, 1, 2)
    lora = LoraTable(
        draw(1, 1, 2, HIDDEN, dtype=ops.dtype),
        draw(1, -(-HIDDEN // 16), 2, 16, dtype=ops.dtype),
        *(draw(1, HIDDEN, seed=4), draw(1, HIDDEN, seed=6)),
        *(2 * ones, ones),
        *((HIDDEN,), (HIDDEN,)),
    )

    def forward() -> Tensor:
        x = ops.add(ops.embedding(ids, table, scale=1.7), ops.packed_embedding(ids, tied, scale=0.3))
        y = ops.rms_norm(x, made["rms_norm"]["weight"], EPS)
        q, _, _ = ops.rotary_qkv(ops.linear(y, qkv), positions, RotaryParams(HEADS, cos_sin, q_norm_weight, eps=EPS))
        params = RouterParams(2, "sigmoid", bias, groups=2, renormalize=True, min_sum=1e-9, scale=1.5)
        chosen = ops.route(ops.linear(y, router), params)
        h = ops.experts(y, *experts, chosen, "silu")
        h = ops.add_gated(h, ops.experts(y, *experts, chosen, "silu", weigh_inputs=True), ops.linear(y, gate))
        x, y = ops.add_rms_norm(x, h, made["rms_norm"]["weight"], EPS)
        u = ops.rms_norm(ops.linear(ops.gated_linear(y, gated, "gelu_tanh"), down), norm, EPS, dtype=torch.float32)
        x, y = ops.add_layer_norm(ops.add(x, u), h, norm, None, EPS)
        heads = ops.norm_heads(ops.linear(y, qkv), head_norms, EPS)
        z, _, _ = ops.rotary_qkv(heads, positions, RotaryParams(HEADS, None, whole_norm, eps=EPS))
        v = ops.activated_linear(ops.layer_norm(x, norm, norm, EPS), down, "silu")
        ops.lora_shrink(v, lora, slots, out=hidden)
        v = ops.activate(ops.lora_expand(hidden, lora, slots, ops.linear(v, down)), "silu")
        v = ops.xielu(ops.linear(v, down), XieluCurve(0.9, 1.2, 0.5, -1e-6))
        logits = torch.empty(rows, 2 * HIDDEN)
        for start in (0, HIDDEN):
            ops.linear(v, down, out=logits[:, start : start + HIDDEN])
        ops.scale(logits, 0.5)
        ops.softcap(logits, 3.0)
        results[:] = [q, *chosen, x, z, u, v, logits]
        return ops.round(x)

    q_norm_weight, results = draw(D, seed=5), list[Tensor]()
    first, program = ops.record(lambda _: forward(), ())
    assert program is not None
    recorded = list(results)
    (native,) = program.parts
    assert isinstance(native, ctypes.Array)
    called = {library.RECORDABLE[call.function] for call in native}
    assert called == set(library.RECORDABLE) - {"penstock_attend"}
    for new_ids, new_positions in (([8, 8, 3], [1, 1, 0]), ([0, 5, 2], [3, 2, 4])):
        ids.copy_(torch.tensor(new_ids))
        positions.copy_(torch.tensor(new_positions))
        assert program.run(()) is first
        found = [item.clone() for item in recorded]
        forward()
        for one, other in zip(found, results, strict=True):
            assert torch.equal(one, other)
    assert first.shape == (rows, HIDDEN)
    ids[0] = 9
    with pytest.raises(ValueError, match="outside of its table"):
        program.run(())


def test_a_program_keeps_what_it_uses(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a replay that reads freed memory, because the one who recorded has let go of it."""
    weight, x = draw(64, HIDDEN), draw(2, HIDDEN, dtype=pair[0].dtype)
    expected = pair[0].linear(x, pair[0].pack_linear(weight)).clone()

    def record() -> tuple[Any, list[Any]]:
        ops = CpuOps(pair[0].dtype)
        packed, own = ops.pack_linear(weight), x.clone()
        return ops.record(lambda _: ops.linear(own, packed), ())[1], [weakref.ref(item) for item in (ops, packed, own)]

    program, alive = record()
    gc.collect()
    assert all(item() is not None for item in alive)
    assert torch.equal(program.run(()), expected)


def test_a_number_given_for_a_float_is_recorded_as_one(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against an integer's bits that a replay reads as those of a double."""
    x, weight = draw(2, HIDDEN), draw(HIDDEN)
    first, program = pair[0].record(lambda _: pair[0].rms_norm(x, weight, 1), ())
    assert program is not None
    expected = first.clone()
    assert torch.equal(program.run(()), expected)


def test_rounding_is_the_same_on_every_thread() -> None:
    """Guards against helper threads that keep tiny numbers where the caller, by another library's doing, drops them."""
    ops, reference = CpuOps(torch.float32, threads=4), CpuOps(torch.float32)
    packed, alone = (item.pack_linear(torch.full((2048, 64), 1e-20)) for item in (ops, reference))
    x = torch.full((256, 64), 1e-20)
    expected = reference.linear(x, alone)
    try:
        torch.set_flush_denormal(True)
        for _ in range(10):
            assert torch.equal(ops.linear(x, packed).view(torch.int32), expected.view(torch.int32))
    finally:
        torch.set_flush_denormal(False)
    assert expected.abs().max() > 0


def test_what_a_program_would_leave_out_is_not_recorded(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a sum of torch's, or an operation that no program knows, that a replayed step would not do."""
    ops, x, weight = pair[0], draw(2, HIDDEN), draw(HIDDEN)
    assert ops.record(lambda _: ops.rms_norm(x, weight, EPS), ())[1] is not None
    assert ops.record(lambda _: ops.rms_norm(x[:1], weight, EPS), ())[1] is not None
    assert ops.record(lambda _: ops.rms_norm(x + 1, weight, EPS), ())[1] is None
    assert ops.record(lambda _: ops.rms_norm(x, weight, EPS).clone(), ())[1] is None
    assert ops.record(lambda _: ops.log_softmax(x), ())[1] is None
    with pytest.raises(ValueError, match="x: "):
        ops.record(lambda _: ops.rms_norm(x.double(), weight, EPS), ())
    assert torch.equal(ops.rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS))


def test_what_torch_computes_is_run_again(pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a view, a change in place or a number that a program keeps from the pass in which it was recorded,
    and against memory that two results share while both are read, in one program or in two that alternate."""
    ops, weight = pair[0], draw(HIDDEN)

    def forward(x: torch.Tensor) -> torch.Tensor:
        factor = torch.tensor(2.0)
        factor += x[0, 0]
        y = ops.rms_norm(x, weight, EPS).float()
        turned = torch.cat([y[:, 1:], y[:, :1]], dim=1)
        turned[:, :2] = x[:, :2] * factor
        best, at = turned.topk(3)
        mixed = (turned.transpose(0, 1) - best.sum()).reshape(x.shape).scatter(1, at, best)
        return ops.rms_norm(mixed + (turned * y).mean(), weight, EPS).float() + y

    inputs = [draw(rows, HIDDEN) for rows in (2, 4)]
    programs = [ops.record(lambda _, x=x: forward(x), (), torch_too=True)[1] for x in inputs]
    for _ in range(2):
        for x, program in zip(inputs, programs, strict=True):
            x.copy_(draw(*x.shape, seed=7) + x)
            assert program is not None
            assert torch.equal(program.run(()), forward(x))


@pytest.mark.parametrize("depends", [lambda x: x * int(x[0, 0]), lambda x: x[x > 0], torch.rand_like])
def test_what_depends_on_values_is_not_recorded(depends: Any, pair: tuple[CpuOps, ReferenceOps]) -> None:
    """Guards against a branch or a number of results that a program would take from the recorded pass."""
    assert pair[0].record(lambda _: depends(draw(2, HIDDEN)), (), torch_too=True)[1] is None


# --- the backend ------------------------------------------------------------------------------------------------------


def test_levels_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a forced level that is ignored, or one that is not there."""
    for level in library.LEVELS[: len(levels())]:
        monkeypatch.setenv(library.LEVEL_VARIABLE, level)
        assert load_ops("cpu", torch.bfloat16, threads=2).level == level
    monkeypatch.setenv(library.LEVEL_VARIABLE, "sse2")
    with pytest.raises(InvalidRequestError, match="sse2"):
        load_ops("cpu", torch.bfloat16)


def test_without_a_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a crash on a machine without a compiler."""
    monkeypatch.setattr("penstock.kernels.cpu.calls.load_library", lambda: None)
    with pytest.raises(InvalidRequestError, match="not installed") as caught:
        load_ops("cpu", torch.bfloat16)
    assert caught.value.param == "kernels"
