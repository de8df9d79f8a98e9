"""Proof that nothing stays behind after a compressed day: very many requests, abandoned requests, and killed engines.

A small leak per request fills a server's memory in a month. So memory is measured while the requests go on, and the
proof judges its slope. Of blocks, open files and entries of tables, none may be left at all.
"""

import asyncio
import contextlib
import gc
import json
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from http import client as http_client
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.attacks.attack import COMPLETION, FLAGS, KEY
from penstock_lab.prove.levels import Level, level_of, memory_bytes, quick_client
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.scripted import ScriptedServer
from penstock_lab.prove.servers import CLIENT_TIMEOUT_S, Server, serve, wait_until

MAX_SLOPE, MAX_MIXED_SLOPE = 1 << 20, 10 << 20  # bytes per SLOPE_REQUESTS; the latter with answers that are stored
SLOPE_REQUESTS = 100_000
COMPLETION_SHARE = 0.6  # of the requests to servers; of the others, half are responses, and half come back to a stream
DELETED_SHARE = 0.99  # of the stored responses
MAX_GROWTH = 64 << 20  # bytes of a server's memory after its start
OVER_HTTP = 0.5  # share of the requests
IN_PROCESS_TIME = 0.3  # share of the time that the requests in this process may take
LEAVE_SHARE = 0.1  # share of the clients that leave
KILL_EVERY_S = 20.0  # between two deaths of an engine, because a server gives up after five within a minute
CLIENTS = 8
READ_EVERY_S = 1.0  # between two readings of the server's memory
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Connection": "close"}
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
SERVER_WARM_UP = 4000  # requests in which a server's memory grows to its level; measured
AT_ONCE = 16
PER_ROUND = 1000
WARM_UP = 0.2  # share of the measurements that is not counted, because caches fill
MIN_POINTS = 10  # points that a slope needs
JSON_HEADER = ((b"content-type", b"application/json"),)
SETTLE_S = 60.0


def body(source: random.Random) -> dict[str, Any]:
    """Draw a small request. Each of its options is used by some requests."""
    options: dict[str, Any] = {
        "stream": True, "n": 2, "logprobs": 2, "seed": source.randrange(2**62), "stop": ["e", "on"], "echo": True,
        "prompt": [source.randrange(2, 900) for _ in range(source.randrange(1, 40))], "logit_bias": {"5": 2.0},
        "temperature": 0, "top_k": 20, "min_tokens": 2, "repetition_penalty": 1.1, "user": str(source.random()),
    }  # fmt: skip
    chosen = {name: value for name, value in options.items() if source.random() < 0.25}
    prompt = f"word {source.randrange(10**6)} of a day"
    return {**COMPLETION, "prompt": prompt, "max_tokens": source.randrange(2, 10), **chosen}


class LongRun:
    """Sends requests to the scripted engine here and to a real server. Some clients leave, and engines die."""

    name: ClassVar[str] = "long-run"
    promise: ClassVar[str] = "However many requests come and go, nothing of them is left behind"
    unit: ClassVar[str] = "requests"
    goal: ClassVar[int] = 400_000
    weight: ClassVar[float] = 3.0

    def run(self, trials: Trials) -> None:
        asyncio.run(_without_sockets(trials, until=time.monotonic() + trials.seconds_left * IN_PROCESS_TIME))
        with (
            tempfile.TemporaryDirectory() as folder,
            serve(trials.subject, *FLAGS, f"--journal={folder}/journal") as server,
        ):
            day = _OverHttp(trials, server)
            day.run()
        trials.figure("over_http", day.num_tried)
        trials.figure("clients_that_left", day.num_left)
        trials.figure("kills", len(day.kills))
        warm = [point for point in day.points if point[0] >= SERVER_WARM_UP]
        judge_slope(trials, "server_memory", warm, MAX_MIXED_SLOPE)
        trials.figure("server_memory_first_mib", day.points[0][1] / 2**20)
        trials.figure("server_memory_most_mib", (most := max(size for _, size in day.points)) / 2**20)
        if most > day.points[0][1] + MAX_GROWTH:
            trials.wrong(f"the server's memory grew to {most / 2**20:.0f} MiB")


