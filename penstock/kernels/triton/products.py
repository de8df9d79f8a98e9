"""Products y = x W^T of float and int8 weights [N, K], as checkpoints store them.

`few_rows`: a program owns COLUMNS outputs of ROWS rows of x, over all of K. The weight is the left operand of the
tensor cores, so that few rows cost what they need. It takes every shape.
`many_rows`: a program owns every so-manieth tile of ROWS x COLUMNS outputs, over all of K. Both operands are read as
blocks through descriptors (by the tensor memory accelerator, where there is one).

Both give the same bits: every sum is one chain over ascending K per leaf, and leaves are added as the tree
((0+1)+(2+3))+((4+5)+(6+7)). The bias is added, and the activation applied, by the program that owns the outputs.

int8: x is rows of int8 (quantize.py), SLICES of them for a row of activations. The sums of a leaf are exact integers,
and each further step is rounded: (d0 + d1/254 + d2/254^2) * scale of the row in the leaf, the tree, the column's scale.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.triton.configurations import Tile, tile
from penstock.kernels.triton.elements import activate, gate, mma
from penstock.kernels.triton.launch import ANEW, Scratch, launch, processors
from penstock.kernels.triton.packed import TritonLinear
from penstock.kernels.triton.quantize import Operand


@triton.jit
def leaf_value(sums, scales, is_token, leaf, M, ROWS: tl.constexpr, SLICES: tl.constexpr):
    """Convert the sums of a leaf, [columns, ROWS * SLICES], to float32 [columns, ROWS].

    scales: where the scales of the rows in the first leaf are; those of the next leaf follow M numbers later.
    """
    value = sums.to(tl.float32)
    if SLICES == 2:
        first, second = value.reshape(sums.shape[0], ROWS, 2).split()
        value = first + second * (1.0 / 254.0)
    elif SLICES == 4:  # three, and one of zeros
        even, odd = value.reshape(sums.shape[0], ROWS, 2, 2).split()
        first, third = even.split()
        second, _ = odd.split()
        value = (first + second * (1.0 / 254.0)) + third * (1.0 / 64516.0)
    if scales is not None:
        value = value * tl.load(scales + leaf * M, mask=is_token, other=0.0)[None, :]
    return value


@triton.jit
def leaf_rows(sums, scales, is_token, leaf, M, ROWS: tl.constexpr, SLICES: tl.constexpr):
    """Do the same for [ROWS * SLICES, columns]."""
    if scales is None:
        value = sums
    elif SLICES == 1:
        value = sums.to(tl.float32) * tl.load(scales + leaf * M, mask=is_token, other=0.0)[:, None]
    else:
        value = leaf_value(sums.T, scales, is_token, leaf, M, ROWS, SLICES).T
    return value


@triton.jit
def add_leaf(leaf, value, one, two, four):
    """Count one more leaf in binary: `one`, `two` and `four` are the sums of so many leaves that wait for others."""
    if leaf % 2 == 0:
        one = value
    elif leaf % 4 == 1:
        two = one + value
    elif leaf % 8 == 3:
        four = two + (one + value)
    else:
        four = four + (two + (one + value))
    return one, two, four


@triton.jit
def finish(value, at, w_scales, bias, count, axis: tl.constexpr):
    """Multiply by the scales of columns, and add the bias. at: the columns; axis: the dimension that a vector lacks."""
    if w_scales is not None:
        value = value * tl.expand_dims(tl.load(w_scales + at, mask=at < count, other=0.0), axis)
    if bias is not None:
        value = value + tl.expand_dims(tl.load(bias + at, mask=at < count, other=0.0), axis)
    return value


@triton.jit
def weight_tile(at, is_column, inside, WHOLE: tl.constexpr):
    if WHOLE:
        values = tl.load(at, mask=is_column, other=0, eviction_policy="evict_first")
    else:
        values = tl.load(at, mask=is_column & inside, other=0)
    return values


@triton.jit
def outputs(
    x_rows, is_row, w, w_scales, bias, scales, is_token, starts, rn, M, N, K, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr, WHOLE: tl.constexpr,
    SLICES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute outputs rn of the rows of x at x_rows: [COLUMNS, ROWS] float32."""
    depth = tl.arange(0, DEPTH)
    w_rows = w + rn.to(tl.int64)[:, None] * K
    up_rows = w + (rn + N).to(tl.int64)[:, None] * K  # of a gated weight
    is_row, is_column = is_row[None, :], (rn < N)[:, None]
    kind: tl.constexpr = tl.float32 if scales is None else tl.int32
    sums = tl.zeros([COLUMNS, ROWS * SLICES], kind)
    up = tl.zeros([COLUMNS, ROWS * SLICES], kind)
    one = tl.zeros([COLUMNS, ROWS], tl.float32)
    two, four = one, one
    steps = tl.cdiv(length, DEPTH)
    for step in range(0, LEAVES * steps):
        leaf, within = step // steps, step % steps * DEPTH + depth
        if starts is not None:
            k = tl.load(starts + leaf) + within
            inside = k < tl.load(starts + leaf + 1)
        else:
            k = leaf * length + within
            inside = within < length
        xt = tl.load(x_rows[None, :] + k[:, None], mask=is_row if WHOLE else is_row & inside[:, None], other=0)
        sums = mma(weight_tile(w_rows + k[None, :], is_column, inside[None, :], WHOLE), xt, sums)
        if GATED:
            up = mma(weight_tile(up_rows + k[None, :], is_column, inside[None, :], WHOLE), xt, up)
        if LEAVES > 1:
            if (step + 1) % steps == 0:
                value = leaf_value(sums, scales, is_token, leaf, M, ROWS, SLICES)
                one, two, four = add_leaf(leaf, value, one, two, four)
                sums = tl.zeros([COLUMNS, ROWS * SLICES], kind)
    if LEAVES == 1:
        value = leaf_value(sums, scales, is_token, 0, M, ROWS, SLICES)
    elif LEAVES == 2:
        value = two
    else:
        value = four
    value = finish(value, rn, w_scales, bias, N, 1)
    if GATED:
        upper = leaf_value(up, scales, is_token, 0, M, ROWS, SLICES)
        return gate(value, finish(upper, rn + N, w_scales, bias, 2 * N, 1), ACTIVATION)
    else:
        return activate(value, ACTIVATION)


