"""Random junk in every field of every request never ends in a 5xx, and the server still answers right afterwards."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.server.client_fields import UNSUPPORTED
from penstock.server.llama_cpp import NativeCompletionRequest
from penstock.server.openai_requests import ChatRequest, CompletionRequest
from penstock.server.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client

GOOD: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    "/completion": (NativeCompletionRequest, {"prompt": "a", "n_predict": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}),
}
FIELDS = [(path, name) for path, (kind, _) in GOOD.items() for name in (*kind.__struct_fields__, *UNSUPPORTED)]
CODES = {"invalid_json", "invalid_type", "missing_field", "unknown_field", "invalid_value"}
NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 17, 0.5, 2.0, -0.0, 1e-45, 1e308, 2**31, 2**53, 2**63, 2**64, 10**40, True, False]
)
WORDS = st.sampled_from(["", "a", "NaN", "5", "\u0000", "\U0001f600\u200d", "text", "auto", "user"])
LEAVES = (
    st.none() | NUMBERS | WORDS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(WORDS | st.sampled_from(["role", "content", "type", "1"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return app_client(FakeEngineClient(max_model_len=64))


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    target=st.sampled_from(FIELDS),
    value=JUNK,
    others=st.dictionaries(st.sampled_from(["n", "stream", "logprobs", "echo"]), JUNK, max_size=1),
)
def test_junk_in_a_field(client: TestClient, target: tuple[str, str], value: Any, others: dict[str, Any]) -> None:
    """Guards against a value that no test lists: the answer is a 200 or a 4xx with an error object, in JSON."""
    path, name = target
    response = client.post(path, json={**GOOD[path][1], **others, name: value})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        if not others:
            assert response.json()["error"]["param"] is not None
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(sorted(GOOD)), body=st.binary(max_size=200) | JUNK.map(msgspec.json.encode))
def test_junk_for_a_body(client: TestClient, path: str, body: bytes) -> None:
    """Guards against bytes that break the parser instead of being refused by it."""
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    if response.status_code == 200:  # by chance a right one: of the least that /tokenize and /v1/completions take
        assert "prompt" in msgspec.json.decode(body, type=dict)
    else:
        assert response.status_code == 400
        assert response.json()["error"]["code"] in CODES


def test_still_right_afterwards(client: TestClient) -> None:
    """Guards against invalid requests that change later answers."""
    response = client.post("/v1/completions", json={"prompt": "a", "seed": 1})
    fresh = app_client(FakeEngineClient(max_model_len=64)).post("/v1/completions", json={"prompt": "a", "seed": 1})
    assert response.json()["choices"] == fresh.json()["choices"]
