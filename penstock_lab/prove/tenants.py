"""Proof that keys are apart: whatever one key does, the answers of nine others come as if they had half the machine.

The nine ask for short streams and for answers in forms. For each of many ways of being hostile, a server is started.
First the nine are alone, while its processes may use half of the cores, and then beside a tenth key, which is hostile,
while they may use all cores. Before that, a key with a quota sends as much as it can.
"""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx

from penstock import EngineError
from penstock_lab.prove.attacks.attack import CHAT, COMPLETION, Target, head, post, read_all
from penstock_lab.prove.levels import memory_bytes, quick_client
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.servers import Server, serve

NUM_HONEST = 9
HONEST = [f"sk-honest{i}-0123456789abcdef" for i in range(NUM_HONEST)]
HOSTILE, LIMITED, ADMIN = (f"sk-{name}-0123456789abcdef" for name in ("hostile", "limited", "admin"))
QUOTA = 600  # tokens per minute of the limited key
STEP_TOKENS = 64  # of one step for the calls that run when the quota is reached: one token for each row
PHASE_S = 4.0  # time in which the nine are watched, alone and then during an attack
QUOTA_S = 60.0  # in which even a slow machine computes what the quota allows
WARM_UP_S = 1.0
PAUSE_S = 0.25  # between two requests of an honest key
FACTOR, FLOOR_S = 2.0, 0.05  # an answer may take FACTOR times as long as alone, and a turn of the machine's scheduler
ATTEMPTS = 3  # for an attack that seems to slow the others: a machine may be slow for a moment
THREADS = 24  # of the hostile client
LONG = {"prompt": "a b " * 150, "max_tokens": 200, "ignore_eos": True}
RESPONSES = "/v1/responses"
Start = Callable[[], contextlib.AbstractContextManager[Server]]


# --- the hostile key --------------------------------------------------------------------------------------------------


def _ask(body: dict[str, Any], path: str = "/v1/completions") -> Callable[["Attacker"], Any]:
    return lambda attacker: attacker.send(path, body)


def _of_number(make: Callable[[int], dict[str, Any]], path: str = "/v1/completions") -> Callable[["Attacker"], Any]:
    return lambda attacker: attacker.send(path, make(next(attacker.numbers)))


def _tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"enum": [str(number)]}}}
    return {"type": "function", "function": {"name": f"f{number}", "strict": True, "parameters": parameters}}


def _cancel(attacker: "Attacker") -> None:
    answer = attacker.send(RESPONSES, {"input": "Hi", "background": True, "max_output_tokens": 200})
    if answer is not None and answer.status_code == 200:
        attacker.send(f"{RESPONSES}/{answer.json()['id']}/cancel", {})


def _leave(attacker: "Attacker", more: dict[str, Any]) -> None:
    with attacker.target.connect() as sock:
        sock.sendall(post({**LONG, "stream": True, **more}).replace(CANARY, HOSTILE.encode()))
        sock.recv(1000)


def _do_not_read(attacker: "Attacker") -> None:
    with attacker.target.connect() as sock:
        sock.sendall(post({**LONG, "stream": True, "n": 8, "logprobs": 20}).replace(CANARY, HOSTILE.encode()))
        time.sleep(2.0)


def _one_byte_chunks(attacker: "Attacker") -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "%s"}' % (b"a" * 30_000)) + b"0\r\n\r\n"
    with attacker.target.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(head("Transfer-Encoding: chunked", "Connection: close").replace(CANARY, HOSTILE.encode()) + body)
        read_all(sock)


def _idle(attacker: "Attacker") -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(attacker.target.connect())
        time.sleep(1.0)


def _reports(attacker: "Attacker") -> None:
    for path in ("/metrics", "/status", "/status/requests", "/openapi.json", "/v1/models"):
        attacker.get(path)