@triton.jit(do_not_specialize=["M"])
def few_rows(
    x, w, w_scales, bias, x_scales, starts, out, M, N, K, length, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr, WHOLE: tl.constexpr,
    SLICES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    rn, m0 = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS
    operand, rm = m0 * SLICES + tl.arange(0, ROWS * SLICES), m0 + tl.arange(0, ROWS)
    scales = None if x_scales is None else x_scales + rm
    value = outputs(
        x + operand.to(tl.int64) * K, operand < M * SLICES, w, w_scales, bias, scales, rm < M, starts, rn, M, N, K,
        length, ROWS, COLUMNS, DEPTH, LEAVES, WHOLE, SLICES, GATED, ACTIVATION,
    )  # fmt: skip
    to = out + rm.to(tl.int64)[None, :] * out_stride + rn[:, None]
    tl.store(to, value.to(out.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


@triton.jit
def leaf_sums(
    x, w, row, column, start, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr
):
    """Multiply a tile over one leaf, which begins at `start`."""
    sums = tl.zeros([ROWS, COLUMNS], KIND)
    for step in range(steps):
        k = start + step * DEPTH
        sums = mma(x.load([row, k]), w.load([column, k]).T, sums)
    return sums


@triton.jit(do_not_specialize=["M"])
def many_rows(
    x, w, w_scales, bias, x_scales, scratch, out, M, N, length, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // SLICES
    GROUP: tl.constexpr = 8  # tiles of rows that share the columns in the L2
    kind: tl.constexpr = tl.float32 if x_scales is None else tl.int32
    tiles_m, tiles_n = tl.cdiv(M, TOKENS), tl.cdiv(N, COLUMNS)
    per_group = GROUP * tiles_n
    steps = tl.cdiv(length, DEPTH)
    own = tl.program_id(0).to(tl.int64) * 2 * TOKENS * COLUMNS
    own += tl.arange(0, TOKENS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first = index // per_group * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + index % size) * TOKENS
        n0 = (index % per_group) // size * COLUMNS
        if LEAVES == 1:
            sums = tl.zeros([ROWS, COLUMNS], kind)
            up = tl.zeros([ROWS, COLUMNS], kind)
            for step in range(steps):
                xt = x.load([m0 * SLICES, step * DEPTH])
                sums = mma(xt, w.load([n0, step * DEPTH]).T, sums)
                if GATED:
                    up = mma(xt, w.load([N + n0, step * DEPTH]).T, up)
            rm = m0 + tl.arange(0, TOKENS)
            scales = None if x_scales is None else x_scales + rm
            value = leaf_rows(sums, scales, rm < M, 0, M, TOKENS, SLICES)
        else:  # the sum of two leaves stays in registers, those of more in memory
            rm = m0 + tl.arange(0, TOKENS)
            scales = None if x_scales is None else x_scales + rm
            value = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for pair in range(LEAVES // 2):
                sums = leaf_sums(x, w, m0 * SLICES, n0, 2 * pair * length, steps, ROWS, COLUMNS, DEPTH, kind)
                even = leaf_rows(sums, scales, rm < M, 2 * pair, M, TOKENS, SLICES)
                sums = leaf_sums(x, w, m0 * SLICES, n0, (2 * pair + 1) * length, steps, ROWS, COLUMNS, DEPTH, kind)
                value = even + leaf_rows(sums, scales, rm < M, 2 * pair + 1, M, TOKENS, SLICES)
                if pair % 2 == 1:
                    value = tl.load(scratch + own) + value
                if pair == 3:
                    value = tl.load(scratch + own + TOKENS * COLUMNS) + value
                if pair + 1 < LEAVES // 2:
                    tl.store(scratch + own + pair % 2 * TOKENS * COLUMNS, value)
        rn = n0 + tl.arange(0, COLUMNS)
        value = finish(value, rn, w_scales, bias, N, 0)
        if GATED:
            upper = leaf_rows(up, scales, rm < M, 0, M, TOKENS, SLICES)
            value = gate(value, finish(upper, rn + N, w_scales, bias, 2 * N, 0), ACTIVATION)
        else:
            value = activate(value, ACTIVATION)
        to = out + rm.to(tl.int64)[:, None] * out_stride + rn[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


def product(
    x: Operand,
    weight: TritonLinear,
    out: torch.Tensor,
    scratch: Scratch = ANEW,
    *,
    activation: str = "",
    gated: bool = False,
) -> torch.Tensor:
    """Compute a product with a float or int8 weight into out, of any float type and with rows of any stride.

    gated: the weight is gate rows, then up rows, in one leaf, and `out` is activation(gate) * up.
    """
    columns, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    name, rows = "product" + kind_of(weight, gated), x.rows * x.slices
    found = tile(name, rows, columns, blocks=True)
    if found.blocks and _is_aligned(weight, found):
        _many_rows(x, weight, out, found, columns, activation, gated, scratch)
        return out
    found = tile(name, rows, columns)
    tokens = found.rows // x.slices
    launch(
        few_rows,
        (triton.cdiv(columns, found.columns), triton.cdiv(x.rows, tokens)),
        x.values,
        weight.values,
        weight.scales,
        weight.bias,
        x.scales,
        weight.starts,
        out,
        x.rows,
        columns,
        depth,
        weight.length,
        out.stride(0),
        ROWS=tokens,
        COLUMNS=found.columns,
        DEPTH=found.depth,
        LEAVES=weight.leaves,
        WHOLE=weight.starts is None and weight.length % found.depth == 0,
        SLICES=x.slices,
        GATED=gated,
        ACTIVATION=activation,
        warps=found.warps,
        stages=found.stages,
    )
    return out


def _many_rows(
    x: Operand,
    weight: TritonLinear,
    out: torch.Tensor,
    found: Tile,
    columns: int,
    activation: str,
    gated: bool,
    scratch: Scratch,
) -> None:
    tokens = found.rows // x.slices
    programs = min(processors(), triton.cdiv(x.rows, tokens) * triton.cdiv(columns, found.columns))
    sums = None
    if weight.leaves > 1:
        sums = scratch.empty((programs * 2 * tokens * found.columns,), torch.float32, out.device)
    launch(
        many_rows,
        (programs,),
        TensorDescriptor.from_tensor(x.values, [found.rows, found.depth]),
        TensorDescriptor.from_tensor(weight.values, [found.columns, found.depth]),
        weight.scales,
        weight.bias,
        x.scales,
        sums,
        out,
        x.rows,
        columns,
        weight.length,
        out.stride(0),
        ROWS=found.rows,
        COLUMNS=found.columns,
        DEPTH=found.depth,
        LEAVES=weight.leaves,
        SLICES=x.slices,
        GATED=gated,
        ACTIVATION=activation,
        warps=found.warps,
        stages=found.stages,
    )


def kind_of(weight: TritonLinear, gated: bool) -> str:
    """Return what a table of configurations calls the product, after the kernel's name."""
    if weight.scales is not None:
        return " int8 gated" if gated else " int8"
    if weight.values.dtype == torch.float32:
        return " float32"
    return " leaves" if weight.leaves > 1 else " gated" if gated else ""


def _is_aligned(weight: TritonLinear, found: Tile) -> bool:
    """Tell whether the rows of a weight can be read as blocks, each within one leaf."""
    if weight.values.dtype == torch.float32 or weight.starts is not None:
        return False
    fits = weight.shape[1] * weight.values.element_size() % 16 == 0  # what descriptors need
    return fits and (weight.leaves == 1 or weight.length % found.depth == 0)
