"""Products with quantised weights, as native/products/products.h defines them, in plain float32.

Here both operands are quantised and scaled back before they are multiplied. The native kernels multiply integers and
scale the sums, so results differ by float32 rounding only.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.quant import int4, int8
from penstock.quant.scheme import Scheme

INT8_MAX = 127
SLICE_STEP = 254  # a slice's rounding error is at most half a unit, which the next one maps to -127 .. 127


def through_weight(weight: Tensor, scheme: Scheme, leaf_ends: Sequence[int]) -> Tensor:
    """Quantise a weight [N, K] float32 and scale it back."""
    if scheme.group_size is None:
        return int8.dequantize_int8(*int8.quantize_int8(weight))
    values, scales = int4.quantize_int4(weight, scheme.group_size, leaf_ends)
    return int4.dequantize_int4(values, scales, scheme.group_size, leaf_ends)


def through_activations(x: Tensor, scheme: Scheme, leaf_ends: Sequence[int]) -> Tensor:
    """Quantise activations [M, K] leaf by leaf and scale them back: [M, K] float32."""
    if not scheme.slices:
        return x.bfloat16().float()
    leaves = [x[:, start:end].float() for start, end in itertools.pairwise((0, *leaf_ends))]
    return torch.cat([_through_slices(leaf, scheme.slices) for leaf in leaves], dim=-1)


def _through_slices(x: Tensor, slices: int) -> Tensor:
    """Write one leaf [M, k] as a sum of int8 rows, and back. A row that is not finite becomes all NaN."""
    if not x.shape[-1]:
        return x
    greatest = x.abs().amax(dim=-1, keepdim=True)
    rest = torch.where(greatest > 0, x * (INT8_MAX / greatest), 0.0)
    total, unit = torch.zeros_like(x), 1.0
    for _ in range(slices):
        row = rest.round()
        total += row * unit
        rest, unit = (rest - row) * SLICE_STEP, unit / SLICE_STEP
    scale = torch.where(greatest.isfinite(), greatest / INT8_MAX, torch.nan)
    return total * scale