async def _without_sockets(trials: Trials, *, until: float) -> None:
    """Serve most of the requests in this process, with the scripted engine."""
    server, source = ScriptedServer(trials.subject.model), trials.random
    points: list[tuple[int, int]] = []
    goal, tried = int(trials.goal * (1 - OVER_HTTP)), 0

    async def work(bodies: list[dict[str, Any]]) -> None:
        while bodies:
            leave_after = source.randrange(6) if source.random() < LEAVE_SHARE else None
            content = json.dumps(bodies.pop()).encode()
            answer = await server.call("POST", "/v1/completions", content, JSON_HEADER, leave_after=leave_after)
            if leave_after is None and answer.status != 200:
                trials.wrong(f"{content[:300]!r}: {answer.status} {answer.body[:300]!r}")

    while tried == 0 or (tried < goal and time.monotonic() < until):
        bodies = [body(source) for _ in range(PER_ROUND)]
        await asyncio.gather(*(work(bodies) for _ in range(AT_ONCE)))
        tried += PER_ROUND
        trials.tried(PER_ROUND)
        left = server.client.leftovers()
        if left is not None:
            trials.wrong(f"after {tried} requests: {left}")
        gc.collect()
        points.append((tried, memory_bytes(os.getpid())))
    judge_slope(trials, "memory", points, MAX_SLOPE)


