"""ModelPool: the models of one server, each with its own engines, within one budget of memory.

    start    a model is loaded when its first request comes; a pinned one with the server
    sleep    its processes end when it has not been used for a while, or when another one needs the memory: first those
             of the model that was used least recently, never of one with a request. What is known of it stays here
    wake     its processes start again, with the same memory as before; packed weights are mapped from their file
    wait     a request for a model that has no room waits for it, in the order of the first requests for each. If the
             others are never idle, one of them takes no new requests after PATIENCE_S until it has been put to sleep

A use of a model is what keeps it awake: from the request's body to the end of its answer, or of the call that outlives
its connection. The memory of a model counts from before its processes start until they have ended, so the budget holds
at any time. A server of one model has a pool of one, which is always awake. The pool knows no HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol

from penstock.client.engine_client import EngineClient, EngineState, EngineStatus
from penstock.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, PenstockError
from penstock.interface.messages import ModelInfo

LOGGER = logging.getLogger("penstock")
PATIENCE_S = 5.0  # a model that is always in use is left alone for so long, while a request waits for another one
FOREVER_S = 1e9  # a model that is to be kept for 31 years or more is kept without an end
SHARE = 2  # a model that states no memory gets at most 1 / SHARE of the budget, if it fits there


class SleepyClient(EngineClient, Protocol):
    """An engine client that can do without its engines for a while, as ProcessClient can."""

    @property
    def failure(self) -> PenstockError | None:
        """Why there will be no engine any more; None as long as there may be one."""

    async def start(self) -> ModelInfo:
        """Wait until every engine is ready. Raise the error why none can be built."""

    async def sleep(self) -> None:
        """End the engines until `wake_up`. No request may be open. On return, their memory is free."""

    async def wake_up(self) -> ModelInfo:
        """Start the engines again, and wait until they are ready. Raises what `start` raises."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request that waits for its model, since a time on the clock of time.monotonic()."""

    since: float
    granted: "asyncio.Future[None]"


class Phase(Enum):
    """What a pool does with a model. LEAVING: it is being put to sleep, and still holds its memory."""

    ASLEEP = auto()
    LOADING = auto()
    AWAKE = auto()
    LEAVING = auto()


class ServedModel:
    """A model of a pool.

    Args:
        name: as requests name it; None: as its engine does.
        make: makes its client within so many bytes of memory; it blocks. None: `client` is there, and never sleeps.
        memory: the bytes that it may take; None: a share of the budget.
        idle_s: seconds without a use after which it is put to sleep; None: never.
        pinned: loaded with the server, and never put to sleep.
        adapters: names of the LoRA adapters that it will have when it is loaded.
        copies: how often its processes hold the memory that they plan: twice with a standby.

    Attributes:
        need: the bytes that it takes when it is awake, as planned; before it has been, the most that it may take.
        held: the bytes that it holds of the budget now.
        num_uses: requests that keep it awake.
        num_loads: how often it was loaded, or woken up.
        used_at: when the last use ended, on the clock of time.monotonic().
        expires_at: when it will be put to sleep if nothing uses it; None: not for this reason.
        error: why it could not be loaded the last time.
    """

    def __init__(
        self,
        name: str | None,
        make: Callable[[int | None], SleepyClient] | None = None,
        *,
        client: EngineClient | None = None,
        memory: int | None = None,
        idle_s: float | None = None,
        pinned: bool = False,
        copies: int = 1,
        adapters: Sequence[str] = (),
    ) -> None:
        self.name, self.copies, self.adapters = name, copies, adapters
        self.pinned = pinned or make is None
        self.idle_s = None if self.pinned else idle_s
        self.phase = Phase.ASLEEP if client is None else Phase.AWAKE
        self.need = memory or 0
        self.held = self.num_uses = self.num_loads = 0
        self.used_at = time.monotonic()
        self.expires_at: float | None = None
        self.error: PenstockError | None = None
        self._make = make
        self._client: Any = client
        self._keep_s = self.idle_s
        self._is_estimate = memory is None  # until it has been loaded, its need is only the most that it may take
        self._task: asyncio.Task[None] | None = None  # that loads it or puts it to sleep
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False  # takes no new uses, because others wait for its memory
        self._waiting: list[_Waiter] = []

    @property
    def loaded(self) -> EngineClient | None:
        """Its engine client; None if it has never been loaded, or could not be."""
        client: EngineClient | None = self._client
        return client

    @property
    def client(self) -> EngineClient:
        """Its engine client. Raise EngineDeadError if it has never been loaded, or could not be."""
        if self.loaded is None:
            raise EngineDeadError(f"the model {self.name} is not loaded")
        return self.loaded

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> EngineState:
        """The state of its engine: SLEEPING also before it is loaded; FAILED if it could not be."""
        if self.phase is Phase.AWAKE:
            return self.client.status().state
        if self.phase is Phase.LOADING:
            return EngineState.STARTING
        return EngineState.SLEEPING if self.error is None else EngineState.FAILED

    def status(self) -> EngineStatus:
        """Take a snapshot of its engines, also while there are none."""
        if self.loaded is None:
            return EngineStatus(self.state, None, 0, None, making_progress=False)
        return replace(self.loaded.status(), state=self.state)


