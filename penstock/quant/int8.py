"""int8 weights, one scale per output channel: the specification of the stored values.

    scale = absmax / 127        value = w * (127 / absmax), rounded to the nearest, ties to even

Everything is float32, and each operation is rounded separately, so that every implementation finds the same integers. A
row whose absmax is below SMALLEST counts as zero, because the quotient 127 / absmax could overflow.

Error bound: |w - scale * value| <= scale * (1/2 + 2^-15). Half a step is the rounding error; the rest is from the
float32 operations, each at most 2^-24 of a number up to 127. In a row that counts as zero the error is at most
SMALLEST.
"""

import torch
from torch import Tensor

SMALLEST = 2.0**-100
MAGNITUDE_LIMIT = 2.0**100  # of weights: from it on, a scale times a sum of integers could overflow float32


def check_quantisable(weight: Tensor) -> None:
    """Raise ValueError if a weight is not finite, or its absolute value is MAGNITUDE_LIMIT or more."""
    if not (weight.abs() < MAGNITUDE_LIMIT).all():
        raise ValueError("a weight that is not finite, or as great as 2^100, cannot be quantised")


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] float32: values [N, K] int8 in -127 .. 127, scales [N] float32.

    Raises:
        ValueError: as in check_quantisable.
    """
    check_quantisable(weight)
    greatest = weight.abs().amax(dim=1, keepdim=True) if weight.shape[1] else weight.new_zeros(len(weight), 1)
    present = greatest >= SMALLEST
    steps = torch.full_like(greatest, 127)  # torch computes number / tensor with a reciprocal
    scales = torch.where(present, greatest / steps, 0.0)
    inverse = torch.where(present, steps / greatest, 0.0)
    return (weight * inverse).round().to(torch.int8), scales[:, 0]


def dequantize_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply values [N, K] int8 by scales [N]: [N, K] float32."""
    return values.float() * scales[:, None]
