"""EngineHandle with scripted engine processes: restarts, epochs and what a broken process says."""

import asyncio
import errno
import itertools

import pytest

from penstock.client import engine_handle, frames
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import EngineConnection, EnginePlan
from penstock.client.fleet import Fleet
from penstock.client.open_requests import OpenRequests
from penstock.client.records import RecordOptions
from penstock.errors import EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from penstock.interface.messages import EngineStats
from penstock.ranks.children import Effort
from tests.fakes_engine import model_info

INFO = model_info(64, 100)


def ready(epoch):
    return frames.Ready(epoch, INFO, EngineStats())


class ScriptedChild:
    """An engine process that says what a script has for its epoch, an exception being a broken frame, and dies."""

    pid = 1234
    is_remote = False
    reason_of = EngineConnection.reason_of

    def __init__(self, script, first):
        self.script = list(script)
        self.sent = [first]

    def effort(self):
        return None

    async def connect(self):
        pass

    def send(self, frame):
        self.sent.append(frame)

    async def receive(self):
        item = self.script.pop(0) if self.script else None
        if isinstance(item, Exception):
            raise item
        return item

    def hang_up(self):
        pass

    async def wait(self):
        return 9


class Watched:
    """A handle whose nth process follows `script(n)`, used as a fleet does until it gives up. If the script raises
    OSError, the process cannot be started."""

    def __init__(self, monkeypatch, script, explained=lambda losses: False):
        epochs = itertools.count()
        self.children, self.frames, self.infos = [], [], []
        self.losses = 0
        self.explained = explained

        def start(first):
            self.children.append(ScriptedChild(script(next(epochs)), first))
            return self.children[-1]

        monkeypatch.setattr(engine_handle, "BACK_OFF_S", 0.0)
        self.handle = engine_handle.EngineHandle(frames.Start(-1, {}), self.received, launch=start)
        asyncio.run(asyncio.wait_for(self.run(), 10))

    async def run(self):
        while await self.handle.wait_for_death(lambda: True) is not None:
            self.losses += 1
            await self.handle.replace(explained=self.explained(self.losses))

    def received(self, frame):
        if isinstance(frame, frames.Ready):
            self.infos.append(frame.info)
        else:
            self.frames.append(frame)


def test_an_engine_that_dies_again_and_again_is_given_up(monkeypatch, caplog):
    """Guards against an engine that is started for ever, and against requests that wait for it."""
    watched = Watched(monkeypatch, lambda epoch: [ready(epoch)])
    assert watched.handle.state is EngineState.FAILED
    assert str(watched.handle.failure) == "the engine process died 5 times in 60 s"
    assert watched.handle.restarts == 4
    assert [child.sent[0].epoch for child in watched.children] == [0, 1, 2, 3, 4]
    assert (watched.losses, watched.infos) == (5, [INFO] * 5)
    assert type(watched.handle.failure) is EngineDeadError
    assert "restarting the engine process (restart 4 of 4)" in caplog.messages


def test_frames_of_an_engine_that_was_replaced_are_dropped(monkeypatch):
    """Guards against tokens that count twice."""
    watched = Watched(
        monkeypatch, lambda epoch: [ready(epoch), frames.Outputs(epoch - 1, [], EngineStats()), outputs(epoch)]
    )
    assert [frame.epoch for frame in watched.frames] == [0, 1, 2, 3, 4]


def outputs(epoch):
    return frames.Outputs(epoch, [], EngineStats(num_running=epoch))


def test_an_invalid_frame_ends_its_engine_only(monkeypatch, caplog):
    """Guards against a handle that ends with an exception, so that no engine comes any more."""
    script = lambda epoch: [ready(0), EngineError("a frame of 9 TB")] if epoch == 0 else []  # noqa: E731
    watched = Watched(monkeypatch, script)
    assert "invalid frame from the engine process; terminating it: a frame of 9 TB" in caplog.messages
    assert watched.handle.restarts == 3


def test_what_could_be_built_before_is_tried_again(monkeypatch):
    """Guards against streams that are given up because memory is short in the moment after a death."""

    def script(epoch):
        return [frames.Failed(epoch, "no memory", None, None, False)] if epoch in (1, 2, 4, 5, 6) else [ready(epoch)]

    monkeypatch.setattr(engine_handle, "MAX_DEATHS", 100)
    watched = Watched(monkeypatch, script)
    assert (watched.handle.restarts, len(watched.infos)) == (6, 2)
    assert isinstance(watched.handle.failure, ModelLoadError)


