"""int8 and int4 weights: the specification of the stored values.

Everything is float32, and each operation is rounded separately, so that every implementation finds the same integers
and scales.

## int8, one scale per output channel

    scale = absmax / 127        value = w * (127 / absmax), rounded to the nearest, ties to even

A row whose absmax is below SMALLEST counts as zero, because the quotient 127 / absmax could overflow.

Error bound: |w - scale * value| <= scale * (1/2 + 2^-15). Half a step is the rounding error; the rest is from the
float32 operations, each at most 2^-24 of a number up to 127. In a row that counts as zero the error is at most
SMALLEST.

## int4 in groups of K, one bfloat16 scale per group

    value = w * (1 / scale), clamped to -8 .. 7, rounded to the nearest, ties to even

Several scales are tried for a group. The one with the smallest sum of squared errors is taken, and the first of several
with the same sum. For each factor of SHRINK, in this order, they are

    absmax * (factor / 7)          the range -7 .. 7 on both sides
    extreme * (-factor / 8)        the whole range: the value of greatest absolute value becomes -8

each rounded to bfloat16 before it is used. The factors below 1 clip the extremes in favour of all other values. The
extreme is absmax if the group has a value of absmax, else -absmax.

The squared errors are added in LANES sums: element i of a group goes into sum i % LANES, in ascending order. Then the
upper half of the sums is added to the lower half, until one sum is left. A group whose greatest absolute value is below
SMALLEST counts as zero.

A group never crosses a leaf of K (kernels/ops.py): each leaf begins a new group, and its last group may be short.

Error bound: the first scale tried is absmax / 7 and clips nothing, so a group's root mean square error is at most
half a step of that scale: absmax / 14 * (1 + 2^-7), where the factor allows for the rounding of the scale. In a group
that counts as zero the error is at most SMALLEST.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

SMALLEST = 2.0**-100
MAGNITUDE_LIMIT = 2.0**100  # of weights: from it on, a scale times a sum of integers could overflow float32
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # factors of int4 scales
LANES = 16  # sums of int4's squared errors


def check_quantisable(weight: Tensor) -> None:
    """Raise ValueError if a weight is not finite, or its absolute value is MAGNITUDE_LIMIT or more."""
    if not (weight.abs() < MAGNITUDE_LIMIT).all():
        raise ValueError("a weight that is not finite, or as great as 2^100, cannot be quantised")


def quantize_int8(weight: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] float32: values [N, K] int8 in -127 .. 127, scales [N] float32.

    greatest: [N, 1] float32, the largest absolute values of the rows, if these are parts of rows.

    Raises:
        ValueError: as in check_quantisable.
    """
    check_quantisable(weight)
    if greatest is None:
        greatest = weight.abs().amax(dim=1, keepdim=True) if weight.shape[1] else weight.new_zeros(len(weight), 1)
    present = greatest >= SMALLEST
    steps = torch.full_like(greatest, 127)  # torch computes number / tensor with a reciprocal
    scales = torch.where(present, greatest / steps, 0.0)
    inverse = torch.where(present, steps / greatest, 0.0)
    return (weight * inverse).round().to(torch.int8), scales[:, 0]


def dequantize_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply values [N, K] int8 by scales [N]: [N, K] float32."""
    return values.float() * scales[:, None]


def leaf_groups(k: int, group_size: int, leaf_ends: Sequence[int] = ()) -> list[tuple[int, int]]:
    """List the first and past-the-last element of every group of an axis of k elements."""
    ends = [0, *(leaf_ends or (k,))]
    return [
        (start, min(start + group_size, end))
        for begin, end in pairwise(ends)
        for start in range(begin, end, group_size)
    ]


def quantize_int4(weight: Tensor, group_size: int, leaf_ends: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] float32: values [N, K] int8 in -8 .. 7, scales [N, groups] float32, exact in bfloat16.

    Raises:
        ValueError: as in check_quantisable.
    """
    check_quantisable(weight)
    rows, k = weight.shape
    groups = leaf_groups(k, group_size, leaf_ends)
    wide = weight.new_zeros(rows, len(groups), group_size)
    for index, (start, end) in enumerate(groups):
        wide[:, index, : end - start] = weight[:, start:end]
    scales = _best_scales(wide)
    wide = _round(wide, scales).to(torch.int8)
    values = torch.empty_like(weight, dtype=torch.int8)
    for index, (start, end) in enumerate(groups):
        values[:, start:end] = wide[:, index, : end - start]
    return values, scales[:, :, 0]


def dequantize_int4(values: Tensor, scales: Tensor, group_size: int, leaf_ends: Sequence[int] = ()) -> Tensor:
    """Multiply values [N, K] int8 by scales [N, groups]: [N, K] float32."""
    result = values.float()
    for index, (start, end) in enumerate(leaf_groups(values.shape[1], group_size, leaf_ends)):
        result[:, start:end] *= scales[:, index, None]
    return result


def _best_scales(wide: Tensor) -> Tensor:
    """Choose the scales [N, groups, 1] of wide [N, groups, group_size], where short groups are padded with zeros."""
    greatest = wide.abs().amax(dim=2, keepdim=True)
    extreme = torch.where(wide.amax(dim=2, keepdim=True) == greatest, greatest, -greatest)
    best, least = torch.zeros_like(greatest), torch.zeros_like(greatest)
    candidates = [pair for factor in SHRINK for pair in ((greatest, factor / 7), (extreme, -factor / 8))]
    for index, (base, multiple) in enumerate(candidates):
        scale = (base * torch.tensor(multiple, dtype=torch.float32)).bfloat16().float()
        error = _squared_error(wide, scale)
        better = error < least if index else torch.ones_like(error, dtype=torch.bool)
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return torch.where(greatest >= SMALLEST, best, 0.0)


def _round(wide: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale != 0, torch.ones_like(scale) / scale, 0.0)
    return (wide * inverse).clamp(-8, 7).round()


def _squared_error(wide: Tensor, scale: Tensor) -> Tensor:
    """Sum the squared errors over each group, [N, groups, 1], in the order that the module docstring specifies."""
    error = wide - _round(wide, scale) * scale
    squares = (error * error).view(*wide.shape[:2], -1, LANES)
    total: Tensor = squares[:, :, 0]
    for index in range(1, squares.shape[2]):
        total = total + squares[:, :, index]
    while (half := total.shape[2] // 2) > 0:
        total = total[:, :, :half] + total[:, :, half:]
    return total
