"""The monitor of every attack: an honest stream that runs beside it, and everything that must be restored after it.

The answer to an attack is the smaller part of a judgement. The larger part is what everybody else notices, which must
be nothing: the canary's tokens and log-probabilities have the bits of its solo run, /health is 200 throughout, the
processes are the same, and every block, request and open file is given back.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from penstock import EngineError
from penstock.client.text import LONG_TEXT
from penstock_lab.prove.levels import Level, level_of, memory_bytes, quick_client
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import Server

# With this seed the demo model wins no token by less than 0.05, noise included. That matters only to the reference
# kernels, which promise a tolerance instead of bits.
CANARY = {
    "prompt": "Once upon a time",
    "max_tokens": 96,
    "ignore_eos": True,
    "seed": 13,
    "logprobs": 3,
    "return_token_ids": True,
}
# A text so long that short ones must not wait for it, and a form of answers, each go to a process of their own.
PROCESS_STARTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/tokenize", {"prompt": "a" * (LONG_TEXT + 1)}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}),
)
HEALTH_S = 5.0  # /health answers sooner, even on a machine that other processes keep busy; the figure says how soon
HEALTH_EVERY_S = 0.05
SETTLE_S = 60.0  # maximum time after an attack until everything is given back; the figure says how long it took
MAX_GROWTH = 200 * 2**20  # maximum growth of the server's memory over all attacks together


@dataclass(frozen=True, slots=True)
class Reading:
    """The output of the canary's stream, token by token."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[Any]
    text: str
    fingerprint: str = ""

    def difference(self, other: "Reading", *, bits: bool) -> str | None:
        """Explain how the two differ; None if they do not.

        Without `bits`, which the reference kernels do not promise, only the tokens are compared.
        """
        if self.token_ids != other.token_ids or self.text != other.text:
            pairs = itertools.zip_longest(self.token_ids, other.token_ids)
            place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), "in the text")
            return f"its tokens differ from its solo run, first at {place}"
        if bits and (self.logprobs, self.top_logprobs) != (other.logprobs, other.top_logprobs):
            return "its log-probabilities differ from its solo run"
        return None


@dataclass(slots=True)
class Worst:
    """The largest value of each measurement over all attacks, in seconds."""

    health: float = 0.0
    token_gap: float = 0.0
    settle: float = 0.0


