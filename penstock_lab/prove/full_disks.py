"""The proof that a full disk under the journal makes the server refuse new calls, and that no answer is lost.

The server's files may grow only to a random number of bytes, so that the write that exceeds it is cut off in the middle
and fails, as on a full disk. Calls that the server has taken must end with the right text: while the disk is full, when
it has room again, and after a kill, when only the journal knows of them. The server must refuse a call
that it cannot write down.
"""

import contextlib
import resource
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import CLIENT_TIMEOUT_S, QUICK, Server, serve, wait_until

PATH = "/v1/responses"
TRIALS_PER_SERVER = 20  # trials before the server is killed and started again
NUM_KINDS = 12  # number of requests whose undisturbed answers are computed once
MAX_CALLS = 40  # calls of a trial after which the disk must have been full
MAX_ROOM = 4096  # maximum number of bytes by which the journal may still grow
REWRITE_RATE = 0.2  # share of the trials in which even a newly written journal has no room
TIMEOUT_S = 60.0
POLL_S = 0.005  # pause between two polls of a call, which take processor time from the call


@dataclass(slots=True)
class _Call:
    """A call that the server has taken: its id, and the text with which it has to end."""

    call_id: str
    expected: str


@dataclass(slots=True)
class _Counts:
    taken: int = 0
    refused: int = 0


class FullDisks:
    """Fills the disk under the journal of a server with calls in the background."""

    name: ClassVar[str] = "full-disks"
    promise: ClassVar[str] = "A journal that cannot be written refuses new calls, and loses none that it has taken"
    unit: ClassVar[str] = "failed writes"
    goal: ClassVar[int] = 500
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        counts = _Counts()
        bodies = [_body(trials, index) for index in range(NUM_KINDS)]
        expected: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            taken: list[_Call] = []
            while trials.go_on() or taken:
                with (
                    serve(trials.subject, f"--journal={journal}") as server,
                    httpx.Client(base_url=server.url, timeout=CLIENT_TIMEOUT_S, **QUICK) as http,
                ):
                    _check(trials, http, taken, "after a kill")
                    taken = []
                    expected = expected or [_answer(http, body) for body in bodies]
                    for _ in range(TRIALS_PER_SERVER):
                        if not trials.go_on():
                            break
                        taken += _Trial(trials, server, http, journal, bodies, expected, counts).run()
        trials.figure("calls_taken", counts.taken)
        trials.figure("calls_refused", counts.refused)


@dataclass(slots=True)
class _Trial:
    """One disk that becomes full, and then has room again."""

    trials: Trials
    server: Server
    http: httpx.Client
    journal: Path
    bodies: list[dict[str, Any]]
    expected: list[str]
    counts: _Counts
    taken: list[_Call] = field(default_factory=list)

    def run(self) -> list[_Call]:
        """Run the trial, and return the calls that the server has taken."""
        limit = self.journal.stat().st_size + self.trials.random.randrange(MAX_ROOM)
        if self.trials.random.random() < REWRITE_RATE:
            limit = self.trials.random.randrange(self.journal.stat().st_size)
        _limit_files(self.server, limit)
        try:
            refused = any(not self._send() for _ in range(MAX_CALLS))
        finally:
            _limit_files(self.server, resource.RLIM_INFINITY)
        if not refused:
            self.trials.wrong(f"the journal may not pass {limit} bytes, and {MAX_CALLS} calls were taken")
        wait_until(lambda: not self._has_failed(), TIMEOUT_S, "the journal to be written again")
        if not self._send():
            self.trials.wrong("a call was refused after the disk had room again")
        _check(self.trials, self.http, self.taken, f"with a journal that might not pass {limit} bytes")
        self.trials.tried()
        return self.taken

    def _send(self) -> bool:
        """Send a request. Return whether the server has taken it."""
        index = self.trials.random.randrange(len(self.bodies))
        body = {**self.bodies[index], "background": True}
        answer = self.http.post(PATH, json=body)
        if answer.status_code == 200:
            self.taken.append(_Call(answer.json()["id"], self.expected[index]))
            self.counts.taken += 1
            return True
        if answer.status_code >= 500 and "journal" in answer.text:
            self.counts.refused += 1
            return False
        raise EngineError(f"a call was answered with {answer.status_code}: {answer.text[:300]}")

    def _has_failed(self) -> bool:
        """Check whether the last write of the journal failed."""
        return self.http.get("/status").json()["journal"]["file"]["error"] is not None


def _limit_files(server: Server, num_bytes: int) -> None:
    """Limit the size of files that the server writes to this many bytes (RLIM_INFINITY: no limit)."""
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _check(trials: Trials, http: httpx.Client, calls: list[_Call], when: str) -> None:
    """Wait for the end of each call, and report those without the expected text."""
    for call in calls:
        found: dict[str, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while found.get("status") in (None, "queued", "in_progress") and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                found = http.get(f"{PATH}/{call.call_id}").json()
            time.sleep(POLL_S)
        if found.get("status") not in ("completed", "incomplete") or _text(found) != call.expected:
            trials.wrong(f"{when}: {call.call_id} gave {str(found)[:600]}; undisturbed {call.expected!r}")


def _body(trials: Trials, index: int) -> dict[str, Any]:
    prompt = f"Story {index}: once upon a time"
    num_tokens = trials.random.randint(16, 48)
    return {"input": prompt, "temperature": index % 2, "seed": index, "max_output_tokens": num_tokens}


def _answer(http: httpx.Client, body: dict[str, Any]) -> str:
    return _text(http.post(PATH, json=body).raise_for_status().json())


def _text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response.get("output", []) for part in item["content"])
