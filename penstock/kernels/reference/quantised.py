"""Products with quantised weights, as native/products.h defines them, in plain float32.

A quantised product is the plain one of what the quantisers leave of both sides. The native kernels multiply integers
and scale the sums; here both sides are scaled back first, so results differ by float32 rounding and by nothing else.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.quant import int4, int8
from penstock.quant.scheme import Scheme

INT8_MAX = 127
SLICE_STEP = 254  # a slice's rounding error is at most half a unit, which the next one spreads over -127 .. 127


def through_weight(weight: Tensor, scheme: Scheme, leaf_ends: Sequence[int]) -> Tensor:
    """What quantising leaves of a weight [N, K] float32: [N, K] float32."""
    if scheme.group_size is None:
        return int8.dequantize_int8(*int8.quantize_int8(weight))
    values, scales = int4.quantize_int4(weight, scheme.group_size, leaf_ends)
    return int4.dequantize_int4(values, scales, scheme.group_size, leaf_ends)


def through_activations(x: Tensor, scheme: Scheme, leaf_ends: Sequence[int]) -> Tensor:
    """What quantising leaves of activations [M, K], leaf by leaf: [M, K] float32."""
    if not scheme.slices:
        return x.bfloat16().float()
    leaves = [x[:, start:end].float() for start, end in itertools.pairwise((0, *leaf_ends))]
    return torch.cat([_through_slices(leaf, scheme.slices) for leaf in leaves], dim=-1)


def _through_slices(x: Tensor, slices: int) -> Tensor:
    """One leaf [M, k] as a sum of int8 rows and back. A row that is not finite becomes NaN, all of it."""
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
