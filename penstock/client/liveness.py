"""Liveness: whether an engine process makes progress, as far as its frames tell."""

import time
from collections import deque
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from penstock.client import frames
from penstock.interface.messages import EngineStats

IDLE_STALL_S = 5.0  # an idle engine sends a heartbeat every half second
FIRST_STEP_STALL_S = 60.0  # until a step has shown how long steps take
STALL_STEPS = 20
NUM_GAPS = 128  # pauses between frames that are remembered, to know how long a step takes
START_STALL_S = 30.0  # a process that starts sends a heartbeat every half second too, while it computes or reads
FIRST_FRAME_STALL_S = 60.0  # Python and the first imports, on a busy machine
COUNTERS = [item.name for item in fields(EngineStats) if item.name.startswith("num_") and item.name.endswith("_total")]


class Liveness:
    """When an engine was last heard from, whether it makes progress, and the newest of its statistics.

    Attributes:
        last_heard: time.monotonic() of its last frame, of its start before the first one; None once it has ended.
    """

    def __init__(self) -> None:
        self.last_heard: float | None = time.monotonic()
        self._stats = EngineStats()
        self._before = EngineStats()  # counted by the engines before it
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)
        self._heard = self._ready = False

    @property
    def stats(self) -> EngineStats:
        """Return the gauges of this engine, and the counters of all engines so far: they never fall."""
        sums: dict[str, Any] = {
            name: _sum(getattr(self._before, name), getattr(self._stats, name)) for name in COUNTERS
        }
        return replace(self._stats, **sums)

    def follow(self, previous: "Liveness") -> None:
        """Go on with what the engine before it has counted, and with how long its steps took."""
        self._before = previous.stats
        self._gaps = previous._gaps

    def note(self, frame: frames.FromEngine) -> None:
        now = time.monotonic()
        if self.last_heard is not None and self._stats.num_running:
            self._gaps.append(now - self.last_heard)
        self.last_heard, self._heard = now, True
        self._ready = self._ready or isinstance(frame, frames.Ready)
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self._stats = frame.stats

    def engine_ended(self) -> None:
        """Keep what the engine counted, and no gauges."""
        counters = {name: getattr(self._stats, name) for name in COUNTERS}
        self._stats, self.last_heard, self._ready = EngineStats(**counters), None, False

    def excuse(self) -> None:
        """Count the engine's silence from now on."""
        if self.last_heard is not None:
            self.last_heard = time.monotonic()

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last frame; None without an engine."""
        return None if self.last_heard is None else time.monotonic() - self.last_heard

    @property
    def making_progress(self) -> bool:
        """Return whether an engine is ready, and has not been silent for too long."""
        return self._ready and self.last_heard is not None and not self.stuck

    @property
    def stuck(self) -> bool:
        """Return whether an engine has been silent for too long: when busy, for STALL_STEPS of its longest steps."""
        if not self._ready:
            allowed = START_STALL_S if self._heard else FIRST_FRAME_STALL_S
        elif self._stats.num_running or self._stats.num_waiting:
            allowed = max(IDLE_STALL_S, STALL_STEPS * max(self._gaps)) if self._gaps else FIRST_STEP_STALL_S
        else:
            allowed = IDLE_STALL_S
        age = self.age_s
        return age is not None and age >= allowed


def _sum(one: Any, other: Any) -> int | list[int]:
    """Return the sum of two counters, or of two lists of them, place by place."""
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return int(one + other)
