"""Rows of activations as int8, for products with quantised weights.

`quantize_rows`: a program owns one row of x in one leaf: its scale, and its SLICES rows of int8. Integers and scales
are those of reference/quantized_kv.split: only maxima and single roundings, so they depend on no order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.elements import divide, round_to_integer
from penstock.kernels.triton.launch import ANEW, Scratch, launch
from penstock.kernels.triton.packed import TritonLinear

SLICE_ROWS = {1: 1, 2: 2, 3: 4}  # rows of int8 per row of activations; a fourth is zeros


@dataclass(frozen=True, slots=True)
class Operand:
    """Rows of activations as a product reads them.

    Attributes:
        values: [rows * slices, K], in the model's type or int8.
        scales: [leaves, rows] float32 of int8 values, or None.
    """

    values: torch.Tensor
    rows: int
    slices: int = 1
    scales: torch.Tensor | None = None


@triton.jit(do_not_specialize=["M"])
def quantize_rows(
    x, starts, values, scales, M, K, length, BLOCK: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr
):
    row, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    if starts is not None:
        start = tl.load(starts + leaf)
        inside = at < tl.load(starts + leaf + 1) - start
    else:
        start = leaf * length
        inside = at < length
    elements = tl.load(x + row * K + start + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(elements)
    greatest = tl.max(size, axis=0)
    finite = tl.max(tl.where(size < float("inf"), 0, 1), axis=0) == 0
    usable = finite & (greatest >= 3.0092655e-36)  # 2^-118
    factor = divide(tl.full([], 127.0, tl.float32), tl.where(usable, greatest, 1.0))
    rest = tl.where(usable, elements * factor, 0.0)
    to = values + row * ROWS * K + start + at
    for index in tl.static_range(ROWS):
        if index < SLICES:
            rounded = round_to_integer(rest)
            tl.store(to + index * K, rounded.to(tl.int8), mask=inside)
            rest = (rest - rounded) * 254.0
        else:
            tl.store(to + index * K, tl.zeros([BLOCK], tl.int8), mask=inside)
    scale = divide(tl.where(usable, greatest, 0.0), tl.full([], 127.0, tl.float32))
    tl.store(scales + leaf.to(tl.int64) * M + row, tl.where(finite, scale, float("nan")))


def operand(x: torch.Tensor, weight: TritonLinear, scratch: Scratch = ANEW) -> Operand:
    """Prepare rows x [M, K] for a product with a weight."""
    rows, depth = x.shape
    if not weight.packing.activation_slices:
        return Operand(x, rows)
    slices = SLICE_ROWS[weight.packing.activation_slices]
    values = scratch.empty((rows * slices, depth), torch.int8, x.device)
    scales = scratch.empty((weight.leaves, rows), torch.float32, x.device)
    block = triton.next_power_of_2(weight.length)
    launch(
        quantize_rows,
        (rows, weight.leaves),
        x,
        weight.starts,
        values,
        scales,
        rows,
        depth,
        weight.length,
        BLOCK=block,
        SLICES=weight.packing.activation_slices,
        ROWS=slices,
        warps=4 if block <= 4096 else 8 if block <= 16384 else 16,
    )
    return Operand(values, rows, slices, scales)
