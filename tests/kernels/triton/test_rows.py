"""Operations of rows and elements: norms, rotary, embedding, and what changes elements in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.metadata import Heads, RotaryParams
from penstock.kernels.ops import XieluCurve
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.triton import norms, rotary, rows
from tests.kernels.triton.compare import DEVICE, bits, close, draw, same_rows

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("hidden", [40, 600])  # within a block and beyond a warp
def test_norms(hidden: int, centred: bool, dtype: torch.dtype) -> None:
    """Guards against padding that counts in a mean, and a branch that is normed but not added to the stream."""
    ops = ReferenceOps(dtype, DEVICE)
    weight, bias = draw(hidden) + 1, draw(hidden, seed=1) if centred else None
    x, h = draw(4, hidden) + 3, draw(4, hidden, seed=2)

    def norm(x: Tensor, branch: Tensor | None = None) -> Tensor:
        out = torch.full_like(x, float("nan"), dtype=dtype)
        return norms.norm(x, branch, weight, bias, 1e-5, out, centred=centred)

    expected = ops.layer_norm(x, weight, bias, 1e-5) if centred else ops.rms_norm(x, weight, 1e-5)
    close(norm(x), expected)
    total = x + h
    stream = x.clone()
    found = norm(stream, h)
    assert torch.equal(stream, total)
    assert torch.equal(bits(found), bits(norm(total)))
    same_rows(norm, x)


def test_norms_of_heads_leave_other_columns_alone() -> None:
    """Guards against a head normed with another's weight, and a stride that is the number of normed columns."""
    x, weight = draw(3, 5 * 24), draw(4, 24)
    expected = ReferenceOps(torch.float32, DEVICE).norm_heads(x.clone(), weight, 1e-5)
    close(norms.norm_heads(x, weight, 1e-5), expected)


ROTARY: list[dict[str, Any]] = [
    {"cos_sin": None},
    {"cos_sin": draw(9, 24)},
    {"cos_sin": draw(9, 16), "q_norm": draw(24), "k_norm": draw(24, seed=1), "q_scale": draw(9)},
    {"cos_sin": draw(9, 24), "q_norm": draw(10 * 24), "k_norm": draw(2 * 24), "eps": 1e-5},
    {"cos_sin": draw(9, 24), "k_norm": draw(24), "v_norm": draw(24, seed=1), "values_are_keys": True},
]


@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Guards against heads, norms and partners that are mixed up where nothing is a power of two."""
    heads = Heads(10, 2, 24)
    params, positions = RotaryParams(heads, **options), torch.tensor([8, 0, 3])
    qkv = draw(3, params.columns)

    def rotate(qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        out = tuple(torch.full((len(qkv), count, 24), float("nan"), dtype=dtype) for count in (10, 2, 2))
        return rotary.rotary_qkv(qkv, positions, params, (out[0], out[1], out[2]))

    found = rotate(qkv, positions)
    for item, expected in zip(found, ReferenceOps(dtype, DEVICE).rotary_qkv(qkv, positions, params), strict=True):
        close(item, expected)
    for item, whole in zip(rotate(qkv[1:2], positions[1:2]), found, strict=True):
        assert torch.equal(bits(item), bits(whole[1:2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    """Guards against an offset of 32 bits, a missing scale, and a last block that is not cut off."""
    table, ids = draw(5, 1030, dtype=dtype), torch.tensor([4, 0, 4])
    found = rows.embed(ids, table, 3.5, torch.empty(3, 1030))
    assert torch.equal(found, ReferenceOps(dtype, DEVICE).embedding(ids, table, scale=3.5))


CURVE = XieluCurve(0.8, 1.3, 0.5, -1e-6)
ELEMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lambda ops, x: ops.add(x, x.flip(1)), lambda x: rows.apply("add", x, x, other=x.flip(1))),
    "add gated": (
        lambda ops, x: ops.add_gated(x, x.flip(1), x[:, :1].clone()),
        lambda x: rows.apply("add gated", x, x, other=x.flip(1), gates=x[:, :1].clone()),
    ),
    "scale": (lambda ops, x: ops.scale(x, 0.3), lambda x: rows.apply("scale", x, x, 0.3)),
    "softcap": (lambda ops, x: ops.softcap(x, 2.0), lambda x: rows.apply("softcap", x, x, 2.0)),
    "round": (lambda ops, x: ops.round(x), lambda x: rows.apply("round", x, torch.empty_like(x, dtype=torch.bfloat16))),
    "xielu": (
        lambda ops, x: ops.xielu(x, CURVE),
        lambda x: rows.xielu(x, CURVE, torch.empty_like(x, dtype=torch.bfloat16)),
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements(name: str) -> None:
    """Guards against a series or a quotient that is wrong for small, large or negative numbers, and against blocks that
    begin in the wrong row."""
    reference, compute = ELEMENTS[name]
    powers = torch.randint(-20, 6, (9, 150), generator=torch.Generator().manual_seed(1), device="cpu")
    x = draw(9, 150) * 2.0 ** powers.to(DEVICE)
    expected = reference(ReferenceOps(torch.bfloat16, DEVICE), x.clone())
    found = compute(x.clone())
    close(found, expected)
    if expected.dtype == torch.float32:
        wrong = (found - expected).abs() > 1e-6 * (x.abs() + x.flip(1).abs())  # small numbers keep their digits
        assert not wrong.any()
