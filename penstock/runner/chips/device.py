"""A simulated chip: two memories with budgets, a clock, and counts of what went through its links."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import InvalidRequestError


class OverBudgetError(InvalidRequestError):
    """A chip has no room for what it is to hold. Nothing of it was held."""

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
    """What lies in one memory of a chip, in bytes by name.

    Attributes:
        peak: the most that it has held at once.
    """

    chip: int
    name: str
    budget: int
    used: int = 0
    peak: int = 0
    _held: dict[str, int] = field(default_factory=dict)

    def hold(self, what: str, num_bytes: int) -> None:
        """Hold so many more bytes under a name. Raise OverBudgetError if there is no room."""
        if self.used + num_bytes > self.budget:
            raise OverBudgetError(self.chip, self, what, num_bytes)
        self._held[what] = self._held.get(what, 0) + num_bytes
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def free(self, what: str) -> None:
        """Free what is held under a name; without anything held it does nothing."""
        self.used -= self._held.pop(what, 0)


@dataclass(frozen=True, slots=True)
class Work:
    """What one chip does in one call of an operation.

    Attributes:
        streamed: bytes of weights that pass from its DRAM through its SRAM.
        operations: of products and attention; a multiply-add is two.
        received, from_host, to_host: bytes over the chip's links.
        buffers: bytes of SRAM for operands and results while it computes.
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
        """The bytes over links."""
        return self.received + self.from_host + self.to_host


COUNTED = ("streamed", "operations", "received", "from_host", "to_host")


@dataclass(slots=True)
class Device:
    """One chip.

    Attributes:
        free_at: when its last operation ended, in simulated seconds.
        busy: seconds in which it computed, streamed or waited for its own links.
        counts: sums of its work, by the names in COUNTED.
    """

    chip: int
    sram: Memory
    dram: Memory
    free_at: float = 0.0
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    @classmethod
    def of(cls, chip: int, budgets: Sequence[int]) -> "Device":
        """Make a chip with so many bytes of SRAM and of DRAM."""
        return cls(chip, Memory(chip, "SRAM", budgets[0]), Memory(chip, "DRAM", budgets[1]))

    def count(self, work: Work, seconds: float) -> None:
        """Add work that took so long."""
        self.busy += seconds
        for name in COUNTED:
            self.counts[name] += getattr(work, name)
