"""Requests for five models on a server with memory for two, while engines and the server are killed.

Every answer is compared with the one that its model gives alone, so an answer of another model shows. Some of the
requests run in the background, and survive the server in its journal; the others are sent again when it is killed. All
the while, the memory that the server counts and that its engines have is compared with the budget.
"""

import asyncio
import contextlib
import itertools
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import httpx

from penstock_lab.prove import tiny_models
from penstock_lab.prove.proof import Subject, Trials
from penstock_lab.prove.rank_deaths import children_of
from penstock_lab.prove.servers import QUICK, Server, post, send_signal, serve

NAMES = ("Llama", "Mistral with a window", "Qwen3-MoE", "Gemma 2", "Falcon")
OPTIONS = {"load_format": "dummy", "max_num_seqs": 32, "max_model_len": 128, "threads": 1}
PROMPTS = ("Once upon a time", "The little robot", "A story about a ship:", "What is 3 + 4?")
ROUTES = ("/v1/completions", "/v1/responses")  # the second in the background
CLIENTS = 160  # a model answers all that wait for it before the next one gets its memory
NUM_TOKENS = 6
MAX_WAIT_S = 600.0  # of a request for its model, on a machine that may be busy
POLL_S, SAMPLE_S, RETRY_S = 0.5, 0.2, 0.05
ENGINE_KILL_S, SERVER_KILL_S = 20.0, 60.0  # mean seconds between two kills
SPARE = 2**22  # bytes of the budget beyond the two largest models
ENGINE = b"penstock.client.engine_process"
Key = tuple[str, str, str]  # model, route and prompt


class SeveralModels:
    """Serves five models with memory for two, kills what computes them, and compares every answer."""

    name: ClassVar[str] = "models"
    promise: ClassVar[str] = "Several models share one memory, and no request is lost or answered by another model"
    unit: ClassVar[str] = "requests"
    goal: ClassVar[int] = 10_000
    weight: ClassVar[float] = 1.0

    def run(self, trials: Trials) -> None:
        with tempfile.TemporaryDirectory() as folder:
            places = tiny_models.write(Path(folder))
            served = {name.partition(" ")[0].lower(): places[name] for name in NAMES}
            subject = Subject(",".join(f"{name}={place}" for name, place in served.items()), OPTIONS)
            with serve(subject, "--memory=8GiB") as server:
                keys = itertools.product(served, ROUTES, PROMPTS)
                expected = {key: _text_of(_post(server, key).json()) for key in keys}
                needs = [model["memory_bytes"] for model in server.status()["models"].values()]
            by_question: dict[tuple[str, str], set[str]] = {}
            for (_, *question), text in expected.items():
                by_question.setdefault(tuple(question), set()).add(text)  # type: ignore[arg-type]
            if any(len(texts) < len(served) for texts in by_question.values()):
                trials.wrong(f"two models give the same answer, so a mistake would not show: {expected}")
            budget = sum(sorted(needs)[-2:]) + SPARE
            flags = (f"--memory={budget}", f"--journal={Path(folder) / 'journal'}", f"--max-queue-wait={MAX_WAIT_S}")
            with contextlib.ExitStack() as servers:  # closed after the threads that start them, whatever ends the run
                asyncio.run(_Run(trials, subject, flags, expected, budget).run(servers))


def _body(key: Key) -> dict[str, Any]:
    model, route, prompt = key
    names = ("prompt", "max_tokens") if route == ROUTES[0] else ("input", "max_output_tokens")
    return {"model": model, names[0]: prompt, names[1]: NUM_TOKENS, "temperature": 0}


def _post(server: Server, key: Key) -> httpx.Response:
    return post(server.url + key[1], json=_body(key)).raise_for_status()


def _text_of(answer: dict[str, Any]) -> str:
    """Join the model's name and the text of an answer."""
    if "choices" in answer:
        return f"{answer['model']}: {answer['choices'][0]['text']}"
    texts = [part["text"] for item in answer["output"] for part in item["content"]]
    return f"{answer['model']}: {''.join(texts)}"


