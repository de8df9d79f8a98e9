"""Products with int4 weights, whose scales belong to groups of K; activations are int8 (int4) or bfloat16 (int4-a16).

`groups`: a program owns COLUMNS outputs of ROWS rows of x, over all of K. Each group is a product of its own, which
begins at zero, is multiplied by the group's scale and added, in ascending order; leaves are added as in products.py.

A word of 16 bits holds one element of each of four neighbouring groups, the first group's in the lowest bits. So a
group's operand comes from words in place, and is never loaded from bytes: the operands of mma.sync that are computed
from bytes have their K in another order. Unpacking is written in PTX, because what Triton makes of shifts takes six
instructions per value, longer than reading it. int8 operands are 16 times the values, and scales a sixteenth, which
changes no bit.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.configurations import tile
from penstock.kernels.triton.elements import activate, mma
from penstock.kernels.triton.launch import INTERPRETED as INTERPRETED_HERE
from penstock.kernels.triton.launch import launch
from penstock.kernels.triton.packed import TritonLinear
from penstock.kernels.triton.products import add_leaf, finish, leaf_value
from penstock.kernels.triton.quantize import Operand

INTERPRETED = tl.constexpr(INTERPRETED_HERE)


@triton.jit
def sixteenfold(words):
    """Take the four groups of words int16, each value times 16 as int8, by two instructions for a group of four."""
    if INTERPRETED:
        wide = words.to(tl.int32)
        values = (
            (wide << 4).to(tl.int8),
            (wide & 240).to(tl.int8),
            (wide >> 4 & 240).to(tl.int8),
            (wide >> 8 & 240).to(tl.int8),
        )
    else:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, shifted;
            prmt.b32 low, $4, $5, 0x6420;
            prmt.b32 high, $4, $5, 0x7531;
            shl.b32 shifted, low, 4;
            and.b32 $0, shifted, 0xF0F0F0F0;
            and.b32 $1, low, 0xF0F0F0F0;
            shl.b32 shifted, high, 4;
            and.b32 $2, shifted, 0xF0F0F0F0;
            and.b32 $3, high, 0xF0F0F0F0;
            }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return values


@triton.jit
def exact(words):
    """Take the four groups of words int16 as bfloat16. 0x4300 | u is 128 + u; with the sign's bit flipped, u is the
    value and 8 more."""
    if INTERPRETED:
        values = (
            ((words << 12).to(tl.int16, bitcast=True) >> 12).to(tl.float32).to(tl.bfloat16),
            ((words << 8).to(tl.int16, bitcast=True) >> 12).to(tl.float32).to(tl.bfloat16),
            ((words << 4).to(tl.int16, bitcast=True) >> 12).to(tl.float32).to(tl.bfloat16),
            (words >> 12).to(tl.float32).to(tl.bfloat16),
        )
    else:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 part, shifted, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            lop3.b32 part, $4, 0x000F000F, 0x43084308, 0x6A;
            fma.rn.bf16x2 $0, part, one, less;
            shr.b32 shifted, $4, 4;
            lop3.b32 part, shifted, 0x000F000F, 0x43084308, 0x6A;
            fma.rn.bf16x2 $1, part, one, less;
            shr.b32 shifted, $4, 8;
            lop3.b32 part, shifted, 0x000F000F, 0x43084308, 0x6A;
            fma.rn.bf16x2 $2, part, one, less;
            shr.b32 shifted, $4, 12;
            lop3.b32 part, shifted, 0x000F000F, 0x43084308, 0x6A;
            fma.rn.bf16x2 $3, part, one, less;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return values


@triton.jit
def quad_scales(w_scales, quad, quads, rn, N, FACTOR: tl.constexpr):
    """Read the scales of the four groups of a word, each [columns], times FACTOR: of none beyond the last word."""
    at, inside = w_scales + quad * 4 * N + rn, (rn < N) & (quad < quads)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    third = tl.load(at + 2 * N, mask=inside, other=0.0).to(tl.float32)
    fourth = tl.load(at + 3 * N, mask=inside, other=0.0).to(tl.float32)
    return first * FACTOR, second * FACTOR, third * FACTOR, fourth * FACTOR


@triton.jit
def group_outputs(
    x_rows, is_row, w, w_scales, bias, scales, starts, rn, M, N, length, quads,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LEAVES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute outputs rn of the rows of x at x_rows: [COLUMNS, ROWS] float32."""
    lane, is_column = tl.arange(0, SIZE), (rn < N)[:, None]
    w_rows = w + rn.to(tl.int64)[:, None] * (LEAVES * quads * SIZE) + lane[None, :]
    kind: tl.constexpr = tl.float32 if scales is None else tl.int32
    factor: tl.constexpr = 1.0 if scales is None else 0.0625
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    one, two, four = total, total, total
    first, second, third, fourth = quad_scales(w_scales, 0, LEAVES * quads, rn, N, factor)
    for quad in range(0, LEAVES * quads):
        leaf, within = quad // quads, quad % quads * (4 * SIZE) + lane
        start, end = leaf * length, leaf * length + length
        if starts is not None:
            start, end = tl.load(starts + leaf), tl.load(starts + leaf + 1)
        words = tl.load(w_rows + quad * SIZE, mask=is_column, other=0, eviction_policy="evict_first")
        scale = first, second, third, fourth
        # read a step ahead: these loads are not asynchronous, and every product would wait for its own
        first, second, third, fourth = quad_scales(w_scales, quad + 1, LEAVES * quads, rn, N, factor)
        if scales is None:
            values = exact(words)
        else:
            values = sixteenfold(words)
        for index in tl.static_range(4):
            k = start + within + index * SIZE
            xt = tl.load(x_rows[None, :] + k[:, None], mask=is_row[None, :] & (k < end)[:, None], other=0)
            part = mma(values[index], xt.to(values[index].dtype), tl.zeros([COLUMNS, ROWS], kind)).to(tl.float32)
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


def name_of(weight: TritonLinear) -> str:
    """Return what a table of configurations calls the product."""
    return "int4" if weight.packing.activation_slices else "int4 a16"


def product(x: Operand, weight: TritonLinear, out: torch.Tensor, *, activation: str = "") -> torch.Tensor:
    """Compute a product with an int4 weight into out, of any float type and with rows of any stride."""
    (columns, depth), found = weight.shape, tile(name_of(weight), x.rows, weight.shape[0])
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