class _OverHttp:
    """Requests of several clients on a real server, whose engine is killed every KILL_EVERY_S.

    Attributes:
        points: the number of requests and the server's memory in bytes, once a second.
        kills: when an engine was killed, on the clock of time.monotonic().
    """

    def __init__(self, trials: Trials, server: Server) -> None:
        self.num_tried = self.num_left = 0
        self.kills: list[float] = []
        self.points: list[tuple[int, int]] = []
        self._trials = trials
        self._server = server
        self._random = trials.random
        self._lock = threading.Lock()
        self._killed_at = -math.inf
        self._asked: dict[int, tuple[float, str]] = {}  # by thread: the last request, and when it was sent

    def run(self) -> None:
        http = quick_client(self._server.url, KEY)
        before = level_of(http, self._server.process.pid)
        self.points.append((0, memory_bytes(self._server.process.pid)))
        threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.points.append((self.num_tried, memory_bytes(self._server.process.pid)))
            time.sleep(READ_EVERY_S)
        self._check_settled(http, before)

    def _work(self) -> None:
        while self._trials.go_on():
            content, problem = body(self._random), None
            try:
                self._kill_if_due()
                self._send(content)
            except (OSError, http_client.HTTPException, EngineError) as error:
                problem = self._describe(error)
            with self._lock:
                self.num_tried += 1
                self._trials.tried()
                if problem is not None:
                    self._trials.wrong(problem)

    def _describe(self, error: Exception) -> str:
        """Say which request failed, when it was sent, which engines were killed meanwhile, and what is open."""
        asked, what = self._asked[threading.get_ident()]
        kills = [f"{at - asked:.1f}" for at in self.kills if at > asked - KILL_EVERY_S]
        took, state = time.monotonic() - asked, b"nothing"
        with contextlib.suppress(OSError, http_client.HTTPException, EngineError):
            state = self._read("GET", "/status") + self._read("GET", "/status/requests")[:2000]
        return f"{what}: {type(error).__name__} after {took:.1f} s: {error}; kills at {kills} s; open: {state!r}"

    def _send(self, content: dict[str, Any]) -> None:
        kind = self._random.random()
        if kind < LEAVE_SHARE:
            more = {"resumable": True} if self._random.random() < 0.5 else {}
            with self._ask("POST", COMPLETIONS, {**content, "stream": True, **more}) as answer:
                answer.read1(1)
            with self._lock:
                self.num_left += 1
        elif kind < COMPLETION_SHARE:
            self._read("POST", COMPLETIONS, {**content, "stream": False})
        elif kind < (COMPLETION_SHARE + 1) / 2:
            self._respond(in_background=self._random.random() < 0.5)
        else:
            self._come_back(content)

    def _ask(
        self, method: str, path: str, content: dict[str, Any] | None = None, **headers: str
    ) -> http_client.HTTPResponse:
        """Begin a request on a connection of its own. Raise EngineError unless its status is 200."""
        connection = http_client.HTTPConnection(self._server.url.rpartition("/")[2], timeout=CLIENT_TIMEOUT_S)
        text = None if content is None else json.dumps(content)
        self._asked[threading.get_ident()] = time.monotonic(), f"{method} {path} {headers} {text}"
        connection.request(method, path, text, {**HEADERS, **headers})
        answer = connection.getresponse()
        if answer.status != 200:
            raise EngineError(f"{method} {path}: {answer.status}: {answer.read()[:300]!r}")
        return answer

    def _read(self, method: str, path: str, content: dict[str, Any] | None = None, **headers: str) -> bytes:
        with self._ask(method, path, content, **headers) as answer:
            return answer.read()

    def _respond(self, *, in_background: bool) -> None:
        """Store a response, fetch it, and delete most of them: those of a whole day would fill the store."""
        body = {"input": "Hi", "max_output_tokens": self._random.randrange(1, 12), "metadata": {"a": "b" * 200}}
        answer = json.loads(self._read("POST", RESPONSES, {**body, "background": in_background}))
        path = f"{RESPONSES}/{answer['id']}"
        self._read("GET", path)
        if self._random.random() < DELETED_SHARE:
            self._read("DELETE", path)

    def _come_back(self, content: dict[str, Any]) -> None:
        """Leave a stream after an event, and continue it."""
        content, last = {**content, "stream": True, "resumable": True}, ""
        with self._ask("POST", COMPLETIONS, content) as answer:
            while not last.startswith("id: "):
                last = answer.readline().decode().rstrip()
        self._read("POST", COMPLETIONS, content, **{"Last-Event-ID": last.removeprefix("id: ")})

    def _kill_if_due(self) -> None:
        """Kill the engine, if it is there and may be killed again: five deaths within a minute end a server."""
        with self._lock:
            if time.monotonic() < self._killed_at + KILL_EVERY_S:
                return
            self._killed_at = time.monotonic()
        pid = json.loads(self._read("GET", "/status"))["engine"]["pid"]
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(time.monotonic())

    def _check_settled(self, http: httpx.Client, before: Level) -> None:
        def settled() -> bool:
            return level_of(http, self._server.process.pid).problem(before, same_engine=False) is None

        try:
            wait_until(settled, SETTLE_S, "everything to be given back")
        except EngineError as error:
            after = level_of(http, self._server.process.pid)
            self._trials.wrong(f"{error}: {after.problem(before, same_engine=False)}")


def slope(points: Sequence[tuple[int, int]]) -> float | None:
    """Compute the least-squares slope of (requests, bytes) in bytes per SLOPE_REQUESTS; None if points are too few."""
    counted = points[int(len(points) * WARM_UP) :]
    if len(counted) < MIN_POINTS:
        return None
    mean_x = sum(x for x, _ in counted) / len(counted)
    mean_y = sum(y for _, y in counted) / len(counted)
    over = sum((x - mean_x) ** 2 for x, _ in counted)
    return SLOPE_REQUESTS * sum((x - mean_x) * (y - mean_y) for x, y in counted) / over


def judge_slope(trials: Trials, name: str, points: Sequence[tuple[int, int]], most: int) -> None:
    """Report the slope. It is judged only if it was measured over SLOPE_REQUESTS; before that, caches still fill."""
    found = slope(points)
    if found is None:
        return
    trials.figure(f"{name}_mib_per_100k", found / 2**20)
    if points[-1][0] >= SLOPE_REQUESTS and found > most:
        trials.wrong(f"{name} grows by {found / 2**20:.2f} MiB per {SLOPE_REQUESTS} requests")
