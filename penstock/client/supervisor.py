"""EngineSupervisor: starts the engine process, and another one when it dies. It knows no requests.

When the process dies, its connection ends at once; an engine that is silent for too long is killed (client/watched.py).
The next process, a standby if there is one, has another epoch. The sender of requests is told of all this as an
EngineListener.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from penstock.client import frames
from penstock.client.child import EngineConnection
from penstock.client.engine_client import EngineState, StandbyStatus
from penstock.client.liveness import Liveness
from penstock.client.standby import RestartLimit, Running, Standby
from penstock.client.watched import WatchedEngine
from penstock.errors import EngineDeadError, PenstockError
from penstock.interface.messages import ModelInfo

LOGGER = logging.getLogger("penstock")
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
MAX_FAILED_STARTS = 3  # in a row, however long each took; the model may not fit
BACK_OFF_S = 0.2  # seconds before the next start, times the number of failed starts
MAX_REFUSALS = 10  # starts in a row that the system refuses: it may be short of memory or processes for some seconds
STANDBY_CHECK_S = 0.25  # seconds between checks whether a standby is needed and can start without harm


class EngineListener(Protocol):
    """What the supervisor reports to the sender of requests."""

    def engine_ready(self, info: ModelInfo) -> None:
        """Handle a new engine; what was sent to the previous one is lost."""

    def engine_lost(self) -> bool:
        """Handle a death before a new engine. Return whether a request is to blame, and has been ended."""

    def engine_failed(self, error: EngineDeadError) -> None:
        """Handle the end: there will be no engine any more."""

    def received(self, frame: frames.Outputs | frames.Rejected) -> None:
        """Handle the engine's outputs, or the rejection of a request."""

    def leaving(self) -> None:
        """Handle an engine that takes no new requests, and is to be shut down once it has none."""

    def recovered(self) -> bool:
        """Return whether every request that the last death interrupted has continued."""


