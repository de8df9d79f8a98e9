"""Proofs that hostile input does no harm: known attacks on a real server, and millions of generated inputs."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import ClassVar

import httpx
import msgspec
from msgspec import inspect

from penstock import PenstockError
from penstock.server.app import LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.client_fields import UNSUPPORTED
from penstock.server.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    RankingRequest,
    ScoreRequest,
    VectorsRequest,
)
from penstock.server.llama_cpp import InfillRequest, NativeChatRequest, NativeCompletionRequest
from penstock.server.messages import CountRequest, MessageRequest
from penstock.server.models import OllamaPullRequest, OllamaShowRequest
from penstock.server.ollama import OllamaChatRequest, OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaGenerateRequest
from penstock.server.openai_requests import (
    BlocksRequest,
    ChatRequest,
    CompletionRequest,
    PinRequest,
    PrefillRequest,
    Strict,
)
from penstock.server.responses import ResponseRequest
from penstock.server.tokens import DetokenizeRequest, TemplateRequest, TokenizeRequest
from penstock_lab.prove.attacks import ATTACKS, SLOW_ATTACKS
from penstock_lab.prove.attacks.attack import BODIES, FLAGS, KEY, Attack, Target, judge
from penstock_lab.prove.canary import Monitor
from penstock_lab.prove.frame_attacks import FrameAttack
from penstock_lab.prove.levels import memory_bytes
from penstock_lab.prove.mutations import Mutator
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.scripted import ScriptedServer
from penstock_lab.prove.servers import serve

KINDS: dict[str, type[Strict]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
    "/api/pull": OllamaPullRequest,
    "/completion": NativeCompletionRequest,
    "/infill": InfillRequest,
    "/chat": NativeChatRequest,
    "/apply-template": TemplateRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "/v1/cache/pin": PinRequest,
    "/v1/kv/prefill": PrefillRequest,
    "/v1/kv/blocks": BlocksRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": VectorsRequest,
    "/classify": ClassificationRequest,
    "/score": ScoreRequest,
    "/rerank": RankingRequest,
}
JSON_HEADER = ((b"content-type", b"application/json"),)
ALLOWED_STATUSES = (200, 400, 404, 405, 408, 413, 414, 415, 422, 429, 431)
LAST_EVENTS = (b"response.completed\n", b"response.incomplete\n", b"message_stop\n")  # of APIs without [DONE]
PER_ROUND, AT_ONCE, THREADS = 400, 16, 4
BACKGROUND_S = 60.0  # time within which a response without a reader must end
WIRE_S = 10.0  # a damaged request that never becomes complete is given up after this
MAX_GROWTH = 64 << 20  # maximum growth of this process's memory, over all inputs after the first round


class BodyMaker:
    """Makes bodies for the routes that take one."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._types = {path: inspect.type_info(kind) for path, kind in KINDS.items()}
        self._names = {path: (*kind.__struct_fields__, *UNSUPPORTED) for path, kind in KINDS.items()}

    def make(self) -> tuple[str, bytes]:
        """Make a path and a body for it."""
        path = self._mutator.random.choice(tuple(KINDS))
        if self._mutator.random.random() < 0.3:  # close to a body that computes something
            limits = {"max_output_tokens", "max_tokens"}.intersection(KINDS[path].__struct_fields__)
            value = self._mutator.nearly({**BODIES[path], **dict.fromkeys(limits, 2)}, self._names[path])
            return path, self._mutator.json(value)
        return path, self._mutator.input(self._types[path], self._mutator.json, self._names[path])