class ModelPool:
    """The models of one server; the first one answers requests that name none. Not thread-safe.

    Args:
        budget: bytes of memory for all engines; None: no limit.
        max_wait_s: how long a request may wait for its model; None: no limit.

    Attributes:
        draining: set once, when the server stops accepting requests.
    """

    def __init__(
        self, models: Sequence[ServedModel], budget: int | None = None, max_wait_s: float | None = None
    ) -> None:
        self.budget = budget
        self.draining = False
        self._models = list(models)
        self._max_wait_s = max_wait_s
        self._look_again: asyncio.TimerHandle | None = None
        for model in self._models:
            model.need = model.need or (budget or 0) // SHARE

    @classmethod
    def of(cls, client: EngineClient) -> "ModelPool":
        """Make the pool of one model, whose engines the caller has started."""
        return cls([ServedModel(None, client=client)])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def held(self) -> int:
        """The bytes that all models hold of the budget."""
        return sum(model.held for model in self._models)

    # --- from start to end -----------------------------------------------------------------------------------------

    async def attach(self) -> None:
        """Watch the engines from this event loop, and load the pinned models, without waiting for them."""
        for model in self._models:
            if model._client is not None:
                await model._client.attach()
            elif model.pinned:
                self._load(model)

    @property
    def state(self) -> EngineState:
        """The state of the models that the server starts with, which decide whether it has started, or has failed."""
        states = {
            model.state for model in self._models if model._make is None or (model.pinned and not model.num_loads)
        }
        for state in (EngineState.FAILED, EngineState.STARTING, EngineState.RECOVERING, EngineState.DRAINING):
            if state in states:
                return state
        return EngineState.READY

    @property
    def num_open(self) -> int:
        """Count the requests that run, wait in an engine's queue, or wait for a model."""
        clients: list[EngineClient] = [model._client for model in self._models if model._client is not None]
        running = sum(client.status().journal_requests for client in clients)
        return running + sum(len(model._waiting) for model in self._models)

    async def drain(self, timeout_s: float) -> None:
        """Refuse those that wait for a model, and wait for the open requests, at most timeout_s seconds."""
        self.draining = True
        for model in self._models:
            self._refuse(model, EngineDeadError("the server is shutting down"))
        clients = [model._client for model in self._models if model._client is not None]
        await asyncio.gather(*(client.drain(timeout_s) for client in clients))

    async def shutdown(self) -> None:
        """End all engines; open requests end with EngineDeadError."""
        self.draining = True
        for timer in [self._look_again, *(model._timer for model in self._models)]:
            if timer is not None:
                timer.cancel()
        clients = [model._client for model in self._models if model._client is not None]
        await asyncio.gather(*(client.shutdown() for client in clients))
        await asyncio.gather(*(model._task for model in self._models if model._task is not None))

    # --- uses ------------------------------------------------------------------------------------------------------

    def is_usable(self, model: ServedModel) -> bool:
        """Tell whether `use` would return at once."""
        if model._make is None:
            return True
        return model.phase is Phase.AWAKE and not model._is_closing and model._client.failure is None

    async def use(self, model: ServedModel, *, patient: bool = False) -> None:
        """Wait until the model can compute, and keep it awake until `release`.

        patient: wait as long as it takes.

        Raises:
            EngineOverloadedError: it could not be loaded in time, because others are in use.
            EngineDeadError: the server is shutting down.
            ModelLoadError, InvalidRequestError: it cannot be loaded.
        """
        if self.is_usable(model):
            self._count_use(model)
            return
        if self.draining:
            raise EngineDeadError("the server is shutting down")
        if model.phase is Phase.AWAKE and model._client.failure is not None:
            self._sleep(model)
        waiter = _Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
        model._waiting.append(waiter)
        self._arrange()
        try:
            async with asyncio.timeout(None if patient else self._max_wait_s):
                await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(model)
            if isinstance(error, TimeoutError):
                what = f"the model {model.name} was not loaded within {self._max_wait_s:g} s, because others are in use"
                raise EngineOverloadedError(f"{what}; try again later") from None
            raise
        finally:
            if waiter in model._waiting:
                model._waiting.remove(waiter)
                self._arrange()

    def _count_use(self, model: ServedModel) -> None:
        model.num_uses += 1
        model._keep_s = model.idle_s
        if model._timer is not None:
            model._timer.cancel()
            model._timer = model.expires_at = None

    def release(self, model: ServedModel) -> None:
        """End a use."""
        model.num_uses -= 1
        model.used_at = time.monotonic()
        self._schedule_sleep(model)
        if any(other._waiting for other in self._models):
            self._arrange()

    def keep(self, model: ServedModel, seconds: float) -> None:
        """Keep a model for so many seconds after its last use, instead of idle_s; from FOREVER_S on, until others need
        its place."""
        if not model.pinned:
            model._keep_s = seconds if seconds < FOREVER_S else None
            self._schedule_sleep(model)

    def _schedule_sleep(self, model: ServedModel) -> None:
        if model._timer is not None:
            model._timer.cancel()
            model._timer = model.expires_at = None
        if model.phase is Phase.AWAKE and not model.num_uses and model._keep_s is not None and not self.draining:
            model.expires_at = time.time() + model._keep_s
            model._timer = asyncio.get_running_loop().call_later(model._keep_s, self._expire, model)

    def _expire(self, model: ServedModel) -> None:
        if model.phase is Phase.AWAKE and not model.num_uses:
            self._sleep(model)

    # --- who has the memory ----------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Load what is waited for and has room, and let others make room for the rest. Called after every change."""
        if self.draining:
            return
        now, closing = time.monotonic(), set[ServedModel]()
        wanted = [model for model in self._models if model._waiting and model.phase is Phase.ASLEEP]
        for model in sorted(wanted, key=lambda model: model._waiting[0].since):
            most = self._most(model)
            if model._is_estimate:
                model.need = min(model.need, most)
            elif model.need > most:
                needs = f"the model {model.name} needs {model.need >> 20} MiB"
                self._refuse(model, EngineDeadError(f"{needs}; the pinned models leave {most >> 20} MiB of the budget"))
                continue
            missing = 0 if self.budget is None else self.held + model.need - self.budget
            if missing <= 0:
                self._load(model)
                continue
            waited_s = now - model._waiting[0].since
            closing = self._make_room(missing, may_close=waited_s >= PATIENCE_S)
            if self._look_again is None and waited_s < PATIENCE_S:
                self._look_again = asyncio.get_running_loop().call_later(PATIENCE_S - waited_s, self._on_time)
            break  # those that came later do not take the room that this one waits for
        for model in self._models:
            model._is_closing = model in closing
            if model._waiting and self.is_usable(model):
                self._grant(model)

    def _grant(self, model: ServedModel) -> None:
        for waiter in model._waiting:
            if not waiter.granted.done():
                self._count_use(model)
                waiter.granted.set_result(None)
        model._waiting.clear()

    def _most(self, model: ServedModel) -> int:
        """Count the bytes that a model can get if all but the pinned ones sleep."""
        pinned = sum(other.need for other in self._models if other.pinned and other is not model)
        return max(0, self.budget - pinned) if self.budget is not None else model.need

    def _on_time(self) -> None:
        self._look_again = None
        self._arrange()

    def _make_room(self, missing: int, *, may_close: bool) -> set[ServedModel]:
        """Put models to sleep that nothing uses, until `missing` bytes will be free. Return those that must take no new
        uses, because that is not enough."""
        missing -= sum(model.held for model in self._models if model.phase is Phase.LEAVING)
        closing: set[ServedModel] = set()
        able = [model for model in self._models if model.phase is Phase.AWAKE and not model.pinned]
        for model in sorted(able, key=lambda model: (model.num_uses > 0, model.used_at)):
            if missing <= 0 or (model.num_uses and not may_close):
                break
            missing -= model.held
            if model.num_uses:
                closing.add(model)
            else:
                self._sleep(model)
        return closing

    # --- loading and sleeping --------------------------------------------------------------------------------------

    def _load(self, model: ServedModel) -> None:
        model.phase, model.held = Phase.LOADING, model.need
        model._task = asyncio.get_running_loop().create_task(self._loaded(model), name=f"load {model.name}")

    def _sleep(self, model: ServedModel) -> None:
        model.phase = Phase.LEAVING
        model._task = asyncio.get_running_loop().create_task(self._put_to_sleep(model), name=f"sleep {model.name}")

    async def _loaded(self, model: ServedModel) -> None:
        """Load a model, or wake it up, and let those that wait for it use it."""
        began, model.error = time.monotonic(), None
        try:
            if model._client is None:
                assert model._make is not None
                model._client = await asyncio.to_thread(model._make, model.need or None)
                if self.draining:
                    raise EngineDeadError("the server is shutting down")
                await model._client.start()
            else:
                await model._client.wake_up()
        except (PenstockError, OSError) as error:
            await self._failed(model, error)
        else:
            model.phase, model._is_estimate, model.num_loads = Phase.AWAKE, False, model.num_loads + 1
            model.need = model.held = model.copies * sum(model._client.status().planned_memory.values()) or model.need
            model._is_closing = False
            self._grant(model)  # first, so that no other model takes its memory before
            LOGGER.info("%s is loaded (%.1f s); %s", model.name, time.monotonic() - began, self)
        self._end_task(model)
        self._schedule_sleep(model)

    async def _failed(self, model: ServedModel, error: PenstockError | OSError) -> None:
        """Give up loading a model; one that does not fit its share of the budget is tried with all that there is."""
        await self._drop(model)
        model.phase, model.held = Phase.ASLEEP, 0
        is_small = model._is_estimate and model.need < self._most(model)
        if is_small and isinstance(error, InvalidRequestError) and error.param == "memory":
            model.need = self._most(model)
            return
        LOGGER.error("%s cannot be loaded: %s", model.name, error)
        model.error = error if isinstance(error, PenstockError) else EngineDeadError(f"no process: {error}")
        self._refuse(model, model.error)

    async def _put_to_sleep(self, model: ServedModel) -> None:
        if model._client.failure is None:
            await model._client.sleep()
        else:
            await self._drop(model)
        model.phase, model.held = Phase.ASLEEP, 0
        LOGGER.info("%s sleeps; %s", model.name, self)
        self._end_task(model)

    async def _drop(self, model: ServedModel) -> None:
        client, model._client = model._client, None
        if client is not None:
            await client.shutdown()

    def _end_task(self, model: ServedModel) -> None:
        model._task = None
        self._arrange()

    def _refuse(self, model: ServedModel, error: PenstockError) -> None:
        for waiter in model._waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        model._waiting.clear()

    def __str__(self) -> str:
        total = "" if self.budget is None else f" of {self.budget >> 20}"
        return f"the models hold {self.held >> 20}{total} MiB"
