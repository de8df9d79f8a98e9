"""Standby: a second engine process that has loaded its model and waits, so that a death costs no start-up time.

It behaves like any idle engine: it sleeps on its connection, sends heartbeats, and is replaced when it dies or hangs.
Mapped weights are shared with the first engine, and its cache is not touched until it gets requests.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.client import frames
from penstock.client.engine_client import EngineState, StandbyStatus
from penstock.client.watched import WatchedEngine

LOGGER = logging.getLogger("penstock")
Running = asyncio.Task[tuple[int, bool]]  # exit code, whether it was ready


@dataclass(slots=True)
class RestartLimit:
    """At most `most` deaths within `window_s` seconds."""

    most: int
    window_s: float
    _deaths: tuple[float, ...] = ()

    def count(self) -> int:
        """Note a death. Return the number of deaths within the window."""
        now = time.monotonic()
        self._deaths = (*(death for death in self._deaths if now - death < self.window_s), now)
        return len(self._deaths)


class Standby:
    """Keeps one engine process in reserve.

    Args:
        start: starts a process.
        limit: limit of its deaths; beyond it there is no standby any more, and the first engine goes on alone.

    Attributes:
        failure: why there is no standby any more.
    """

    def __init__(self, start: Callable[[], WatchedEngine], limit: RestartLimit) -> None:
        self.failure: str | None = None
        self._start = start
        self._limit = limit
        self._engine: WatchedEngine | None = None
        self._running: Running | None = None
        self._private_bytes: int | None = None

    def keep(self) -> None:
        """Start a standby if there is none. Called repeatedly while the first engine works."""
        if self.failure is not None or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._died()
        if self.failure is None:
            try:
                self._engine = self._start()
            except OSError as error:
                self._give_up(f"its process cannot be started: {error}")
                return
            self._engine.take = self._take
            self._running = asyncio.create_task(self._engine.run(), name="standby engine")

    def hand_over(self) -> tuple[WatchedEngine, Running] | None:
        """Return the process, ready or still starting, and forget it; None if there is none."""
        engine, running = self._engine, self._running
        self._engine = self._running = None
        return None if engine is None or running is None or running.done() else (engine, running)

    def status(self) -> StandbyStatus:
        engine = self._engine
        if self.failure is not None:
            return StandbyStatus(EngineState.FAILED, None, None)
        if engine is None or engine.ready is None:
            return StandbyStatus(EngineState.STARTING, None if engine is None else engine.child.pid, None)
        return StandbyStatus(EngineState.READY, engine.child.pid, self._private_bytes)

    def hang_up(self) -> None:
        """End the process."""
        if self._engine is not None:
            self._engine.child.hang_up()

    def end(self) -> None:
        """End the process at once, and wait until it has ended; for use without an event loop."""
        if self._engine is not None:
            self._engine.child.end()

    async def wait(self) -> None:
        """Wait until the process has ended, after `hang_up`."""
        if self._running is not None and self._running.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._running])

    def _take(self, frame: frames.FromEngine) -> None:
        if isinstance(frame, frames.Ready) and self._engine is not None:
            memory = self._private_bytes = private_bytes(self._engine.child.pid)
            size = "" if memory is None else f"; it holds {memory / 2**20:.0f} MiB of memory of its own"
            LOGGER.info("a standby engine is ready%s", size)
        elif isinstance(frame, frames.Failed):
            self._give_up(frame.message)

    def _died(self) -> None:
        deaths = self._limit.count()
        LOGGER.warning("the standby engine process died; starting another one")
        if deaths >= self._limit.most:
            self._give_up(f"it died {deaths} times in {self._limit.window_s:.0f} s")

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        LOGGER.error("there is no longer a standby engine: %s", reason)


def private_bytes(pid: int | None) -> int | None:
    """Return the memory in bytes of this process alone, without files; None if it cannot be read."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        rows = (line.split() for line in file)
        return 1024 * next(int(row[1]) for row in rows if row[0] == "Private_Dirty:")
    return None
