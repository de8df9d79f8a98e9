"""An attack: requests with the correct statuses, bytes on the wire, or a way for clients to behave.

`Target.judge` judges a single answer. canary.py watches what everybody else notices of an attack.
"""

import json
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock_lab.prove.levels import quick_client

KEY = "sk-canary-7f3a9c"  # the API key of the attacked server
ADAPTERS = tempfile.gettempdir()  # the directory from which adapters may be loaded; it holds none
FLAGS = (  # both key and Host are checked
    f"--api-key={KEY}", "--allowed-host=127.0.0.1", "--allowed-host=localhost", f"--allowed-lora-path={ADAPTERS}",
)  # fmt: skip
ANSWER_S = 60.0  # maximum wait for the answer to an attack
JSON = {"Content-Type": "application/json"}
COMPLETION: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": False,
        "options": {"num_predict": 8, "temperature": 0, "stop": ["x"], "num_gpu": 1},
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "demo", "prompt": "Hi", "raw": True, "options": {"num_predict": 8}},
    "/api/embed": {"model": "demo", "input": ["Hi", "Once"], "options": {"num_ctx": 64}},
    "/api/embeddings": {"model": "demo", "prompt": "Hi"},
    "/api/show": {"model": "demo"},
    "/api/pull": {"model": "demo", "stream": False},
    "/completion": {
        "prompt": "Hi",
        "n_predict": 2,
        "temperature": 0,
        "n_probs": 1,
        "cache_prompt": True,
        "logit_bias": [[5, 1.5], [6, False]],
        "stop": ["x"],
        "return_tokens": True,
    },
    "/infill": {
        "input_prefix": "def f(a):\n",
        "input_suffix": "\n",
        "input_extra": [{"filename": "a.py", "text": "x = 1\n"}],
        "prompt": "    ",
        "n_predict": 4,
        "n_indent": 4,
        "samplers": ["top_k", "infill"],
        "t_max_predict_ms": 250,
        "response_fields": ["content", "timings/prompt_n"],
    },
    "/chat": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_new_tokens": 2,
        "do_sample": False,
        "stream": "False",
        "add_generation_prompt": True,
    },
    "/apply-template": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/cache/pin": {"prompt": "Once upon a time, far away, there was a little girl who liked to read.", "name": "a"},
    "/v1/kv/prefill": {"store": "penstock-x", "prompt_token_ids": [1, 2], "cache_salt": "s"},
    "/v1/kv/blocks": {"names": ["0-00"]},
    "/v1/embeddings": {"input": ["Hi", "Once upon a time"]},
    "/pooling": {"input": "Hi", "task": "token_embed", "encoding_format": "float"},
    "/classify": {"input": ["Hi", "Once"], "use_activation": True},
    "/score": {"text_1": "Hi", "text_2": ["Hi", "Once"]},
    "/rerank": {"query": "Hi", "documents": ["Hi", {"text": "Once"}]},
}
ERROR_FIELDS = {"message", "type", "param", "code"}
ANTHROPIC_FIELDS = {"type", "message", "details"}
OLLAMA_FIELDS = {"error", "code", "param"}
# What no answer may show: the key, the server's path, and parts of a traceback.
SECRETS = re.compile(
    "|".join([KEY, "Traceback", "site-packages", *map(re.escape, {str(Path(__file__).parents[2]), sys.prefix})])
)


