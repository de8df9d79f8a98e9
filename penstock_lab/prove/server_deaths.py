"""Kills of the whole server, under clients that reconnect and responses that run in the background."""

import contextlib
import json
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import Server, command_line, get, open_stream, post, serve, wait_until

STREAMS = 10  # streams that run at each kill
MAX_KILLS_OF_A_STREAM = 3
LATEST_KILL_S = 1.2  # after the streams have begun, or the server is back
LATEST_KILL_AT_START_S = 3.0
TIMEOUT_S = 300.0
RETRY_S = 0.05
PROMPTS = ("Once upon a time", "The little robot", "A story about a ship:", "What is 3 + 4?")


@dataclass(slots=True)
class Request:
    """A request of the proof: its route, its body, and its undisturbed answer."""

    path: str
    body: dict[str, Any]
    expected: Any = None


@dataclass(slots=True)
class Received:
    """The events that arrived over all connections of one stream."""

    answer: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # by choice: text, token ids
    finished: dict[int, str] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        index = choice.get("index", 0)
        text, ids = self.answer.get(index, ("", ()))
        new = choice.get("text") or choice.get("delta", {}).get("content") or ""
        self.answer[index] = (text + new, ids + tuple(choice.get("token_ids") or ()))
        if choice.get("finish_reason"):
            self.finished[index] = choice["finish_reason"]


