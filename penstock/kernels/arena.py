"""Arena: the buffers that a forward pass writes its results to, kept from step to step.

Each kind of result has a slot, shared by all decoder layers: what one layer wrote is used up before the next one
writes. A slot grows when a step has more rows than any before, so in the long run a step allocates nothing. Few rows
have memory of their own that never moves, so what was recorded about it stays right. What a model returns lives in a
slot too, until the model is called again.
"""

from typing import Protocol

import torch
from torch import Tensor


class Buffer(Protocol):
    """Where results of one kind go, for `out=`.

    Attributes:
        dtype: of the results.
    """

    dtype: torch.dtype

    def __call__(self, rows: int) -> Tensor:
        """A tensor of that many rows."""


FEW_ROWS = 64  # up to so many rows are always at the same place


class Slot:
    """A buffer [rows, *columns]: one that stays for up to FEW_ROWS, and one that grows for more."""

    def __init__(self, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.columns = columns
        self.dtype = dtype
        self._few = torch.empty((FEW_ROWS, *columns), dtype=dtype, device=device)
        self._many = self._few
        self._rows = FEW_ROWS
        self._last = self._few

    def __call__(self, rows: int) -> Tensor:
        """The first `rows` rows. What was handed out before is overwritten through it, or left behind by growth."""
        if rows != self._rows:
            if rows > self._many.shape[0]:
                self._many = self._many.new_empty((rows, *self.columns))
            self._last = (self._few if rows <= FEW_ROWS else self._many)[:rows]
            self._rows = rows
        return self._last


class Arena:
    """Slots by name. One arena for each model; its user sees to it that a slot's results do not live twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Slot] = {}

    def slot(self, name: str, columns: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """The slot of that name; columns and dtype have to be the same for all who share it.

        Raises:
            ValueError: they are not.
        """
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot(columns, dtype, self._device)
        if (slot.columns, slot.dtype) != (columns, dtype):
            raise ValueError(f"{name}: {columns} {dtype} does not fit {slot.columns} {slot.dtype}")
        return slot