CANARY = head().split(b"Bearer ")[1].split(b"\r\n")[0]  # the key that `head` writes
WAYS: dict[str, Callable[["Attacker"], Any]] = {
    "short completions": _ask(COMPLETION),
    "long prompts": _of_number(lambda i: {"prompt": f"{i} " + "word " * 400, "max_tokens": 1}),
    "long answers": _ask(LONG),
    "many choices": _ask({**LONG, "n": 128}),
    "many prompts": _ask({"prompt": ["a"] * 200, "max_tokens": 20}),
    "beam searches": _ask({"prompt": "a", "use_beam_search": True, "n": 32, "max_tokens": 40}),
    "log-probabilities": _ask({**LONG, "n": 16, "logprobs": 20, "prompt_logprobs": 20}),
    "background": _ask({"input": "Hi", "background": True, "max_output_tokens": 200}, RESPONSES),
    "background that is cancelled": _cancel,
    "stored responses": _ask({"input": "Hi", "max_output_tokens": 1, "metadata": {"a": "b" * 500}}, RESPONSES),
    "abandoned streams": lambda attacker: _leave(attacker, {"resumable": True}),
    "streams that are left": lambda attacker: _leave(attacker, {"n": 32}),
    "streams that are not read": _do_not_read,
    "different forms": _of_number(lambda i: {**COMPLETION, "guided_json": {"const": f"{i}"}}),
    "forms that take long": _of_number(
        lambda i: {**COMPLETION, "guided_json": {"allOf": [{"pattern": f".*{i}_{j}.*"} for j in range(200)]}}
    ),
    "different tools": _of_number(
        lambda i: {**CHAT, "tools": [_tool(8 * i + j) for j in range(8)], "tool_choice": "required"},
        "/v1/chat/completions",
    ),
    "long texts": _of_number(lambda i: {"prompt": chr(97 + i % 26) * 8000}, "/tokenize"),
    "embeddings": _ask({"input": ["x"] * 2048}, "/v1/embeddings"),
    "large bodies": _ask({"prompt": "a", "user": "x" * 7_000_000}),
    "bodies in chunks of one byte": _one_byte_chunks,
    "idle connections": _idle,
    "reports": _reports,
}


