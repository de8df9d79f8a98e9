"""Arena: the buffers that a forward pass writes its results to, kept from step to step.

Each kind of result has a slot, shared by all decoder layers: what one layer wrote is used up before the next one
writes. A slot grows when a step has more rows than any before, so in the long run a step allocates nothing. What a
model returns lives in a slot too, until the model is called again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Buffer = Callable[[int], Tensor]  # rows -> a tensor of that many rows, for `out=`

ROWS_UNIT = 32  # rows of a slot are a multiple of this: a batch that grows by one does not make it grow each time


class Slot:
    """A buffer [rows, *columns] that grows with the rows asked for."""

    def __init__(self, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.columns = columns
        self.dtype = dtype
        self._memory = torch.empty((0, *columns), dtype=dtype, device=device)
        self._rows = 0
        self._last = self._memory

    def __call__(self, rows: int) -> Tensor:
        """The first `rows` rows. What was handed out before is overwritten through it, or left behind by growth."""
        if rows != self._rows:
            if rows > self._memory.shape[0]:
                self._memory = self._memory.new_empty((-(-rows // ROWS_UNIT) * ROWS_UNIT, *self.columns))
            self._last = self._memory[:rows]
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
