"""Addresses of tensors as arguments of native functions, which do not check type, shape or layout themselves."""

import torch
from torch import Tensor

from penstock.kernels.cpu.abi import ABI

TYPES = {torch.float32: ABI.constants["TYPE_F32"], torch.bfloat16: ABI.constants["TYPE_BF16"]}
ACTIVATIONS = {name: ABI.constants[f"ACT_{name.upper()}"] for name in ("silu", "gelu", "gelu_tanh")}


def address(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> int:
    """Return the address of a contiguous tensor of exactly this shape and type.

    Raises:
        ValueError: the tensor has another shape or type, is not contiguous, or not in CPU memory.
    """
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu:
        return tensor.data_ptr()
    layout = "" if tensor.is_cpu and tensor.is_contiguous() else ", not contiguous in CPU memory"
    found = f"{list(tensor.shape)} {tensor.dtype}{layout}"
    raise ValueError(f"{name}: {found} where {list(shape)} {dtype} is needed".replace("torch.", ""))


def rows_address(tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, name: str) -> tuple[int, int]:
    """Return the address of a tensor, which may be some columns of a wider one, and the elements between its rows.

    Raises:
        ValueError: the tensor has another shape or type, or its rows are not contiguous.
    """
    fits = tensor.dtype is dtype and tensor.shape == shape and tensor.is_cpu
    if not fits or tensor.is_contiguous() or tensor.stride(1) != 1 or tensor.stride(0) < shape[1]:
        return address(tensor, shape, dtype, name), shape[1]
    return tensor.data_ptr(), tensor.stride(0)


def optional_address(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> int | None:
    """Return the address of a tensor, or None for None; see `address`."""
    return None if tensor is None else address(tensor, shape, dtype, name)


def output(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `out`, or a new tensor if it is None."""
    return torch.empty(shape, dtype=dtype) if out is None else out


def rows_of(tensor: Tensor, name: str) -> tuple[int, int]:
    """Return the shape of a tensor [rows, columns].

    Raises:
        ValueError: the tensor does not have two axes.
    """
    shape = tensor.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: {list(shape)} where [rows, columns] is needed")
    return shape[0], shape[1]


def type_code(dtype: torch.dtype) -> int:
    """Return the DataType of abi.h.

    Raises:
        ValueError: native functions do not support the type.
    """
    code = TYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype: {dtype}; supported are {', '.join(map(str, TYPES))}".replace("torch.", ""))
    return code


def activation_code(activation: str) -> int:
    """Return the Activation of abi.h.

    Raises:
        ValueError: there is no such activation.
    """
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(f"no activation {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    return code