class Attacker:
    """The hostile client: threads that do the same thing again and again, in a process of their own."""

    def __init__(self, url: str) -> None:
        self.target = Target(url)
        self.numbers = itertools.count(int(time.time()) % 10**6 * 1000)
        self._http = threading.local()

    def _client(self) -> httpx.Client:
        if not hasattr(self._http, "client"):
            self._http.client = quick_client(self.target.url, HOSTILE, 60.0)
        client: httpx.Client = self._http.client
        return client

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            return self._client().post(path, json=body)
        return None

    def get(self, path: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._client().get(path)


def _attack(url: str, way: str) -> None:
    """Attack until standard input is closed. Runs in a process of its own, which yields the processor to all others."""
    os.nice(10)
    attacker = Attacker(url)

    def work() -> None:
        while True:
            with contextlib.suppress(OSError):
                WAYS[way](attacker)

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    print("attacking", flush=True)
    sys.stdin.read()
    os._exit(0)


@contextlib.contextmanager
def attacking(url: str, way: str) -> Iterator[None]:
    command = [sys.executable, "-m", "penstock_lab.prove.tenants", url, way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise EngineError(f"the hostile client did not start: {way}")
            yield
        finally:
            process.kill()


# --- the honest keys --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Times:
    """How long the honest keys waited, in seconds, and what was refused to them."""

    first_token: list[float] = field(default_factory=list)
    form: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class Honest:
    """Nine keys, each of which asks for a short stream and for an answer in a new form in turn.

    numbers: make each form a new one.
    """

    def __init__(self, url: str) -> None:
        self._clients = [quick_client(url, key, 120.0) for key in HONEST]
        self._numbers = itertools.count()

    def watch(self, seconds: float) -> Times:
        times, end = Times(), time.monotonic() + seconds
        threads = [threading.Thread(target=self._ask, args=(http, times, end)) for http in self._clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return times

    def _ask(self, http: httpx.Client, times: Times, end: float) -> None:
        while time.monotonic() < end:
            number = next(self._numbers)
            stream = {"prompt": f"word {number} of a day", "max_tokens": 4, "stream": True}
            form = {"prompt": "a", "max_tokens": 4, "guided_regex": f"[a-z]{{1,3}}{number}"}
            for body, found in ((stream, times.first_token), (form, times.form)):
                asked = time.monotonic()
                try:
                    with http.stream("POST", "/v1/completions", json=body) as answer:
                        first = next(answer.iter_bytes(), b"")
                        found.append(time.monotonic() - asked)
                        if answer.status_code != 200:
                            times.refused.append(f"{answer.status_code} for {body}: {first[:300]!r}")
                except httpx.HTTPError as error:
                    times.refused.append(f"{type(error).__name__} for {body}")
                time.sleep(PAUSE_S)


class Tenants:
    """Compares nine keys beside a hostile one with the same nine alone on half of the machine."""

    name: ClassVar[str] = "tenants"
    promise: ClassVar[str] = (
        "One key makes the others wait no longer than half of the machine would, and keeps its quota"
    )
    unit: ClassVar[str] = "attacks"
    goal: ClassVar[int] = len(WAYS) + 1
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        with _key_file() as keys:
            start, ratios = partial(serve, trials.subject, f"--api-key-file={keys}"), dict[str, float]()
            trials.figure("load_average", os.getloadavg()[0])
            ratio, problem = _beside(trials, start, None)
            trials.figure("ratio_beside_nobody", ratio)
            if problem:
                return trials.skip(f"the machine is too busy: beside nobody, {problem}")
            with start() as server:
                _check_quota(trials, server)
                trials.tried()
            for way in trials.random.sample(tuple(WAYS), len(WAYS)):
                if trials.go_on():
                    ratios[way], problem = _beside(trials, start, way)
                    if problem:
                        trials.wrong(f"{way}: {problem}")
                    trials.tried()
        if ratios:
            trials.figure("worst_ratio", max(ratios.values()))
            trials.figure("median_ratio", statistics.median(ratios.values()))
        trials.detail("ratios", {way: round(ratio, 2) for way, ratio in ratios.items()})


def _beside(trials: Trials, start: Start, way: str | None) -> tuple[float, str]:
    """Watch the nine beside one attack, or none: up to ATTEMPTS times while they are too slow, each on a new server.

    Return how much longer they waited than alone at best, and what was wrong the last time or "".
    """
    problem, best, memory = "", float("inf"), "server_memory_most_mib"
    for _ in range(ATTEMPTS):
        with start() as server:
            honest = Honest(server.url)
            honest.watch(WARM_UP_S)
            with _half_of_the_cores():
                alone = honest.watch(PHASE_S)
            with contextlib.nullcontext() if way is None else attacking(server.url, way):
                time.sleep(WARM_UP_S)
                beside = honest.watch(PHASE_S)
            most = max(trials.outcome.figures.get(memory, 0.0), memory_bytes(server.process.pid) / 2**20)
        trials.figure(memory, most)
        ratio, problem = _compare(alone, beside)
        best = min(best, ratio)
        if not problem:
            break
    return best, problem


def _compare(alone: Times, beside: Times) -> tuple[float, str]:
    """Compare medians. Return the larger ratio, and what is wrong or ""."""
    if beside.refused:
        return float("inf"), f"{len(beside.refused)} requests of others were refused: {beside.refused[0]}"
    worst, problem = 0.0, ""
    for what in ("first_token", "form"):
        before, now = (statistics.median(getattr(times, what)) for times in (alone, beside))
        worst = max(worst, now / before)
        if now > FACTOR * before + FLOOR_S:
            problem = f"the {what.replace('_', ' ')} of others took {1000 * now:.0f} ms instead of {1000 * before:.0f}"
    return worst, problem


def _check_quota(trials: Trials, server: Server) -> None:
    """Send as much as a quota allows, with every kind of call, and compare what was used with the quota."""
    http, began, refused = quick_client(server.url, LIMITED), time.monotonic(), threading.Event()

    def work() -> None:
        while time.monotonic() < began + (PHASE_S if refused.is_set() else QUOTA_S):
            http.post(RESPONSES, json={"input": "Hi", "background": True, "max_output_tokens": 30})
            answer = http.post("/v1/completions", json={**LONG, "prompt": "a", "n": 2, "max_tokens": 30})
            if answer.status_code == 429:
                refused.set()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.0)  # what was begun ends
    lines = quick_client(server.url, ADMIN).get("/metrics").text.splitlines()
    used = sum(float(line.split()[-1]) for line in lines
               if line.startswith("penstock_key_tokens_total") and 'key="limited"' in line)  # fmt: skip
    allowed = QUOTA * (1 + (time.monotonic() - began) / 60) + STEP_TOKENS
    trials.figure("quota_used_of_allowed", used / allowed)
    if not 0 < used <= allowed:
        trials.wrong(f"a key with {QUOTA} tokens a minute used {used:.0f}; {allowed:.0f} were allowed")


@contextlib.contextmanager
def _half_of_the_cores() -> Iterator[None]:
    """Let this process and its server run on half of the cores (on all of them where there is only one)."""
    cores = sorted(os.sched_getaffinity(0))
    _confine(os.getpid(), set(cores[: (len(cores) + 1) // 2]))
    try:
        yield
    finally:
        _confine(os.getpid(), set(cores))


def _confine(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
            for child in (task / "children").read_text().split():
                _confine(int(child), cores)


@contextlib.contextmanager
def _key_file() -> Iterator[str]:
    rules = {f"honest{i}": f'key = "{key}"' for i, key in enumerate(HONEST)}
    rules |= {"hostile": f'key = "{HOSTILE}"', "admin": f'key = "{ADMIN}"\nadmin = true'}
    rules["limited"] = f'key = "{LIMITED}"\ntokens_per_minute = {QUOTA}'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_text("".join(f"[{name}]\n{text}\n" for name, text in rules.items()))
        yield str(path)


if __name__ == "__main__":
    _attack(*sys.argv[1:])