class Follower(threading.Thread):
    """A client that reads one stream to its end, over as many connections as it takes.

    Attributes:
        received: what it has received.
        problem: an error that it cannot recover from.
        gaps: seconds without a token around each lost connection.
    """

    def __init__(self, url: str, request: Request) -> None:
        super().__init__(daemon=True)
        self.request = request
        self.received = Received()
        self.problem: str | None = None
        self.gaps: list[float] = []
        self.has_begun = threading.Event()
        self._url = url
        self._last_id: str | None = None
        self._next_number = 0
        self._over = False
        self._lost_at: float | None = None

    def run(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._over and self.problem is None:
            if time.monotonic() > deadline:
                self.problem = f"it did not end within {TIMEOUT_S:.0f} s"
                break
            with contextlib.suppress(httpx.HTTPError):
                self._connect()
            if not self._over:
                self._lost_at = self._lost_at or time.monotonic()
                time.sleep(RETRY_S)
        self.has_begun.set()

    def _connect(self) -> None:
        """Begin or continue the stream, until it ends or the connection breaks."""
        method, path, headers = "POST", self.request.path, {}
        body: dict[str, Any] | None = {**self.request.body, "stream": True}
        if self._last_id is not None:
            method, body = "GET", None
            if path == "/v1/responses":
                path += f"/{self._last_id}?stream=true&starting_after={self._next_number - 1}"
            else:
                path += f"/{self._last_id.partition(':')[0]}?stream=true"
                headers = {"Last-Event-ID": self._last_id}
        with open_stream(method, self._url + path, json=body, headers=headers) as answer:
            if answer.status_code not in (200, 503):
                self.problem = f"{method} {path}: {answer.status_code} {answer.read().decode()[:300]}"
            if answer.status_code == 200:
                self._read(answer)

    def _read(self, answer: httpx.Response) -> None:
        """Take whole events. An event that was cut off before its blank line does not count."""
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields.get("data") == "[DONE]":
                self._over = True
                return
            else:
                if "data" in fields:
                    self._add_event(fields)
                fields = {}
            if self._over or self.problem:
                return

    def _add_event(self, fields: dict[str, str]) -> None:
        event = json.loads(fields["data"])
        if "error" in event and "type" not in event:
            return  # a server that is killed may report that its engine is gone
        if self._lost_at is not None:
            self.gaps.append(time.monotonic() - self._lost_at)
            self._lost_at = None
        if "type" in event:
            self._add_response_event(event)
        else:
            self._last_id = fields["id"]
            for choice in event["choices"]:
                self.received.add(choice)
                if choice.get("text"):
                    self.has_begun.set()

    def _add_response_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "response.failed":
            return
        if event["sequence_number"] != self._next_number:
            self.problem = f"event {event['sequence_number']} came where {self._next_number} was due"
        self._next_number += 1
        response = event.get("response", {})
        self._last_id = response.get("id", self._last_id)
        if event["type"] == "response.output_text.delta":
            self.received.add({"text": event["delta"]})
            self.has_begun.set()
        if event["type"] in ("response.completed", "response.incomplete"):
            self._over = True


class ServerDeaths:
    """Kills a server that has a journal while streams run, starts it again, and compares what its clients received."""

    name: ClassVar[str] = "server-deaths"
    promise: ClassVar[str] = "No stream is lost when the server is killed"
    unit: ClassVar[str] = "kills"
    goal: ClassVar[int] = 100
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        gaps: list[float] = []
        compared = 0
        with tempfile.TemporaryDirectory() as folder:
            journal = f"--journal={Path(folder) / 'journal'}"
            while trials.go_on():
                requests = [_some_request(trials) for _ in range(STREAMS)]
                with contextlib.ExitStack() as stack:
                    server = stack.enter_context(serve(trials.subject, journal))
                    requests = [request for request in requests if _note_expected(server, request)]
                    if not requests:
                        return trials.skip("the model takes none of the requests")
                    cycle = _Cycle(trials, requests, journal, server)
                    compared += cycle.run(stack)
                gaps += cycle.gaps
        if gaps:
            trials.figure("median_gap_s", statistics.median(gaps))
        trials.figure("streams", compared)


class _Cycle:
    """Some streams and some kills."""

    def __init__(self, trials: Trials, requests: list[Request], journal: str, server: Server) -> None:
        self._trials = trials
        self._requests = requests
        self._journal = journal
        self._server = server
        self.gaps: list[float] = []

    def run(self, stack: contextlib.ExitStack) -> int:
        """Begin the streams, kill the server under them, and compare. Return the number of streams."""
        url = self._server.url
        in_background, followed = [], []
        for request in self._requests:
            if request.path == "/v1/responses" and self._trials.random.random() < 0.5:
                in_background.append((request, _post(self._server, request)["id"]))
            else:
                followed.append(Follower(url, request))
        for follower in followed:
            follower.start()
        for follower in followed[: self._trials.random.randrange(len(followed) + 1)]:
            follower.has_begun.wait(TIMEOUT_S)
        num_kills = 0
        port = int(url.rpartition(":")[2])
        for _ in range(self._trials.random.randint(1, MAX_KILLS_OF_A_STREAM)):
            time.sleep(self._trials.random.uniform(0.0, LATEST_KILL_S))
            self._server.process.kill()
            self._server.process.wait()
            num_kills += 1 + self._kill_at_start(port)
            self._server = stack.enter_context(serve(self._trials.subject, self._journal, port=port))
        problems = [self._problem(follower) for follower in followed]
        problems += [self._background_problem(request, call_id) for request, call_id in in_background]
        self._report(num_kills, [problem for problem in problems if problem])
        return len(problems)

    def _kill_at_start(self, port: int) -> int:
        """Kill a random number of servers while they start. Return how many."""
        num_kills = self._trials.random.choice([0, 0, 1, 2])
        for _ in range(num_kills):
            command = command_line(self._trials.subject, self._journal, port=port)
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                time.sleep(self._trials.random.uniform(0.0, LATEST_KILL_AT_START_S))
                process.kill()
        return num_kills

    def _report(self, num_kills: int, problems: list[str]) -> None:
        for problem in problems[:num_kills]:  # a kill counts as broken only once
            self._trials.wrong(problem)
        self._trials.tried(num_kills)

    def _problem(self, follower: Follower) -> str | None:
        follower.join(TIMEOUT_S)
        self.gaps += follower.gaps
        got = {
            index: (*follower.received.answer[index], reason) for index, reason in follower.received.finished.items()
        }
        if follower.request.path == "/v1/responses":
            got = follower.received.answer.get(0, ("", ()))[0]  # type: ignore[assignment]
        if follower.problem is None and got == follower.request.expected:
            return None
        return _differs(follower.request, follower.problem or got)

    def _background_problem(self, request: Request, call_id: str) -> str | None:
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            answer = get(f"{self._server.url}/v1/responses/{call_id}")
            found.update(answer.json() if answer.status_code != 503 else {})
            return answer.status_code not in (200, 503) or found.get("status") not in (None, "queued", "in_progress")

        with contextlib.suppress(EngineError):
            wait_until(has_ended, TIMEOUT_S, "a response in the background")
        is_right = found.get("status") in ("completed", "incomplete") and _text_of(found) == request.expected
        return None if is_right else _differs(request, found)


def _some_request(trials: Trials) -> Request:
    """Draw a request of a random kind, with its own seed."""
    draw = trials.random
    prompt = draw.choice(PROMPTS)
    common = {"temperature": draw.choice([0, 1]), "seed": draw.randrange(2**31)}
    num_tokens = draw.randint(50, 250)
    if draw.random() < 0.5:
        return Request(
            "/v1/responses", {**common, "input": prompt, "max_output_tokens": num_tokens, "background": True}
        )
    body = {**common, "max_tokens": num_tokens, "return_token_ids": True, "resumable": True, "n": draw.choice([1, 3])}
    extras: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"stop": ["the"]},
        {"logprobs": 2},
        {"ignore_eos": True},
    ]
    extra = draw.choice(extras)
    if draw.random() < 0.5:
        return Request("/v1/completions", {**body, **extra, "prompt": prompt})
    logprobs = {"logprobs": True, "top_logprobs": 2} if "logprobs" in extra else extra
    return Request("/v1/chat/completions", {**body, **logprobs, "messages": [{"role": "user", "content": prompt}]})


def _choice_text(choice: Any) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _note_expected(server: Server, request: Request) -> bool:
    """Note the undisturbed answer. Return False if the model cannot take the request."""
    body = {name: value for name, value in request.body.items() if name not in ("resumable", "background")}
    answer = post(server.url + request.path, json=body)
    if answer.status_code == 400:
        return False
    found = answer.raise_for_status().json()
    if request.path == "/v1/responses":
        request.expected = _text_of(found)
        return True
    request.expected = {
        choice["index"]: (_choice_text(choice), tuple(choice["token_ids"]), choice["finish_reason"])
        for choice in found["choices"]
    }
    return True


def _text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response.get("output", []) for part in item["content"])


def _post(server: Server, request: Request) -> dict[str, Any]:
    answer = post(server.url + request.path, json=request.body)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def _differs(request: Request, got: Any) -> str:
    return f"{request.path} {json.dumps(request.body)}: got {str(got)[:600]}, undisturbed {str(request.expected)[:600]}"