def judge(status: int, body: bytes, expect: Sequence[int]) -> str | None:
    """Explain what is wrong with an answer; None if nothing is.

    Args:
        expect: the correct statuses; an error must carry OpenAI's error object, Anthropic's or Ollama's.
    """
    shown = body[:200].decode(errors="replace")
    if status not in expect:
        return f"{status} instead of {' or '.join(map(str, expect))}: {shown}"
    if SECRETS.search(body.decode(errors="replace")):
        return f"the answer shows something of the inside: {shown}"
    if status < 400:
        return None
    try:
        found = json.loads(body)
        error = found["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object: {shown}"
    if isinstance(error, str) and error and found.keys() == OLLAMA_FIELDS:
        return None
    fields = ANTHROPIC_FIELDS if found.get("type") == "error" else ERROR_FIELDS
    return None if set(error) == fields and error["message"] else f"{status} with another error object: {shown}"


def error_code(body: bytes) -> str:
    """Read the code of an error, in the shape of any of the APIs."""
    found = json.loads(body)
    error = found if isinstance(found["error"], str) else found["error"]
    code: str = error["details"]["error_code"] if "details" in error else error["code"]
    return code


@dataclass(slots=True)
class Target:
    """The attacked server, and what was wrong with its answers."""

    url: str
    complaints: list[str] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self) -> httpx.Client:
        """Make an HTTP client that has the key."""
        return quick_client(self.url, KEY, ANSWER_S)

    def judge(self, what: str, status: int, body: bytes, expect: Sequence[int]) -> None:
        problem = judge(status, body, expect)
        if problem is not None:
            self.complaints.append(f"{what}: {problem}")

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=ANSWER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def exchange(self, data: bytes) -> bytes:
        """Send bytes unchanged. Return what comes until the server closes. Raises TimeoutError if it does not."""
        with self.connect() as sock:
            with suppress(OSError):
                sock.sendall(data)
            return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    """Read until the other end closes. Raise TimeoutError if it does not."""
    parts = []
    with suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Call:
    """One request over HTTP.

    Args:
        content: bytes, pieces of bytes (sent in chunks), or a value for JSON; a function that makes one is called when
            it is needed.
    """

    content: Any = None
    expect: tuple[int, ...] = (400,)
    path: str = "/v1/completions"
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def send(self, http: httpx.Client) -> httpx.Response:
        content = self.content() if callable(self.content) else self.content
        if content is not None and not isinstance(content, bytes | Iterator):
            content = json.dumps(content).encode()
        return http.request(self.method, self.path, content=content, headers=dict(self.headers))

    def __str__(self) -> str:
        content = "" if callable(self.content) else repr(self.content)[:120]
        return f"{self.method} {self.path} {content}"


@dataclass(frozen=True, slots=True)
class Calls:
    """Requests whose answers are judged one by one."""

    name: str
    calls: Sequence[Call]

    def run(self, target: Target) -> int:
        """Send the requests. Return how many were sent."""
        with target.client() as http:
            for call in self.calls:
                try:
                    answer = call.send(http)
                except httpx.HTTPError as error:
                    target.complaints.append(f"{call}: no answer: {type(error).__name__}")
                else:
                    target.judge(str(call), answer.status_code, answer.content, call.expect)
        return len(self.calls)


@dataclass(frozen=True, slots=True)
class Wire:
    """Pieces of bytes, each on its own connection, which the server closes afterwards.

    Args:
        expect: correct statuses of the first answer. 0: the connection may also end without an answer.
    """

    name: str
    pieces: Sequence[bytes]
    expect: tuple[int, ...] = (400,)

    def run(self, target: Target) -> int:
        """Send the pieces. Return how many were sent."""
        for data in self.pieces:
            what = repr(data[:120])
            try:
                answer = target.exchange(data)
            except TimeoutError:
                target.complaints.append(f"{what}: neither an answer nor the end of the connection")
                continue
            if answer or 0 not in self.expect:
                head, _, body = answer.partition(b"\r\n\r\n")
                words = head.split(b" ", 2)
                status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
                length = re.search(rb"(?i)content-length: (\d+)", head)
                target.judge(what, status, body[: int(length[1])] if length else body, self.expect)
        return len(self.pieces)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Clients whose behaviour takes code to describe.

    Args:
        act: behaves, complains to the target, and returns how many requests it made.
    """

    name: str
    act: Callable[[Target], int]

    def run(self, target: Target) -> int:
        return self.act(target)


Attack = Calls | Wire | Behaviour


def refused(
    name: str, *fields: dict[str, Any], path: str = "/v1/completions", expect: tuple[int, ...] = (400,)
) -> Calls:
    """Make an attack of requests that are valid except for these fields."""
    return Calls(name, [Call({**BODIES[path], **item}, expect, path) for item in fields])


def each(name: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Make a field of a body for each value."""
    return [{name: value} for value in values]


def head(*lines: str, request: str = "POST /v1/completions HTTP/1.1", host: str = "localhost") -> bytes:
    """Write the head of a request that has the key and declares a JSON body."""
    fields = [request, f"Host: {host}", f"Authorization: Bearer {KEY}", "Content-Type: application/json", *lines]
    return "".join(f"{line}\r\n" for line in [*fields, ""]).encode("latin-1")


def post(body: Any, *lines: str, path: str = "/v1/completions") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(f"Content-Length: {len(content)}", *lines, request=f"POST {path} HTTP/1.1") + content
