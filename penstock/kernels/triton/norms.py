"""Norms of rows.

`norm_rows`: a program owns a row: it adds a branch to it, if there is one, and norms the sum.
`norm_some_heads`: a program owns one head of a row.

A sum over a row has the order that Triton chooses for its length, so these kernels have one configuration, which
follows the length alone.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.elements import divide
from penstock.kernels.triton.launch import launch


@triton.jit
def normed(value, weight, bias, at, inside, N, eps, CENTRED: tl.constexpr):
    """Norm a row whose elements beyond N are zeros, as layer_norm (CENTRED) or rms_norm."""
    if CENTRED:
        value = tl.where(inside, value - divide(tl.sum(value, axis=0), N.to(tl.float32)), 0.0)
    mean = divide(tl.sum(value * value, axis=0), N.to(tl.float32))
    result = divide(value, tl.sqrt_rn(mean + eps)) * tl.load(weight + at, mask=inside, other=0.0)
    if bias is not None:
        result = result + tl.load(bias + at, mask=inside, other=0.0)
    return result


@triton.jit(do_not_specialize=["N"])
def norm_rows(x, branch, weight, bias, out, N, eps, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < N
    here = tl.program_id(0).to(tl.int64) * N + at
    value = tl.load(x + here, mask=inside, other=0.0)
    if branch is not None:
        value = value + tl.load(branch + here, mask=inside, other=0.0)
        tl.store(x + here, value, mask=inside)
    result = normed(value, weight, bias, at, inside, N, eps, CENTRED)
    tl.store(out + here, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def norm_some_heads(x, weight, N, eps, stride, BLOCK: tl.constexpr):
    head, at = tl.program_id(1), tl.arange(0, BLOCK)
    inside = at < N
    here = x + tl.program_id(0).to(tl.int64) * stride + head * N + at
    value = tl.load(here, mask=inside, other=0.0)
    tl.store(here, normed(value, weight + head * N, None, at, inside, N, eps, True), mask=inside)


def row_warps(block: int) -> int:
    """Return the warps of a program that owns a row of so many elements. They decide the order of its sums."""
    return min(16, max(1, block // 512))


def norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    *,
    centred: bool,
) -> torch.Tensor:
    """Add a branch into x [T, hidden] float32, if there is one, and compute the norm of the sum into out."""
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    arguments = x, branch, weight, bias, out, hidden, eps
    launch(norm_rows, (rows,), *arguments, BLOCK=block, CENTRED=centred, warps=row_warps(block))
    return out


def norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Replace the first heads of each row of x by their layer norms, in place."""
    heads, head_dim = weight.shape
    block = triton.next_power_of_2(head_dim)
    grid = len(x), heads
    launch(norm_some_heads, grid, x, weight, head_dim, eps, x.stride(0), BLOCK=block, warps=row_warps(block))
    return x
