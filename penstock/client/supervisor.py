"""EngineSupervisor: starts the engine process, watches it, and starts another one when it dies. Knows no request.

The end of the connection is the death of the process, noticed at once; an engine that is silent for too long is killed.
The next process has the next epoch. Whoever sends it requests is told of all this as an EngineListener.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import fields, replace
from typing import Any, Protocol

from penstock.client import frames
from penstock.client.child import EngineChild
from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.interface.messages import EngineStats, ModelInfo

LOGGER = logging.getLogger("penstock")
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
MAX_FAILED_STARTS = 3  # in a row, however long each took: the model may not fit
BACK_OFF_S = 0.2  # times the number of failed starts, before the next one
IDLE_STALL_S = 5.0  # an idle engine sends a heartbeat every half second
FIRST_STEP_STALL_S = 60.0  # until a step has shown how long steps take
STALL_STEPS = 20
NUM_GAPS = 128  # pauses between frames that are remembered, to know how long a step takes
START_STALL_S = 30.0  # a process that starts sends a heartbeat every half second too
CHECK_S = 0.25  # between two looks at whether the engine makes progress
COUNTERS = [item.name for item in fields(EngineStats) if item.name.startswith("num_") and item.name.endswith("_total")]


class EngineListener(Protocol):
    """What the supervisor tells the one who sends requests to its engines."""

    def engine_ready(self, info: ModelInfo) -> None:
        """Handle a new engine; what was sent to the one before is lost."""

    def engine_lost(self) -> bool:
        """Handle a death, after which a new engine comes. Returns whether a request is to blame, and has been ended."""

    def engine_failed(self, error: EngineDeadError) -> None:
        """Handle the end: there will be no engine any more."""

    def received(self, frame: frames.Outputs | frames.Rejected) -> None:
        """Handle what the engine says of its requests."""


class EngineSupervisor:
    """Keeps an engine process running. The first one is started by the constructor; `run` watches it.

    Args:
        options: for EngineConfig.from_options in the engine process.
        listener: is told of deaths, new engines and their outputs.
        ring: descriptor of the flight recorder's memory, which every engine process inherits.

    Attributes:
        child: the current engine process.
        restarts: processes started after the first; also the epoch of the current one.
        model_info: of the last engine that was ready.
        failure: why there will be no engine any more; None while there is hope.
        last_death: why the last engine process ended: its exit code or signal.
        settled: set once an engine has been ready, or there is a failure.
    """

    def __init__(self, options: dict[str, Any], listener: EngineListener, ring: int | None = None) -> None:
        self.restarts = 0
        self.child = EngineChild(frames.Start(self.restarts, options, ring))
        self.last_death = ""
        self._ring = ring
        self.liveness = Liveness()
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.settled = asyncio.Event()
        self._options = options
        self._listener = listener
        self._deaths: list[float] = []  # within the last DEATHS_WINDOW_S
        self._failed_starts = 0  # in a row
        self._ready = False

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.FAILED
        if self._ready:
            return EngineState.READY
        return EngineState.STARTING if self.model_info is None else EngineState.RECOVERING

    async def run(self) -> None:
        """Serve one engine process after another until stopped or failed."""
        try:
            while self.failure is None:
                was_ready = await self._talk()
                code = await self.child.wait()
                if self.failure is None:
                    await self._restart_after(code, was_ready)
        except Exception as error:
            LOGGER.exception("the supervisor of the engine process failed")
            self._fail(EngineDeadError(f"the engine's supervisor failed: {error!r}"))
            self.child.hang_up()

    def stop(self) -> None:
        """End the engine process and start no other. A second call does nothing."""
        if self.failure is None:
            self._fail(EngineDeadError("the engine was shut down"))
        self.child.hang_up()

    async def _talk(self) -> bool:
        """Receive frames until the connection ends. Returns whether the engine was ready."""
        watch = asyncio.create_task(self._kill_if_stuck(), name="watch for a stuck engine")
        try:
            await self.child.connect()
            while (frame := await self.child.receive()) is not None:
                if frame.epoch == self.restarts:  # else it comes from an engine that was replaced
                    self._take(frame)
        except EngineError as error:
            LOGGER.error("invalid frame from the engine process; terminating it: %s", error)
        finally:
            watch.cancel()
            was_ready, self._ready = self._ready, False
            self.liveness.engine_ended()
            self.child.hang_up()
        return was_ready

    async def _kill_if_stuck(self) -> None:
        """Kill the engine process once it has made no progress for too long: stopped, in a deadlock, or swapped out."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_S)
            if time.monotonic() - before > 4 * CHECK_S:
                self.liveness.excuse()  # this process stood still too, so nobody can tell
            elif self.liveness.stuck:
                LOGGER.error("the engine process has been silent for %.1f s; killing it", self.liveness.age_s)
                self.child.kill()
                return

    def _take(self, frame: frames.FromEngine) -> None:
        self.liveness.note(frame)
        match frame:
            case frames.Ready(info=info):
                self.model_info, self._ready = info, True
                self.settled.set()
                self._listener.engine_ready(info)
            case frames.Outputs() | frames.Rejected():
                self._listener.received(frame)
            case frames.Failed():
                self._fail(frame.as_error())

    async def _restart_after(self, code: int, was_ready: bool) -> None:
        """Report a death and start a new engine process, unless deaths are too many."""
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        LOGGER.warning("the engine process died (%s); its requests go on in a new one", reason)
        self.last_death = reason
        explained = self._listener.engine_lost()
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < DEATHS_WINDOW_S] + [now] * (not explained)
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._fail(EngineDeadError(f"the engine process died {self._failed_starts} times before it was ready"))
        elif len(self._deaths) >= MAX_DEATHS:
            self._fail(EngineDeadError(f"the engine process died {MAX_DEATHS} times in {DEATHS_WINDOW_S:.0f} s"))
        else:
            await asyncio.sleep(BACK_OFF_S * self._failed_starts)
        if self.failure is None:  # neither given up nor stopped meanwhile
            self.restarts += 1
            LOGGER.warning("restarting the engine process (restart %d of %d)", len(self._deaths), MAX_DEATHS - 1)
            self.child = EngineChild(frames.Start(self.restarts, self._options, self._ring))

    def _fail(self, error: PenstockError) -> None:
        """Give up: there will be no engine any more."""
        self.failure = error
        self._listener.engine_failed(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
        self.settled.set()


class Liveness:
    """When the engine was last heard from, whether it makes progress, and the newest of its statistics.

    Attributes:
        last_heard: time.monotonic() of its last frame; None without an engine.
    """

    def __init__(self) -> None:
        self.last_heard: float | None = None
        self._stats = EngineStats()
        self._before = dict.fromkeys(COUNTERS, 0)  # counted by the engines that died
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)
        self._ready = False

    @property
    def stats(self) -> EngineStats:
        """Return the gauges of this engine, and the counters of all engines so far: they never fall."""
        return replace(self._stats, **{name: self._before[name] + getattr(self._stats, name) for name in COUNTERS})

    def note(self, frame: frames.FromEngine) -> None:
        now = time.monotonic()
        if self.last_heard is not None and self._stats.num_running:
            self._gaps.append(now - self.last_heard)
        self.last_heard = now
        self._ready = self._ready or isinstance(frame, frames.Ready)
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self._stats = frame.stats

    def engine_ended(self) -> None:
        """Forget the engine, and keep what it counted."""
        self._before = {name: getattr(self.stats, name) for name in COUNTERS}
        self._stats, self.last_heard, self._ready = EngineStats(), None, False

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
        allowed = IDLE_STALL_S if self._ready else START_STALL_S
        if self._stats.num_running or self._stats.num_waiting:
            allowed = max(IDLE_STALL_S, STALL_STEPS * max(self._gaps)) if self._gaps else FIRST_STEP_STALL_S
        age = self.age_s
        return age is not None and age >= allowed
