"""Products with int4 weights."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.ops import Packing, TensorRows
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import int4
from penstock.kernels.triton.packed import pack
from penstock.kernels.triton.quantize import operand
from penstock.kernels.triton.sizes import count_bytes
from tests.kernels.triton.compare import DEVICE, close, draw, same_rows

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("scheme", "size", "ends", "dtype"),
    [
        ("int4", 32, (), BF16),
        ("int4", 64, (64, 150), F32),
        ("int4-a16", 32, (), BF16),
        ("int4-a16", 32, (10, 40, 150), BF16),  # groups that begin anew, and are short
    ],
)
def test_against_the_reference(scheme: str, size: int, ends: tuple[int, ...], dtype: torch.dtype) -> None:
    """Guards against a group that has its neighbour's scale or crosses a leaf, and a sign that is lost."""
    weight, bias, x = draw(21, 150) * 150**-0.5, draw(21), draw(3, 150, dtype=dtype)
    packing, ops = Packing(ends, Scheme.parse(scheme, size)), ReferenceOps(dtype, DEVICE)
    packed = pack(TensorRows(weight), bias, packing, dtype, DEVICE)
    assert packed.num_bytes == count_bytes((21, 150), packing, str(dtype).removeprefix("torch."), bias=True)

    def product(x: Tensor) -> Tensor:
        return int4.product(operand(x, packed), packed, torch.full((len(x), 21), float("nan")))

    close(product(x), ops.linear(x, ops.pack_linear(weight, bias, packing)))
    if ends:
        same_rows(product, x)
