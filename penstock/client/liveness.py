"""Liveness: whether an engine process makes progress, judged by its frames."""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from penstock.client import frames
from penstock.interface.messages import EngineStats
from penstock.ranks.children import Effort

SILENCE_S = 5.0  # an engine sends a heartbeat every half second, idle or computing
MAX_STEP_S = 600.0  # a step that computes for longer is in an endless loop
START_SILENCE_S = 10.0  # a starting process sends heartbeats too, but a user's code may wait for a network
REMOTE_START_SILENCE_S = 60.0  # before the first frame of a process whose effort cannot be seen from here
COUNTERS = [item.name for item in fields(EngineStats) if item.name.startswith("num_") and item.name.endswith("_total")]


class Liveness:
    """When an engine was last heard from, whether it makes progress, and its newest statistics.

    Attributes:
        last_heard: time.monotonic() of its last frame or, before the first frame, of its last effort or its start; None
            once it has ended.
        heard: whether a frame has arrived.
    """

    def __init__(self) -> None:
        self.last_heard: float | None = time.monotonic()
        self._stats = EngineStats()
        self._before = EngineStats()  # counted by earlier engines
        self._working_s = 0.0  # of the step under way, as far as known
        self.heard = self._ready = False
        self._effort: Effort | None = None  # before the first frame

    @property
    def stats(self) -> EngineStats:
        """Return the gauges of this engine, and the counters summed over all engines so far, which never fall."""
        sums: dict[str, Any] = {
            name: _sum(getattr(self._before, name), getattr(self._stats, name)) for name in COUNTERS
        }
        return replace(self._stats, **sums)

    def follow(self, previous: "Liveness") -> None:
        """Continue the counters of the previous engine."""
        self._before = previous.stats

    def note(self, frame: frames.FromEngine) -> None:
        self.last_heard, self.heard = time.monotonic(), True
        self._ready = self._ready or isinstance(frame, frames.Ready)
        self._working_s = frame.working_s if isinstance(frame, frames.Heartbeat) else 0.0
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self._stats = frame.stats

    def watch_start(self, effort: Effort | None) -> None:
        """Note what a process has done before its first frame, while it starts Python; None: not known."""
        if effort is not None and (self._effort is None or effort.exceeds(self._effort)):
            self._effort, self.last_heard = effort, time.monotonic()

    def engine_ended(self) -> None:
        """Keep the counters of the engine, but no gauges."""
        counters = {name: getattr(self._stats, name) for name in COUNTERS}
        self._stats, self.last_heard, self._ready = EngineStats(**counters), None, False

    def excuse(self) -> None:
        """Restart the measurement of the engine's silence."""
        if self.last_heard is not None:
            self.last_heard = time.monotonic()

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last frame; None without an engine."""
        return None if self.last_heard is None else time.monotonic() - self.last_heard

    @property
    def making_progress(self) -> bool:
        """Return whether an engine is ready and not stuck."""
        return self._ready and self.last_heard is not None and not self.stuck

    @property
    def stuck(self) -> bool:
        """Return whether an engine has been silent, or in one step, for too long."""
        return self.symptom is not None

    @property
    def symptom(self) -> str | None:
        """Return how an engine is stuck; None if it is not."""
        age = self.age_s
        if age is None:
            return None
        patience = SILENCE_S if self._ready else START_SILENCE_S
        if not self.heard:
            patience = SILENCE_S if self._effort is not None else REMOTE_START_SILENCE_S
        if age >= patience:
            return f"silent for {age:.1f} s, and neither computing nor reading"
        if self._ready and self._working_s >= MAX_STEP_S:
            return f"in the same step for {self._working_s:.0f} s"
        return None


def total_stats(found: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of all gauges and counters of several engines."""
    total = {item.name: getattr(found[0], item.name) for item in fields(EngineStats)}
    for stats in found[1:]:
        total = {name: _sum(value, getattr(stats, name)) for name, value in total.items()}
    return EngineStats(**total)


def _sum(one: Any, other: Any) -> int | list[int]:
    """Return the sum of two counters, or of two lists of them, place by place."""
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return int(one + other)
