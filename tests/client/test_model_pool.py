"""ModelPool: who has the memory, who waits, and that every request gets its own model."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.client import model_pool
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.model_pool import ModelPool, Phase, ServedModel
from penstock.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, ModelLoadError, PenstockError


class Machine:
    """The memory that the fake engines of a test hold, and the most that they ever held."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def take(self, amount: int) -> None:
        self.held += amount
        self.peak = max(self.peak, self.held)


class FakeClient:
    """A SleepyClient whose engines take memory from their start to their end."""

    def __init__(self, machine: Machine, memory: int, error: PenstockError | None = None) -> None:
        self.machine, self.memory, self.error = machine, memory, error
        self.failure: PenstockError | None = None
        self.awake = False
        self.num_starts = 0

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        await self.wake_up()

    async def wake_up(self) -> None:
        self.num_starts += 1
        self.machine.take(self.memory)
        await asyncio.sleep(0.001)
        self.awake = True

    async def sleep(self) -> None:
        self.awake = False
        await asyncio.sleep(0.001)
        self.machine.take(-self.memory)

    async def shutdown(self) -> None:
        if self.awake:
            await self.sleep()

    async def drain(self, timeout_s: float) -> None:
        pass

    def status(self) -> EngineStatus:
        state = EngineState.READY if self.awake else EngineState.SLEEPING
        return EngineStatus(state, 1, 0, 0.0, self.awake, planned_memory={"weights": self.memory})


def pool_of(machine: Machine, needs: dict[str, int], budget: int, **options: Any) -> tuple[ModelPool, Any]:
    def model(name: str, need: int) -> ServedModel:
        return ServedModel(name, making(lambda: FakeClient(machine, need)), memory=need, **options)

    models = {name: model(name, need) for name, need in needs.items()}
    return ModelPool(list(models.values()), budget, max_wait_s=20.0), models


def making(make: Callable[[], Any]) -> Callable[[int | None], Any]:
    """What makes a client, whatever the memory."""
    return lambda memory: make()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30.0))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_random_requests_never_pass_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that is given to a model before another one's processes have ended, against a model that is
    put to sleep under a request, and against requests that wait for ever."""
    monkeypatch.setattr(model_pool, "PATIENCE_S", 0.005)
    machine, draw = Machine(), random.Random(5)
    pool, models = pool_of(machine, {"a": 3, "b": 4, "c": 5, "d": 5, "e": 2}, budget=9)
    num_served = 0

    async def request() -> None:
        nonlocal num_served
        model = models[draw.choice("aabbbcde")]
        await pool.use(model)
        for _ in range(draw.randrange(4)):
            assert model.client.awake
            assert pool.held <= 9
            assert machine.held <= pool.held
            await asyncio.sleep(draw.random() * 0.002)
        pool.release(model)
        num_served += 1

    async def client() -> None:
        for _ in range(25):
            await request()

    async def work() -> None:
        await asyncio.gather(*(client() for _ in range(16)))
        await pool.shutdown()

    run(work)
    assert num_served == 400
    assert machine.held == 0
    assert machine.peak <= 9
    assert not any(model.num_uses for model in models.values())


def test_the_model_used_least_recently_makes_room() -> None:
    """Guards against putting the wrong model to sleep: one in use, or the one used last."""
    machine = Machine()
    pool, models = pool_of(machine, {"a": 4, "b": 4, "c": 4, "d": 4}, budget=12)

    async def work() -> None:
        for name in "abc":
            await pool.use(models[name])
        for name in "bca":
            pool.release(models[name])
            await asyncio.sleep(0.002)
        await pool.use(models["b"])  # is used again, and not released
        await pool.use(models["d"])
        assert [name for name, model in models.items() if model.phase is Phase.AWAKE] == ["a", "b", "d"]
        await pool.use(models["c"])  # a is the only one without a use
        assert models["a"].phase is Phase.ASLEEP

    run(work)


def test_a_model_in_constant_use_lets_others_have_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a busy model that keeps all others out: its uses overlap without a gap."""
    monkeypatch.setattr(model_pool, "PATIENCE_S", 0.01)
    pool, models = pool_of(Machine(), {"a": 4, "b": 4}, budget=4)

    async def work() -> None:
        await pool.use(models["a"])
        other = asyncio.create_task(pool.use(models["b"]))
        for _ in range(200):
            if other.done():
                break
            again = asyncio.create_task(pool.use(models["a"]))
            await asyncio.sleep(0.001)
            pool.release(models["a"])
            if not again.done():  # it waits for its turn behind b
                await other
                pool.release(models["b"])
            await again
        assert other.done()
        assert models["b"].num_loads == 1
        assert models["a"].num_loads == 2

    run(work)


