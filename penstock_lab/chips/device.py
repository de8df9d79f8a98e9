"""A simulated chip: two memories with budgets, a clock, and counts of its work and of the bytes over its links."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock import InvalidRequestError


class OverBudgetError(InvalidRequestError):
    """A chip has no room for something that it is to hold. None of it was stored."""

    def __init__(self, chip: int, memory: "Memory", what: str, num_bytes: int) -> None:
        over = memory.used + num_bytes - memory.budget
        message = (
            f"placement: chip {chip}: {what}: {num_bytes} bytes of {memory.name}, {over} more than are left of its "
            f"{memory.budget}"
        )
        super().__init__(message, param="placement")
        self.chip = chip


@dataclass(slots=True)
class Memory:
    """The contents of one memory of a chip, in bytes by name.

    Attributes:
        peak: the maximum number of bytes that it has held at once.
    """

    chip: int
    name: str
    budget: int
    used: int = 0
    peak: int = 0
    _held: dict[str, int] = field(default_factory=dict)

    def hold(self, what: str, num_bytes: int) -> None:
        """Hold `num_bytes` more under a name. Raise OverBudgetError if there is no room."""
        if self.used + num_bytes > self.budget:
            raise OverBudgetError(self.chip, self, what, num_bytes)
        self._held[what] = self._held.get(what, 0) + num_bytes
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def free(self, what: str) -> None:
        """Free what is held under a name, if anything is."""
        self.used -= self._held.pop(what, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one chip in one call of an operation.

    Attributes:
        streamed: bytes of weights that are read from its DRAM through its SRAM.
        operations: arithmetic operations of products and attention; a multiply-add counts as two.
        received, from_host, to_host: bytes over the chip's links.
        buffers: bytes of SRAM for operands and results during the call.
    """

    chip: int
    streamed: int = 0
    operations: int = 0
    received: int = 0
    from_host: int = 0
    to_host: int = 0
    buffers: int = 0

    @property
    def linked(self) -> int:
        """The bytes over all links."""
        return self.received + self.from_host + self.to_host


COUNTED = ("streamed", "operations", "received", "from_host", "to_host")


@dataclass(slots=True)
class Device:
    """One chip.

    Attributes:
        free_at: when its last operation ended, in simulated seconds.
        busy: seconds in which it computed, streamed or waited for its own links.
        counts: totals of its work, by the names in COUNTED.
    """

    chip: int
    sram: Memory
    dram: Memory
    free_at: float = 0.0
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    @classmethod
    def of(cls, chip: int, budgets: Sequence[int]) -> "Device":
        """Make a chip whose budgets are the bytes of SRAM and of DRAM, in this order."""
        return cls(chip, Memory(chip, "SRAM", budgets[0]), Memory(chip, "DRAM", budgets[1]))

    def count(self, work: Work, seconds: float) -> None:
        """Add work that took `seconds`."""
        self.busy += seconds
        for name in COUNTED:
            self.counts[name] += getattr(work, name)
