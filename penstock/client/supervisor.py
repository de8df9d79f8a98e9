"""EngineSupervisor: starts the engine process, watches it, and starts another one when it dies. Knows no request.

The end of the connection is the death of the process, noticed at once; the next process has the next epoch. The request
side gets outputs and rejections through `on_frame`, and learns through `on_loss` that all requests sent are lost.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

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


class EngineSupervisor:
    """Keeps an engine process running. The first one is started by the constructor; `run` watches it.

    Args:
        options: for EngineConfig.from_options in the engine process.
        on_frame: called with each Outputs and Rejected frame.
        on_loss: called with the reason when the engine process has died or will not be started again.

    Attributes:
        child: the current engine process.
        restarts: processes started after the first; also the epoch of the current one.
        model_info: of the last engine that was ready.
        failure: why there will be no engine any more; None while there is hope.
        settled: set once an engine has been ready, or there is a failure.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        on_frame: Callable[[frames.Outputs | frames.Rejected], None],
        on_loss: Callable[[EngineDeadError], None],
    ) -> None:
        self.restarts = 0
        self.child = EngineChild(frames.Start(self.restarts, options))
        self.liveness = Liveness()
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.settled = asyncio.Event()
        self._options = options
        self._on_frame = on_frame
        self._on_loss = on_loss
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
        try:
            await self.child.connect()
            while (frame := await self.child.receive()) is not None:
                if frame.epoch == self.restarts:  # else it comes from an engine that was replaced
                    self._take(frame)
        except (EngineError, msgspec.DecodeError) as error:
            LOGGER.error("invalid frame from the engine process; terminating it: %s", error)
        finally:
            was_ready, self._ready = self._ready, False
            self.liveness.last_heard = None
            self.child.hang_up()
        return was_ready

    def _take(self, frame: frames.FromEngine) -> None:
        self.liveness.note(frame)
        match frame:
            case frames.Ready(info=info):
                self.model_info, self._ready = info, True
                self.settled.set()
            case frames.Outputs() | frames.Rejected():
                self._on_frame(frame)
            case frames.Failed():
                self._fail(frame.as_error())

    async def _restart_after(self, code: int, was_ready: bool) -> None:
        """Report a death and start a new engine process, unless deaths are too many."""
        self.liveness.stats = EngineStats()
        self._on_loss(
            EngineDeadError(f"the engine process died (exit code {code}); send the request again in a moment")
        )
        LOGGER.warning("the engine process died (exit code %s); open requests have failed", code)
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < DEATHS_WINDOW_S] + [now]
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
            self.child = EngineChild(frames.Start(self.restarts, self._options))

    def _fail(self, error: PenstockError) -> None:
        """Give up: there will be no engine any more."""
        self.failure = error
        self._on_loss(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
        self.settled.set()


class Liveness:
    """When the engine was last heard from, and whether it makes progress."""

    def __init__(self) -> None:
        self.stats = EngineStats()  # the newest that the engine sent
        self.last_heard: float | None = None  # time.monotonic() of its last frame; None without an engine
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)

    def note(self, frame: frames.FromEngine) -> None:
        now = time.monotonic()
        if self.last_heard is not None and self.stats.num_running:
            self._gaps.append(now - self.last_heard)
        self.last_heard = now
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self.stats = frame.stats

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last frame; None without an engine."""
        return None if self.last_heard is None else time.monotonic() - self.last_heard

    @property
    def making_progress(self) -> bool:
        """Return False once the engine has been silent for too long: when busy, STALL_STEPS of its longest steps."""
        allowed = IDLE_STALL_S
        if self.stats.num_running or self.stats.num_waiting:
            allowed = max(IDLE_STALL_S, STALL_STEPS * max(self._gaps)) if self._gaps else FIRST_STEP_STALL_S
        age = self.age_s
        return age is not None and age < allowed