class EngineSupervisor:
    """Keeps an engine process running. The first one is started by the constructor; `run` watches it.

    Args:
        start: the first frame of every engine process, each with its own epoch.
        listener: receives deaths, new engines and their outputs.
        standby: whether a second process is kept ready.
        name: name of the process in the log.
        launch: makes the connection to an engine; None: to a child process.

    Attributes:
        restarts: number of processes that took over after the first.
        model_info: model description from the last engine that was ready.
        failure: why there will be no engine any more; None as long as there may be one.
        last_death: why the last engine process ended: its exit code or signal.
        cache_bytes: memory of its cache.
        settled: set once an engine has been ready, or there is a failure.
    """

    def __init__(
        self,
        start: frames.Start,
        listener: EngineListener,
        *,
        standby: bool = False,
        name: str = "the engine process",
        launch: Callable[[frames.Start], EngineConnection] | None = None,
    ) -> None:
        self.restarts = 0
        self.last_death = ""
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.settled = asyncio.Event()
        self.cache_bytes = 0
        self._start_frame = start  # of the process started last
        self._name = name
        self._launch = launch
        self._is_leaving = False  # the current engine has announced it
        self._listener = listener
        self._deaths = RestartLimit(MAX_DEATHS, DEATHS_WINDOW_S)
        self._failed_starts = 0  # in a row
        self._start_error: PenstockError | None = None  # why the last failed start could not build its engine
        self._engine = self._start()
        self._running: Running | None = None
        self._standby = Standby(self._start, RestartLimit(MAX_DEATHS, DEATHS_WINDOW_S)) if standby else None

    @property
    def child(self) -> EngineConnection:
        """Return the current engine process."""
        return self._engine.child

    @property
    def liveness(self) -> Liveness:
        return self._engine.liveness

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.FAILED
        if self._engine.ready is not None:
            return EngineState.READY
        return EngineState.STARTING if self.model_info is None else EngineState.RECOVERING

    def standby_status(self) -> StandbyStatus | None:
        """Return the state of the standby; None if none is wanted."""
        return None if self._standby is None else self._standby.status()

    async def run(self) -> None:
        """Serve one engine process after another until stopped or failed."""
        try:
            self._running = asyncio.create_task(self._engine.run(), name="engine")
            while self.failure is None:
                code, was_ready = await self._end_of_engine()
                if self.failure is None:
                    await self._replace(code, was_ready)
        except Exception as error:
            LOGGER.exception("the supervisor of the engine process failed")
            self._fail(EngineDeadError(f"the engine's supervisor failed: {error!r}"))
        finally:
            self._hang_up()

    def stop(self) -> None:
        """End the engine process and start no others. A second call does nothing."""
        if self.failure is None:
            self._fail(EngineDeadError("the engine was shut down"))
        self._hang_up()

    def give_up(self, error: EngineDeadError) -> None:
        """End the engine process for this reason, and start no others."""
        self._fail(error)
        self._hang_up()

    def end(self) -> None:
        """End the processes at once, after `stop`, and wait until they have ended; for use without an event loop."""
        self.child.end()
        if self._standby is not None:
            self._standby.end()

    async def wait(self) -> None:
        """Wait for the processes to end, after `stop`."""
        await self.child.wait()
        if self._standby is not None:
            await self._standby.wait()

    def _hang_up(self) -> None:
        self.child.hang_up()
        if self._standby is not None:
            self._standby.hang_up()

    def _start(self) -> WatchedEngine:
        """Start an engine process under a new epoch."""
        self._start_frame = structs.replace(self._start_frame, epoch=self._start_frame.epoch + 1)
        return WatchedEngine(self._start_frame, self._take, self._launch)

    async def _end_of_engine(self) -> tuple[int, bool]:
        """Wait until the engine process has ended, and keep a standby meanwhile, whose start must not slow down a
        recovery. Return the exit code, and whether the engine was ready."""
        running = self._running
        if running is None:
            raise EngineDeadError("no engine process was started")
        while not running.done():
            await asyncio.wait([running], timeout=None if self._standby is None else STANDBY_CHECK_S)
            if self._standby is not None and self.state is EngineState.READY and self._listener.recovered():
                self._standby.keep()
        return running.result()

    def _take(self, frame: frames.FromEngine) -> None:
        match frame:
            case frames.Ready(info=info, cache_bytes=cache_bytes):
                self._start_frame = taking_over(self._start_frame, info.max_model_len, cache_bytes)
                self.model_info, self.cache_bytes, self._start_error = info, cache_bytes, None
                self.settled.set()
                self._listener.engine_ready(info)
            case frames.Outputs() | frames.Rejected():
                self._listener.received(frame)
            case frames.Leaving():
                self._is_leaving = True
                self._listener.leaving()
            case frames.Failed() if self.model_info is None:
                self._fail(frame.as_error())
            case frames.Failed():  # it could be built before, so memory may only be short for now
                self._start_error = frame.as_error()
                LOGGER.error("the engine cannot be started: %s", frame.message)

    async def _replace(self, code: int, was_ready: bool) -> None:
        """Report a death and start another engine process, unless there were too many deaths."""
        self.last_death = self.child.reason_of(code)
        if self._is_leaving:
            LOGGER.info("%s was released", self._name)
        else:
            LOGGER.warning("%s died (%s); its requests continue in another one", self._name, self.last_death)
        explained = self._listener.engine_lost() or self.child.is_remote
        deaths = 0 if explained else self._deaths.count()
        self._failed_starts = 0 if was_ready or self._is_leaving else self._failed_starts + 1
        self._is_leaving = False
        if self._failed_starts >= MAX_FAILED_STARTS:
            died = EngineDeadError(f"{self._name} died {self._failed_starts} times before it was ready")
            self._fail(self._start_error or died)
        elif deaths >= MAX_DEATHS:
            self._fail(EngineDeadError(f"{self._name} died {MAX_DEATHS} times in {DEATHS_WINDOW_S:.0f} s"))
        else:
            await asyncio.sleep(BACK_OFF_S * self._failed_starts)
        num_refused = 0
        while self.failure is None:  # neither given up nor stopped meanwhile
            try:
                self._go_on(deaths)
                return
            except OSError as error:
                num_refused += 1
                reason = f"{self._name} cannot be started: {error.strerror or error}"
            if num_refused == MAX_REFUSALS:
                self._fail(EngineDeadError(f"{reason} (tried {MAX_REFUSALS} times)"))
            else:
                LOGGER.error("%s; trying again", reason)
                await asyncio.sleep(BACK_OFF_S * num_refused)

    def _go_on(self, deaths: int) -> None:
        """Let the standby or a new process take over. Raise OSError if the system cannot start a process now."""
        before = self._engine
        reserve = None if self._standby is None else self._standby.hand_over()
        if reserve is None:
            LOGGER.warning("restarting %s%s", self._name, f" (restart {deaths} of {MAX_DEATHS - 1})" if deaths else "")
            engine = self._start()
            reserve = engine, asyncio.create_task(engine.run(), name="engine")
        else:
            LOGGER.warning("the standby engine takes over (restart %d of %d)", deaths, MAX_DEATHS - 1)
        self._engine, self._running = reserve
        self.restarts += 1
        self._engine.liveness.follow(before.liveness)
        self._engine.take = self._take
        if self._engine.ready is not None:
            self._take(self._engine.ready)

    def _fail(self, error: PenstockError) -> None:
        """Give up: there will be no engine any more."""
        self.failure = error
        if isinstance(error, EngineDeadError):
            self._listener.engine_failed(error)
        else:  # its text may name files, which readers of streams should not see
            if self.model_info is not None:  # at the first start, the waiting caller reports the error
                LOGGER.error("no engine can be started again: %s", error)
            self._listener.engine_failed(EngineDeadError("no engine can be started again; the server's log says why"))
        self.settled.set()


def taking_over(first: frames.Start, max_model_len: int, cache_bytes: int) -> frames.Start:
    """Return the first frame for engines that will take over. They use as much memory as this engine, however much is
    free while they start, so that every request that it has accepted fits them."""
    options = {name: value for name, value in first.options.items() if name != "memory"}
    options |= {"max_model_len": max_model_len, "kv_cache_memory_bytes": cache_bytes}
    return structs.replace(first, options=options, takes_over=True)
