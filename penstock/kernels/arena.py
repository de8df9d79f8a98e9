"""Arena: the buffers that a forward pass writes its results to, kept from step to step.

Each kind of result has a slot, which all decoder layers share: one layer's result is consumed before the next layer
writes its own. A slot grows when a step has more rows than any step before, so in the long run a step allocates
nothing. Results of few rows are always at the same address, so that a recorded program stays valid. A model's result is
in a slot, too, and is overwritten when the model runs again.
"""

from collections.abc import Callable

from penstock.kernels.tensors import Dtype, Tensor

FIXED_ROWS = 64  # maximum number of rows that are always at the same address
LOGITS_ROWS = 128  # prompt positions whose logits exist at once: 64 MiB for a vocabulary of 128k

Allocate = Callable[[tuple[int, ...], str], Tensor]  # shape and name of a type -> memory, like Ops.empty


class Slot:
    """A buffer [rows, *columns] for results of one kind, passed as `out=`: fixed memory for up to FIXED_ROWS rows, and
    memory that grows for more."""

    def __init__(self, columns: tuple[int, ...], dtype: str, allocate: Allocate) -> None:
        self.columns = columns
        self._name = dtype
        self._allocate = allocate
        self._few = allocate((FIXED_ROWS, *columns), dtype)
        self._many = self._few
        self._rows = FIXED_ROWS
        self._last = self._few

    @property
    def dtype(self) -> Dtype:
        """The type of the results."""
        return self._few.dtype

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return int(self._few.nbytes) // FIXED_ROWS

    def __call__(self, rows: int) -> Tensor:
        """Return the first `rows` rows. Tensors returned earlier share the memory unless the slot has grown since."""
        if rows != self._rows:
            if rows > self._many.shape[0]:
                self._many = self._allocate((rows, *self.columns), self._name)
            self._last = (self._few if rows <= FIXED_ROWS else self._many)[:rows]
            self._rows = rows
        return self._last

    def holds(self, columns: tuple[int, ...], dtype: str) -> bool:
        """Return whether the results have these columns and this type."""
        return (self.columns, self._name) == (columns, dtype)


class Arena:
    """Slots by name, one arena per model. Its users must not need two results of one slot at the same time."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._slots: dict[str, Slot] = {}

    def slot(self, name: str, columns: tuple[int, ...], dtype: str) -> Slot:
        """Return the slot with this name, for results of the type that `dtype` names.

        Raises:
            ValueError: the slot exists with other columns or another dtype.
        """
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot(columns, dtype, self._allocate)
        if not slot.holds(columns, dtype):
            raise ValueError(f"{name}: {columns} {dtype} does not fit {slot.columns} {slot.dtype}")
        return slot

    @property
    def slots(self) -> frozenset[Slot]:
        """Return all slots."""
        return frozenset(self._slots.values())
