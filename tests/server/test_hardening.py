"""Attacks on the HTTP side that once held the event loop, memory, a connection or the wrong answer."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.server import openai_requests
from penstock.server.api_errors import ApiError
from penstock.server.app import create_app
from penstock.server.middleware import FREE_BODY_BYTES, BodyLimitMiddleware
from penstock.server.openai_requests import (
    MAX_NESTED,
    MAX_STRINGS,
    MAX_VALUES,
    ChatRequest,
    CompletionRequest,
    parse,
    to_request,
)
from penstock.server.options import ServerOptions
from penstock.server.timelines import label_text
from penstock_lab.prove.scripted import ScriptedServer
from tests.server.fakes import FakeEngineClient
from tests.server.harness import QUIET, RunningServer, app_client, running, send, wait_until
from tests.server.test_sockets import post, raw, read_all

KEYED = dataclasses.replace(QUIET, api_key="right", max_body_bytes=100_000_000)
JSON = {"Content-Type": "application/json"}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeEngineClient(), KEYED) as started:
        yield started


def failure(body: dict[str, Any], kind: Any = CompletionRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        to_request(parse(json.dumps(body).encode(), kind), kind)
    return caught.value


def test_a_misspelt_field_is_told_its_right_name() -> None:
    """Guards against a search for the letter that is wrong."""
    for name, hint in (("max_token", "did you mean max_tokens?"), ("max_new_tokens", "it is max_tokens here")):
        assert str(failure({"prompt": "a", name: 1})) == f"{name}: unknown field; {hint}"
    assert str(failure({"prompt": "a", "zzz": 1})) == "zzz: unknown field"
    assert "belong beside the others" in str(failure({"prompt": "a", "extra_body": {"top_k": 1}}))


def test_long_unknown_names_cost_little() -> None:
    """Guards against a regular expression that took quadratic time over the name of an unknown field."""
    begin = time.monotonic()
    failure({"prompt": "a", " - at " * 100_000: 1})
    assert time.monotonic() - begin < 30  # it took minutes


@pytest.mark.parametrize("name", [" - at `$", "x` - at `$.n", "unknown", "` - at `key` in `$.n`", "required field `a`"])
def test_names_that_look_like_places(name: str) -> None:
    """Guards against a caller's name that is taken for the place of the mistake, or for another kind of it."""
    error = failure({"prompt": "a", name: 1})
    assert (error.param, error.code) == (name, "unknown_field")


def test_places_are_named() -> None:
    """Guards against a field inside another, or a key, that is no longer found; and against a role without the list."""
    assert failure({"prompt": "a", "stream_options": {"x": 1}}).param == "stream_options.x"
    assert failure({"prompt": "a", "logit_bias": {"AI": 1}}).param == "logit_bias"
    error = failure({"messages": [{"role": "wizard", "content": "a"}]}, ChatRequest)
    assert error.param == "messages[0].role"
    assert "developer, user, assistant" in error.message


