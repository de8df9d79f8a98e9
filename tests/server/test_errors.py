"""Every failure is OpenAI's error object with the right status, and shows nothing of the inside."""

import json
import logging
from typing import Any

import pytest

from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, RequestFailedError
from penstock.interface.outputs import RequestOutput
from penstock.server.generation import _raise_failure
from penstock.server.options import ServerOptions
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import app_client

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"prompt": "Hi", "max_tokens": 4}
CALLS = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (InvalidRequestError("prompt: bad", param="prompt", code="odd"), 400, "odd"),
        (EngineOverloadedError("full", retry_after_s=0.2), 429, "engine_overloaded"),
        (EngineDeadError("it died"), 503, "engine_unavailable"),
        (RequestFailedError("bad numbers\n  at /secret/file.py"), 500, "request_failed"),
        (RuntimeError("/secret/file.py exploded"), 500, "internal_error"),
    ],
)
def test_failures_before_the_first_byte(
    path: str, body: dict[str, Any], stream: bool, failure: Exception, status: int, code: str
) -> None:
    """Guards against a 200 (or a 500 for everything) when a request fails before anything was sent."""
    client = app_client(FakeEngineClient(Behaviour(failure=failure)))
    response = client.post(path, json={**body, "stream": stream})
    error = error_of(response, status)
    assert error["code"] == code
    assert "secret" not in response.text
    if status in (429, 503):
        assert response.headers["retry-after"] == "1"
    if status == 429:
        assert response.headers["retry-after-ms"] == "200"


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("failure", [EngineDeadError("it died"), RuntimeError("/secret exploded")])
def test_failures_after_the_first_byte(path: str, body: dict[str, Any], failure: Exception) -> None:
    """Guards against a stream that ends with [DONE], or with half an event, although it failed."""
    client = app_client(FakeEngineClient(Behaviour(failure=failure, fail_at=2)))
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith('data: {"error":{"message":')
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


def test_unexpected_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an internal error that is not logged."""
    with caplog.at_level(logging.ERROR, "penstock.server"):
        app_client(FakeEngineClient(Behaviour(failure=RuntimeError("boom")))).post("/v1/completions", json=TEXT)
    assert "boom" in caplog.text


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_no_engine_yet(path: str, body: dict[str, Any]) -> None:
    """Guards against a crash, or a 400, for a request that comes before the engine is ready."""
    fake = FakeEngineClient()
    fake.state = EngineState.STARTING
    client = app_client(fake)
    assert error_of(client.post(path, json=body), 503)["code"] == "engine_unavailable"
    assert error_of(client.get("/health"), 503)["message"] == "the engine is starting"
    assert client.get("/live").status_code == 200
    assert client.get("/status").json()["engine"]["state"] == "starting"
    assert error_of(client.get("/v1/models"), 503)


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_unknown_model(path: str, body: dict[str, Any]) -> None:
    """Guards against answering for a model that is not there, by path or by a name that looks like ours."""
    client = app_client(options=ServerOptions(served_model_names=("a", "b"), access_log=False))
    for name in ("fake", "../fake", "", "a\u0430", "x" * 5000):
        error = error_of(client.post(path, json={**body, "model": name}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert client.post(path, json={**body, "model": "b"}).json()["model"] == "b"
    assert client.post(path, json=body).json()["model"] == "a"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]


def test_unknown_routes_and_methods() -> None:
    """Guards against Starlette's plain-text 404 and 405, and against redirects to a similar path."""
    client = app_client()
    for path in ("/nope", "/v1", "/v1/models/", "//v1//models", "/v1/../metrics/x", "/health/"):
        assert error_of(client.get(path, follow_redirects=False), 404)
    response = client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(client.request("BREW", "/v1/models"), 405)


