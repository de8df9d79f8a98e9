"""Operations in which every element is computed by itself.

`look_up`: a program owns a row of the result, and copies it from a table.
`change`: a program owns BLOCK neighbouring elements, in all rows of the result.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.ops import XieluCurve
from penstock.kernels.triton.elements import activate, divide, gate, sigmoid, tanh
from penstock.kernels.triton.launch import launch

BLOCK = 1024


@triton.jit
def look_up(ids, table, out, scale, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(table + tl.load(ids + row) * N + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, values * scale, mask=at < N)


@triton.jit
def expm1(x):
    """Compute e^x - 1: a series near 0, where the difference would cancel."""
    series = 1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.0083333338 + x * 0.0013888889))))
    return tl.where(tl.abs(x) < 0.25, x * series, tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=["count", "columns"])
def change(
    x, other, gates, out, count, columns, a, b, c, d,
    BLOCK: tl.constexpr, OPERATION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute out from x and `other` element by element; a to d are numbers that the operation needs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    columns = columns.to(tl.int64)
    if OPERATION == "gate":  # rows of x are gates, then up
        row, column = at // columns, at % columns
        here = x + row * 2 * columns + column
        y = gate(tl.load(here, mask=inside), tl.load(here + columns, mask=inside), ACTIVATION)
    else:
        y = tl.load(x + at, mask=inside).to(tl.float32)
    if OPERATION == "activate":
        y = activate(y, ACTIVATION)
    elif OPERATION == "add":
        y = y + tl.load(other + at, mask=inside)
    elif OPERATION == "add gated":
        y = y + sigmoid(tl.load(gates + at // columns, mask=inside)) * tl.load(other + at, mask=inside)
    elif OPERATION == "scale":
        y = y * a
    elif OPERATION == "softcap":
        y = tanh(divide(y, a)) * a
    elif OPERATION == "xielu":
        below = expm1(tl.minimum(y, d, propagate_nan=tl.PropagateNan.ALL)) - y
        y = tl.where(y > 0.0, a * (y * y), b * below) + c * y
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def add_shares(
    parts, scales, bias, out, count, columns,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts: [PARTS, rows, columns]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    own = parts + at
    y = tl.load(own, mask=inside, other=0.0) + tl.load(own + count, mask=inside, other=0.0)
    if PARTS > 2:
        own += 2 * count
        y = y + (tl.load(own, mask=inside, other=0.0) + tl.load(own + count, mask=inside, other=0.0))
    if PARTS > 4:
        own += 2 * count
        z = tl.load(own, mask=inside, other=0.0) + tl.load(own + count, mask=inside, other=0.0)
        own += 2 * count
        y = y + (z + (tl.load(own, mask=inside, other=0.0) + tl.load(own + count, mask=inside, other=0.0)))
    if scales is not None:
        y = y * tl.load(scales + at % columns, mask=inside, other=0.0)
    if bias is not None:
        y = y + tl.load(bias + at % columns, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)


def add_parts(
    parts: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Add parts [2, 4 or 8, M, N] as a tree, multiply by scales [N], and add bias [N]."""
    count = out.numel()
    numbers = count, out.shape[1]
    options = {"PARTS": len(parts), "BLOCK": BLOCK, "warps": 4}
    launch(add_shares, (triton.cdiv(count, BLOCK),), parts, scales, bias, out, *numbers, **options)
    return out


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
    """Look up rows of a table."""
    columns = table.shape[1]
    grid = len(ids), triton.cdiv(columns, BLOCK)
    launch(look_up, grid, ids, table, out, scale, columns, BLOCK=BLOCK, warps=4)
    return out


def apply(
    operation: str,
    x: torch.Tensor,
    out: torch.Tensor,
    *numbers: float,
    other: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """Compute every element of out, which may be x: round, activate, gate, add, add gated, scale, softcap or xielu."""
    count, four = out.numel(), (*numbers, 0.0, 0.0, 0.0, 0.0)[:4]
    arguments = x, other, gates, out, count, out.shape[-1], *four
    grid = (triton.cdiv(count, BLOCK),)
    launch(change, grid, *arguments, BLOCK=BLOCK, OPERATION=operation, ACTIVATION=activation, warps=4)
    return out


def xielu(x: torch.Tensor, curve: XieluCurve, out: torch.Tensor) -> torch.Tensor:
    """Compute xIELU of x into out."""
    return apply("xielu", x, out, curve.convex, curve.concave, curve.linear, curve.bound)
