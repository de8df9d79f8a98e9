"""Effort: whether processes make progress, or would if the machine let them.

A process that is stopped or in a deadlock uses no processor time, reads nothing, and waits for neither a core nor a
disk. One that is slow does at least one of these. All of it is read from /proc, so another process can see it.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.parallel.spawn import children

MIN_EFFORT_S = 0.005  # of processor time; heartbeats alone take less
WAITING = ("R", "D")  # states in /proc: running or waiting for a core, waiting for a disk
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_elsewhere: "list[weakref.WeakMethod[Callable[[], float]]]" = []


@dataclass(frozen=True, slots=True)
class Effort:
    """What some processes have done so far.

    Attributes:
        cpu_s: seconds of processor time.
        reads: bytes read from disks, and page faults that needed a disk.
        is_waiting: whether one of the main threads runs, or waits for a core or a disk, at this moment.
    """

    cpu_s: float
    reads: int
    is_waiting: bool = False

    @classmethod
    def of(cls, process_ids: Iterable[int]) -> "Effort":
        """Return the effort of these processes together; one that has ended counts nothing."""
        ticks = reads = 0
        is_waiting = False
        for process_id in process_ids:
            with suppress(OSError):
                files = Path(f"/proc/{process_id}")
                fields = (files / "stat").read_text().rpartition(")")[2].split()  # proc(5) numbers them from 3
                is_waiting |= fields[0] in WAITING
                reads += int(fields[9])
                ticks += int(fields[11]) + int(fields[12])
                reads += _bytes_read(files / "io")
        return cls(ticks / TICKS_PER_S, reads, is_waiting)

    @classmethod
    def so_far(cls) -> "Effort":
        """Return the effort of this process and of those that it has started, here and on other machines."""
        here = cls.of([os.getpid(), *children()])
        elsewhere = [cpu_s() for item in _elsewhere if (cpu_s := item()) is not None]
        return replace(here, cpu_s=here.cpu_s + sum(elsewhere))

    def exceeds(self, earlier: "Effort") -> bool:
        """Return whether there has been progress since, or only the machine is in its way."""
        return self.is_waiting or self.cpu_s - earlier.cpu_s > MIN_EFFORT_S or self.reads > earlier.reads


def count_elsewhere(cpu_s: Callable[[], float]) -> None:
    """Have `so_far` add the processor time of processes on other machines, as long as the method's object lives."""
    _elsewhere.append(weakref.WeakMethod(cpu_s))


def _bytes_read(counters: Path) -> int:
    """Return the bytes read from disks; 0 where the system does not tell."""
    with suppress(OSError):
        lines = counters.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
    return 0