def test_trailers_are_no_headers(server: RunningServer) -> None:
    """Guards against a key in a trailer that authenticates."""
    body = b"Content-Type: application/json\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\n"
    answer = read_all(raw(server, CHUNKED + body + b"Authorization: Bearer right\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("piece", [b"X: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
def test_trailers_are_bounded(server: RunningServer, piece: bytes) -> None:
    """Guards against trailers, or one that never ends, that fill the memory."""
    sock = raw(server, CHUNKED + b"Authorization: Bearer right\r\n\r\n0\r\nX: ")
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 50_000_000:
            sock.sendall(piece * 100)
            sent += 100 * len(piece)
    sock.close()
    assert sent < 50_000_000, "the server went on reading"


def test_unread_answer_is_cut_off() -> None:
    """Guards against a connection, and its buffers, held indefinitely by a client that does not read a whole answer."""
    body = b'{"prompt": [%s], "max_tokens": 200, "n": 2, "logprobs": 5, "echo": true}' % b",".join(
        [b'"%s"' % (b"a" * 200)] * 99
    )
    data = post(body, "Authorization: Bearer right\r\n")
    impatient = dataclasses.replace(KEYED, stall_timeout_s=0.5)
    with running(FakeEngineClient(), impatient) as server, raw(server, data, receive_buffer=4096):
        wait_until(lambda: len(server.client.seen) == 99)
        wait_until(lambda: not server._serving._server.server_state.connections)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /live HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_framing_that_others_read_differently(server: RunningServer, data: bytes) -> None:
    """Guards against a request that a proxy on the way understands in another way."""
    assert read_all(raw(server, data)).startswith(b"HTTP/1.1 400 ")


def test_labels_cost_little() -> None:
    """Guards against a log line for which megabytes of labels are printed, or sorted, first."""
    huge = {str(number): "x" for number in range(300_000)}
    body = {"prompt": "a", "user": "\n\u20ac" * 100, "metadata": {"a": huge, **huge}}
    begin = time.monotonic()
    for _ in range(1000):
        text = label_text(body)
    assert time.monotonic() - begin < 30  # each took a tenth of a second
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 200


def test_bodies_have_a_common_budget() -> None:
    """Guards against memory that grows with the number of large bodies; small ones are taken all the same."""
    limits = BodyLimitMiddleware(create_app(FakeEngineClient()), options=ServerOptions(max_inflight_body_bytes=20))
    limits.charge("a", 10)
    with pytest.raises(ApiError) as caught:
        limits.charge("a", 1)
    limits.charge("b", 5)
    assert caught.value.headers == {"Retry-After": "1"}
    client = app_client(options=dataclasses.replace(QUIET, max_inflight_body_bytes=2000))
    large = {"prompt": "a", "max_tokens": 1, "user": "x" * (FREE_BODY_BYTES + 2000)}
    assert client.post("/v1/completions", json=large).status_code == 503
    for size in (10, FREE_BODY_BYTES + 500, FREE_BODY_BYTES + 500):  # what a request took it gives back
        assert client.post("/v1/completions", json={**large, "user": "x" * size}).status_code == 200


class ApartClient(FakeEngineClient):
    """Tells each choice in an output of its own, the prompt's log-probabilities with the last one of the first step."""

    async def _run(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        async for output in super()._run(ids, params, request_id):
            for index, choice in enumerate(output.outputs):
                last = index == len(output.outputs) - 1
                places = output.prompt_logprobs if last else None
                yield dataclasses.replace(
                    output, outputs=[choice], prompt_logprobs=places, finished=last and output.finished
                )


def test_streamed_echo_is_the_whole_answer() -> None:
    """Guards against choices that echo the prompt without its log-probabilities, because a stream tells them once."""
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 1, "max_tokens": 3, "echo": True, "logprobs": 1}
    whole = app_client().post("/v1/completions", json=body).json()["choices"]
    lines = app_client(ApartClient()).post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert list(itertools.chain(*(piece["logprobs"][name] for piece in own))) == values


def test_two_counts_of_prompt_logprobs() -> None:
    """Guards against the larger of two counts shown in both places."""
    body = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    (choice,) = app_client().post("/v1/completions", json=body).json()["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2  # the likeliest, and the prompt's own
    assert len(choice["prompt_logprobs"][1]) == 3


def test_many_prompts_leave_the_loop_to_others(server: RunningServer) -> None:
    """Guards against one call whose prompts are all taken up before anybody else is served."""
    body = {"prompt": ["a" * 100] * 256, "max_tokens": 1}
    head = {"Authorization": "Bearer right"}
    answer = send(f"{server.url}/v1/completions", json=body, headers=head).json()
    assert len(answer["choices"]) == 256
    assert len({id(params) for _, params, _ in server.client.seen[-256:]}) == 1


def test_a_body_has_a_limited_number_of_values() -> None:
    """Guards against megabytes of small values, which take a second to decode, and against text that counts as some."""

    def code(body: bytes) -> str | None:
        answer = app_client(FakeEngineClient(max_model_len=2**20)).post("/v1/completions", content=body, headers=JSON)
        return None if answer.status_code == 200 else answer.json()["error"]["code"]

    texts = rb"[{\\\"\\,:" * 60_000  # looks like values, and none of its quotes ends it
    assert code(b'{"prompt": "a", "max_tokens": 1, "user": "%s"}' % texts) is None
    for piece, most in ((b"0,", MAX_VALUES), (b'"a",', MAX_STRINGS), (b"[],", MAX_NESTED), (b"{},", MAX_NESTED)):
        for count, expected in ((most - 100, "invalid_type"), (most + 100, "too_many_values")):
            assert code(b'{"prompt": "a", "stop": [%s0]}' % (piece * count)) == expected, piece


PARTS = (b'\\"', b"\\\\", b",", b"[{", b"n")


@given(st.lists(st.lists(st.sampled_from(PARTS)).map(b"".join), max_size=3), st.integers(1, 9), st.integers(0, 4))
def test_values_are_counted_as_a_reader_counts_them(texts: list[bytes], slice_size: int, most: int) -> None:
    """Guards against a slice that ends in an escape or a string, after which strings are taken for what is between."""
    data = b"".join(b'"%s",[' % text for text in texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_requests, "SLICE", slice_size)
        patch.setattr(openai_requests, "MAX_NESTED", most)
        refused = False
        try:
            openai_requests.check_values(data)
        except InvalidRequestError:
            refused = True
    assert refused == (len(texts) > most)


@pytest.mark.parametrize("path", ["/metrics", "/status", "/status/requests", "/openapi.json"])
def test_reports_are_made_one_per_turn_of_the_loop(path: str) -> None:
    """Guards against a client that asks for many reports at once, while nobody else is served."""

    async def turns() -> int:
        server, count = ScriptedServer("demo"), 0
        tasks = {asyncio.create_task(server.call("GET", path)) for _ in range(20)}
        while any(not task.done() for task in tasks):
            await asyncio.sleep(0)
            count += 1
        assert {task.result().status for task in tasks} == {200}
        return count

    assert asyncio.run(turns()) >= 20
