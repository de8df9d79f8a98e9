"""Too much at once: refusals in time, deadlines, a fair share for the short ones, and readers that stand still."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock import AsyncLLM, SamplingParams
from penstock.client import process
from penstock.errors import EngineOverloadedError
from penstock.server.middleware import MAX_REFUSAL_LINES, _RefusalLines
from penstock.server.timelines import RequestLog
from penstock_lab.prove.attacks.attack import BODIES as EXAMPLES
from penstock_lab.prove.servers import QUICK
from tests.server.fakes import Behaviour, FakeEngineClient, FakeTokenizer
from tests.server.harness import QUIET, WAIT_S, RunningServer, app_client, get, samples, send, stream, wait_until
from tests.server.test_sockets import post

BODY = {"prompt": "a", "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", EXAMPLES)
def test_no_request_is_counted_for_ever(path: str) -> None:
    """Guards against a route whose refused requests count as arriving: new ones were refused, and the server did not
    stop."""
    client = app_client(FakeEngineClient(max_model_len=2))  # has room for no prompt
    client.post(path, json=EXAMPLES[path])
    assert not client.app.state.context.arriving  # type: ignore[attr-defined]


class CountingTokenizer(FakeTokenizer):
    """Counts what it is asked for."""

    num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
@pytest.mark.parametrize("streams", [False, True])
def test_a_full_queue_refuses_before_it_tokenises(path: str, body: dict[str, Any], streams: bool) -> None:
    """Guards against an overload that is made worse by the work on requests that are refused."""
    fake = FakeEngineClient()
    fake.tokenizer = CountingTokenizer()
    fake.overload = EngineOverloadedError("the queue is full", retry_after_s=7.2)
    answer = app_client(fake).post(f"/v1/{path}", json=body | {"stream": streams})
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "8"
    assert answer.json()["error"] == {
        "message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "engine_overloaded",
    }  # fmt: skip
    assert fake.tokenizer.num_encoded == 0
    assert app_client(fake).post(f"/v1/{path}", content=b"no JSON").status_code == 429  # before the body is read
    stranger = app_client(fake, dataclasses.replace(QUIET, api_key="k" * 20)).post(f"/v1/{path}", json=body)
    assert stranger.status_code == 401
    rest = app_client(fake).post(f"/v1/{path}", json=body, headers={"Last-Event-ID": "cmpl-1:0"})
    assert rest.status_code != 429  # the rest of a stream is no new request


def test_what_is_on_its_way_is_counted_until_it_is_there() -> None:
    """Guards against a count that grows with each request that fails early, until everybody is refused."""
    fake = FakeEngineClient()
    client = app_client(fake)
    wrong = [{"prompt": "a", "n": 100_000}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a" * 9999}, {"prompt": [-5]}]
    for body in (*wrong, BODY, BODY | {"stream": True}, BODY | {"stream": True, "resumable": True}):
        client.post("/v1/completions", json=body)
    assert not client.app.state.context.arriving  # type: ignore[attr-defined]
    assert set(fake.num_arriving) == {0}


def test_what_is_on_its_way_counts_for_its_own_key() -> None:
    """Guards against a key that is refused for the requests of another one that are on their way."""
    fake = FakeEngineClient()
    context = app_client(fake).app.state.context  # type: ignore[attr-defined]
    logs = [RequestLog("", key=key) for key in "aab"]
    for log in logs:
        context.arrive(log)
    assert fake.num_arriving == [0, 1, 0]
    for log in logs * 2:
        context.arrived(log)
    assert not context.arriving


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a log line for each of thousands of refusals, which costs more than to refuse."""
    caplog.set_level("INFO", logger="penstock.access")
    now = 7.0
    lines = _RefusalLines(lambda: now)
    assert sum(lines.may_write() for _ in range(500)) == MAX_REFUSAL_LINES
    now = 8.0
    assert lines.may_write()
    assert f"{500 - MAX_REFUSAL_LINES} more requests were refused" in caplog.text


