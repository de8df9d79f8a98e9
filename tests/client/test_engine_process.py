"""The engine process's own parts, without a process."""

import socket
import threading

from penstock.client import engine_process, frames


def test_a_start_sends_heartbeats_only_while_it_gets_on(monkeypatch):
    """Guards against a deadlock in loading that looks like a long load for ever."""
    efforts = [(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 7), (1.001, 7), (2.0, 7)]
    looked = iter(efforts)
    all_seen = threading.Event()

    def so_far():
        effort = next(looked, None)
        if effort is None:
            all_seen.set()
            effort = efforts[-1]
        return engine_process._Effort(*effort)

    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(engine_process._Effort, "so_far", so_far)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with engine_process._heartbeats(theirs, 3):
            assert all_seen.wait(60)
        theirs.close()
        beats = list(iter(lambda: frames.receive(ours), None))
    assert [frames.unpack_from_engine(beat).epoch for beat in beats] == [3, 3, 3]  # computing, reading, computing


def test_effort_is_measured():
    """Guards against a start that is taken for a deadlock while it computes."""
    before = engine_process._Effort.so_far()
    while not engine_process._Effort.so_far().exceeds(before):
        sum(range(10_000))
