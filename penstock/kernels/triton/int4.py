"""Products with int4 weights, whose scales belong to groups of K; activations are int8 (int4) or bfloat16 (int4-a16).

`groups`: a program owns COLUMNS outputs of ROWS rows of x, over all of K. Each group is a product of its own, which
begins at zero, is multiplied by the group's scale and added, in ascending order; leaves are added as in products.py.

A word of 16 bits holds one element of each of four neighbouring groups, the first group's in the lowest bits. So a
group's operand comes from one shift of words in place, and is never loaded from bytes: the operands of mma.sync that
are computed from bytes have their K in another order.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.configurations import tile
from penstock.kernels.triton.elements import activate, mma
from penstock.kernels.triton.launch import launch
from penstock.kernels.triton.packed import TritonLinear
from penstock.kernels.triton.products import add_leaf, finish, leaf_value
from penstock.kernels.triton.quantize import Operand


@triton.jit
def group(words, INDEX: tl.constexpr, INTEGER: tl.constexpr):
    """Take the values of one of the four groups of words int16: -8 .. 7, int8 or bfloat16."""
    values = (words << (12 - 4 * INDEX)).to(tl.int16, bitcast=True) >> 12
    if INTEGER:
        return values.to(tl.int8)
    else:
        return values.to(tl.float32).to(tl.bfloat16)


@triton.jit
def quad_scales(w_scales, quad, quads, rn, N):
    """Read the scales of the four groups of a word, each [columns]: of none beyond the last word."""
    at, inside = w_scales + quad * 4 * N + rn, (rn < N) & (quad < quads)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    third = tl.load(at + 2 * N, mask=inside, other=0.0).to(tl.float32)
    fourth = tl.load(at + 3 * N, mask=inside, other=0.0).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def group_outputs(
    x_rows, is_row, w, w_scales, bias, scales, starts, rn, M, N, length, quads,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LEAVES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute outputs rn of the rows of x at x_rows: [COLUMNS, ROWS] float32."""
    lane, is_column = tl.arange(0, SIZE), (rn < N)[:, None]
    w_rows = w + rn.to(tl.int64)[:, None] * (LEAVES * quads * SIZE) + lane[None, :]
    kind: tl.constexpr = tl.float32 if scales is None else tl.int32
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    one, two, four = total, total, total
    first, second, third, fourth = quad_scales(w_scales, 0, LEAVES * quads, rn, N)
    for quad in range(0, LEAVES * quads):
        leaf, within = quad // quads, quad % quads * (4 * SIZE) + lane
        start, end = leaf * length, leaf * length + length
        if starts is not None:
            start, end = tl.load(starts + leaf), tl.load(starts + leaf + 1)
        words = tl.load(w_rows + quad * SIZE, mask=is_column, other=0, eviction_policy="evict_first")
        scale = first, second, third, fourth
        # read a step ahead: these loads are not asynchronous, and every product would wait for its own
        first, second, third, fourth = quad_scales(w_scales, quad + 1, LEAVES * quads, rn, N)
        for index in tl.static_range(4):
            k = start + within + index * SIZE
            xt = tl.load(x_rows[None, :] + k[:, None], mask=is_row[None, :] & (k < end)[:, None], other=0)
            values = group(words, index, scales is not None)
            part = mma(values, xt.to(values.dtype), tl.zeros([COLUMNS, ROWS], kind)).to(tl.float32)
            total = total + part * scale[index][:, None]
        if (quad + 1) % quads == 0:
            value = leaf_value(total, scales, is_row, leaf, M, ROWS, 1)
            one, two, four = add_leaf(leaf, value, one, two, four)
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
    if LEAVES == 1:
        value = one
    elif LEAVES == 2:
        value = two
    else:
        value = four
    return activate(finish(value, rn, None, bias, N, 1), ACTIVATION)


@triton.jit(do_not_specialize=["M"])
def groups(
    x, w, w_scales, bias, x_scales, starts, out, M, N, K, length, quads, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LEAVES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    rn = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rm = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    scales = None if x_scales is None else x_scales + rm
    value = group_outputs(
        x + rm.to(tl.int64) * K, rm < M, w, w_scales, bias, scales, starts, rn, M, N, length, quads,
        ROWS, COLUMNS, SIZE, LEAVES, ACTIVATION,
    )  # fmt: skip
    to = out + rm.to(tl.int64)[None, :] * out_stride + rn[:, None]
    tl.store(to, value.to(out.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


def product(x: Operand, weight: TritonLinear, out: torch.Tensor, *, activation: str = "") -> torch.Tensor:
    """Compute a product with an int4 weight into out, of any float type and with rows of any stride."""
    (columns, depth), found = weight.shape, tile("int4", x.rows, weight.shape[0])
    arguments = x.values, weight.values, weight.scales, weight.bias, x.scales, weight.starts, out
    launch(
        groups,
        (triton.cdiv(columns, found.columns), triton.cdiv(x.rows, found.rows)),
        *arguments,
        x.rows,
        columns,
        depth,
        weight.length,
        weight.leaf_quads,
        out.stride(0),
        ROWS=found.rows,
        COLUMNS=found.columns,
        SIZE=weight.group_size,
        LEAVES=weight.leaves,
        ACTIVATION=activation,
        warps=found.warps,
        stages=found.stages,
    )
    return out