@pytest.mark.parametrize(("user_error", "kind"), [(True, InvalidRequestError), (False, ModelLoadError)])
def test_what_cannot_be_built_is_not_tried_again(monkeypatch, user_error, kind):
    failed = frames.Failed(0, "max_model_len: too long", "max_model_len", None, user_error)
    watched = Watched(monkeypatch, lambda epoch: [failed])
    assert (type(watched.handle.failure), len(watched.children)) == (kind, 1)
    assert watched.frames == [failed]  # so that its owner need not wait for the end of the process


def test_an_engine_that_is_released_before_it_is_ready_has_not_failed(monkeypatch):
    """Guards against a server that gives up because its cluster takes machines away while engines start there."""
    script = lambda epoch: [ready(0)] if epoch == 0 else [frames.Leaving(epoch)] if epoch < 6 else []  # noqa: E731
    watched = Watched(monkeypatch, script, explained=lambda losses: True)
    assert str(watched.handle.failure) == "the engine process died 3 times before it was ready"
    assert len(watched.children) == 6 + 3


def no_process(*_):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_process_that_the_system_refuses_for_a_moment_is_started_later(monkeypatch, caplog):
    """Guards against a service that ends because the system was short of processes or memory in the moment after a
    death."""
    script = lambda epoch: no_process() if epoch in (1, 2, 4) else [ready(epoch)]  # noqa: E731
    watched = Watched(monkeypatch, script)
    assert [child.sent[0].epoch for child in watched.children] == [0, 3, 5, 6, 7]
    assert (watched.handle.restarts, len(watched.infos)) == (4, 5)
    refused = "the engine process cannot be started: Resource temporarily unavailable; trying again"
    assert caplog.messages.count(refused) == 3


def test_a_system_that_starts_no_process_any_more_ends_the_service(monkeypatch):
    """Guards against requests that wait for ever for an engine that cannot come."""
    watched = Watched(monkeypatch, lambda epoch: no_process() if epoch else [ready(epoch)])
    assert str(watched.handle.failure) == (
        "the engine process cannot be started: Resource temporarily unavailable (tried 10 times)"
    )
    assert type(watched.handle.failure) is EngineDeadError


def test_deaths_that_a_request_is_to_blame_for_do_not_end_the_service(monkeypatch):
    """Guards against a handful of harmful requests that stop a server for everybody."""
    watched = Watched(monkeypatch, lambda epoch: [ready(epoch)], explained=lambda losses: losses <= 20)
    assert watched.losses == 25
    assert str(watched.handle.failure) == "the engine process died 5 times in 60 s"


def test_counters_do_not_fall_when_an_engine_is_replaced(monkeypatch):
    """Guards against metrics that start again from zero: a monitor would show negative rates."""
    seen = []

    def script(epoch):
        stats = EngineStats(num_running=3, kv_blocks_total=7, num_steps_total=10, num_generated_tokens_total=epoch)
        return [ready(epoch), frames.Outputs(epoch, [], stats), frames.Heartbeat(epoch, stats)]

    def received(self, frame):
        if isinstance(frame, frames.Outputs):
            seen.append(self.handle.liveness.stats)

    monkeypatch.setattr(Watched, "received", received)
    watched = Watched(monkeypatch, script)
    assert [stats.num_steps_total for stats in seen] == [10, 20, 30, 40, 50]
    assert [stats.num_generated_tokens_total for stats in seen] == [0, 1, 3, 6, 10]
    assert {(stats.num_running, stats.kv_blocks_total) for stats in seen} == {(3, 7)}  # gauges are the engine's own
    assert watched.handle.liveness.stats == EngineStats(num_steps_total=50, num_generated_tokens_total=10)


class Owner:
    """The owner of a fleet with one engine, whose nth process follows `script(n)`."""

    def __init__(self, script):
        self.errors, self.number = [], itertools.count()
        self.requests = OpenRequests()
        engine_plan = EnginePlan(lambda first: ScriptedChild(script(next(self.number)), first))
        record = RecordOptions(flight_recorder=0)
        self.fleet = Fleet(frames.Start(-1, {}), self.requests, self, lambda *_: 1.0, record, engine_plan=engine_plan)

    async def run(self):
        self.fleet.attach()
        await asyncio.wait_for(self.fleet.settled.wait(), 10)
        await asyncio.wait_for(asyncio.wait(self.fleet._watches), 10)

    def engine_ready(self, index, num_rows, info):
        pass

    def engine_lost(self, index, num_rows, to_blame):
        pass

    def engine_failed(self, error):
        self.errors.append(error)

    def received(self, index, outputs, stats):
        raise RuntimeError("a bug in the client")