def test_a_model_sleeps_when_idle_and_wakes() -> None:
    """Guards against a model that never sleeps, sleeps during a use, or forgets keep_alive's time."""
    machine = Machine()
    pool, models = pool_of(machine, {"a": 4}, budget=9, idle_s=0.01)
    model = models["a"]

    async def work() -> None:
        await pool.use(model)
        await asyncio.sleep(0.03)
        assert model.phase is Phase.AWAKE
        assert model.state is EngineState.READY
        pool.release(model)
        assert model.expires_at is not None
        await until(lambda: model.phase is Phase.ASLEEP)
        assert (machine.held, pool.held, model.state) == (0, 0, EngineState.SLEEPING)
        await pool.use(model)
        await pool.use(model)
        pool.release(model)
        assert model.expires_at is None
        assert model.client.num_starts == 2
        pool.keep(model, 1e300)
        pool.release(model)
        await asyncio.sleep(0.03)
        assert model.phase is Phase.AWAKE
        assert model.expires_at is None
        pool.keep(model, 0.0)
        await until(lambda: model.phase is Phase.ASLEEP)

    run(work)


def test_pinned_models_stay_and_what_does_not_fit_beside_them_is_refused() -> None:
    """Guards against evicting a pinned model, and against waiting for memory that never comes."""
    machine = Machine()
    pinned = ServedModel("p", making(lambda: FakeClient(machine, 6)), memory=6, pinned=True)
    others = [ServedModel(name, making(lambda: FakeClient(machine, 4)), memory=4) for name in "ab"]
    large = ServedModel("l", making(lambda: FakeClient(machine, 5)), memory=5)
    pool = ModelPool([pinned, *others, large], budget=10)

    async def work() -> None:
        await pool.attach()
        assert pool.state is EngineState.STARTING
        await until(lambda: pinned.phase is Phase.AWAKE)
        assert pool.state is EngineState.READY
        for model in others:
            await pool.use(model)
            pool.release(model)
        assert pinned.phase is Phase.AWAKE
        assert others[0].phase is Phase.ASLEEP
        with pytest.raises(EngineDeadError, match="pinned models leave"):
            await pool.use(large)

    run(work)


def test_a_model_that_does_not_fit_its_share_gets_the_rest() -> None:
    """Guards against a model that needs more than half of the budget and is never served, or never told."""
    machine, tried = Machine(), []

    def make(memory: int | None) -> Any:
        tried.append(memory)
        small = InvalidRequestError("memory: too little", param="memory") if (memory or 0) < 7 else None
        return FakeClient(machine, 6, small)

    model = ServedModel("a", make)
    pool = ModelPool([model], budget=10)

    async def work() -> None:
        await pool.use(model)
        assert tried == [5, 10]
        assert (model.need, pool.held) == (6, 6)

    run(work)


def test_a_model_that_cannot_be_loaded_fails_its_requests_and_is_tried_again() -> None:
    """Guards against waiting for a model that failed, and against one failure that lasts for ever."""
    machine, errors = Machine(), [ModelLoadError("no such file"), None]
    model = ServedModel("a", making(lambda: FakeClient(machine, 4, errors.pop(0))), memory=4)
    pool = ModelPool([model], budget=10)

    async def work() -> None:
        found = await asyncio.gather(pool.use(model), pool.use(model), return_exceptions=True)
        assert [type(error) for error in found] == [ModelLoadError] * 2
        assert model.state is EngineState.FAILED
        assert pool.held == 0
        await pool.use(model)
        assert model.state is EngineState.READY
        model.client.failure = EngineDeadError("it died five times")  # type: ignore[attr-defined, misc]
        errors.append(None)
        await pool.use(model)  # another client takes its place
        assert model.client.failure is None
        assert model.num_loads == 2
        assert machine.held == 4

    run(work)


def test_waiting_ends_in_time_or_with_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a use that nobody holds: a waiter left, or was refused, at the moment when it was its turn."""
    pool, models = pool_of(Machine(), {"a": 4, "b": 4}, budget=4)

    async def work() -> None:
        await pool.use(models["a"])
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_max_wait_s", 0.02)
            with pytest.raises(EngineOverloadedError, match="the model b was not loaded within"):
                await pool.use(models["b"])
        leaving = asyncio.create_task(pool.use(models["b"], patient=True))
        await asyncio.sleep(0.03)
        assert models["b"].num_waiting == 1
        grant = pool._grant
        monkeypatch.setattr(pool, "_grant", lambda model: (grant(model), leaving.cancel()))
        pool.release(models["a"])
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        monkeypatch.undo()
        assert models["b"].num_waiting == models["b"].num_uses == models["a"].num_uses == 0
        waiting = asyncio.create_task(pool.use(models["a"]))
        await asyncio.sleep(0)
        await pool.drain(1.0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await waiting

    run(work)
