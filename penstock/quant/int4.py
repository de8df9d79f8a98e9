"""int4 weights in groups of K, one bfloat16 scale per group: the specification of the stored values.

    value = w * (1 / scale), clamped to -8 .. 7, rounded to the nearest, ties to even

Several scales are tried for a group. The one with the smallest sum of squared errors is taken, and the first of several
with the same sum. For each factor of SHRINK, in this order, they are

    absmax * (factor / 7)          the range -7 .. 7 on both sides
    extreme * (-factor / 8)        the whole range: the value of greatest absolute value becomes -8

each rounded to bfloat16 before it is used. The factors below 1 clip the extremes in favour of all other values. The
extreme is absmax if the group has a value of absmax, else -absmax.

Everything is float32, and each operation is rounded separately. The squared errors are added in LANES sums: element i
of a group goes into sum i % LANES, in ascending order. Then the upper half of the sums is added to the lower half,
until one sum is left. So every implementation finds the same scales. A group whose greatest absolute value is below
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

from penstock.quant.int8 import SMALLEST, check_quantisable

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
LANES = 16


def leaf_groups(k: int, group_size: int, leaf_ends: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the first and past-the-last element of every group of an axis of k elements."""
    ends = [0, *(leaf_ends or (k,))]
    return [
        (start, min(start + group_size, end))
        for begin, end in pairwise(ends)
        for start in range(begin, end, group_size)
    ]


def quantize_int4(weight: Tensor, group_size: int, leaf_ends: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] float32: values [N, K] int8 in -8 .. 7, scales [N, groups] float32, exact in bfloat16.

    Raises:
        ValueError: as in int8.check_quantisable.
    """
    check_quantisable(weight)
    rows, k = weight.shape
    groups = leaf_groups(k, group_size, leaf_ends)
    wide = weight.new_zeros(rows, len(groups), group_size)
    for index, (start, end) in enumerate(groups):
        wide[:, index, : end - start] = weight[:, start:end]
    scales = _best_scales(wide)
    wide = _round(wide, scales).to(torch.int8)
    values = torch.empty(weight.shape, dtype=torch.int8)
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
    """Return the scales [N, groups, 1] of wide [N, groups, group_size], where short groups are padded with zeros."""
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
    """Return the sum over each group, [N, groups, 1], in the order that the module docstring specifies."""
    error = wide - _round(wide, scale) * scale
    squares = (error * error).view(*wide.shape[:2], -1, LANES)
    total: Tensor = squares[:, :, 0]
    for index in range(1, squares.shape[2]):
        total = total + squares[:, :, index]
    while (half := total.shape[2] // 2) > 0:
        total = total[:, :, :half] + total[:, :, half:]
    return total
