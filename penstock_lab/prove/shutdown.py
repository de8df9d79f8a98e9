"""Proof that a server that is asked to stop finishes its requests, lets nothing new in, and leaves nothing behind."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.proof import Subject, Trials
from penstock_lab.prove.servers import Server, post, serve, stream, wait_until

STREAMS = 6  # streams of each trial
STOP_TIMEOUT_S = 60.0
ORPHAN_TIMEOUT_S = 5.0  # time within which the engine must end after its server
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "stop": [" the"], "max_tokens": 400},
)

ChoiceTexts = dict[int, tuple[str, str | None]]  # by choice: its text, and why it ended


@dataclass(slots=True)
class _Reader:
    """A client in its own thread, which reads one stream.

    Attributes:
        answer: what has arrived; the whole answer if `problem` is None.
        problem: why the answer is not whole.
        began: time.monotonic() before the request was sent.
    """

    url: str
    body: dict[str, Any]
    answer: ChoiceTexts = field(default_factory=dict)
    problem: Exception | None = None
    began: float = 0.0

    def read(self) -> None:
        self.began = time.monotonic()
        try:
            for chunk in stream(self.url, self.body):
                for choice in chunk["choices"]:
                    text, _ = self.answer.get(choice["index"], ("", None))
                    self.answer[choice["index"]] = (text + choice["text"], choice["finish_reason"])
        except (httpx.HTTPError, EngineError) as error:
            self.problem = error

    def refused(self, signalled_at: float) -> bool:
        """Check that the request was not let in: it got a 503, or the server was already gone."""
        if self.answer or self.problem is None:
            return False
        late = self.began > signalled_at and isinstance(self.problem, httpx.HTTPError)
        return late or str(self.problem).startswith("503") or isinstance(self.problem, httpx.ConnectError)


class Drains:
    """Runs streams on a real server, and sends SIGTERM at a random moment."""

    name: ClassVar[str] = "drains"
    promise: ClassVar[str] = "SIGTERM cuts no stream, admits nothing new, and leaves no process behind"
    unit: ClassVar[str] = "drains"
    goal: ClassVar[int] = 200
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        bodies = [_body(index) for index in range(2 * len(KINDS))]
        with serve(trials.subject) as server:
            started = time.monotonic()
            whole = _read_all([_Reader(server.url, body) for body in bodies])
            usual_s = time.monotonic() - started
        broken = [str(reader.problem) for reader in whole if reader.problem is not None]
        if broken:
            raise EngineError(f"an undisturbed stream failed: {broken[0]}")
        expected = [reader.answer for reader in whole]
        drains: list[_Drain] = []

        def draw() -> _Drain:
            chosen = trials.random.sample(range(len(bodies)), STREAMS)
            return _Drain([bodies[i] for i in chosen], [expected[i] for i in chosen], trials.random.uniform(0, usual_s))

        def trial(drain: _Drain) -> str | None:
            drain.make(trials.subject)
            drains.append(drain)
            return f"SIGTERM after {drain.delay_s:.3f} s: {'; '.join(drain.problems)}" if drain.problems else None

        trials.side_by_side(draw, trial, trials.subject.num_servers)
        trials.figure("streams_finished", sum(drain.finished for drain in drains))
        trials.figure("streams_refused", sum(drain.refused for drain in drains))
        trials.figure("max_drain_s", max(drain.stop_s for drain in drains))


@dataclass(slots=True)
class _Drain:
    """One server that is stopped.

    Attributes:
        bodies, expected: of its streams, and their answers.
        delay_s: from the start of the streams to SIGTERM.
        problems: what went wrong.
        finished, refused: numbers of streams.
        stop_s: seconds from SIGTERM until the server had ended.
    """

    bodies: list[dict[str, Any]]
    expected: list[ChoiceTexts]
    delay_s: float
    problems: list[str] = field(default_factory=list)
    finished: int = 0
    refused: int = 0
    stop_s: float = 0.0

    def make(self, subject: Subject) -> None:
        """Start the server, stop it, and check what its streams received."""
        with serve(subject) as server:
            engine_pid = server.engine_pid
            readers = [_Reader(server.url, body) for body in self.bodies]
            threads = _start(readers)
            time.sleep(self.delay_s)
            signalled_at = time.monotonic()
            os.kill(server.process.pid, signal.SIGTERM)
            self.problems += _new_request_problem(server)
            for thread in threads:
                thread.join(STOP_TIMEOUT_S)
            code = server.process.wait(STOP_TIMEOUT_S)
            self.stop_s = time.monotonic() - signalled_at
            if code != 0:
                self.problems.append(f"exit code {code}: {server.log()[-500:]}")
        for reader, answer in zip(readers, self.expected, strict=True):
            refused = reader.refused(signalled_at)
            self.refused += refused
            self.finished += not refused
            if not refused and (reader.problem is not None or reader.answer != answer):
                problem = f"{reader.body} gave {reader.answer}, then {reader.problem!r}; undisturbed {answer}"
                self.problems.append(problem)
        if engine_pid is not None and not _ended(engine_pid):
            self.problems.append(f"the engine process {engine_pid} has outlived its server")


def _body(index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    prompt = f"Once upon a time, story {index}:"
    return {"prompt": prompt, "seed": index, "max_tokens": 60 + 20 * (index % 5), "ignore_eos": True} | kind


def _start(readers: list[_Reader]) -> list[threading.Thread]:
    threads = [threading.Thread(target=reader.read, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    return threads


def _read_all(readers: list[_Reader]) -> list[_Reader]:
    """Read several streams at the same time."""
    for thread in _start(readers):
        thread.join()
    return readers


def _new_request_problem(server: Server) -> list[str]:
    """Send a request to a server that has been asked to stop. Return what is wrong with its answer, if anything is."""
    wait_s = 0.05  # for the signal to arrive; an earlier request may be let in
    time.sleep(wait_s)
    try:
        status = post(f"{server.url}/v1/completions", json={"prompt": "late", "max_tokens": 1}).status_code
    except httpx.HTTPError:
        return []  # the server has ended
    return [] if status == 503 else [f"a request {wait_s} s after the signal got {status}"]


def _ended(pid: int) -> bool:
    """Wait for a process that is not our child; True if it ends in time."""
    try:
        wait_until(lambda: not _alive(pid), ORPHAN_TIMEOUT_S, f"the end of process {pid}")
    except EngineError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
