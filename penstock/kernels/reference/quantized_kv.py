"""int8 keys and values, and the int8 rows that they are multiplied with: the specification of both.

A stored integer B, -127 .. 127, represents (B + offset) * scale (the antiquant parameters of Huawei's
IncreFlashAttention operator). There is one scale and offset per token and kv head, computed from that head's elements,
or one per channel (layer, kv head and element), read from a file. Keys and values each have their own. A scale for the
whole tensor is a scale per channel with equal numbers. Everything is float32, and each operation is rounded separately,
so that every implementation finds the same integers.

Per token, over a head's elements x:
    middle = (min x + max x) / 2      half = max(max x - middle, middle - min x)
    scale = half / 127                offset = middle / scale
    B = (x - middle) * (127 / half), rounded to the nearest, ties to even
If half is below SMALLEST, all B are 0, scale is |middle|, and offset is the sign of middle: 1, -1 or 0. If an element
is not finite, or its absolute value is MAGNITUDE_LIMIT or more, scale is NaN, and offset and all B are 0: rows that see
that token become NaN, and no other rows do.

Error bound: |x - (B + offset) * scale| <= scale * (1/2 + 2^-15) + |middle| * 2^-22. The first term is half a step of
rounding and its float32 error, the second the float32 error of a middle far from zero. If half is below SMALLEST, the
error is at most SMALLEST.

Per channel: B = x / scale - offset, clamped to -127 .. 127, rounded to the nearest, ties to even; NaN becomes 0. Scales
are finite and above zero. Error bound, for x that is not clamped: scale * (1/2 + 2^-15) + scale * |offset| * 2^-22.

Slices: a product with B is computed in integers. To that end, the other operand's row x (a query row, a row of
probabilities) becomes 1, 2 or 3 int8 rows, computed one after the other (the same operator's multi-step decomposition).
Where a is the row's greatest |x| and y = x * (127 / a), the slices are q0 = round(y), q1 = round((y - q0) * 254),
q2 = round(((y - q0) * 254 - q1) * 254); they represent x as (q0 + q1 / 254 + q2 / 254^2) * (a / 127). A row whose a is
below 2^-118 counts as zero. A row with a value that is not finite becomes NaN. Error bound with n slices:
a / 254^n + a * 2^-22.
"""

import torch
from torch import Tensor

from penstock.kernels.reference.quantized_weights import MAGNITUDE_LIMIT, SMALLEST

LARGEST = 127.0  # the largest stored integer
SLICE_RATIO = 254.0  # the rounding error is at most 1/2, which is 127 units of the next slice
SMALLEST_ROW = 2.0**-118  # the smallest a for which the row's scale is not denormal and 127 / a is finite


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x [.., D] of any float type: values [.., D] int8, scales [..] and offsets [..] float32."""
    x = x.float()
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    middle = (low + high) * 0.5
    half = torch.maximum(high - middle, middle - low)
    usable = torch.maximum(-low, high) < MAGNITUDE_LIMIT  # a NaN among the elements is both low and high
    spread = usable & (half >= SMALLEST)
    steps = torch.full_like(half, LARGEST)  # torch computes number / tensor with a reciprocal
    scales = torch.where(spread, half / steps, middle.abs())
    offsets = torch.where(spread, middle / scales, middle.sign())
    values = torch.where(spread, (x - middle) * (steps / half), 0.0).round().to(torch.int8)
    scales, offsets = torch.where(usable, scales, torch.nan), torch.where(usable, offsets, 0.0)
    return values, scales[..., 0], offsets[..., 0]


def quantize_channels(x: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Quantise x [.., Hkv, D] of any float type with scales and offsets [Hkv, D]: [.., Hkv, D] int8."""
    steps = x.float() / scales - offsets
    return steps.nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST).round().to(torch.int8)


def dequantize(values: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Compute (values + offsets) * scales of values [.., D] int8: [.., D] float32.

    scales, offsets: [Hkv, D] per channel, [.., 1] per token.
    """
    return (values.float() + offsets) * scales


def split(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Convert x [.., n] float32 to slices [count, .., n] int8 and scales [..] float32."""
    greatest = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    finite = greatest < torch.inf
    usable = finite & (greatest >= SMALLEST_ROW)
    steps = torch.full_like(greatest, LARGEST)
    rest = torch.where(usable, x * (steps / greatest), 0.0)
    rows = []
    for _ in range(count):
        rows.append(rest.round())
        rest = (rest - rows[-1]) * SLICE_RATIO
    scales = torch.where(usable, greatest / steps, torch.where(finite, 0.0, torch.nan))
    return torch.stack(rows).to(torch.int8), scales[..., 0]


def slices(x: Tensor, count: int) -> Tensor:
    """Convert x [.., n] float32 to `count` slices and back."""
    rows, scales = split(x, count)
    weights = torch.tensor([SLICE_RATIO**-s for s in range(count)], device=x.device)
    terms = rows.float() * weights.view(-1, *[1] * x.ndim)
    return terms.sum(dim=0) * scales[..., None]
