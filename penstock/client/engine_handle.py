"""EngineHandle: keeps one engine running, in one process after another. It knows frames, but no requests.

    start      the constructor starts a process, so that it loads while its client still starts
    watch      a process whose connection ends has died; one that is silent for too long is killed (Liveness)
    standby    a second process that has loaded its model and waits, so that a death costs no start-up time
    restart    `replace` lets the standby or a new process take over, under the next epoch, or gives up
    sleep      the processes end, and `replace` waits for `wake_up`
    end        `give_up`, then `end` or `wait`

Under it, EngineConnection is the client's end of the connection to one process; it knows neither restarts nor
liveness. EngineChild starts that process, as a child of this one; engines on other machines have a connection of their
own kind (penstock_lab/ray_app/remote.py). EnginePlan says which of the two a client uses.

Its owner awaits one death after the other and calls `replace` after each; in between it gets the frames of the current
process, and of no other (client/fleet.py).
"""

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import structs

from penstock.client import frames
from penstock.client.adapters import Adapter, Adapters
from penstock.client.engine_client import EngineState, StandbyStatus
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.interface.messages import AdapterInfo, EngineStats, LoRARequest, ModelInfo
from penstock.ranks.children import Effort, spawn_connected

LOGGER = logging.getLogger("penstock")
MAX_REPLICAS = 64  # engines of one client
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
MAX_FAILED_STARTS = 3  # in a row, however long each took; the model may not fit
BACK_OFF_S = 0.2  # seconds before the next start, times the number of failed starts
MAX_REFUSALS = 10  # starts in a row that the system refuses: it may be short of memory or processes for some seconds
STANDBY_CHECK_S = 0.25  # seconds between checks whether a standby is needed and can start without harm
LIVENESS_CHECK_S = 0.5  # seconds between checks whether a process makes progress
SILENCE_S = 5.0  # an engine sends a heartbeat every half second while it computes, and every second while it is idle
MAX_STEP_S = 600.0  # a step that computes for longer is in an endless loop
START_SILENCE_S = 10.0  # a starting process sends heartbeats too, but a user's code may wait for a network
REMOTE_START_SILENCE_S = 60.0  # before the first frame of a process whose effort cannot be seen from here
EXIT_WAIT_S = 5.0  # for the process to end on its own once the connection is closed
STDERR = 2  # output of the engine process joins our messages on stderr; stdout belongs to the user
COUNTERS = [item.name for item in fields(EngineStats) if item.name.startswith("num_") and item.name.endswith("_total")]


