"""Effort: whether processes make progress, or would make progress if the machine let them.

A process that is stopped or in a deadlock uses no processor time, reads nothing, and waits for neither a core nor a
disk. A slow process does at least one of these. All figures are read from /proc, so another process can see them.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.parallel.spawn import children

MIN_EFFORT_S = 0.005  # processor time that counts as progress; heartbeats alone take less
WAITING = ("R", "D")  # states in /proc: running or waiting for a core, waiting for a disk
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_elsewhere: "list[weakref.WeakMethod[Callable[[], float]]]" = []


@dataclass(frozen=True, slots=True)
class Effort:
    """The work that some processes have done so far.

    Attributes:
        cpu_s: seconds of processor time.
        reads: bytes read from disks, and page faults that needed a disk.
        is_waiting: whether at this moment one of the main threads runs, or waits for a core or a disk.
    """

    cpu_s: float
    reads: int
    is_waiting: bool = False

    @classmethod
    def of(cls, process_ids: Iterable[int]) -> "Effort":
        """Return the effort of these processes together; processes that have ended are left out."""
        ticks = reads = 0
        is_waiting = False
        for process_id in process_ids:
            with suppress(OSError):
                files = Path(f"/proc/{process_id}")
                fields = (files / "stat").read_text().rpartition(")")[2].split()  # starts with field 3 of proc(5)
                is_waiting |= fields[0] in WAITING
                reads += int(fields[9])
                ticks += int(fields[11]) + int(fields[12])
                reads += _bytes_read(files / "io")
        return cls(ticks / TICKS_PER_S, reads, is_waiting)

    @classmethod
    def so_far(cls) -> "Effort":
        """Return the effort of this process and of the processes that it has started, here and on other machines."""
        here = cls.of([os.getpid(), *children()])
        elsewhere = [cpu_s() for item in _elsewhere if (cpu_s := item()) is not None]
        return replace(here, cpu_s=here.cpu_s + sum(elsewhere))

    def exceeds(self, earlier: "Effort") -> bool:
        """Return whether there has been progress since `earlier`, or only the machine prevents it."""
        return self.is_waiting or self.cpu_s - earlier.cpu_s > MIN_EFFORT_S or self.reads > earlier.reads


def count_elsewhere(cpu_s: Callable[[], float]) -> None:
    """Make `so_far` add this method's processor time of processes elsewhere, as long as the method's object lives."""
    _elsewhere.append(weakref.WeakMethod(cpu_s))


def _bytes_read(counters: Path) -> int:
    """Return the bytes read from disks, or 0 if the system does not report them."""
    with suppress(OSError):
        lines = counters.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
    return 0