class _Run:
    """The requests, the kills and the measurements of one run."""

    def __init__(
        self, trials: Trials, subject: Subject, flags: tuple[str, ...], expected: dict[Key, str], budget: int
    ) -> None:
        self._trials, self._subject, self._flags = trials, subject, flags
        self._expected, self._budget = expected, budget
        self._server: Server
        self._is_up = asyncio.Event()
        self._num_kills = {"engine": 0, "server": 0}
        self._most = {"counted": 0, "resident": 0}
        self._longest_s = 0.0
        self._num_loads = 0

    async def run(self, servers: contextlib.ExitStack) -> None:
        """Run until enough was tried. servers: gets every server that is started."""
        limits = httpx.Limits(max_connections=None)
        self._server = servers.enter_context(serve(self._subject, *self._flags))
        self._is_up.set()
        async with httpx.AsyncClient(timeout=MAX_WAIT_S, limits=limits, **QUICK) as http:
            others = [asyncio.create_task(work) for work in (self._measure(http), self._kill(http, servers))]
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))
            for task in others:
                task.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        for what, most in self._most.items():
            if most > self._budget:
                self._trials.wrong(f"the engines' {what} memory was {most:,} bytes; the budget has {self._budget:,}")
            self._trials.figure(f"{what}_of_budget", most / self._budget)
        self._trials.figure("longest_request_s", self._longest_s)
        self._trials.figure("loads", self._num_loads)
        for kind, number in self._num_kills.items():
            self._trials.figure(f"{kind}_kills", number)

    async def _client(self, http: httpx.AsyncClient) -> None:
        keys = list(self._expected)
        while self._trials.go_on():
            key, began = self._trials.random.choice(keys), time.monotonic()
            self._trials.tried(1)
            try:
                found = _text_of(await self._answer(http, key))
            except httpx.HTTPStatusError as error:
                self._trials.wrong(f"{key}: {error.response.status_code} {error.response.text[:500]}")
                continue
            except KeyError as error:
                self._trials.wrong(f"{key}: the answer has no {error}")
                continue
            self._longest_s = max(self._longest_s, time.monotonic() - began)
            if found != self._expected[key]:
                self._trials.wrong(f"{key}: {found!r}; alone it is {self._expected[key]!r}")

    async def _answer(self, http: httpx.AsyncClient, key: Key) -> dict[str, Any]:
        """Get an answer: at once, or as a response in the background that is asked for until it has ended."""
        body = _body(key) if key[1] == ROUTES[0] else {**_body(key), "background": True}
        answer = await self._send(http, "POST", key[1], body)
        while answer.get("status") in ("queued", "in_progress"):
            await asyncio.sleep(POLL_S)
            answer = await self._send(http, "GET", f"{key[1]}/{answer['id']}", None)
        return answer

    async def _send(self, http: httpx.AsyncClient, method: str, path: str, body: Any) -> dict[str, Any]:
        """Send a request, again when the server is killed under it. Raise httpx.HTTPStatusError if it is refused."""
        while True:
            await self._is_up.wait()
            with contextlib.suppress(httpx.TransportError):
                answer = await http.request(method, self._server.url + path, json=body)
                if answer.status_code != 503 or "not available yet" not in answer.text:  # after a restart
                    found: dict[str, Any] = answer.raise_for_status().json()
                    return found
            await asyncio.sleep(RETRY_S)

    async def _measure(self, http: httpx.AsyncClient) -> None:
        """Note the most memory that the server counts, and that its engines have."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            resident = sum(map(_resident_bytes, self._engines()))
            self._most["resident"] = max(self._most["resident"], resident)
            with contextlib.suppress(httpx.TransportError):
                status = (await http.get(f"{self._server.url}/status")).json()
                self._most["counted"] = max(self._most["counted"], status["models_memory_bytes"])
                self._num_loads = sum(model["loads"] for model in status["models"].values())

    async def _kill(self, http: httpx.AsyncClient, servers: contextlib.ExitStack) -> None:
        """Kill an engine now and then, and the server, which then starts again on its port."""
        random = self._trials.random
        server_at = time.monotonic() + SERVER_KILL_S * random.uniform(0.1, 1.0)
        while True:
            await asyncio.sleep(ENGINE_KILL_S * random.uniform(0.1, 1.9))
            if time.monotonic() < server_at:
                engine = await self._ready_engine(http)
                send_signal(engine, signal.SIGKILL)
                self._num_kills["engine"] += engine is not None
                continue
            self._is_up.clear()
            self._server.process.kill()
            self._server.process.wait()
            self._num_kills["server"] += 1
            port = int(self._server.url.rpartition(":")[2])
            again = serve(self._subject, *self._flags, port=port)
            self._server = await asyncio.to_thread(servers.enter_context, again)
            self._is_up.set()
            server_at = time.monotonic() + SERVER_KILL_S * random.uniform(0.5, 1.5)

    async def _ready_engine(self, http: httpx.AsyncClient) -> int | None:
        """Wait for an engine that is ready: one that is killed three times while it starts is given up."""
        url = f"{self._server.url}/status"
        with contextlib.suppress(httpx.TransportError):
            while True:
                models = (await http.get(url)).json()["models"]
                if ready := [name for name, model in models.items() if model["state"] == "ready"]:
                    asked = await http.get(url, params={"model": self._trials.random.choice(ready)})
                    pid: int | None = asked.json()["engine"]["pid"]
                    return pid
                await asyncio.sleep(RETRY_S)
        return None

    def _engines(self) -> list[int]:
        return [pid for pid in children_of(self._server.process.pid) if ENGINE in _command_of(pid)]


def _command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return 0