@pytest.mark.parametrize("path", ["/v1/completions/render", "/v1/responses/compact", "/v1/responses/input_tokens"])
def test_planned_routes(path: str) -> None:
    """Guards against a planned route that looks like a typing mistake."""
    assert error_of(app_client().post(path, json={}), 404)["code"] == "not_implemented"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, "unsupported_media_type"),
        ({"Content-Type": "text/plain"}, "unsupported_media_type"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, "unsupported_media_type"),
        ({}, "unsupported_media_type"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "unsupported_encoding"),
    ],
)
def test_wrong_content_type(headers: dict[str, str], code: str) -> None:
    """Guards against reading a form, a simple cross-origin request or a compressed bomb as JSON."""
    response = app_client().post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert error_of(response, 415)["code"] == code


def test_content_type_with_charset() -> None:
    """Guards against refusing the header as browsers send it."""
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert app_client().post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_body_over_the_limit() -> None:
    """Guards against buffering a body of any size, announced or not."""
    client = app_client(options=ServerOptions(max_body_bytes=1000, access_log=False))
    headers = {"Content-Type": "application/json"}
    big = b'{"prompt": "%s"}' % (b"a" * 1000)
    assert error_of(client.post("/v1/completions", content=big, headers=headers), 413)
    pieces = (big[i : i + 100] for i in range(0, len(big), 100))  # sent without a Content-Length
    assert error_of(client.post("/v1/completions", content=pieces, headers=headers), 413)
    assert error_of(client.post("/v1/completions", content=b"{}", headers={**headers, "Content-Length": "9" * 30}), 413)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"a"',
        b"{",
        b'{"prompt": "a"} x',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xc0\xaf"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": %s}' % (b"9" * 5000),
        b'{"prompt": "a", "logit_bias": %s}' % (b"[" * 100_000),
        b'{"prompt": "a", "metadata": %s}' % (b'{"a":' * 100_000),
        b'{"prompt": %s' % (b"[" * 100_000),
    ],
)
def test_hostile_json(body: bytes) -> None:
    """Guards against a parser that dies of depth, of digits, or of what only looks like JSON."""
    response = app_client().post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)


def test_error_message_is_bounded() -> None:
    """Guards against an error that sends a large value back."""
    response = app_client().post("/v1/completions", json={"prompt": "a", "x" * 100_000: 1})
    assert error_of(response, 400)
    assert len(response.content) < 2000


def test_request_id() -> None:
    """Guards against an id that splits a header, fills the log, or becomes the engine's own key."""
    fake = FakeEngineClient()
    client = app_client(fake)

    def echoed(value: bytes) -> str:
        response = client.post("/v1/completions", json=TEXT, headers={b"X-Request-Id": value})
        return response.headers["x-request-id"]

    assert echoed(b"own-1") == "own-1"
    assert echoed(b"x" * 100_000) == "x" * 128
    assert "\u00e4" not in echoed("\u00e4".encode("latin-1"))
    assert len(echoed(b"a b")) == 32
    ids = [request_id for _, _, request_id in fake.seen]
    assert len(set(ids)) == len(ids)
    assert not any("own" in request_id or "xxx" in request_id for request_id in ids)  # no hexadecimal digits


def test_access_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a log without status or tokens, and against a label that forges a line of its own."""
    client = app_client(options=ServerOptions())
    with caplog.at_level(logging.INFO, "penstock.access"):
        client.post("/v1/completions", json={**TEXT, "user": "eve\nGET /fake 200", "metadata": {"a": 1}})
        client.get("/no%0Awhere")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST /v1/completions 200 ")
    assert "prompt=3 cached=0 completion=4 user='eve\\nGET /fake 200' metadata={'a': 1} id=" in first
    assert "\n" not in first + second
    assert " 404 " in second


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"max_new_tokens": 4}, "max_new_tokens", "it is max_tokens here"),
        ({"num_beams": 4}, "num_beams", "it is n here, with use_beam_search: true"),
        ({"bad_words_ids": [[]]}, "bad_words_ids", "at least one token id"),
        ({"use_beam_search": True, "n": 2, "echo": True, "logprobs": 1}, "echo", "use_beam_search"),
    ],
)
def test_what_is_refused_says_what_to_do(fields: dict[str, Any], param: str, hint: str) -> None:
    """Guards against other engines' names refused without a word, and errors that name a field nobody sent."""
    error = error_of(app_client(FakeEngineClient()).post("/v1/completions", json=TEXT | fields), 400)
    assert error["param"] == param
    assert hint in error["message"]


