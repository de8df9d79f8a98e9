"""The engine process's own parts, without a process."""

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from penstock.client import engine_process, frames
from penstock.client.engine_process import Outbox
from penstock.interface.messages import EngineRequest, EngineStats
from penstock.interface.sampling_params import SamplingParams
from penstock.ranks.child_main import EXIT_CLIENT_GONE
from penstock.ranks.children import Effort, children, spawn


def test_heartbeats_come_only_while_work_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a deadlock that looks like a long load or step for ever, and a long step that looks like one."""
    efforts = [(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 7), (1.001, 7), (2.0, 7)]
    looked = iter(efforts)
    all_seen = threading.Event()

    def effort() -> Effort:
        seen = next(looked, None)
        if seen is None:
            all_seen.set()
            seen = efforts[-1]
        return Effort(*seen)

    monkeypatch.setattr(engine_process, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(Effort, "so_far", effort)
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


def test_effort_tells_work_from_a_stop() -> None:
    """Guards against a start, or a step of ranks, that is taken for a deadlock while it computes or waits for a core,
    and against a stop that is not seen from outside."""
    child = spawn("timeit", ["-n", "1000000000", "pass"], inherited=[], stdout=subprocess.DEVNULL)
    try:
        assert child.pid in children()
        before = Effort.so_far()
        while Effort.of([child.pid]).cpu_s < 0.05:
            time.sleep(0.01)
        assert Effort.so_far().exceeds(before)
        assert Effort.of([child.pid]).is_waiting
        child.send_signal(signal.SIGSTOP)
        while Effort.of([child.pid]).is_waiting:
            time.sleep(0.01)
        stopped = Effort.of([child.pid])
        assert not Effort.of([child.pid]).exceeds(stopped)
    finally:
        child.kill()
        child.wait()
    assert child.pid not in children()


def test_reads_are_effort() -> None:
    """Guards against a load from a slow disk that is taken for a deadlock."""
    assert Effort(1.0, 4096).exceeds(Effort(1.0, 0))
    assert not Effort(1.0, 4096).exceeds(Effort(1.0, 4096))
    assert Effort.of([2**22 + 1]) == Effort(0.0, 0)  # there is no such process


SLOW_READER = """
import sys, threading
from penstock.client import engine_process, frames

def read(sock, inbox):
    while (body := frames.receive(sock)) is not None:
        inbox.put(body)

engine_process._read = read
sys.exit(engine_process.main(sys.argv[1:]))
"""


def test_a_client_that_leaves_during_a_step_is_no_error() -> None:
    """Guards against a traceback at the end of a program if the engine sends outputs before its reader thread has seen
    the end of the connection; here that thread never ends the process."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            script = [sys.executable, "-c", SLOW_READER, str(theirs.fileno())]
            process = subprocess.Popen(script, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        ours.sendall(frames.pack(frames.Start(0, {"model": "demo", "load_format": "mock"})))
        assert isinstance(frames.unpack_from_engine(frames.receive(ours) or b""), frames.Ready | frames.Heartbeat)
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True, seed=0)
        ours.sendall(frames.pack(frames.AddRequest(EngineRequest("a", [1, 2], params))))
        assert frames.receive(ours) is not None
    assert process.communicate()[1] == ""
    assert process.returncode == EXIT_CLIENT_GONE


def test_a_client_that_is_gone_is_an_error_of_its_own() -> None:
    """Guards against a ConnectionError of the user's code that ends an engine silently, as if its client had gone."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(engine_process.ClientGoneError):
        Outbox(theirs, 3).send(frames.Outputs(3, [], EngineStats()))
