"""Tensors as arguments of the native functions: their addresses, once nothing about them can go wrong.

A native function believes what it is told, so a tensor of another type, shape or layout is refused here.
"""

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # native/abi.h, DataType
ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}  # native/abi.h, Activation


def address(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> int:
    """Where a tensor of exactly that shape and type begins.

    Raises:
        ValueError: it is another tensor, not contiguous, or not in the CPU's memory.
    """
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu:
        return tensor.data_ptr()
    layout = "" if tensor.is_cpu and tensor.is_contiguous() else ", not contiguous in the CPU's memory"
    found = f"{list(tensor.shape)} {tensor.dtype}{layout}"
    raise ValueError(f"{name}: {found} where {list(shape)} {dtype} is needed".replace("torch.", ""))


def rows_address(tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, name: str) -> tuple[int, int]:
    """Where a tensor begins that may be some columns of a wider one, and the elements from one row to the next.

    Raises:
        ValueError: it is another tensor, or its rows are not contiguous.
    """
    fits = tensor.dtype is dtype and tensor.shape == shape and tensor.is_cpu
    if not fits or tensor.is_contiguous() or tensor.stride(1) != 1 or tensor.stride(0) < shape[1]:
        return address(tensor, shape, dtype, name), shape[1]
    return tensor.data_ptr(), tensor.stride(0)


def optional_address(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> int | None:
    """The same, and None for None."""
    return None if tensor is None else address(tensor, shape, dtype, name)


def rows_of(tensor: Tensor, name: str) -> tuple[int, int]:
    """The shape of a tensor [rows, columns].

    Raises:
        ValueError: it has another number of axes.
    """
    shape = tensor.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: {list(shape)} where [rows, columns] is needed")
    return shape[0], shape[1]


def type_code(dtype: torch.dtype) -> int:
    """The number of a type.

    Raises:
        ValueError: no native function has it.
    """
    code = TYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype: {dtype}; there are {', '.join(map(str, TYPES))}".replace("torch.", ""))
    return code


def activation_code(activation: str) -> int:
    """The number of an activation.

    Raises:
        ValueError: there is no such activation.
    """
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(f"no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    return code