def test_sequence_breakers_may_be_ids() -> None:
    """Guards against a field of SamplingParams that only Python knows."""
    body = TEXT | {"dry_multiplier": 0.8, "dry_sequence_breaker_ids": [[5], [6, 7]]}
    assert app_client(FakeEngineClient()).post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("text", "lone"),
    [
        ("\\ud83d", "\\ud83d"), ("a\\uD83D b", "\\uD83D"), ("\\ude00", "\\ude00"), ("\\ud83d\\n", "\\ud83d"),
        ("\\ud83d\\ude00\\ude01", "\\ude01"), ("\\ud83d\\ud83d\\ude00", "\\ud83d"), ("\\ud83d\\u0041", "\\ud83d"),
    ],
)  # fmt: skip
def test_half_a_character_is_named(path: str, text: str, lone: str) -> None:
    """Guards against `Input data was truncated` about a whole body: a client has cut an emoji in two."""
    message = {"role": "user", "content": "@"}
    field = {"messages": [message]} if path == "/v1/chat/completions" else {"prompt": "@"}
    body = json.dumps(field).replace("@", text).encode()
    error = app_client().post(path, content=body, headers={"Content-Type": "application/json"}).json()["error"]
    assert error["code"] == "invalid_json"
    assert f"{lone} is a lone surrogate" in error["message"]


def test_what_is_no_half_character() -> None:
    """Guards against blaming a pair, or a backslash with letters after it, for JSON that is broken elsewhere."""
    for text in ("\\ud83d\\ude00", "\\\\ud83d"):
        json_header = {"Content-Type": "application/json"}
        whole = app_client().post("/tokenize", content=b'{"prompt": "%s"}' % text.encode(), headers=json_header)
        assert whole.status_code == 200
        broken = app_client().post("/tokenize", content=b'{"prompt": "%s"' % text.encode(), headers=json_header)
        assert "surrogate" not in broken.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "a client's base URL ends in /v1."),
        ("/complete", "a client's base URL ends in /v1."),
        ("/v1/v1/chat/completions", "the path has /v1 twice"),
        ("/v1/nowhere", "GET /openapi.json lists the routes."),
    ],
)
def test_a_wrong_base_url_is_told_what_to_do(path: str, advice: str) -> None:
    """Guards against the commonest mistake of a new client, which was answered with "no such route" alone."""
    answer = app_client().post(path, json={"messages": []})
    assert answer.status_code == 404
    assert advice in answer.json()["error"]["message"]


def test_the_log_says_what_was_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a log from which an operator cannot tell why clients get 400, and against a field's name, which
    the client chooses, that forges a line."""
    client = app_client(options=ServerOptions(port=0))
    with caplog.at_level(logging.INFO, "penstock.access"):
        client.post("/v1/completions", json={"prompt": "a", "temperature": -1})
        client.post("/v1/completions", json={"prompt": "a", "odd\nname": 1})
        client.get("/nowhere")
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    wrong, odd, nowhere, fine = (record.getMessage() for record in caplog.records)
    assert "code=invalid_value param='temperature'" in wrong
    assert "param='odd\\nname'" in odd
    assert "\n" not in odd
    assert "code=unknown_url" in nowhere
    assert "code=" not in fine


@pytest.mark.parametrize(("error", "kind"), [
    ("structured_outputs: nothing fits it: there is no text that it allows", InvalidRequestError),
    ("bad_words: no token may be chosen", InvalidRequestError),
    ("the logits are not finite", RequestFailedError),
])  # fmt: skip
def test_what_a_request_makes_impossible_is_its_own_fault(error: str, kind: type[Exception]) -> None:
    """Guards against a 500, and an alarm, for a form that turns out to allow no text."""
    with pytest.raises(kind, match=error):
        _raise_failure(RequestOutput("x", None, [], [], finished=True, error=error))
