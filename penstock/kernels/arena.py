"""Arena: the buffers that a forward pass writes its results to, kept from step to step.

Each kind of result has a slot, shared by all decoder layers: what one layer wrote is used up before the next one
writes. A slot grows when a step has more rows than any before, so in the long run a step allocates nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Buffer = Callable[[int], Tensor]  # rows -> a tensor of that many rows, for `out=`


class Slot:
    """A buffer [rows, *columns] that grows with the rows asked for."""

    def __init__(self, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._memory = torch.empty((0, *columns), dtype=dtype, device=device)
        self._last = self._memory

    def __call__(self, rows: int) -> Tensor:
        """The first `rows` rows. What was handed out before is overwritten through it, or left behind by growth."""
        if rows != self._last.shape[0]:
            if rows > self._memory.shape[0]:
                self._memory = self._memory.new_empty((rows, *self._columns))
            self._last = self._memory[:rows]
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
        found = slot(0)
        if found.shape[1:] != columns or found.dtype != dtype:
            raise ValueError(f"{name}: {columns} {dtype} does not fit {tuple(found.shape[1:])} {found.dtype}")
        return slot
