"""Streams of completions and chats that a client continues with Last-Event-ID, each piece exactly once."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.errors import EngineDeadError, EngineOverloadedError, RequestFailedError
from penstock.server.options import ServerOptions
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, call, get, running, send, stream, wait_until

COMPLETION = ("/v1/completions", {"prompt": "Once", "max_tokens": 8})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
MORE: Any = {"n": 3, "logprobs": True, "stream_options": {"include_usage": True}}
Event = tuple[str | None, Any]  # its id and data


def events(answer: httpx.Response) -> Iterator[Event]:
    """Yield whole events; comments and an event without its blank line are none."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields.get("id"), fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
            fields = {}


def read(method: str, url: str, count: int | None = None, *, last: str | None = None, **more: Any) -> list[Event]:
    """Return the first `count` events of a stream, and leave."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with stream(method, url, headers=headers, **more) as answer:
        assert answer.status_code == 200, answer.read()
        return list(itertools.islice(events(answer), count))


def pieces(found: list[Event]) -> list[Any]:
    """What is comparable between two runs, by choice, in order."""
    shown = [data if isinstance(data, str) else (data["choices"], data.get("usage")) for _, data in found]
    return sorted(shown, key=lambda data: -1 if isinstance(data, str) else (data[0] or [{"index": 99}])[0]["index"])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeEngineClient()) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("same_post", [False, True])
@pytest.mark.parametrize("cut", [1, 5, 20, 24])
def test_each_piece_once(server: RunningServer, path: str, body: dict[str, Any], same_post: bool, cut: int) -> None:
    """Guards against a piece that comes twice or never where a client has lost its connection."""
    server.client.behaviour = Behaviour(delay_s=0.002)
    more = {**MORE, "logprobs": True if "chat" in path else 1}
    body = {**body, **more, "seed": 5, "stream": True, "resumable": True}
    whole = read("POST", server.url + path, json={**body, "resumable": False})
    first = read("POST", server.url + path, cut, json=body)
    last = first[-1][0]
    assert last is not None
    call_id = last.partition(":")[0]
    if same_post:
        rest = read("POST", server.url + path, last=last, json=body)
    else:
        rest = read("GET", f"{server.url}{path}/{call_id}?stream=true", last=last)
    assert pieces(first + rest) == pieces(whole)
    assert rest[-1] == (None, "[DONE]")
    assert all(event_id is None for event_id, _ in whole)
    again = read("GET", f"{server.url}{path}/{call_id}?stream=true")
    assert again == first + rest


def test_without_asking_a_lost_connection_aborts(server: RunningServer) -> None:
    """Guards against work for a client that has gone and will not come back."""
    path, body = COMPLETION
    server.client.behaviour = Behaviour(hang_at=3)
    read("POST", server.url + path, 2, json={**body, "stream": True})
    wait_until(lambda: server.client.open == set())


def test_nobody_comes_back() -> None:
    """Guards against a stream that waits for its client for ever."""
    path, body = COMPLETION
    options = ServerOptions(port=0, access_log=False, resume_grace_s=0.05)
    with running(FakeEngineClient(Behaviour(hang_at=3)), options) as server:
        ((last, _),) = read("POST", server.url + path, 1, json={**body, "stream": True, "resumable": True})
        wait_until(lambda: server.client.open == set() and len(server.kept) == 0)
        answer = send(
            server.url + path, json={**body, "stream": True, "resumable": True}, headers={"Last-Event-ID": last}
        )
        assert answer.status_code == 404


def test_a_reader_keeps_it(server: RunningServer) -> None:
    """Guards against a grace period that ends a stream under its reader, and two readers that disturb each other."""
    path, body = COMPLETION
    server.client.behaviour = Behaviour(delay_s=0.01)
    body = {**body, "stream": True, "resumable": True, "seed": 1}
    with stream("POST", server.url + path, json=body) as answer:
        mine = events(answer)
        first = next(mine)
        call_id = str(first[0]).partition(":")[0]
        theirs = read("GET", f"{server.url}{path}/{call_id}?stream=true")
        assert [first, *mine] == theirs


@pytest.mark.parametrize(
    ("failure", "status"),
    [(RequestFailedError("NaN"), 500), (EngineOverloadedError("full"), 429), (EngineDeadError("x"), 503)],
)
def test_failures(server: RunningServer, failure: Exception, status: int) -> None:
    """Guards against a failure that a resumable stream hides, at once or later, also from who comes back."""
    path, body = COMPLETION
    body = {**body, "stream": True, "resumable": True}
    server.client.behaviour = Behaviour(fail_at=0, failure=failure)
    assert send(server.url + path, json=body).status_code == status
    server.client.behaviour = Behaviour(fail_at=2, failure=failure)
    found = read("POST", server.url + path, json=body)
    assert "error" in found[-1][1]
    last = found[0][0]
    assert read("POST", server.url + path, last=last, json=body) == found[1:]


@pytest.mark.parametrize(
    ("method", "path", "body", "last", "status"),
    [
        ("POST", "/v1/completions", {"resumable": True}, None, 400),  # without stream
        ("POST", "/v1/completions", {"resumable": True, "stream": True, "n": 65}, None, 400),
        ("POST", "/v1/completions", {"stream": True}, "cmpl-1:3", 404),
        ("POST", "/v1/completions", {"stream": True}, "rubbish", 400),
        ("POST", "/v1/completions", {"stream": True}, "cmpl-1:3.x", 400),
        ("POST", "/v1/completions", {"stream": True}, "cmpl-1:" + "1." * 70 + "1", 400),
        ("GET", "/v1/completions/cmpl-1?stream=true", None, None, 404),
        ("GET", "/v1/completions/cmpl-1", None, None, 400),
    ],
)
def test_refusals(server: RunningServer, method: str, path: str, body: Any, last: str | None, status: int) -> None:
    headers = {} if last is None else {"Last-Event-ID": last}
    json_body = None if body is None else {"prompt": "Once", **body}
    answer = call(method, server.url + path, json=json_body, headers=headers)
    assert answer.status_code == status, answer.text


def test_another_body_or_key_or_stream_is_refused(server: RunningServer) -> None:
    """Guards against a stream that continues as the answer to something else, or for someone else."""
    path, body = COMPLETION
    body = {**body, "stream": True, "resumable": True}
    server.client.behaviour = Behaviour()
    last = str(read("POST", server.url + path, 2, json=body)[-1][0])
    headers = {"Last-Event-ID": last}
    url = f"{server.url}{path}/{last.partition(':')[0]}?stream=true"
    assert send(server.url + path, json={**body, "prompt": "Twice"}, headers=headers).status_code == 400
    assert get(url, headers={**headers, "Authorization": "Bearer other"}).status_code == 404
    assert get(url, headers={"Last-Event-ID": "cmpl-2:1"}).status_code == 400
    assert get(url.replace("/v1/", "/v1/chat/"), headers=headers).status_code == 404
