"""Sample the present limits of the machine, and how much of it other processes use."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.tensors import BFLOAT16
from penstock_lab.bench.machine import MachineLimits
from penstock_lab.bench.samples import READ

PROBES = 7  # probes for each median, because single probes differ by half
WARMING = 3  # earlier probes that are dropped, because a core that slept takes some milliseconds to wake
MOVED = 1.5  # a sample is marked if the limits before and after it differ by more than this factor
DISTURBED = 0.05  # ... or if other processes used more than this share of the cores
QUIET_SECONDS = 0.3  # time for which other processes must be quiet before a sample
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """The limits at one moment with all threads: 10^9 bytes read, or 10^9 operations of a kind, per second."""

    read: float
    bf16: float
    int8: float

    def moved(self, other: "Limits") -> bool:
        """Return whether one of the limits differs too much from that at another moment."""
        pairs = [*zip(asdict(self).values(), asdict(other).values(), strict=True)]
        return any(max(pair) > MOVED * min(pair) for pair in pairs)


class Machine:
    """The machine's limits, sampled with Penstock's native loops in about 60 milliseconds, and its other users."""

    def __init__(self, threads: int) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self._limits = MachineLimits(CpuOps(BFLOAT16, threads=threads))

    def limits(self) -> Limits:
        """Return the limits at this moment."""
        probes = [self._limits.probe("bf16", "int8") for _ in range(WARMING + PROBES)][WARMING:]
        return Limits(*(statistics.median(probe[name] for probe in probes) for name in (READ, "bf16", "int8")))

    def watch(self, engine_seconds: Callable[[], float]) -> "OthersMeter":
        """Return a meter of what other processes use from now on."""
        return OthersMeter(engine_seconds)

    def wait_until_quiet(self, longest: float) -> None:
        """Wait until other processes are quiet for QUIET_SECONDS, or for `longest` seconds."""
        deadline = time.monotonic() + longest
        while time.monotonic() < deadline:
            meter = OthersMeter(lambda: 0.0)
            time.sleep(QUIET_SECONDS)
            if not self.is_disturbed(meter.cores()):
                return

    def is_disturbed(self, cores_of_others: float) -> bool:
        """Return whether other processes used too much for a sample to count."""
        return cores_of_others > DISTURBED * self.cores

    def available_bytes(self) -> int:
        """Return the bytes that a new process can allocate."""
        return int(Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split()[0]) * 1024


class OthersMeter:
    """Measures how many cores the host stole, or other processes than the engine and this one used."""

    def __init__(self, engine_seconds: Callable[[], float]) -> None:
        self._engine_seconds = engine_seconds
        self._begun, self._before = time.monotonic(), self._others()

    def cores(self) -> float:
        """Return the mean number of cores since this meter was made."""
        return max(0.0, (self._others() - self._before) / max(1e-3, time.monotonic() - self._begun))

    def _others(self) -> float:
        mine = os.times()
        return busy_seconds() - self._engine_seconds() - mine.user - mine.system


def busy_seconds() -> float:
    """Return the seconds for which all cores together were busy or stolen since the machine started."""
    user, nice, system, _idle, _wait, irq, softirq, stolen = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + stolen) / TICK


def session_seconds(session: int) -> float:
    """Return the processor seconds of all processes in a session, including their children that have ended."""
    total = 0
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                fields = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total / TICK


def describe(threads: int) -> dict[str, Any]:
    """Return what the report says about the machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if name in flags]
    memory = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) / 2**20
    return {
        "processor": names[0] if names else "unknown",
        "features": features,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(memory),
    }