class HostileRequests:
    """Sends known attacks and generated requests to a real server, while a canary runs."""

    name: ClassVar[str] = "hostile-requests"
    promise: ClassVar[str] = "No request, however hostile, is answered with a 5xx, or affects another one"
    unit: ClassVar[str] = "requests"
    goal: ClassVar[int] = 60_000
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        with serve(trials.subject, *FLAGS) as server:
            monitor, target = Monitor(server, KEY), Target(server.url)
            mutator = Mutator(trials.random)
            maker = BodyMaker(mutator)
            known = trials.random.sample(ATTACKS, len(ATTACKS))  # so that short runs do not all try the same attacks
            for attack in (*known, *SLOW_ATTACKS):
                if trials.go_on():
                    self._attack(trials, monitor, target, attack)
                    self._generated(trials, monitor, target, maker, mutator)
            while trials.go_on():
                self._generated(trials, monitor, target, maker, mutator)
            monitor.report(trials)

    def _attack(self, trials: Trials, monitor: Monitor, target: Target, attack: Attack) -> None:
        try:
            with monitor.watching(attack.name):
                number = attack.run(target)
        except (OSError, ValueError, KeyError) as error:
            number = 1
            target.complaints.append(f"{attack.name}: {type(error).__name__}: {error}")
        trials.tried(number)
        _report(trials, monitor, target)

    def _generated(self, trials: Trials, monitor: Monitor, target: Target, maker: BodyMaker, mutator: Mutator) -> None:
        requests = [maker.make() for _ in range(PER_ROUND // 2)]
        wire = [mutator.http(*maker.make(), KEY) for _ in range(PER_ROUND // 2)]
        with monitor.watching("generated requests"):
            _send_generated(target, requests, wire)
        trials.tried(PER_ROUND)
        _report(trials, monitor, target)


def _report(trials: Trials, monitor: Monitor, target: Target) -> None:
    for complaint in (*target.complaints, *monitor.complaints):
        trials.wrong(complaint)
    target.complaints.clear()
    monitor.complaints.clear()


def _send_generated(target: Target, requests: list[tuple[str, bytes]], wire: list[bytes]) -> None:
    """Send bodies unchanged, and bytes on the wire, from several threads."""
    jobs: list[Callable[[httpx.Client], None]] = [partial(_send_body, target, *request) for request in requests]
    jobs += [lambda http, data=data: _send_on_wire(target, data) for data in wire]  # type: ignore[misc]
    lock = threading.Lock()

    def work() -> None:
        with target.client() as http:
            while True:
                with lock:
                    if not jobs:
                        return
                    job = jobs.pop(len(jobs) // 2)  # so that both kinds are sent at any time
                job(http)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send_body(target: Target, path: str, body: bytes, http: httpx.Client) -> None:
    what = f"{path} {body[:500]!r}"
    try:
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        target.complaints.append(f"{what}: no answer: {type(error).__name__}")
    else:
        target.judge(what, answer.status_code, answer.content, ALLOWED_STATUSES)


def _send_on_wire(target: Target, data: bytes) -> None:
    """Send damaged HTTP. It may be incomplete, so silence is fine, but a 5xx is not."""
    with target.connect() as sock, suppress(OSError):
        sock.settimeout(WIRE_S)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(1 << 16)
        if answer.startswith(b"HTTP/1.1 5"):
            target.complaints.append(f"{data[:300]!r}: {answer[:200]!r}")


class GeneratedInput:
    """Sends generated bodies to the application, and generated frames to both ends of the engine's connection."""

    name: ClassVar[str] = "generated-input"
    promise: ClassVar[str] = (
        "Whatever is sent to a route or an engine is served or refused; nothing breaks or is left behind"
    )
    unit: ClassVar[str] = "inputs"
    goal: ClassVar[int] = 1_000_000
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        asyncio.run(self._run(trials))

    async def _run(self, trials: Trials) -> None:
        mutator = Mutator(trials.random)
        maker, server = BodyMaker(mutator), ScriptedServer(trials.subject.model)
        async with contextlib.aclosing(FrameAttack(trials, mutator)) as frame_attack:
            await frame_attack.start()
            baseline = 0
            while trials.go_on():
                await self._bodies(trials, server, maker)
                await frame_attack.round(2 * PER_ROUND)  # these are quicker
                if not baseline:
                    baseline = _settled_memory()
            await frame_attack.finish()
        growth = _settled_memory() - baseline
        trials.figure("memory_growth_mib", growth / 2**20)
        if growth > MAX_GROWTH:
            trials.wrong(f"memory grew by {growth >> 20} MiB")

    async def _bodies(self, trials: Trials, server: ScriptedServer, maker: BodyMaker) -> None:
        """Send PER_ROUND requests, AT_ONCE of them at the same time."""
        inputs = [maker.make() for _ in range(PER_ROUND)]

        async def work() -> None:
            while inputs:
                path, body = inputs.pop()
                try:
                    async with asyncio.timeout(60):
                        answer = await server.call("POST", path, body, JSON_HEADER)
                    # A body may ask for an answer within 1e-45 s, and only its own deadline may end it.
                    is_late = b'"timeout"' in body and b'"request_timeout"' in answer.body
                    fine = (*ALLOWED_STATUSES, 504) if is_late else ALLOWED_STATUSES
                    problem = judge(answer.status, answer.body, fine) or _not_json(answer.status, answer.body)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem is not None:
                    trials.wrong(f"POST {path} {body[:500]!r}: {problem}")
                trials.tried()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        with _reporting(trials):
            left = await _left(server)
            if left is not None:
                trials.wrong(f"after a round of requests: {left}")


async def _left(server: ScriptedServer) -> str | None:
    """Describe what is held without a reader, once responses in the background have ended; None if nothing is."""
    deadline = time.monotonic() + BACKGROUND_S
    while (left := server.client.leftovers()) is not None and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return left


def _not_json(status: int, body: bytes) -> str | None:
    """Explain what is wrong with the answer to a valid request: JSON, or a stream with a proper end."""
    if status != 200 or body.endswith(b"data: [DONE]\n\n") or body.rpartition(b"event: ")[2].startswith(LAST_EVENTS):
        return None
    try:
        lines = msgspec.json.Decoder().decode_lines(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the answer is not JSON: {error}"
    has_end = len(lines) == 1 or (lines and not {"error", "done_reason"}.isdisjoint(lines[-1]))
    return None if has_end else "the answer's lines have no end"


@contextlib.contextmanager
def _reporting(trials: Trials) -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        trials.wrong(str(error))


def _settled_memory() -> int:
    gc.collect()
    return memory_bytes(os.getpid())
