"""A standby engine: scripted processes for what is hard to time, and a real pair of them."""

import asyncio
import itertools
import os
import signal

import pytest

from penstock import AsyncLLM, SamplingParams
from penstock.client import engine_handle, frames
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import EngineConnection
from penstock.errors import EngineDeadError
from penstock.interface.messages import EngineStats
from penstock.kernels.cpu.library import load_library
from tests.client.test_process import alive, final, until
from tests.fakes_engine import model_info

INFO = model_info(64, 100)
CACHE_BYTES = 4096
OPTIONS = {"max_num_seqs": 3, "memory": 2**30}


class Child:
    """An engine process that says what a test puts into it, and dies when told."""

    is_remote = False
    reason_of = EngineConnection.reason_of

    def __init__(self, start):
        self.start = start
        self.pid = 1000 + start.epoch
        self._frames = asyncio.Queue()

    def effort(self):
        return None

    def say_ready(self):
        self._frames.put_nowait(frames.Ready(self.start.epoch, INFO, EngineStats(), CACHE_BYTES))

    def say(self, frame):
        self._frames.put_nowait(frame)

    def die(self):
        self._frames.put_nowait(None)

    async def connect(self):
        pass

    async def receive(self):
        return await self._frames.get()

    def hang_up(self):
        self.die()

    def kill(self):
        self.die()

    async def wait(self):
        return -9


class World:
    """A handle with a standby, the processes that it has started, and what its owner is told."""

    def __init__(self, monkeypatch):
        self.children, self.told = [], []
        self.may_start_standby = True

        def start(first):
            self.children.append(Child(first))
            return self.children[-1]

        monkeypatch.setattr(engine_handle, "STANDBY_CHECK_S", 0.001)
        monkeypatch.setattr(engine_handle, "BACK_OFF_S", 0.0)
        self.handle = engine_handle.EngineHandle(frames.Start(-1, OPTIONS), self.received, standby=True, launch=start)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.run())
        return self

    async def run(self):
        while await self.handle.wait_for_death(lambda: self.may_start_standby) is not None:
            self.told.append("lost")
            await self.handle.replace(explained=False)

    async def __aexit__(self, *exc_info):
        self.handle.give_up(EngineDeadError("the test is over"))
        await asyncio.wait_for(self.task, 10)
        await asyncio.wait_for(self.handle.wait(), 10)

    async def pair(self):
        """Return the engine and its standby, both ready."""
        self.children[0].say_ready()
        await until(lambda: len(self.children) == 2)
        self.children[1].say_ready()
        await until(lambda: self.handle.standby_status().state is EngineState.READY)
        return self.children

    def received(self, frame):
        self.told.append("ready" if isinstance(frame, frames.Ready) else frame.epoch)


def outputs(child):
    return frames.Outputs(child.start.epoch, [], EngineStats(num_generated_tokens_total=5))


async def test_the_standby_takes_over_and_is_replaced(monkeypatch):
    """Guards against a start in the way of a recovery, two engines that are listened to, and counters that fall."""
    async with World(monkeypatch) as world:
        first, second = await world.pair()
        taken = {"max_model_len": INFO.max_model_len, "kv_cache_memory_bytes": CACHE_BYTES}
        assert first.start == frames.Start(0, OPTIONS)
        assert second.start == frames.Start(1, {"max_num_seqs": 3} | taken, takes_over=True)
        first.say(outputs(first))
        second.say(outputs(second))  # from a standby, which was given nothing
        await until(lambda: 0 in world.told)
        world.may_start_standby = False
        first.die()
        await until(lambda: world.handle.restarts == 1)
        assert world.told == ["ready", 0, "lost", "ready"]
        assert world.handle.state is EngineState.READY
        assert world.handle.connection is second
        second.say(outputs(second))
        await until(lambda: 1 in world.told)
        assert world.handle.liveness.stats.num_generated_tokens_total == 10
        assert len(world.children) == 2  # the recovery goes on
        world.may_start_standby = True
        await until(lambda: len(world.children) == 3)


async def test_a_standby_that_still_starts_takes_over_too(monkeypatch):
    """It is ahead of a new process."""
    async with World(monkeypatch) as world:
        world.children[0].say_ready()
        await until(lambda: len(world.children) == 2)
        world.may_start_standby = False
        world.children[0].die()
        await until(lambda: world.handle.restarts == 1)
        assert world.handle.state is EngineState.RECOVERING
        world.children[1].say_ready()
        await until(lambda: world.told == ["ready", "lost", "ready"])
        assert len(world.children) == 2


async def test_a_standby_that_dies_again_and_again_is_given_up_and_nothing_else(monkeypatch, caplog):
    async with World(monkeypatch) as world:
        world.children[0].say_ready()
        for number in itertools.count(1):
            state = world.handle.standby_status
            await until(lambda: len(world.children) > number or state().state == "failed")  # noqa: B023
            if len(world.children) == number:
                break
            world.children[number].die()
        assert len(world.children) == 1 + engine_handle.MAX_DEATHS
        assert (world.told, world.handle.state) == (["ready"], EngineState.READY)
    assert "there is no longer a standby engine: it died 5 times in 60 s" in caplog.messages


async def test_a_standby_that_cannot_be_built_does_not_end_the_service(monkeypatch, caplog):
    """Guards against a server that fails because memory is short for a second engine."""
    async with World(monkeypatch) as world:
        world.children[0].say_ready()
        await until(lambda: len(world.children) == 2)
        world.children[1].say(frames.Failed(1, "no memory for a second one", None, None, False))
        world.children[1].die()
        await until(lambda: world.handle.standby_status().state is EngineState.FAILED)
        assert world.told == ["ready"]
        world.children[0].die()
        await until(lambda: len(world.children) == 3)
        world.children[2].say_ready()
        await until(lambda: world.told == ["ready", "lost", "ready"])
    assert "there is no longer a standby engine: no memory for a second one" in caplog.messages


@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
async def test_real_engines(monkeypatch):
    """The next token comes from the process that stood by, which has no memory for a cache until then."""
    monkeypatch.setattr(engine_handle, "STANDBY_CHECK_S", 0.01)
    options = {"kv_cache_memory_bytes": 2**30, "max_num_seqs": 12}
    async with AsyncLLM(model="demo", standby=True, **options) as llm:
        long = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        whole = await final(llm, params=long)
        await until(lambda: llm.status().standby.state is EngineState.READY)
        before = llm.status()
        assert before.standby.private_bytes < 2**28
        stream = asyncio.create_task(final(llm, params=long))
        await until(lambda: llm.status().journal_tokens > 10)
        os.kill(before.pid, signal.SIGKILL)
        assert (await stream).outputs == whole.outputs
        assert llm.status().pid == before.standby.pid
        assert llm.status().stats.kv_blocks_total == before.stats.kv_blocks_total
        await until(lambda: llm.status().standby.pid not in (None, before.standby.pid))
        pids = [llm.status().pid, llm.status().standby.pid]
    assert not any(alive(pid) for pid in pids)
