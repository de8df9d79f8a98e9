"""An engine's worker as the runner sees it: a process that answers requests, is frozen between its turns, and ended."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import session_seconds

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """The worker answered with an error, or ended."""


class OverTimeError(Exception):
    """The worker did not answer within the time limit and has been ended."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")
        self.seconds = seconds


class Worker:
    """A process in its own session, so that everything it starts is frozen and ended with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._unread = b""

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. Answers come in the order of the requests."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # receive() says why the worker ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, cap: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            WorkerError: the engine failed; the message is the engine's own.
            OverTimeError: there was no answer within `cap` seconds, counted only while this process runs.
        """
        line = self._read_line(cap)
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._how_it_ended()}
        if "error" in answer:
            self.stop()
            raise WorkerError(answer["error"])
        return answer

    def ask(self, request: Mapping[str, Any], cap: float) -> dict[str, Any]:
        """Wake the worker, return its answer, and freeze it again."""
        self._signal(signal.SIGCONT)
        self.send(request)
        answer = self.receive(cap)
        self._signal(signal.SIGSTOP)  # idle threads of some engines spin
        return answer

    def seconds(self) -> float:
        """Return the processor seconds that the worker has used so far."""
        return session_seconds(self._process.pid)

    def stop(self) -> None:
        """End the process and everything that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read_line(self, cap: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], cap)
            if not ready:
                self.stop()
                raise OverTimeError(cap)
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                return b""
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"the process ended with {ended}; see {self._log.name}"
