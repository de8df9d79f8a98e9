"""Clients that behave badly: they leave, do not read, send slowly, try routes without a key, or come in hundreds."""

import contextlib
import json
import re
import selectors
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

from starlette.routing import Route

from penstock.client.engine_client import EngineClient
from penstock.server.app import create_app
from penstock_lab.prove.attacks.attack import (
    COMPLETION,
    JSON,
    KEY,
    Attack,
    Behaviour,
    Call,
    Target,
    head,
    post,
    read_all,
)

# the middleware has its own list: opening another path must be noticed
OPEN_PATHS = {"/", "/health", "/ping", "/live", "/ready", "/docs", "/openapi.json"}
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
LORIS_S = 60.0  # time within which the server must close a connection that sends a byte now and then; it allows 36 s
LORIS_EVERY_S = 5.0


def without_the_key(target: Target) -> int:
    """Request every route of the application without the key, and some with wrong keys."""
    app = create_app(cast(EngineClient, None))  # only its table of routes is used
    routes = [route for route in app.routes if isinstance(route, Route)]
    wrong = ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, f"Bearer {KEY}, Bearer {KEY}")
    calls = 0
    with target.client() as http:
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            for method in sorted(route.methods or ()):
                for key in wrong if path == "/v1/models" else wrong[:1]:
                    answer = http.request(method, path, headers={"Authorization": key})
                    calls += 1
                    if (answer.status_code == 401) == (path in OPEN_PATHS):
                        target.complaints.append(f"{method} {path} with {key!r}: {answer.status_code}")
    return calls


def leave(target: Target, *, count: int, reset: bool) -> int:
    """Disconnect in the queue, in the prompt, in the middle and at the end, with RST or FIN, streaming or not."""
    for number in range(count):
        stream, after_bytes = number % 2 == 0, (0, 0, 1, 3000, 20_000)[number % 5]
        with target.connect() as sock:
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            body = {**LONG, "stream": stream, "n": 1 + number % 3}
            sock.sendall(post(body)[: None if number % 7 else -3])  # some leave before they have sent all
            received = 0
            while stream and number % 7 and received < after_bytes and (part := sock.recv(4096)):
                received += len(part)
    return count


def half_close(target: Target) -> int:
    """Close the sending half only. The client may still read."""
    for body in ({**LONG, "stream": True, "max_tokens": 8}, COMPLETION):
        with target.connect() as sock:
            sock.sendall(post(body))
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
    return 2


def leave_uploads_unfinished(target: Target) -> int:
    """Begin bodies, with a length or in chunks, and disconnect."""
    for number in range(40):
        kind = "Transfer-Encoding: chunked" if number % 2 else "Content-Length: 5000000"
        with target.connect() as sock:
            sock.sendall(head(kind) + (b"1000\r\n" if number % 2 else b"") + b"x" * 50 * number)
    return 40


def do_not_read(target: Target, *, count: int) -> int:
    """Ask for long streams, read nothing, and disconnect."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(target.address)
            sock.sendall(post({**LONG, "stream": True, "logprobs": 5}))
        time.sleep(0.5)  # while the server writes streams that nobody reads
    return count


def send_slowly(target: Target, *, count: int, body: bool) -> int:
    """Hold connections open with a byte now and then, in the head or in the body, until the server closes them."""
    begin = head("Content-Length: 1000") if body else head()[:-4]
    pending, since = selectors.DefaultSelector(), time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(target.connect())
            sock.sendall(begin)
            pending.register(sock, selectors.EVENT_READ)
        sent_at = time.monotonic()
        while pending.get_map() and time.monotonic() - since < LORIS_S:
            for key, _ in pending.select(1.0):
                pending.unregister(key.fileobj)  # an answer, or the end of the connection
            if time.monotonic() - sent_at > LORIS_EVERY_S:
                sent_at = time.monotonic()
                for key in list(pending.get_map().values()):
                    with contextlib.suppress(OSError):
                        cast(socket.socket, key.fileobj).send(b"x")
        if pending.get_map():
            target.complaints.append(f"{len(pending.get_map())} of {count} slow connections are open after {LORIS_S} s")
    pending.close()
    return count


def in_parallel(target: Target, calls: list[Call]) -> int:
    """Send all requests at once, each on its own connection."""

    def send(call: Call) -> None:
        with target.client() as http:
            try:
                answer = call.send(http)
                target.judge(str(call), answer.status_code, answer.content, call.expect)
            except Exception as error:
                target.complaints.append(f"{call}: no answer: {type(error).__name__}")

    threads = [threading.Thread(target=send, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(calls)


def one_id_for_many(target: Target) -> int:
    """Send different requests at once with the same X-Request-Id and request_id. Each must get its own answer."""
    headers = {**JSON, "X-Request-Id": "the-same"}
    bodies = [{"prompt": "Hi", "max_tokens": 4, "seed": seed, "request_id": "the-same"} for seed in range(8)]
    with target.client() as http:
        alone = [_choice(Call(body, headers=headers).send(http).content) for body in bodies]
    together: dict[int, Any] = {}

    def send(index: int) -> None:
        with target.client() as http:
            together[index] = _choice(Call(bodies[index], headers=headers).send(http).content)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target.complaints += [
        f"seed {i}: the answer of another" for i, answer in enumerate(alone) if together.get(i) != answer
    ]
    return 2 * len(bodies)


def _choice(content: bytes) -> Any:
    return json.loads(content)["choices"][0]["text"]


def cancel_anothers(target: Target) -> int:
    """Cancel and read answers by ids that are not the client's own."""
    ids = ("the-same", "resp_1", "cmpl-1-0", "..%2f..", "x" * 5000, "'%20OR%201=1")
    with target.client() as http:
        for given in ids:
            for method, action in (("POST", "/cancel"), ("GET", ""), ("GET", "/input_items")):
                path = f"/v1/responses/{given}{action}"
                answer = http.request(method, path)
                target.judge(f"{method} {path[:60]}", answer.status_code, answer.content, (400, 404))
    return 3 * len(ids)


