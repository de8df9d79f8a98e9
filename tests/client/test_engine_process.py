"""The engine process's own parts, without a process."""

import socket
import subprocess
import threading
import time

import pytest

from penstock.client import frames, outbox
from penstock.client.outbox import Effort, Outbox
from penstock.interface.messages import EngineStats
from penstock.parallel.spawn import spawn


def test_heartbeats_come_only_while_work_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a deadlock that looks like a long load or step for ever, and a long step that looks like one."""
    efforts = [(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 7), (1.001, 7), (2.0, 7)]
    looked = iter(efforts)
    all_seen = threading.Event()

    def so_far() -> Effort:
        effort = next(looked, None)
        if effort is None:
            all_seen.set()
            effort = efforts[-1]
        return Effort(*effort)

    monkeypatch.setattr(outbox, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(Effort, "so_far", so_far)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Outbox(theirs, 3)
        box.send(frames.Outputs(3, [], EngineStats(num_running=5)))
        with box.working():
            assert all_seen.wait(60)
        theirs.shutdown(socket.SHUT_WR)
        sent = [frames.unpack_from_engine(body) for body in iter(lambda: frames.receive(ours), None)]
    beats = [frame for frame in sent if isinstance(frame, frames.Heartbeat)]
    assert len(beats) == len(sent) - 1 == 3  # computing, reading, computing
    assert all(beat.epoch == 3 and beat.stats.num_running == 5 and beat.working_s > 0 for beat in beats)


def test_effort_is_measured() -> None:
    """Guards against a start or a step that is taken for a deadlock while it computes."""
    before = Effort.so_far()
    while not Effort.so_far().exceeds(before):
        sum(range(10_000))


def test_effort_of_a_child_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine that is killed while it waits for the ranks that compute its step."""
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    before = Effort.so_far()
    child = spawn("timeit", ["-n", "1000000000", "pass"], inherited=[], stdout=subprocess.DEVNULL)
    try:
        while Effort.so_far().cpu_s <= before.cpu_s:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
