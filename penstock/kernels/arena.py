"""Arena: the buffers that a forward pass writes its results to, kept from step to step.

Each kind of result has a slot, shared by all decoder layers: one layer's result is consumed before the next layer
writes. A slot grows when a step has more rows than any before, so in the long run a step allocates nothing. Few rows
are always at the same address, so that a recorded program stays valid. A model's result is in a slot too, and is
overwritten by the next call of the model.
"""

import torch
from torch import Tensor

FEW_ROWS = 64  # the most rows that are always at the same address


class Slot:
    """A buffer [rows, *columns] for results of one kind, passed as `out=`: fixed memory for up to FEW_ROWS rows, and
    memory that grows for more."""

    def __init__(self, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.columns = columns
        self.dtype = dtype
        self._few = torch.empty((FEW_ROWS, *columns), dtype=dtype, device=device)
        self._many = self._few
        self._rows = FEW_ROWS
        self._last = self._few

    def __call__(self, rows: int) -> Tensor:
        """Return the first `rows` rows. Tensors returned before share the memory, unless it has grown since."""
        if rows != self._rows:
            if rows > self._many.shape[0]:
                self._many = self._many.new_empty((rows, *self.columns))
            self._last = (self._few if rows <= FEW_ROWS else self._many)[:rows]
            self._rows = rows
        return self._last


class Arena:
    """Slots by name, one arena per model. Its users must not need two results of one slot at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Slot] = {}

    def slot(self, name: str, columns: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Return the slot of that name.

        Raises:
            ValueError: it exists with other columns or another dtype.
        """
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot(columns, dtype, self._device)
        if (slot.columns, slot.dtype) != (columns, dtype):
            raise ValueError(f"{name}: {columns} {dtype} does not fit {slot.columns} {slot.dtype}")
        return slot
