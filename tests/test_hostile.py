"""Attacks on the real server while an honest stream runs: nobody else may notice them.

The oracle is not the status code alone: the canary's tokens equal its solo run, the processes are the same ones,
/health is 200 throughout, every block comes back, and memory does not grow without bound.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

# With this seed no token is won by less than 0.05 (noise included): the reference kernels promise a tolerance, not
# bits, and with seed 3 token 193 is won by 6e-7, which any crowd turns round.
CANARY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "seed": 13}
MAX_GROWTH = 200 * 2**20  # of the server's memory over all attacks together


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ["--port", "0", "--threads", "1", "--dtype", "float32"]
    command = [sys.executable, "-m", "penstock", "serve", "demo", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline()
        found = next(word for word in line.split() if word.startswith("http://"))
        before = memory(process.pid)
        yield found
        assert process.poll() is None, "the server process died"
        assert memory(process.pid) - before < MAX_GROWTH
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def stream(url: str) -> str:
    """The canary's text, as streamed."""
    text = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**CANARY, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return "".join(text)


@pytest.fixture(scope="module")
def solo(url) -> str:
    return stream(url)


def post(url: str, content: str | bytes, status: set[int]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code in status, answer.text[:300]
    if answer.status_code != 200:
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def body(**fields: object) -> str:
    return json.dumps({"model": "demo", "prompt": "x", "max_tokens": 2, **fields})


def head(*fields: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def raw(url: str, data: bytes, wait_s: float = 0.5) -> None:
    """Send bytes as they are and go away."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.settimeout(wait_s)
        try:
            sock.sendall(data)
            sock.recv(65536)
        except (TimeoutError, ConnectionError):
            pass


def trailers(url: str) -> None:
    raw(url, head("Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n" + b"X-Filler: y\r\n" * 300_000)


def slow_readers(url: str) -> None:
    text = body(max_tokens=200, ignore_eos=True, stream=True, logprobs=5).encode()
    for _ in range(10):
        raw(url, head(f"Content-Length: {len(text)}") + text, wait_s=0.05)


def disconnects(url: str) -> None:
    for _ in range(20):
        with httpx.stream("POST", f"{url}/v1/completions", json={**CANARY, "stream": True}) as answer:
            next(answer.iter_lines())


ATTACKS: dict[str, Callable[[str], None]] = {
    "a field name that a parser might walk": lambda url: post(url, json.dumps({" - at " * 20_000: 1}), {400}),
    "nesting": lambda url: post(url, "[" * 100_000, {400}),
    "a huge label": lambda url: post(url, body(metadata={"k": ["x" * 100] * 60_000}), {200, 400, 413}),
    "a huge body": lambda url: post(url, b"x" * 10_000_000, {413}),
    "floats for ids": lambda url: post(url, body(prompt=[1.5] * 1_000_000), {400}),
    "many prompts with costly stops": lambda url: post(
        url, body(prompt=["x"] * 200, stop=[chr(65 + i) * 256 for i in range(16)]), {200}
    ),
    "many biased prompts": lambda url: post(
        url, body(prompt=["x"] * 200, logit_bias={str(i): 1 for i in range(300)}), {200}
    ),
    "too many choices": lambda url: post(url, body(n=10**9), {400}),
    "too many prompts": lambda url: post(url, body(prompt=["a"] * 200_000), {400}),
    "a prompt beyond the context": lambda url: post(url, body(prompt="word " * 200_000), {400}),
    "trailers without end": trailers,
    "readers that do not read": slow_readers,
    "clients that leave": disconnects,
    "rubbish": lambda url: raw(url, bytes(range(256)) * 100),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_else_notices(name, url, solo):
    before = httpx.get(f"{url}/status").json()
    texts: list[str] = []
    canary = threading.Thread(target=lambda: texts.append(stream(url)))
    canary.start()
    ATTACKS[name](url)
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    canary.join()
    assert texts == [solo]
    until_idle(url)
    after = httpx.get(f"{url}/status").json()
    assert after["engine"]["pid"] == before["engine"]["pid"]
    assert after["engine"]["restarts"] == 0
    assert after["kv_blocks"]["free"] == after["kv_blocks"]["total"]


def until_idle(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        status = httpx.get(f"{url}/status").json()
        if not status["running"] and not status["waiting"]:
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