@pytest.mark.parametrize("behaviour", [Behaviour(hang_at=0), Behaviour(text="x" * 400, delay_s=0.01)])
def test_an_answer_that_takes_too_long_is_given_up(behaviour: Behaviour) -> None:
    """Guards against a call without an end: one that hangs, and one that goes on and on."""
    fake = FakeEngineClient(behaviour)
    options = dataclasses.replace(QUIET, request_timeout_s=0.3)
    answer = app_client(fake, options).post("/v1/completions", json={"prompt": "a", "max_tokens": 400})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert len(fake.aborted) == len(fake.seen)  # which a busy machine may not have begun
    assert not fake.open


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    """Guards against a deadline that cuts a stream without a word, or holds for whole answers only."""
    fake = FakeEngineClient(Behaviour(text="x" * 400, hang_at=3))
    options = dataclasses.replace(QUIET, request_timeout_s=0.3)
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    lines = [line for line in app_client(fake, options).post("/v1/completions", json=body).text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert len(lines) <= 4
    assert not fake.open


# --- with a real engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server in a thread, with the demo model in four rows, and little room in its sockets."""
    started = RunningServer(AsyncLLM(max_num_seqs=4, threads=1).client, dataclasses.replace(QUIET, keep_alive_s=0.2))
    started._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    started.start()
    wait_until(lambda: get(f"{started.url}/health").status_code == 200)
    yield started
    started.stop()


def completion(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = send(f"{server.url}/v1/completions", json={"prompt": "Once upon a time", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_large_calls_do_not_keep_a_small_one_out(server: RunningServer) -> None:
    """Guards against three calls with n=32 that made a request for five tokens time out."""
    large = {"n": 32, "max_tokens": 900, "ignore_eos": True, "stream": True, "prompt": "Once upon a time"}
    with httpx.Client(timeout=WAIT_S, **QUICK) as client:
        opened = []
        for _ in range(3):
            request = client.build_request("POST", f"{server.url}/v1/completions", json=large)
            opened.append(client.send(request, stream=True))
        wait_until(lambda: get(f"{server.url}/status").json()["running"] == 4)
        assert completion(server, max_tokens=5)["usage"]["completion_tokens"] == 5
        assert get(f"{server.url}/status").json()["waiting"] > 80  # they are far from done
        for answer in opened:
            answer.close()
    wait_until(lambda: get(f"{server.url}/status").json()["journal"]["requests"] == 0)


@pytest.mark.covers("J23")
def test_a_stream_that_nobody_reads_is_paused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against computing, and holding in memory, all of an answer for a client that takes nothing of it; and
    against losing or repeating a token when it begins to read. What it has not read is a backlog that is shown."""
    monkeypatch.setattr(process, "MAX_UNREAD", 64)
    body = {"n": 4, "max_tokens": 250, "ignore_eos": True, "logprobs": 3, "seed": 5, "temperature": 1}
    expected = completion(server, **body)["choices"]
    data = json.dumps({"prompt": "Once upon a time", "stream": True, **body}).encode()
    before = get(f"{server.url}/status").json()["generated_tokens_total"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(WAIT_S)
        sock.sendall(post(data, "Connection: close\r\n"))
        wait_until(lambda: is_paused(server) and 0 not in unread(server))
        generated = get(f"{server.url}/status").json()["generated_tokens_total"] - before
        assert 0 < generated < 1000
        wait_until(lambda: 0 not in (shown := unread(server)) and len(shown) == 1)  # the sockets are full
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    wait_until(lambda: unread(server) == {0})
    texts = dict.fromkeys(range(4), "")
    logprobs: dict[int, list[float]] = {index: [] for index in range(4)}
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
                logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert "data: [DONE]" in received.decode()
    for choice in expected:
        assert texts[choice["index"]] == choice["text"]
        assert logprobs[choice["index"]] == choice["logprobs"]["token_logprobs"]


def unread(server: RunningServer) -> set[int]:
    """The tokens that wait for readers: as /metrics says, and a moment later /status."""
    shown = samples(get(f"{server.url}/metrics").text, "demo")["penstock_unread_tokens"]
    return {get(f"{server.url}/status").json()["unread_tokens"], int(shown)}


def is_paused(server: RunningServer) -> bool:
    status = get(f"{server.url}/status").json()
    return bool(status["journal"]["requests"] and not status["running"] and not status["waiting"])


def test_a_request_waits_for_the_next_engine(server: RunningServer) -> None:
    """Guards against refusing, or leaving in silence, what comes while an engine is replaced."""
    pid = get(f"{server.url}/status").json()["engine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: get(f"{server.url}/health").status_code == 503)
    assert get(f"{server.url}/health").json()["status"] == "recovering"
    body = {"prompt": "Once upon a time", "max_tokens": 5, "stream": True}
    with stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"


def test_what_would_come_too_late_is_refused_at_once() -> None:
    """Guards against a queue in which everybody waits: the first token of what is let in comes in time."""
    max_queue_wait = 3.0
    params = SamplingParams(max_tokens=100, ignore_eos=True, output_kind="delta")
    prompt = {"prompt_token_ids": [1, 2, 3]}  # no text: what a tokenizer takes on a busy machine is not the queue's

    async def scenario() -> tuple[list[float], list[float], float]:
        waits: list[float] = []
        refusals: list[float] = []
        async with AsyncLLM(max_num_seqs=2, threads=1, max_queue_wait=max_queue_wait) as llm:

            async def one() -> None:
                started = time.monotonic()
                try:
                    async with contextlib.aclosing(llm.generate(prompt, params)) as outputs:
                        await anext(outputs)
                        waits.append(time.monotonic() - started)
                        async for _ in outputs:
                            pass
                except EngineOverloadedError as error:
                    refusals.append(error.retry_after_s)

            tasks: list[asyncio.Task[None]] = []
            late_s, pause_s = 0.0, 0.02
            while not refusals or not all(task.done() for task in tasks):
                if not refusals:
                    tasks.append(asyncio.create_task(one()))
                before = time.monotonic()
                await asyncio.sleep(pause_s)
                late_s = max(late_s, time.monotonic() - before - pause_s)
            await asyncio.gather(*tasks)
        return waits, refusals, late_s

    waits, refusals, late_s = asyncio.run(scenario())
    wakes = 3  # of this process, each as late as the machine is busy: for the token or its deadline, and for its reader
    assert max(waits) < max_queue_wait + wakes * late_s + 0.2
    assert min(refusals) >= 1
