"""Attacks on the event loop: what one client may send so that everybody else waits for it."""

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from penstock.server.openai_requests import MAX_NESTED, MAX_STRINGS, MAX_VALUES
from penstock_lab.prove.attacks.attack import (
    CHAT,
    COMPLETION,
    Attack,
    Behaviour,
    Call,
    Calls,
    Target,
    head,
    post,
    read_all,
)
from penstock_lab.prove.attacks.clients import do_not_read, in_parallel, leave

CHUNKED, CLOSE = "Transfer-Encoding: chunked", "Connection: close"
MIB = 2**20
ANY = (200, 400, 404, 408, 413, 429, 503)
CHAT_PATH, RESPONSES, EMBEDDINGS, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"
RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2}
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
_numbers = itertools.count()


def _repeated(piece: bytes, *, before: bytes = b'{"prompt": [', after: bytes = b"1]}", size: int = 7 * MIB) -> Call:
    """Make a body of one piece again and again."""
    return Call(lambda: before + piece * (size // len(piece)) + after, ANY)


def _of_keys(count: int) -> bytes:
    return b'{"prompt": "a", "logit_bias": {%s}}' % b",".join(b'"%d":1' % i for i in range(count))


def _of_blocks(count: int) -> bytes:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * count}
    return json.dumps({"max_tokens": 2, "messages": [message]}, separators=(",", ":")).encode()


LABEL, TEXT = b'{"prompt": "a", "metadata": {"a": [', b'{"prompt": "'
BODIES = {
    "empty lists": _repeated(b"[],"),
    "as many empty lists as are allowed": _repeated(b"[],", size=3 * (MAX_NESTED - 8)),
    "empty objects": _repeated(b"{},"),
    "integers": _repeated(b"1,"),
    "as many integers as are allowed": _repeated(b"12345,", size=6 * (MAX_VALUES - 8)),
    "floats": _repeated(b"0.1,"),
    "as many floats as are allowed": _repeated(b"0.1,", size=4 * (MAX_VALUES - 8)),
    "texts": _repeated(b'"a",'),
    "as many texts as are allowed": _repeated(b'"a",', size=4 * (MAX_STRINGS - 8)),
    "lists of lists": _repeated(b"[[1]],"),
    "objects as metadata": _repeated(b'{"a":1},', before=LABEL),
    "as many objects as are allowed": _repeated(b'{"a":1},', before=LABEL, size=8 * (MAX_NESTED // 2 - 8)),
    "escaped letters": _repeated(b"\\u00e9", before=TEXT, after=b'"}'),
    "escaped backslashes": _repeated(b"\\\\", before=TEXT, after=b'"}'),
    "escaped quotes": _repeated(b'\\"', before=TEXT, after=b'"}'),
    "spaces": _repeated(b" "),
    "lists and objects in each other": _repeated(b'[{"content":', before=b'{"messages": '),
    "names": Call(lambda: _of_keys(600_000), ANY),
    "as many names as are allowed": Call(lambda: _of_keys(MAX_NESTED - 8), ANY),
    "blocks of a message": Call(lambda: _of_blocks(9_000), ANY, "/v1/messages"),
    "as many blocks of a message as are allowed": Call(lambda: _of_blocks(MAX_NESTED // 3 - 8), ANY, "/v1/messages"),
}


def pieces_of_one_byte(target: Target, *, connections: int, size: int) -> int:
    """Send bodies in chunks of a byte, on several connections at once."""
    text = b'{"prompt": "%s"}' % (b"a" * size)
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"

    def send() -> None:
        with target.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(head(CHUNKED, CLOSE) + body)
            read_all(sock)

    return _at_once([send] * connections)


def _at_once(jobs: list[Callable[[], Any]]) -> int:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(jobs)


def segments_of_one_byte(target: Target, *, count: int) -> int:
    """Send a head in segments of a byte."""
    data = head("Content-Length: 2", CLOSE, f"X: {'y' * count}") + b"{}"
    with target.connect() as sock:
        for byte in data:
            sock.send(bytes([byte]))
        read_all(sock)
    return 1


def pipelined(target: Target, *, count: int) -> int:
    """Send requests without waiting for their answers."""
    calls = post({**COMPLETION, "n": 0}) * count
    with target.connect() as sock, contextlib.suppress(OSError):
        reader = threading.Thread(target=read_all, args=(sock,))
        reader.start()
        sock.sendall(calls + post({"n": 0}, CLOSE))
        reader.join()
    return count


def idle(target: Target, *, count: int) -> int:
    """Open connections without sending anything, and reset them all at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(target.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return count


def forms(target: Target, *, count: int, at_once: int = 16) -> int:
    """Ask for forms that nobody has asked for before."""
    number = next(_numbers)
    schemas = [{"type": "object", "properties": {f"a{number}_{i}": {"type": "string"}}} for i in range(count)]
    calls = [Call({**COMPLETION, "structured_outputs": {"json": schema}}, (200, 429)) for schema in schemas]
    for start in range(0, count, at_once):
        in_parallel(target, calls[start : start + at_once])
    return count


def hostile_forms(target: Target, *, count: int) -> int:
    """Ask for forms that take the whole time that compiling may take."""
    number = next(_numbers)
    schemas = [{"allOf": [{"pattern": f".*{number}_{i}{j}.*"} for j in range(200)]} for i in range(count)]
    return in_parallel(
        target, [Call({**COMPLETION, "structured_outputs": {"json": schema}}, ANY) for schema in schemas]
    )


def tools(target: Target, *, count: int) -> int:
    """Offer as many tools as a request may have."""
    number = next(_numbers)
    offered = [
        {"type": "function", "function": {"name": f"f{number}_{i}", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "enum": ["b", f"c{i}"]}}}}}
        for i in range(count)
    ]  # fmt: skip
    return in_parallel(target, [Call({**CHAT, "tools": offered, "tool_choice": "required"}, ANY, CHAT_PATH)] * 2)


def stored(target: Target, *, count: int, readers: int) -> int:
    """Store responses with the largest metadata, and read one of them, and lists of all, again and again."""
    labels = {f"{i:064}": "x" * 512 for i in range(16)}
    with target.client() as http:
        answers = [Call({**RESPONSE, "metadata": labels}, path=RESPONSES).send(http) for _ in range(count)]
        body = {**RESPONSE, "max_output_tokens": 300, "stream": True}
        events = Call(body, path=RESPONSES).send(http).text
    for answer in answers:
        target.judge("a response", answer.status_code, answer.content, (200, 429))
    last = json.loads(events.rpartition("data: ")[2])["response"]["id"]
    gets = [f"{RESPONSES}/{last}?stream=true", "/status/requests", "/metrics", "/status", "/openapi.json"]
    in_parallel(target, [Call(None, ANY, path, "GET") for path in gets] * readers)
    return count + 5 * readers


def leave_large_calls(target: Target, *, count: int) -> int:
    """Ask for many choices, and reset the connection as soon as they have begun."""
    for _ in range(count):
        with target.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(post({**LONG, "stream": True, "n": 128, "logprobs": 20}))
            sock.recv(4096)
    return count


@contextlib.contextmanager
def key_file(text: str) -> Iterator[Path]:
    """Write a file of API keys, which `keys_from_a_pipe` replaces."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_text(text)
        yield path


def keys_from_a_pipe(target: Target, path: Path, pid: int) -> int:
    """Put a FIFO in the place of the file of API keys, and have it read again."""
    text = path.read_text()
    path.unlink()
    os.mkfifo(path)
    try:
        os.kill(pid, signal.SIGHUP)
        with target.client() as http:
            answer = http.get("/v1/models")
            target.judge("/v1/models", answer.status_code, answer.content, (200,))
    finally:
        path.unlink()
        path.write_text(text)
    return 1


def holding(size: int) -> tuple[Attack, ...]:
    """List the attacks on the loop. `size` is 1 for a sample, and more for larger crowds."""
    wide = {**COMPLETION, "prompt": ["x"] * 200}
    bias = {"logit_bias": {str(i): 1 for i in range(300)}}
    one_byte = partial(pieces_of_one_byte, connections=4)
    return (
        *(Calls(f"a body of {name}", [call]) for name, call in BODIES.items()),
        Behaviour("bodies in chunks of one byte", partial(one_byte, size=60_000 * size)),
        Behaviour("a head in segments of one byte", partial(segments_of_one_byte, count=5000 * size)),
        Behaviour("requests before the answers to those before", partial(pipelined, count=500 * size)),
        Behaviour("idle connections", partial(idle, count=min(1500 * size, 8000))),
        Behaviour("forms, all different", partial(forms, count=48 * size)),
        Behaviour("forms that take long", partial(hostile_forms, count=3 * size)),
        Behaviour("long texts at once", lambda target: in_parallel(
            target, [Call({"prompt": chr(97 + i) * 900_000}, ANY, TOKENIZE) for i in range(8 * size)])),
        Behaviour("texts of the longest length that is tokenised", lambda target: in_parallel(
            target, [Call({"prompt": chr(97 + i % 26) * 8000}, ANY, TOKENIZE) for i in range(16 * size)])),
        Behaviour("tools", partial(tools, count=1024)),
        Behaviour("messages", lambda target: in_parallel(
            target, [Call({**CHAT, "messages": CHAT["messages"] * 1024}, ANY, CHAT_PATH)] * 2 * size)),
        Behaviour("items of a conversation", lambda target: in_parallel(target, [
            Call({**RESPONSE, "input": [{"role": "user", "content": "a"}] * 1024}, ANY, RESPONSES)] * 2 * size)),
        Calls("many biased prompts", [Call({**wide, **bias}, (200,))]),
        Calls("many prompts with costly stops", [
            Call({**wide, "stop": [chr(65 + i) * 256 for i in range(16)]}, (200,))]),
        Calls("many prompts with a form", [Call({**wide, "guided_regex": "[a-z]{1,4}"}, (200,))]),
        Calls("many embeddings", [Call({"input": ["x"] * min(512 * size, 2048)}, (200,), EMBEDDINGS)]),
        Calls("many documents", [Call({"query": "a", "documents": ["x"] * min(256 * size, 2000)}, ANY, "/rerank")]),
        Calls("many log-probabilities", [
            Call({**LONG, "n": 64, "logprobs": 20, "stream": stream, "max_tokens": 20}, (200,))
            for stream in (False, True)]),
        Calls("log-probabilities of a long prompt", [
            Call({"prompt": "a b " * 200, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, ANY)]),
        Calls("beams", [Call({**COMPLETION, "use_beam_search": True, "n": 64, "max_tokens": 20}, ANY)]),
        Behaviour("stored responses", partial(stored, count=40 * size, readers=4 * size)),
        Behaviour("readers that do not read", partial(do_not_read, count=10 * size)),
        Behaviour("clients that reset the connection", partial(leave, count=40 * size, reset=True)),
        Behaviour("large calls that nobody waits for", partial(leave_large_calls, count=3 * size)),
    )  # fmt: skip
