"""Comparisons that every operation has to pass, in Triton's interpreter or on a GPU.

PENSTOCK_TEST_DEVICE=cuda runs the tests of this folder on a GPU, where they make all tensors (tools/gpu_check.py).
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cpu")
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1e-2)}  # of a result, by its type: relative, absolute


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))  # the same numbers on every device
    return torch.randn(shape, generator=generator, device="cpu").to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """The result has the type of the reference, and its values to about one rounding of that type."""
    relative, absolute = TOLERANCE.get(expected.dtype, (0, 0))
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute, equal_nan=True)


def same_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A row's bits depend on no other row: not on their number, their order, or a NaN among them.

    compute: from rows [M, ..] to rows [M, ..]; x: at least three rows.
    """
    whole = compute(x.clone())
    order = torch.arange(len(x)).flip(0)
    assert torch.equal(bits(compute(x[order].clone())), bits(whole[order])), "in another order"
    assert torch.equal(bits(compute(x[1:2].clone())), bits(whole[1:2])), "alone"
    spoilt = x.clone()
    spoilt[0] = float("nan")
    assert torch.equal(bits(compute(spoilt)[1:]), bits(whole[1:])), "beside NaN"


def bits(x: Tensor) -> Tensor:
    """Return the bits as integers, so that NaN equals NaN and -0 does not equal 0."""
    kind = {2: torch.int16, 4: torch.int32}.get(x.element_size()) if x.dtype.is_floating_point else None
    return x if kind is None else x.view(kind)
