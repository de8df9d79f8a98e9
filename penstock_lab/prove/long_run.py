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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.attacks.attack import COMPLETION, FLAGS, KEY
from penstock_lab.prove.levels import Level, level_of, memory_bytes, quick_client
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.scripted import ScriptedServer
from penstock_lab.prove.servers import Server, serve, wait_until

MAX_SLOPE, MAX_MIXED_SLOPE = 1 << 20, 10 << 20  # bytes per SLOPE_REQUESTS; the latter with answers that are stored
SLOPE_REQUESTS = 100_000
COMPLETION_SHARE = 0.6  # of the requests to servers; of the others, half are responses, and half come back to a stream
DELETED_SHARE = 0.95  # of the stored responses
OVER_HTTP = 1 / 11  # share of the requests
IN_PROCESS_TIME = 0.6  # share of the time that the requests in this process may take
LEAVE_SHARE = 0.1  # share of the clients that leave
KILL_SHARE = 0.01  # share of the requests that begin with a death of the engine
KILL_EVERY_S = 20.0  # minimum time between two deaths, because a server gives up after five within a minute
DEMO_SERVERS = 4  # they mostly wait until their engine may be killed again
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
    goal: ClassVar[int] = 220_000
    weight: ClassVar[float] = 3.0

    def run(self, trials: Trials) -> None:
        asyncio.run(_without_sockets(trials, until=time.monotonic() + trials.seconds_left * IN_PROCESS_TIME))
        with contextlib.ExitStack() as stack:
            number = DEMO_SERVERS if trials.subject.model == "demo" else 1
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            journals = [f"--journal={folder}/{index}" for index in range(number)]
            started = [stack.enter_context(serve(trials.subject, *FLAGS, journal)) for journal in journals]
            lock = threading.Lock()
            days = [_OverHttp(trials, server, random.Random(trials.random.random()), lock) for server in started]
            with ThreadPoolExecutor(number) as threads:
                for done in [threads.submit(day.run) for day in days]:
                    done.result()
        trials.figure("over_http", sum(day.num_tried for day in days))
        trials.figure("clients_that_left", sum(day.num_left for day in days))
        trials.figure("kills", sum(day.num_kills for day in days))
        warm = [[point for point in day.points if point[0] >= SERVER_WARM_UP] for day in days]
        steepest = max(warm, key=lambda points: slope(points) or -math.inf)
        judge_slope(trials, "server_memory", steepest, MAX_MIXED_SLOPE)
        trials.figure("server_memory_most_mib", max(size for day in days for _, size in day.points) / 2**20)


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
    """Requests of several clients on a real server.

    Args:
        source: makes the random choices.
        lock: held while a result is reported to the trials, which several servers share.
    """

    def __init__(self, trials: Trials, server: Server, source: random.Random, lock: threading.Lock) -> None:
        self.num_kills = self.num_left = self.num_tried = 0
        self.points: list[tuple[int, int]] = []
        self._trials = trials
        self._server = server
        self._random = source
        self._lock = lock
        self._http = quick_client(server.url, KEY)
        self._killing = threading.Lock()  # held by the client that waits until the engine may be killed
        self._killed_at = time.monotonic()

    def run(self) -> None:
        before = level_of(self._http, self._server.process.pid)
        while self.num_tried == 0 or self._trials.go_on():
            self._round(PER_ROUND // 10)
            self.points.append((self.num_tried, memory_bytes(self._server.process.pid)))
        self._check_settled(before)

    def _round(self, number: int) -> None:
        bodies = [body(self._random) for _ in range(number)]
        leave = [self._random.random() < LEAVE_SHARE for _ in bodies]
        kill = [self._random.random() < KILL_SHARE for _ in bodies]
        pending = list(zip(bodies, leave, kill, strict=True))
        threads = [threading.Thread(target=self._work, args=(pending,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.num_tried += number
        with self._lock:
            self._trials.tried(number)

    def _work(self, pending: list[tuple[dict[str, Any], bool, bool]]) -> None:
        while True:
            with self._killing:
                if not pending:
                    return
                content, leaves, kills = pending.pop()
                if kills:
                    self._kill()
            try:
                self._send(content, leaves=leaves)
            except (httpx.HTTPError, EngineError) as error:
                with self._lock:
                    self._trials.wrong(f"{content}: {type(error).__name__}: {error}")

    def _send(self, content: dict[str, Any], *, leaves: bool) -> None:
        kind = self._random.random()
        if kind < COMPLETION_SHARE or leaves:
            self._complete(content, leaves=leaves)
        elif kind < (COMPLETION_SHARE + 1) / 2:
            self._respond(in_background=self._random.random() < 0.5)
        else:
            self._come_back(content)

    def _complete(self, content: dict[str, Any], *, leaves: bool) -> None:
        path, stored = "/v1/completions", {"resumable": True} if self._random.random() < 0.5 else {}
        with self._http.stream(
            "POST", path, json={**content, "stream": leaves, **(stored if leaves else {})}
        ) as answer:
            if leaves:
                next(answer.iter_bytes(), None)
                with self._lock:
                    self.num_left += 1
                return
            body = answer.read()
        if answer.status_code != 200:
            raise EngineError(f"{answer.status_code}: {body[:300]!r}")

    def _respond(self, *, in_background: bool) -> None:
        """Store a response, fetch it, and delete most of them: those of a whole day would fill the store."""
        body = {"input": "Hi", "max_output_tokens": self._random.randrange(1, 12), "metadata": {"a": "b" * 200}}
        answer = self._http.post("/v1/responses", json={**body, "background": in_background})
        path = f"/v1/responses/{answer.raise_for_status().json()['id']}"
        self._http.get(path).raise_for_status()
        if self._random.random() < DELETED_SHARE:
            self._http.delete(path).raise_for_status()

    def _come_back(self, content: dict[str, Any]) -> None:
        """Leave a stream after an event, and continue it."""
        body, last = {**content, "stream": True, "resumable": True}, ""
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    last = line[4:]
                    break
        self._http.post("/v1/completions", json=body, headers={"Last-Event-ID": last}).raise_for_status()

    def _kill(self) -> None:
        """Kill the engine, if it is there, once it may be killed again; do nothing if the time is up before."""
        wait = self._killed_at + KILL_EVERY_S - time.monotonic()
        if wait > self._trials.seconds_left:
            return
        time.sleep(max(0.0, wait))
        pid = self._http.get("/status").json()["engine"]["pid"]
        if pid is not None:
            self._killed_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.num_kills += 1

    def _check_settled(self, before: Level) -> None:
        def settled() -> bool:
            return level_of(self._http, self._server.process.pid).problem(before, same_engine=False) is None

        try:
            wait_until(settled, SETTLE_S, "everything to be given back")
        except EngineError as error:
            after = level_of(self._http, self._server.process.pid)
            with self._lock:
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