def test_a_fleet_says_why_nothing_can_be_built_and_readers_of_streams_no_files():
    """Guards against a request that waits for an engine that cannot come, and a path that every client may read."""
    failed = frames.Failed(0, "/secret/model: no such file", None, None, False)
    owner = Owner(lambda epoch: [failed])
    asyncio.run(owner.run())
    assert str(owner.fleet.failure) == "/secret/model: no such file"
    assert [type(owner.fleet.failure), owner.fleet.state] == [ModelLoadError, EngineState.FAILED]
    assert [str(error) for error in owner.errors] == ["no engine can be started again; the server's log says why"]


def test_a_bug_in_the_client_ends_the_fleet_and_not_only_its_task(caplog):
    """Guards against requests that wait for ever for an engine that nobody watches any more."""
    owner = Owner(lambda epoch: [ready(epoch), outputs(epoch)])
    asyncio.run(owner.run())
    assert str(owner.fleet.failure) == "the supervision of the engine failed: RuntimeError('a bug in the client')"
    assert owner.errors == [owner.fleet.failure]
    assert "the supervision of the engine process failed" in caplog.messages


class Clock:
    """Stands in for `time`, and lets asyncio.sleep pass as much of it as is wanted."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    ("frames_seen", "patience"),
    [
        ([], engine_handle.START_SILENCE_S),  # it starts
        ([frames.Ready(0, INFO, EngineStats())], engine_handle.SILENCE_S),
        ([frames.Ready(0, INFO, EngineStats(num_waiting=1))], engine_handle.SILENCE_S),
    ],
)
def test_how_long_an_engine_may_be_silent(monkeypatch, frames_seen, patience):
    """Guards against an engine that hangs and is never replaced, and one that is killed in a long first step."""
    clock = Clock()
    monkeypatch.setattr(engine_handle, "time", clock)
    engine = engine_handle.Liveness()
    clock.now += engine_handle.REMOTE_START_SILENCE_S - 0.1  # nothing was heard yet: importing may take long
    assert engine.symptom is None
    clock.now += 0.2
    assert engine.symptom is not None
    for frame in [frames.Heartbeat(0, EngineStats()), *frames_seen]:
        engine.note(frame)
    clock.now += patience - 0.1
    assert engine.symptom is None
    engine.excuse()
    clock.now += patience - 0.1
    assert engine.symptom is None
    clock.now += 0.2
    assert engine.symptom is not None
    assert not engine.making_progress
    engine.engine_ended()
    assert engine.symptom is None


def test_a_start_may_take_minutes_while_it_gets_on(monkeypatch):
    """Guards against an engine that is stopped before its first frame and replaced a minute later, and against a start
    on a slow disk or a busy machine that is taken for a stopped one."""
    clock = Clock()
    monkeypatch.setattr(engine_handle, "time", clock)
    engine = engine_handle.Liveness()
    engine.watch_start(None)  # elsewhere, so nobody knows
    efforts = [Effort(0.0, 0), Effort(0.1, 0), Effort(0.1, 1), Effort(0.1, 1, is_waiting=True), Effort(0.1, 1)]
    for effort in efforts:
        clock.now += engine_handle.SILENCE_S - 0.1
        engine.watch_start(effort)
        assert engine.symptom is None
    clock.now += 0.2
    engine.watch_start(efforts[-1])
    assert engine.symptom is not None


def test_a_step_may_take_minutes_while_it_computes(monkeypatch):
    """Guards against an engine that is killed in a long prompt because the steps before it were short, and against one
    that computes for ever."""
    clock = Clock()
    monkeypatch.setattr(engine_handle, "time", clock)
    engine = engine_handle.Liveness()
    engine.note(frames.Ready(0, INFO, EngineStats(num_running=1)))
    for _ in range(100):
        clock.now += 0.1
        engine.note(frames.Outputs(0, [], EngineStats(num_running=1)))
    for working_s in range(1, int(engine_handle.MAX_STEP_S)):
        clock.now += 1.0
        engine.note(frames.Heartbeat(0, EngineStats(num_running=1), working_s=float(working_s)))
        assert engine.making_progress
    engine.note(frames.Heartbeat(0, EngineStats(num_running=1), working_s=engine_handle.MAX_STEP_S))
    assert engine.symptom is not None
    engine.note(frames.Outputs(0, [], EngineStats(num_running=1)))
    assert engine.making_progress
