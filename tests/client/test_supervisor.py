"""EngineSupervisor with scripted engine processes: restarts, epochs and what a broken process says."""

import asyncio
import itertools

import pytest

from penstock.client import frames, supervisor
from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from penstock.interface.messages import EngineStats
from tests.fakes_engine import model_info

INFO = model_info(64, 100)


def ready(epoch):
    return frames.Ready(epoch, INFO, EngineStats())


class ScriptedChild:
    """An engine process that says what a script has for its epoch, an exception being a broken frame, and dies."""

    pid = 1234

    def __init__(self, script):
        self.script = list(script)
        self.sent = []

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
    """A supervisor whose nth process follows `script(n)`, run until it gives up."""

    def __init__(self, monkeypatch, script):
        epochs = itertools.count()
        self.children, self.frames, self.losses = [], [], []

        def start():
            self.children.append(ScriptedChild(script(next(epochs))))
            return self.children[-1]

        monkeypatch.setattr(supervisor, "EngineChild", start)
        monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.0)
        self.supervisor = supervisor.EngineSupervisor({}, on_frame=self.frames.append, on_loss=self.losses.append)
        asyncio.run(asyncio.wait_for(self.supervisor.run(), 10))


def test_an_engine_that_dies_again_and_again_is_given_up(monkeypatch, caplog):
    """Guards against an engine that is started for ever, and against requests that wait for it."""
    watched = Watched(monkeypatch, lambda epoch: [ready(epoch)])
    assert watched.supervisor.state is EngineState.FAILED
    assert str(watched.supervisor.failure) == "the engine process died 5 times in 60 s"
    assert watched.supervisor.restarts == 4
    assert [child.sent for child in watched.children] == [[frames.Start(epoch, {})] for epoch in range(5)]
    assert len(watched.losses) == 6  # each death, and the end
    assert all(isinstance(error, EngineDeadError) for error in watched.losses)
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
    """Guards against a supervisor that ends with an exception, so that no engine comes any more."""
    failed = frames.Failed(1, "no such model", None, None, False)
    watched = Watched(monkeypatch, lambda epoch: [ready(0), EngineError("a frame of 9 TB")] if epoch == 0 else [failed])
    assert "invalid frame from the engine process; terminating it: a frame of 9 TB" in caplog.messages
    assert watched.supervisor.restarts == 1
    assert isinstance(watched.supervisor.failure, ModelLoadError)


@pytest.mark.parametrize(("user_error", "kind"), [(True, InvalidRequestError), (False, ModelLoadError)])
def test_what_cannot_be_built_is_not_tried_again(monkeypatch, user_error, kind):
    failed = frames.Failed(0, "max_model_len: too long", "max_model_len", None, user_error)
    watched = Watched(monkeypatch, lambda epoch: [failed])
    assert (type(watched.supervisor.failure), len(watched.children)) == (kind, 1)
    assert watched.supervisor.settled.is_set()