def half_a_character(target: Target) -> int:
    """Stream tokens that never complete a UTF-8 character, if the model has such tokens."""
    with target.client() as http:
        tokens = Call({"prompt": "\U0001f469\u4e2d", "add_special_tokens": False}, path="/tokenize").send(http).json()
        for token_id in tokens["tokens"][:4]:
            body = {"prompt": "a", "max_tokens": 40, "logit_bias": {str(token_id): 100}, "logprobs": 1, "stream": True}
            content = Call(body).send(http).content.decode()  # raises if it is not UTF-8
            lines = [line.removeprefix("data: ") for line in content.split("\n") if line.startswith("data: {")]
            if any("error" in json.loads(line) for line in lines) or not content.endswith("data: [DONE]\n\n"):
                target.complaints.append(f"token {token_id} again and again: {content[-200:]}")
    return 5


def look_for_doors(target: Target) -> int:
    """List what the server's processes listen on: only the HTTP port, and no socket in the file system."""
    port = target.address[1]
    listening = [line.split() for line in _lines("/proc/net/tcp") if line.split()[3:4] == ["0A"]]
    inodes = {line[9]: int(line[1].rpartition(":")[2], 16) for line in listening}
    for pid in _processes(port, inodes):
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
        held = {link[8:-1] for link in links if link.startswith("socket:[")}
        doors = {inodes[inode] for inode in held & inodes.keys()} - {port}
        named = [
            line.split()[7] for line in _lines("/proc/net/unix") if line.split()[6] in held and len(line.split()) > 7
        ]
        if doors or named:
            target.complaints.append(f"process {pid} listens on {sorted(doors)} and {named}")
    return 1


def _processes(port: int, inodes: dict[str, int]) -> list[int]:
    """Find the process that listens on the port, and its children."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            links = [str(link.readlink()) for link in (status.parent / "fd").iterdir()]
            if any(f"socket:[{inode}]" in links for inode, its_port in inodes.items() if its_port == port):
                found.append(int(status.parent.name))
    children = [
        int(status.parent.name)
        for status in Path("/proc").glob("[0-9]*/status")
        if any(f"\nPPid:\t{pid}\n" in "".join(_lines(str(status), end="\n")) for pid in found)
    ]
    return found + children


def _lines(path: str, end: str = "") -> list[str]:
    with contextlib.suppress(OSError):
        return [line + end for line in Path(path).read_text().splitlines()]
    return []


def _large_prompts(count: int) -> list[Call]:
    return [Call({**COMPLETION, "prompt": chr(97 + i % 26) * 900_000}, (400, 408, 413, 503)) for i in range(count)]


ACCESS: tuple[Attack, ...] = (
    Behaviour("every route without the key", without_the_key),
    Behaviour("doors beside the port of HTTP", look_for_doors),
    Behaviour("one id for many requests (vLLM #10583)", one_id_for_many),
    Behaviour("another client's requests", cancel_anothers),
    Behaviour("tokens that complete no character", half_a_character),
)
QUICK: tuple[Attack, ...] = (
    Behaviour("clients that leave (SGLang #36333)", partial(leave, count=21, reset=False)),
    Behaviour("clients that reset the connection", partial(leave, count=21, reset=True)),
    Behaviour("connections that are half closed", half_close),
    Behaviour("bodies that are never finished", leave_uploads_unfinished),
    Behaviour("readers that do not read (CVE-2025-30202)", partial(do_not_read, count=10)),
    Behaviour("long prompts, all at once (CVE-2025-46560)", lambda target: in_parallel(target, _large_prompts(20))),
)
CROWDS: tuple[Attack, ...] = (
    Behaviour("hundreds of clients that leave", partial(leave, count=500, reset=True)),
    Behaviour("hundreds of long prompts at once", lambda target: in_parallel(target, _large_prompts(200))),
    Behaviour("500 connections with slow heads", partial(send_slowly, count=500, body=False)),
    Behaviour("500 connections with slow bodies", partial(send_slowly, count=500, body=True)),
)