class EngineConnection(ABC):
    """Our end of the connection to an engine process.

    Attributes:
        is_remote: whether the engine is on a machine that may be taken away at any time, so that its end is normal.
    """

    is_remote = False

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process id; None if there is no process, or it has ended."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Read the most physical memory that the process ever had; None if it is not known."""

    @abstractmethod
    def effort(self) -> Effort | None:
        """Measure the work that the process has done so far; None if it is not known."""

    @abstractmethod
    async def connect(self) -> None:
        """Attach the connection to the running event loop."""

    @abstractmethod
    def hang_up(self) -> None:
        """Close our end. The process then exits, even in the middle of a step. A second call does nothing."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, even if it is stopped."""

    @abstractmethod
    def end(self) -> None:
        """End the process at once, and wait until it has ended; for use without an event loop."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the process and return its exit code."""

    def send(self, frame: frames.ToEngine) -> None:
        """Send a frame without waiting: frames are small, and the engine always reads. After hang_up it is dropped."""
        self.send_bytes(frames.pack(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send the result of `frames.pack`."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> frames.FromEngine | None:
        """Wait for the next frame; None at the end of the connection.

        Raises:
            InvalidFrameError: what arrived is not a frame.
        """
        if self._reader is None:
            return None
        try:
            length = frames.body_length(await self._reader.readexactly(frames.HEADER_BYTES))
            return frames.unpack_from_engine(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def reason_of(self, code: int) -> str:
        if code == -signal.SIGBUS:
            return f"signal {-code}: a mapped file has become shorter, or its disk has failed"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class EngineChild(EngineConnection):
    """A running engine process and our end of its connection. Raise OSError if no process can be started.

    start: the first frame, sent at once, so that the engine loads while its client still starts.
    """

    def __init__(self, start: frames.Start) -> None:
        super().__init__()
        inherited = [] if start.ring is None else [start.ring]
        module = "penstock.client.engine_process"
        self._sock, self._process = spawn_connected(module, inherited=inherited, stdout=STDERR)
        with suppress(OSError):  # it has died already: the end of the connection will show
            self._sock.sendall(frames.pack(start))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    def peak_memory_bytes(self) -> int | None:
        with suppress(OSError), open(f"/proc/{self._process.pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)
        return None

    def effort(self) -> Effort:
        return Effort.of([self._process.pid])

    async def connect(self) -> None:
        """Attach the connection to the running event loop, unless it has been closed."""
        if self._sock.fileno() < 0:
            return
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    def hang_up(self) -> None:
        if self._writer is None:
            self._sock.close()
        else:
            with suppress(RuntimeError):  # its event loop is closed; the connection ends with the process
                self._writer.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def end(self) -> None:
        self.hang_up()
        self.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for the process and return its exit code. Kill it after EXIT_WAIT_S."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
            await asyncio.sleep(0.005)
        return code


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The number of engines that a client has, and the function that starts them.

    Attributes:
        start: starts an engine, given its first frame, and makes the connection to it.
        num_engines: most engines.
        num_initial: engines that must be ready before requests are taken; the others join when they can. None: all.
        lora_modules: adapters that engines load before requests are taken.
    """

    start: Callable[[frames.Start], EngineConnection] = EngineChild
    num_engines: int = 1
    num_initial: int | None = None
    lora_modules: tuple[LoRARequest, ...] = ()


class EngineHandle:
    """One engine and its successors. The first process is started by the constructor, which raises OSError if the
    system refuses it.

    Args:
        start: the first frame of every process, each with its own epoch.
        deliver: called with every Ready, Outputs, Rejected and Leaving frame of the current process, and with the
            Failed frame that ends the first start.
        standby: whether a second process is kept ready.
        name: name of the process in the log.
        launch: starts a process, and makes the connection to it.
        adapters: those that every process loads as soon as it is ready.

    Attributes:
        restarts: number of processes that took over after the first.
        model_info: model description from the last process that was ready.
        failure: why there will be no engine any more; None as long as there may be one.
        awake: set while an engine is wanted.
    """

    def __init__(
        self,
        start: frames.Start,
        deliver: Callable[[frames.FromEngine], None],
        *,
        standby: bool = False,
        name: str = "the engine process",
        launch: Callable[[frames.Start], EngineConnection] = EngineChild,
        adapters: Adapters | None = None,
    ) -> None:
        self.restarts = 0
        self.model_info: ModelInfo | None = None
        self.failure: PenstockError | None = None
        self.awake = asyncio.Event()
        self.awake.set()
        self._start_frame = start  # of the process started last
        self._deliver = deliver
        self._name = name
        self._launch = launch
        self._adapters = Adapters() if adapters is None else adapters
        self._is_leaving = False  # the current process has announced its end
        self._deaths, self._standby_deaths = deque[float](), deque[float]()  # when they were
        self._failed_starts = 0  # in a row
        self._start_error: PenstockError | None = None  # why the last failed start could not build its engine
        self._wants_standby = standby
        self._standby: _Process | None = None
        self._standby_failed = False
        self._process = self._start()

    # --- its state -------------------------------------------------------------------------------------------------

    @property
    def connection(self) -> EngineConnection:
        return self._process.connection

    @property
    def liveness(self) -> "Liveness":
        return self._process.liveness

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return EngineState.FAILED
        if not self.awake.is_set():
            return EngineState.SLEEPING
        if self._process.is_ready:
            return EngineState.READY
        return EngineState.STARTING if self.model_info is None else EngineState.RECOVERING

    def standby_status(self) -> StandbyStatus | None:
        standby = self._standby
        if not self._wants_standby:
            return None
        if self._standby_failed:
            return StandbyStatus(EngineState.FAILED, None, None)
        if standby is None or not standby.is_ready:
            return StandbyStatus(EngineState.STARTING, None if standby is None else standby.connection.pid, None)
        return StandbyStatus(EngineState.READY, standby.connection.pid, standby.private_bytes)

    def send(self, frame: frames.ToEngine) -> None:
        """Send to the current process; frames for a dead one are dropped."""
        self._process.connection.send(frame)

    def load(self, adapter: Adapter) -> list[asyncio.Future[AdapterInfo]]:
        """Let the current process and the standby load an adapter, if they are ready and have not been asked yet.

        Return their answers; a process that ends before it has answered gives EngineDeadError.
        """
        return [process.load(adapter) for process in self._processes() if process.is_ready]

    def unload(self, adapter_id: str) -> None:
        for process in self._processes():
            process.unload(adapter_id)

    # --- one process after another ---------------------------------------------------------------------------------

    async def wait_for_death(self, may_start_standby: Callable[[], bool]) -> str | None:
        """Wait for the end of the current process. Return its exit code or signal; None if there will be no other
        process.

        may_start_standby: whether a start would delay no other work, such as a recovery.
        """
        if self._process.running is None:
            self._process.running = asyncio.create_task(self._receive(self._process), name="engine")
        running = self._process.running
        while not running.done():
            await asyncio.wait([running], timeout=STANDBY_CHECK_S if self._wants_standby else None)
            if self._wants_standby and self.state is EngineState.READY and may_start_standby():
                self._keep_standby()
        code = running.result()
        if self.failure is not None:
            return None
        cause = self.connection.reason_of(code)
        if not self.awake.is_set():
            LOGGER.info("%s sleeps", self._name)
        elif self._is_leaving:
            LOGGER.info("%s was released", self._name)
        else:
            LOGGER.warning("%s died (%s); its requests continue in another one", self._name, cause)
        return cause

    async def replace(self, *, explained: bool) -> None:
        """Let another process take over after a death, unless there were too many deaths; if it sleeps, when it wakes.

        explained: whether a request is to blame for the death, so that it does not count.
        """
        dead = self._process
        assert dead.has_ended, "two processes of one engine would get the same requests"
        slept = not self.awake.is_set()
        deaths = 0 if explained or slept or dead.connection.is_remote else _count_death(self._deaths)
        self._failed_starts = 0 if dead.ready is not None or self._is_leaving or slept else self._failed_starts + 1
        self._is_leaving = False
        if self._failed_starts >= MAX_FAILED_STARTS:
            died = EngineDeadError(f"{self._name} died {self._failed_starts} times before it was ready")
            self.give_up(self._start_error or died)
        elif deaths >= MAX_DEATHS:
            self.give_up(EngineDeadError(f"{self._name} died {MAX_DEATHS} times in {DEATHS_WINDOW_S:.0f} s"))
        else:
            await asyncio.sleep(BACK_OFF_S * self._failed_starts)
        num_refused = 0
        while True:
            await self.awake.wait()
            if self.failure is not None:  # given up or stopped meanwhile
                return
            try:
                self._take_over(deaths, slept=slept)
                return
            except OSError as error:
                num_refused += 1
                reason = f"{self._name} cannot be started: {error.strerror or error}"
            if num_refused == MAX_REFUSALS:
                self.give_up(EngineDeadError(f"{reason} (tried {MAX_REFUSALS} times)"))
            else:
                LOGGER.error("%s; trying again", reason)
                await asyncio.sleep(BACK_OFF_S * num_refused)

    def _take_over(self, deaths: int, *, slept: bool) -> None:
        """Let the standby or a new process take over. Raise OSError if the system cannot start a process now."""
        dead, standby = self._process, self._standby
        self._standby = None
        if slept:
            self._process = self._start()
        elif standby is None or standby.has_ended:
            LOGGER.warning("restarting %s%s", self._name, f" (restart {deaths} of {MAX_DEATHS - 1})" if deaths else "")
            self._process = self._start()
        else:
            LOGGER.warning("the standby engine takes over (restart %d of %d)", deaths, MAX_DEATHS - 1)
            self._process = standby
        assert self._process.epoch > dead.epoch, "frames of the dead process would look like the new one's"
        self.restarts += not slept
        self._process.liveness.follow(dead.liveness)
        if self._process.ready is not None:
            self._handle(self._process.ready)

    def _start(self) -> "_Process":
        """Start a process under a new epoch."""
        self._start_frame = structs.replace(self._start_frame, epoch=self._start_frame.epoch + 1)
        return _Process(self._start_frame, self._launch)

    # --- the end ---------------------------------------------------------------------------------------------------

    def give_up(self, reason: PenstockError) -> None:
        """End the processes and start no others. Only the first reason counts."""
        self.failure = self.failure or reason
        self.awake.set()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections; the processes then exit. A second call does nothing."""
        for process in self._processes():
            process.connection.hang_up()

    def end(self) -> None:
        """End the processes at once after `give_up`, and wait for their end; for use without an event loop."""
        for process in self._processes():
            process.connection.end()

    async def sleep(self) -> None:
        """End the processes, which have nothing to do, and start no others until `wake_up`."""
        self.awake.clear()
        self.hang_up()
        await self.wait()

    def wake_up(self) -> None:
        """Start a process again."""
        self.awake.set()

    async def wait(self) -> None:
        """Wait for the processes to end, after `give_up` or `sleep`."""
        for process in self._processes():
            await process.connection.wait()
            if process.running is not None and process.running.get_loop() is asyncio.get_running_loop():
                await asyncio.wait([process.running])

    def _processes(self) -> "list[_Process]":
        return [self._process] if self._standby is None else [self._process, self._standby]

    # --- frames ----------------------------------------------------------------------------------------------------

    async def _receive(self, process: "_Process") -> int:
        """Receive the frames of a process until its connection ends. Return its exit code."""
        connection = process.connection
        watch = asyncio.create_task(_kill_if_stuck(process), name="watch for a stuck engine")
        try:
            await connection.connect()
            while (frame := await connection.receive()) is not None:
                if frame.epoch == process.epoch:  # otherwise it belongs to another engine
                    process.liveness.note(frame)
                    process.answered(frame)
                    if process is not self._process:
                        self._handle_of_standby(process, frame)
                    elif isinstance(frame, frames.Outputs):
                        self._deliver(frame)
                    else:
                        self._handle(frame)
                await asyncio.sleep(0)  # a fast engine must not keep new requests and refusals waiting
        except (EngineError, msgspec.DecodeError) as error:
            LOGGER.error("invalid frame from the engine process; terminating it: %s", error)
        finally:
            watch.cancel()
            process.has_ended = True
            process.fail_loads()
            process.liveness.engine_ended()
            connection.hang_up()
        return await connection.wait()

    def _handle(self, frame: frames.FromEngine) -> None:
        match frame:
            case frames.Ready():
                self._process.ready = frame
                self._start_frame = taking_over(self._start_frame, frame)
                self.model_info, self._start_error = frame.info, None
                self._load_all(self._process)
            case frames.Leaving():
                self._is_leaving = True
            case frames.Failed() if self.model_info is None:
                self.give_up(frame.as_error())
            case frames.Failed():  # it could be built before, so memory may only be short for now
                self._start_error = frame.as_error()
                LOGGER.error("the engine cannot be started: %s", frame.message)
                return
            case frames.Heartbeat():
                return
        self._deliver(frame)

    def _load_all(self, process: "_Process") -> None:
        for adapter in self._adapters.held():
            process.load(adapter)

    # --- the standby -----------------------------------------------------------------------------------------------

    def _keep_standby(self) -> None:
        """Start a standby if there is none. It behaves like any idle engine: it sleeps on its connection, sends
        heartbeats, and is replaced when it dies or hangs. Mapped weights are shared with the first process, and its
        cache is not touched until it gets requests."""
        standby = self._standby
        if self._standby_failed or (standby is not None and standby.running is not None and not standby.running.done()):
            return
        if standby is not None:
            deaths = _count_death(self._standby_deaths)
            LOGGER.warning("the standby engine process died; starting another one")
            if deaths >= MAX_DEATHS:
                self._give_up_standby(f"it died {deaths} times in {DEATHS_WINDOW_S:.0f} s")
                return
        try:
            standby = self._standby = self._start()
        except OSError as error:
            self._give_up_standby(f"its process cannot be started: {error}")
            return
        standby.running = asyncio.create_task(self._receive(standby), name="standby engine")

    def _handle_of_standby(self, standby: "_Process", frame: frames.FromEngine) -> None:
        if isinstance(frame, frames.Ready):
            standby.ready = frame
            self._load_all(standby)
            memory = standby.private_bytes = private_bytes(standby.connection.pid)
            size = "" if memory is None else f"; it holds {memory / 2**20:.0f} MiB of memory of its own"
            LOGGER.info("a standby engine is ready%s", size)
        elif isinstance(frame, frames.Failed):
            self._give_up_standby(frame.message)

    def _give_up_standby(self, reason: str) -> None:
        """Go on without a standby; the first process is not concerned."""
        self._standby_failed = True
        LOGGER.error("there is no longer a standby engine: %s", reason)


class _Process:
    """One process of an engine, from start to end. Raise OSError if it cannot be started.

    Attributes:
        running: receives its frames until it has ended; None until the client has an event loop.
        ready: its Ready frame, once it has sent it.
        private_bytes: its own memory when it was ready, if it was a standby then.
    """

    def __init__(self, start: frames.Start, launch: Callable[[frames.Start], EngineConnection]) -> None:
        self.epoch = start.epoch
        self.connection = launch(start)
        self.liveness = Liveness()
        self.running: asyncio.Task[int] | None = None
        self.ready: frames.Ready | None = None
        self.has_ended = False
        self.private_bytes: int | None = None
        self._loads: dict[str, asyncio.Future[AdapterInfo]] = {}  # by id, of the adapters that it has or is loading

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and not self.has_ended

    # --- its adapters ----------------------------------------------------------------------------------------------

    def load(self, adapter: Adapter) -> asyncio.Future[AdapterInfo]:
        """Ask for an adapter, unless that was done before, and return the answer."""
        if adapter.id not in self._loads:
            answer = self._loads[adapter.id] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may wait for it
            self.connection.send(frames.LoadAdapter(adapter.id, adapter.source.lora_path, adapter.sha256))
        return self._loads[adapter.id]

    def unload(self, adapter_id: str) -> None:
        if self._loads.pop(adapter_id, None) is not None:
            self.connection.send(frames.UnloadAdapter(adapter_id))

    def answered(self, frame: frames.FromEngine) -> None:
        """Note an answer to `load`, if the frame is one."""
        match frame:
            case frames.AdapterLoaded(_, info) if (answer := self._loads.get(info.name)) and not answer.done():
                answer.set_result(info)
            case frames.Rejected(_, adapter_id) if answer := self._loads.pop(adapter_id, None):
                answer.set_exception(frame.as_error())

    def fail_loads(self) -> None:
        """Answer every open `load`: the process has ended."""
        for answer in self._loads.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine process died while it loaded the adapter; try again"))


async def _kill_if_stuck(process: _Process) -> None:
    liveness = process.liveness
    while True:
        before = time.monotonic()
        await asyncio.sleep(LIVENESS_CHECK_S)
        if not liveness.heard:
            liveness.watch_start(process.connection.effort())
        if time.monotonic() - before > 4 * LIVENESS_CHECK_S:
            liveness.excuse()  # this process stood still too, so it cannot tell
        elif liveness.symptom is not None:
            LOGGER.error("the engine process is stuck (%s); killing it", liveness.symptom)
            process.connection.kill()
            return


class Liveness:
    """The signs of life of an engine: its last frame, its progress, and its newest statistics.

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
        """The gauges of this engine, and the counters summed over all engines so far, which never fall."""
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
        """Note the effort of a process before its first frame, while it starts Python; None: not known."""
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
        """Seconds since the last frame; None without an engine."""
        return None if self.last_heard is None else time.monotonic() - self.last_heard

    @property
    def making_progress(self) -> bool:
        """True if an engine is ready and not stuck."""
        return self._ready and self.last_heard is not None and self.symptom is None

    @property
    def symptom(self) -> str | None:
        """A phrase that says how an engine is stuck: silent, or in one step, for too long; None if it is not."""
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
    total = {item.name: getattr(found[0], item.name) for item in fields(EngineStats)}
    for stats in found[1:]:
        total = {name: _sum(value, getattr(stats, name)) for name, value in total.items()}
    return EngineStats(**total)


def _sum(one: Any, other: Any) -> int | list[int]:
    """Add two counters, or two lists of them place by place."""
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return int(one + other)


def private_bytes(pid: int | None) -> int | None:
    """Read the memory in bytes of this process alone, without files; None if it cannot be read."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        rows = (line.split() for line in file)
        return 1024 * next(int(row[1]) for row in rows if row[0] == "Private_Dirty:")
    return None


def taking_over(first: frames.Start, ready: frames.Ready) -> frames.Start:
    """Make the first frame for engines that will take over. They use as much memory as this engine, however much is
    free while they start, so that every request that it has accepted fits them."""
    options = {name: value for name, value in first.options.items() if name != "memory"}
    options |= {"max_model_len": ready.info.max_model_len, "kv_cache_memory_bytes": ready.cache_bytes}
    return structs.replace(first, options=options, takes_over=True)


def _count_death(deaths: deque[float]) -> int:
    """Note a death. Return the number of deaths within DEATHS_WINDOW_S."""
    now = time.monotonic()
    deaths.append(now)
    while now - deaths[0] >= DEATHS_WINDOW_S:
        deaths.popleft()
    return len(deaths)
