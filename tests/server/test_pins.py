"""Salts and pins over HTTP: who shares a cached prefix with whom, who may pin one, and who may see which are used."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from penstock.client.input_processor import PromptRequest
from penstock.client.text import choose_tokenizer
from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import SamplingParams
from penstock.server.kept_calls import Begun, decode_record, encode_record
from penstock.server.options import ServerOptions
from penstock_lab.prove.scripted import ScriptedClient
from tests.server.fakes import FakeEngineClient
from tests.server.harness import QUIET, app_client, samples

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789abc", "root": "sk-root-0123456789ab"}
PROMPT = list(range(3, 73))
CHAT = [{"role": "system", "content": "You tell short stories to children, and each of them ends well."}]


@pytest.fixture
def keyed(tmp_path: Path) -> ServerOptions:
    file = tmp_path / "keys.toml"
    tables = [f'[{name}]\nkey = "{key}"\nadmin = {str(name == "root").lower()}\n' for name, key in KEYS.items()]
    file.write_text("".join(tables))
    return dataclasses.replace(QUIET, api_key_file=str(file))


def engine() -> ScriptedClient:
    """A client of the real engine, over a model that is a formula."""
    tokenizer = choose_tokenizer(None, "demo")
    assert tokenizer is not None
    return ScriptedClient(tokenizer)


def of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def cached(client: TestClient, name: str | None = None, **fields: Any) -> int:
    """How many tokens of the prompt an answer found in the cache."""
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    answer = client.post("/v1/completions", json=body, headers={} if name is None else of(name)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_no_key_can_tell_what_another_has_sent(keyed: ServerOptions) -> None:
    """Guards against CVE-2025-46570: the time to the first token, and cached_tokens, told the prompt of another tenant,
    since all shared the cached blocks. A salt that another key uses does not help either."""
    salted = app_client(engine(), dataclasses.replace(keyed, cache_salt_by_key=True))
    for fields in ({}, {"cache_salt": "x"}):
        assert [cached(salted, name, **fields) for name in ("alice", "alice", "bob", "bob")] == [0, 64, 0, 64]
    shared = app_client(engine(), keyed)
    assert [cached(shared, name) for name in ("alice", "bob")] == [0, 64]
    assert [cached(shared, name, cache_salt="x") for name in ("alice", "bob")] == [0, 64]


def test_salts_of_every_api_reach_the_engine() -> None:
    """Guards against a salt that is accepted and ignored, and against one that a kept call forgets."""
    fake = FakeEngineClient()
    client = app_client(fake)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for path, body in (
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True, "resumable": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ):
        for salt in ("pepper", None):
            assert client.post(path, json={**body, "cache_salt": salt}).status_code == 200
    assert fake.salts == ["pepper", "pepper", None, None, *["pepper", None] * 3]
    for salt in ("", 1, "x" * 1025):
        answer = client.post("/v1/completions", json={"prompt": "a", "cache_salt": salt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


def test_the_journal_keeps_the_salt() -> None:
    """Guards against a call that a new server goes on with, in the cache of everybody."""
    prompt = PromptRequest([1, 2], cache_salt="pepper")
    begun = Begun(
        id="a", kind="completions", owner="", created=0, body=b"{}", model="demo", fingerprint="", grace_s=None,
        params=SamplingParams(seed=1), prompts=[prompt], keep_s=0.0,
    )  # fmt: skip
    assert decode_record(encode_record(begun)).prompts == [prompt]
    written = msgspec.msgpack.decode(encode_record(begun))  # by a version that kept less about each prompt
    names = ("token_ids", "text", "seed", "output_token_ids", "cache_salt")
    written["prompts"] = [{name: kept[name] for name in names} for kept in written["prompts"]]
    assert decode_record(msgspec.msgpack.encode(written)).prompts == [prompt]


def test_a_pin_is_made_found_listed_and_deleted() -> None:
    """Guards against clients that break on a renamed field, and against a text of a prompt in the list."""
    client = app_client(engine())
    made = client.post("/v1/cache/pin", json={"prompt": PROMPT, "name": "system"}).json()
    pin = {"object": "cache.pin", "name": "system", "tokens": 64, "hits": 0, "tokens_saved": 0, "last_used": None}
    assert made == pin
    assert cached(client, cache_salt="anybody's") == 64
    (listed,) = client.get("/v1/cache/pin").json()["data"]
    assert listed == pin | {"hits": 1, "tokens_saved": 64, "last_used": listed["last_used"]}
    status = client.get("/status").json()
    assert status["kv_blocks"]["pinned"] == 4
    assert [(use["name"], use["hits"]) for use in status["prefixes"]] == [("system", 1)]
    metrics = samples(client.get("/metrics").text, "demo")
    assert metrics['penstock_pinned_prefix_hits_total{pin="system"}'] == 1
    assert metrics["penstock_prefix_cache_hits_total"] == 64
    assert metrics["penstock_prefix_cache_queries_total"] == 134
    assert client.delete("/v1/cache/pin/system").json() == {"name": "system", "object": "cache.pin", "deleted": True}
    assert client.delete("/v1/cache/pin/system").status_code == 404
    assert client.get("/status").json()["kv_blocks"]["pinned"] == 0


def test_a_system_prompt_is_pinned_as_conversations_begin() -> None:
    """Guards against a pin of the text alone: the template's tokens around it come first in every conversation."""
    client = app_client(engine())
    tokens = client.post("/v1/cache/pin", json={"messages": CHAT, "name": "chat"}).json()["tokens"]
    assert tokens >= 16
    body = {"messages": [*CHAT, {"role": "user", "content": "Go on."}], "max_tokens": 2, "cache_salt": "a"}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == tokens


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", None),
        ({"prompt": PROMPT, "messages": CHAT}, "prompt", None),
        ({"prompt": [PROMPT, PROMPT]}, "prompt", None),
        ({"prompt": PROMPT[:15]}, "prompt", None),
        ({"prompt": PROMPT, "name": "a/b"}, "name", "invalid_value"),
        ({"prompt": PROMPT[1:], "name": "taken"}, "name", "name_in_use"),
        ({"prompt": PROMPT, "cache_salt": ""}, "cache_salt", None),
        ({"prompt": PROMPT * 2}, "prompt", "context_length_exceeded"),
        ({"prompt": PROMPT, "temperature": 1}, "temperature", "unknown_field"),
    ],
)
def test_what_cannot_be_pinned_is_refused(body: dict[str, Any], param: str, code: str | None) -> None:
    client = app_client(engine())
    assert client.post("/v1/cache/pin", json={"prompt": PROMPT, "name": "taken"}).status_code == 200
    answer = client.post("/v1/cache/pin", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert code is None or error["code"] == code
    assert len(client.get("/v1/cache/pin").json()["data"]) == 1


def test_only_administrators_pin_and_see_what_is_used(keyed: ServerOptions) -> None:
    """Guards against a tenant who fills half of the cache, and against one who reads in /status how long the prompts of
    others are. A pin of an administrator's is found by all, also where keys share nothing else."""
    client = app_client(engine(), dataclasses.replace(keyed, cache_salt_by_key=True, api_key="k" * 20))
    pin = {"prompt": PROMPT, "name": "system"}
    for method, path in (("POST", "/v1/cache/pin"), ("GET", "/v1/cache/pin"), ("DELETE", "/v1/cache/pin/system")):
        refused = client.request(method, path, json=pin, headers=of("alice"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_administrator")
    assert client.post("/v1/cache/pin", json=pin, headers=of("root")).status_code == 200
    assert cached(client, "alice") == cached(client, "bob") == 64
    assert client.get("/status", headers=of("alice")).json()["prefixes"] == []
    assert len(client.get("/status", headers=of("root")).json()["prefixes"]) == 1
    assert client.get("/v1/cache/pin", headers={"Authorization": f"Bearer {'k' * 20}"}).status_code == 200


def test_salting_by_key_needs_keys() -> None:
    """Guards against an option that promises a separation which there is not."""
    with pytest.raises(InvalidRequestError, match="cache_salt_by_key"):
        ServerOptions(cache_salt_by_key=True, api_key="k" * 20)
