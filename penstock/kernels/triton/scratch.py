"""Scratch: the memory that operations use for what is between their kernels, one after the other.

Its contents last for one operation. The next one on the same stream begins when that one has ended, so it may use the
same memory. Programs (programs.py) hold addresses of it, so it never moves while one of them lives: when it has to
grow, the old memory stays. It does not, if it was reserved as large as `scratch_bytes` says.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


class Scratch(Protocol):
    """Memory between the kernels of one operation."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Take memory that nothing else in this operation has."""


class _Anew:
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


ANEW: Scratch = _Anew()  # allocates


class FixedScratch:
    """One piece of memory of a device.

    Attributes:
        peak: the most bytes that an operation has taken so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0
        self._used = 0
        self._pieces = [torch.empty(0, dtype=torch.uint8, device=device)]  # the last one is used

    def reserve(self, num_bytes: int) -> None:
        """Make room for so many bytes."""
        if num_bytes > len(self._pieces[-1]):
            self._pieces.append(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    def begin(self) -> "FixedScratch":
        """Begin an operation, which may overwrite everything."""
        self._used = 0
        return self

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.peak = max(self.peak, self._used)
        self.reserve(self._used if self._used <= len(self._pieces[-1]) else 2 * self._used)
        return self._pieces[-1][start : start + num_bytes].view(dtype).view(shape)