@dataclass(slots=True)
class Monitor:
    """Watches one server while it is attacked.

    Args:
        key: the API key of the server.
        health_s: time within which /health has to answer.

    Attributes:
        complaints: what went wrong, each with the name of its attack.
    """

    server: Server
    key: str
    health_s: float = HEALTH_S
    complaints: list[str] = field(default_factory=list)
    worst: Worst = field(default_factory=Worst)
    solo_gap_s: float = field(init=False)
    _http: httpx.Client = field(init=False)
    _solo: Reading = field(init=False)
    _before: Level = field(init=False)
    _memory: int = field(init=False)

    def __post_init__(self) -> None:
        self._http = quick_client(self.server.url, self.key)
        self._solo = self._read_canary()
        self.worst = Worst()
        self._read_canary()  # a second time, with a warm cache
        self.solo_gap_s = self.worst.token_gap
        self._start_everything()
        self._before = self._idle_level()
        self._memory = memory_bytes(self.server.process.pid)

    @property
    def growth_bytes(self) -> int:
        """The growth of the server's memory since the monitor was made."""
        return memory_bytes(self.server.process.pid) - self._memory

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Run canaries while the block runs, and complain of everything that anybody else noticed of it."""
        begun, ended = threading.Event(), threading.Event()
        complain = self._complainer(name)
        threads = [
            threading.Thread(target=self._sing, args=(begun, ended, complain)),
            threading.Thread(target=self._ask_health, args=(ended, complain)),
        ]
        for thread in threads:
            thread.start()
        begun.wait()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            self._check_level(complain)

    def report(self, trials: Trials) -> None:
        """Report the measurements of all attacks so far."""
        trials.figure("worst_health_s", self.worst.health)
        trials.figure("worst_token_gap_s", self.worst.token_gap)
        trials.figure("solo_token_gap_s", self.solo_gap_s)
        trials.figure("worst_settle_s", self.worst.settle)
        trials.figure("memory_growth_mib", self.growth_bytes / 2**20)

    def _start_everything(self) -> None:
        """Use what a server starts with the first request that needs it, and keeps: two more text processes."""
        for path, body in PROCESS_STARTS:
            self._http.post(path, json=body).raise_for_status()

    def _complainer(self, name: str) -> Callable[[str], None]:
        return lambda what: self.complaints.append(f"{name}: {what}")

    def _sing(self, begun: threading.Event, ended: threading.Event, complain: Callable[[str], None]) -> None:
        """Read the canary's stream again and again until the attack has ended."""
        try:
            while True:
                reading = self._read_canary(begun)
                difference = reading.difference(self._solo, bits="reference" not in reading.fingerprint)
                if difference is not None:
                    complain(f"the canary: {difference}")
                if ended.is_set():
                    return
        except (httpx.HTTPError, EngineError) as error:
            complain(f"the canary's stream broke: {type(error).__name__}: {error}")
        finally:
            begun.set()

    def _read_canary(self, begun: threading.Event | None = None) -> Reading:
        ids: list[int] = []
        logprobs: list[float] = []
        top: list[Any] = []
        text: list[str] = []
        body = {**CANARY, "stream": True}
        last: float | None = None
        fingerprint = ""
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise EngineError(f"{answer.status_code}: {answer.read().decode(errors='replace')[:300]}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return Reading(ids, logprobs, top, "".join(text), fingerprint)
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise EngineError(str(chunk["error"]))
                fingerprint = chunk["system_fingerprint"]
                now = time.monotonic()
                self.worst.token_gap = max(self.worst.token_gap, now - (last or now))
                last = now
                for choice in chunk["choices"]:
                    ids += choice["token_ids"]
                    logprobs += choice["logprobs"]["token_logprobs"]
                    top += choice["logprobs"]["top_logprobs"]
                    text.append(choice["text"])
                if begun is not None:
                    begun.set()
        raise EngineError("the stream ended without [DONE]")

    def _ask_health(self, ended: threading.Event, complain: Callable[[str], None]) -> None:
        while not ended.wait(HEALTH_EVERY_S):
            asked = time.monotonic()
            try:
                status = self._http.get("/health", timeout=self.health_s).status_code
            except httpx.HTTPError as error:
                complain(f"/health did not answer: {type(error).__name__}")
                return
            self.worst.health = max(self.worst.health, time.monotonic() - asked)
            if status != 200:
                complain(f"/health answered {status}")
                return

    def _check_level(self, complain: Callable[[str], None]) -> None:
        if self.server.process.poll() is not None:
            return complain("the server process died")
        started = time.monotonic()
        while (problem := self._level().problem(self._before)) is not None:
            if time.monotonic() - started > SETTLE_S:
                self._before = self._level()  # complain of it only once
                return complain(f"{SETTLE_S:.0f} s later: {problem}")
            time.sleep(0.02)
        self.worst.settle = max(self.worst.settle, time.monotonic() - started)
        if self.growth_bytes > MAX_GROWTH:
            complain(f"the server's memory has grown by {self.growth_bytes >> 20} MiB")
            self._memory += self.growth_bytes

    def _idle_level(self) -> Level:
        """Read the level once nothing is open."""
        deadline = time.monotonic() + SETTLE_S
        while (level := self._level()).open_requests:
            if time.monotonic() > deadline:
                raise EngineError(f"{level.open_requests} requests are open, and nobody has sent any")
            time.sleep(0.02)
        return level

    def _level(self) -> Level:
        return level_of(self._http, self.server.process.pid)
