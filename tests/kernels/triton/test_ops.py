"""TritonOps: each method calls the right kernel with the right arguments, and fills the buffer that it is given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.metadata import Heads, RotaryParams, RouterParams
from penstock.kernels.ops import PLAIN, Packing, XieluCurve
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import ops
from penstock.kernels.triton.ops import TritonOps
from tests.kernels.triton.compare import DEVICE, close, draw

BF16 = torch.bfloat16
TRITON, REFERENCE = TritonOps(BF16, DEVICE), ReferenceOps(BF16, DEVICE)
INT4, EIGHTHS = Packing((), Scheme.parse("int4", 32), gated=True), Packing((3, 6, 9, 12, 15, 18, 21, 24), gated=True)


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def packed(ops: Any, packing: Packing = PLAIN) -> Any:
    return ops.pack_linear(draw(16, 24) * 0.2, draw(16), packing)


CALLS: dict[str, Callable[..., Any]] = {
    "linear": lambda ops, **out: ops.linear(draw(3, 24, dtype=BF16), packed(ops), **out),
    "activated_linear": lambda ops, **out: ops.activated_linear(draw(3, 24, dtype=BF16), packed(ops), "gelu", **out),
    "gated_linear": lambda ops, **out: ops.gated_linear(
        draw(3, 24, dtype=BF16), packed(ops, Packing(gated=True)), "silu", **out
    ),
    "gated int4": lambda ops, **out: ops.gated_linear(
        draw(3, 24, dtype=BF16), packed(ops, INT4), "clamped_silu", **out
    ),
    "gated in leaves": lambda ops, **out: ops.gated_linear(
        draw(3, 24, dtype=BF16), packed(ops, EIGHTHS), "gelu_tanh", **out
    ),
    "embedding": lambda ops, **out: ops.embedding(torch.tensor([3, 0]), draw(5, 24, dtype=BF16), scale=2.0, **out),
    "packed_embedding": lambda ops, **out: ops.packed_embedding(torch.tensor([3, 0]), packed(ops), scale=0.5, **out),
    "route": lambda ops, **out: ops.route(draw(3, 8), RouterParams(2), **out),
    "rms_norm": lambda ops, **out: ops.rms_norm(draw(3, 24), draw(24), 1e-5, **out),
    "rms_norm in float32": lambda ops, **out: ops.rms_norm(draw(3, 24), draw(24), 1e-5, dtype=torch.float32, **out),
    "layer_norm": lambda ops, **out: ops.layer_norm(draw(3, 24), draw(24), None, 1e-5, **out),
    "layer_norm in float32": lambda ops, **out: ops.layer_norm(
        draw(3, 24), draw(24), draw(24), 1e-5, dtype=torch.float32, **out
    ),
    "round": lambda ops, **out: ops.round(draw(3, 24), **out),
    "xielu": lambda ops, **out: ops.xielu(draw(3, 24), XieluCurve(0.8, 1.3, 0.5, -1e-6), **out),
    "rotary_qkv": lambda ops, **out: ops.rotary_qkv(
        draw(2, 4 * 6), torch.tensor([1, 4]), RotaryParams(Heads(2, 1, 6), draw(5, 6)), **out
    ),
    "rotary_q": lambda ops, **out: ops.rotary_q(
        draw(2, 4 * 6), torch.tensor([1, 9]), RotaryParams(Heads(2, 1, 6), draw(5, 6)), **out
    ),
    "experts": lambda ops, **out: ops.experts(
        draw(2, 24, dtype=BF16),
        [packed(ops, Packing(gated=True))] * 4,
        [ops.pack_linear(draw(24, 8))] * 4,
        (torch.tensor([[3, 0], [0, 1]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])),
        "silu",
        **out,
    ),
}
IN_PLACE: dict[str, Callable[[Any, Tensor], Any]] = {
    "add": lambda ops, x: ops.add(x, draw(3, 24)),
    "add_gated": lambda ops, x: ops.add_gated(x, draw(3, 24), draw(3, 1)),
    "scale": lambda ops, x: ops.scale(x, 3.0),
    "softcap": lambda ops, x: ops.softcap(x, 2.0),
    "norm_heads": lambda ops, x: ops.norm_heads(x, draw(2, 8), 1e-5),
    "add_rms_norm": lambda ops, x: ops.add_rms_norm(x, draw(3, 24), draw(24), 1e-5),
    "add_layer_norm": lambda ops, x: ops.add_layer_norm(x, draw(3, 24), draw(24), draw(24, seed=1), 1e-5),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_buffers(name: str) -> None:
    """Guards against arguments in the wrong order, a type that is not the contract's, and an ignored `out`."""
    expected = tensors(CALLS[name](REFERENCE))
    buffers = tuple(torch.zeros_like(item) for item in expected)
    given = tensors(CALLS[name](TRITON, out=buffers if len(buffers) > 1 else buffers[0]))
    for found, buffer, item in zip(given, buffers, expected, strict=True):
        assert found is buffer
        close(found, item)
    if name in ("linear", "rotary_qkv", "route"):
        for found, item in zip(tensors(CALLS[name](TRITON)), expected, strict=True):
            close(found, item)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    """Guards against an operation that returns a new tensor, or changes its operand."""
    x, other = draw(3, 24, seed=5), draw(3, 24, seed=5)
    expected, found = tensors(IN_PLACE[name](REFERENCE, x)), tensors(IN_PLACE[name](TRITON, other))
    assert found[0] is other
    for item, wanted in zip(found, expected, strict=True):
        close(item, wanted)


@pytest.mark.parametrize("packing", [Packing(), Packing((), Scheme.parse("int8")), INT4])
def test_restoring(packing: Packing) -> None:
    """Guards against a state that lacks a tensor, and bytes that are not counted."""
    weight = packed(TRITON, packing)
    assert TRITON.packed_bytes((16, 24), packing, bias=True) == weight.num_bytes
    restored = TRITON.restore_linear((16, 24), weight.state(), packing)
    x = draw(2, 24, dtype=BF16)
    assert torch.equal(TRITON.linear(x, restored), TRITON.linear(x, weight))
    with pytest.raises(ValueError, match="do not fit"):
        TRITON.restore_linear((18, 24), weight.state(), packing)


def test_gates_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that are left out or written twice where not all gates fit into scratch memory."""
    x, weight = draw(20, 24, dtype=BF16), packed(TRITON, INT4)
    whole = TRITON.gated_linear(x, weight, "silu")
    monkeypatch.setattr(ops, "GATE_BYTES", 1)
    assert torch.equal(TRITON.gated_linear(x, weight, "silu"), whole)
