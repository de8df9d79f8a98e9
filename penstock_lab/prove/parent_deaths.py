"""The proof that no engine outlives its server.

A real `penstock serve` is killed at a random moment: while it starts, idle, in the middle of a stream, or with its
engines stopped, so that they cannot notice anything. All its processes carry a mark in their environment, and one
second later none of them may be left.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock import EngineError
from penstock_lab.prove.proof import Subject, Trials
from penstock_lab.prove.servers import command_line, send_signal, stream

MARK_VARIABLE = "PENSTOCK_PROOF"  # environment variable
ALLOWED_S = 1.0
START_S = 1.5  # time within which a starting server is killed
RUN_S = 0.2  # time within which a started server is killed
SHARE_WITH_STANDBY = 0.3
FIRST_LINES_S = 0.2  # time from the import of ctypes to the call that ties a child to its parent, on a busy machine
TIMEOUT_S = 120.0  # maximum wait for the remaining processes to end, so that the proof leaves nothing behind
LONG_STREAM = {"prompt": [1, 2, 3], "max_tokens": 10**6, "ignore_eos": True, "temperature": 0}


class ParentDeaths:
    """Kills servers, and counts the processes that are left."""

    name: ClassVar[str] = "parent-deaths"
    promise: ClassVar[str] = "A server's death takes its engines with it within a second"
    unit: ClassVar[str] = "kills"
    goal: ClassVar[int] = 200
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        if sys.platform != "linux":
            trials.skip("only on Linux does a stopped process die with its parent")
            return
        took = [0.0]

        def draw() -> _Choices:
            random = trials.random
            moment = random.choice([*DEATH_MOMENTS])
            flags = ["--standby"] if random.random() < SHARE_WITH_STANDBY else []
            return _Choices(moment, flags, random.uniform(0, START_S), random.uniform(0, RUN_S))

        def trial(chosen: _Choices) -> str | None:
            with Owner(trials.subject, chosen.flags) as owner:
                DEATH_MOMENTS[chosen.moment](owner, chosen)
                took.append(seconds := owner.kill())
            if seconds <= ALLOWED_S:
                return None
            return f"{chosen.moment} {' '.join(chosen.flags)}: an engine was left for {seconds:.1f} s"

        trials.side_by_side(draw, trial, trials.subject.num_servers)
        trials.figure("slowest_s", max(took))


@dataclass(frozen=True, slots=True)
class _Choices:
    """The random choices of a trial.

    Attributes:
        moment: when the server is killed, one of DEATH_MOMENTS.
        start_s: seconds after which a starting server is killed.
        run_s: seconds after which a server that is ready, or has begun a stream, is killed.
    """

    moment: str
    flags: list[str]
    start_s: float
    run_s: float


class Owner:
    """A server with its engine processes."""

    def __init__(self, subject: Subject, flags: list[str]) -> None:
        self._mark = f"{MARK_VARIABLE}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._process = subprocess.Popen(
            command_line(subject, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, name: value},
            text=True,
        )
        self._stream: Any = None

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pid in self.processes():
            send_signal(pid, signal.SIGKILL)
        self._process.communicate()

    def url(self) -> str:
        """Wait until the server is ready, and return its address."""
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        found = next((word for word in line.split() if word.startswith("http://")), None)
        if found is None:
            raise EngineError(f"the server did not start: {line!r}")
        return found

    def begin_stream(self) -> None:
        """Let the engine compute a stream that ends only with the context."""
        self._stream = stream(self.url(), LONG_STREAM)
        next(self._stream)

    def processes(self) -> list[int]:
        """List the ids of the living processes among the server's own and all that it started."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def stop_engines(self) -> None:
        """Stop all that the server started, except processes before their first lines (docs/guarantees.md)."""
        tied = [pid for pid in self.processes() if pid != self._process.pid and _is_past_first_lines(pid)]
        time.sleep(FIRST_LINES_S)
        for pid in tied:
            send_signal(pid, signal.SIGSTOP)

    def kill(self) -> float:
        """Kill the server. Return the seconds until none of its processes was left."""
        self._process.kill()
        started = time.monotonic()
        while self.processes():
            if time.monotonic() - started > TIMEOUT_S:
                break
            time.sleep(0.005)
        return time.monotonic() - started

    def _is_ours(self, pid: int) -> bool:
        with suppress(OSError):  # the process has ended, or belongs to another user
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


def _is_past_first_lines(pid: int) -> bool:
    """Check that a child has imported ctypes. Its next line uses ctypes to tie it to its parent (child_main.py)."""
    with suppress(OSError):
        return "_ctypes" in Path(f"/proc/{pid}/maps").read_text()
    return False


def _starting(owner: Owner, chosen: _Choices) -> None:
    time.sleep(chosen.start_s)


def _starting_and_stopped(owner: Owner, chosen: _Choices) -> None:
    _starting(owner, chosen)
    owner.stop_engines()


def _idle(owner: Owner, chosen: _Choices) -> None:
    owner.url()
    time.sleep(chosen.run_s)


def _busy(owner: Owner, chosen: _Choices) -> None:
    owner.begin_stream()
    time.sleep(chosen.run_s)


def _stopped(owner: Owner, chosen: _Choices) -> None:
    _idle(owner, chosen)
    owner.stop_engines()


def _busy_and_stopped(owner: Owner, chosen: _Choices) -> None:
    _busy(owner, chosen)
    owner.stop_engines()


DEATH_MOMENTS: dict[str, Callable[[Owner, _Choices], None]] = {
    "starting": _starting, "starting and stopped": _starting_and_stopped,
    "idle": _idle, "busy": _busy, "stopped": _stopped, "busy and stopped": _busy_and_stopped,
}  # fmt: skip
