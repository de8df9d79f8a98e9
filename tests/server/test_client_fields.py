"""What clients send beside the fields that are computed: ignored by name, refused, or served under another name."""

import json
import logging
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as HFTokenizersTokenizer
from tokenizers import models

from penstock.server.client_fields import UNSUPPORTED, ignored_fields
from penstock.server.embeddings import EmbeddingRequest
from penstock.server.llama_cpp import ExtraFile, InfillRequest
from penstock.server.messages import MessageRequest
from penstock.server.openai_requests import ChatRequest, CompletionRequest, FunctionTool, Message
from penstock.server.options import ServerOptions
from penstock.server.responses import ResponseRequest
from penstock.tokenizer.fill_in import MARKS, fill_in_of
from penstock.tokenizer.hf import HFTokenizer
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import app_client
from tests.server.test_completions import chunks
from tests.server.test_tools import ADD, CALLED, SCHEMA, USER, fake

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest, "completions": CompletionRequest, "responses": ResponseRequest, "messages": MessageRequest,
    "message": Message, "chat_tool": FunctionTool, "completion": InfillRequest, "extra_file": ExtraFile,
    "pooling": EmbeddingRequest,
}  # fmt: skip


def send(body: dict[str, Any], path: str = CHAT, engine: FakeEngineClient | None = None, **options: Any) -> Any:
    common = {"messages": [USER], "max_tokens": 4} if path == CHAT else {"prompt": "Hi", "max_tokens": 4}
    client = app_client(engine or FakeEngineClient(), ServerOptions(port=0, access_log=False, **options))
    return client.post(path, json={**common, **body})


def error_of(response: Any) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["code"]


# --- ignored ----------------------------------------------------------------------------------------------------------


def test_ignored_fields_are_no_others() -> None:
    """Guards against a row that takes a served or a refused field away, and against a body that is unknown."""
    for name, row in ignored_fields().items():
        for place in row.places.split():
            assert name not in BODIES[place].__struct_fields__, (name, place)
            assert name not in UNSUPPORTED or place not in UNSUPPORTED[name].places.split(), (name, place)
        assert row.clients
        assert row.about


def test_ignored_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a field that is ignored in silence, logged each time, or that changes the answer."""
    tools = [{**ADD, "copilot_mcp_server_name": "x", "cache_control": {"type": "ephemeral"}}]
    body = {"messages": [{**USER, "id": 7, "opts": {"visible": False}}], "tools": tools, "tool_choice": "none"}
    plain = {"messages": [USER], "tools": [ADD], "tool_choice": "none", "seed": 3}
    engine = fake("abcd")
    client = app_client(engine, ServerOptions(port=0, access_log=False))
    with caplog.at_level(logging.WARNING, "penstock.server"):
        answers = [client.post(CHAT, json={**plain, **body, "provider": {"sort": "price"}, "ttl": None}) for _ in "ab"]
    answers.append(client.post(CHAT, json=plain))
    assert {answer.status_code for answer in answers} == {200}
    headers = [answer.headers.get("x-ignored-fields") for answer in answers]
    assert headers == ["provider, id, opts, cache_control, copilot_mcp_server_name"] * 2 + [None]
    assert len({str(engine.seen[index][:2]) for index in range(3)}) == 1
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 5
    assert any("field provider" in line and "OpenRouter" in line and "--unknown-fields" in line for line in lines)


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"reasoning_effort": "high", "verbosity": "low"}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 3, "output_config": {"effort": "low"}}),
])  # fmt: skip
def test_levels_that_the_template_lacks(path: str, body: dict[str, Any]) -> None:
    """Guards against a coding agent that is refused for a hint, and a hint that is ignored in silence."""
    body = {"messages": [USER], **body} if path == CHAT else body
    for mode, status in (("warn", 200), ("refuse", 400)):
        client = app_client(FakeEngineClient(), ServerOptions(port=0, access_log=False, unknown_fields=mode))
        answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert ("reasoning_effort" in answer.headers.get("x-ignored-fields", "")) is (status == 200)
        assert client.post(path, json={**body, "reasoning_effort": "much", "reasoning": 1}).status_code == 400


@pytest.mark.parametrize("body", [
    {"provider": {}}, {"messages": [{**USER, "id": 7}]}, {"tools": [{**ADD, "cache_control": {}}]},
])  # fmt: skip
def test_unknown_fields_can_be_refused(body: dict[str, Any]) -> None:
    """Guards against an option without effect inside of messages and tools."""
    assert send(body, CHAT, fake("x")).status_code == 200
    param, code = error_of(send(body, CHAT, fake("x"), unknown_fields="refuse"))
    assert code == "unknown_field"
    assert param.endswith(("provider", "id", "cache_control"))


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"providr": {}}), (CHAT, {"transforms": ["middle-out"]}), (CHAT, {"safe_prompt": True}),
    (CHAT, {"betas": []}), (COMPLETIONS, {"id": 7}), (COMPLETIONS, {"intent": True}),
])  # fmt: skip
def test_others_are_refused(path: str, body: dict[str, Any]) -> None:
    """Guards against a misspelling, a field that changes the text, or one of another API that is ignored."""
    assert error_of(send(body, path))[0] == next(iter(body))


# --- other names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_of_local_servers(path: str) -> None:
    """Guards against -1 as a number of tokens, and names that do nothing."""
    engine = FakeEngineClient()
    body = {"max_tokens": -1, "repeat_penalty": 1.5, "cache_prompt": False, "service_tier": "priority"}
    answer = send(body, path, engine).json()
    params = engine.seen[0][1]
    assert (params.max_tokens, params.repetition_penalty) == (None, 1.5)
    assert answer["service_tier"] == "default"
    assert engine.salts[0] is not None
    send({"cache_prompt": True}, path, engine)
    assert engine.salts[1] is None
    assert error_of(send({"repeat_penalty": 1.5, "repetition_penalty": 1.5}, path))[0] == "repeat_penalty"
    assert error_of(send({"service_tier": "gold"}, path))[0] == "service_tier"


def test_the_best_of_several() -> None:
    """Guards against the first answers instead of the likeliest, and indices of those that were left out."""
    engine = FakeEngineClient()
    every = send({"n": 5, "seed": 2, "logprobs": 1}, COMPLETIONS, engine).json()["choices"]
    sums = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every}
    best = send({"best_of": 5, "n": 2, "seed": 2}, COMPLETIONS, engine).json()
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [sums[choice["text"]] for choice in best["choices"]] == sorted(sums.values(), reverse=True)[:2]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 20
    for wrong in ({"best_of": 2, "n": 3}, {"best_of": 3, "stream": True}, {"best_of": 0}, {"best_of": 10**6}):
        assert error_of(send(wrong, COMPLETIONS))[0] == "best_of"


# --- functions --------------------------------------------------------------------------------------------------------

FUNCTIONS = [{"name": "add", "description": "Adds.", "parameters": SCHEMA}]


def test_functions_are_answered_in_their_own_form() -> None:
    """Guards against calls in the form of tools, which clients of the older API do not read."""
    engine = fake(CALLED)
    body = {"functions": FUNCTIONS, "function_call": "auto", "max_tokens": 500}
    choice = send(body, CHAT, engine).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": 2})
    assert choice["message"]["content"] is None
    assert '"name": "add"' in bytes(engine.seen[0][0]).decode()
    parts = [part["choices"][0] for part in chunks(CHAT, {"messages": [USER], **body}, fake(CALLED))]
    deltas = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert deltas[0]["name"] == "add"
    assert json.loads("".join(delta["arguments"] for delta in deltas)) == {"a": 1, "b": 2}
    assert parts[-1]["finish_reason"] == "function_call"


def test_functions_in_a_conversation() -> None:
    """Guards against results that the template does not show with their call."""
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    result = {"role": "function", "name": "add", "content": "3"}
    old, new = fake("x"), fake("x")
    send({"messages": [USER, called, result], "functions": FUNCTIONS, "function_call": {"name": "add"}}, CHAT, old)
    turn = {"role": "assistant", "content": None}
    calls = [{"id": "c", "type": "function", "function": called["function_call"]}]
    tool = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"}
    forced = {"type": "function", "function": {"name": "add"}}
    send({"messages": [USER, {**turn, "tool_calls": calls}, tool], "tools": [ADD], "tool_choice": forced,
          "parallel_tool_calls": False}, CHAT, new)  # fmt: skip
    assert old.seen[0][0] == new.seen[0][0]
    assert old.seen[0][1].structured_outputs == new.seen[0][1].structured_outputs
    for wrong, param in (
        ({"functions": FUNCTIONS, "tools": [ADD]}, "functions"), ({"function_call": {"name": "add"}}, "tool_choice"),
        ({"messages": [USER, result]}, "messages"),
    ):  # fmt: skip
        assert error_of(send(wrong, CHAT, fake("")))[0] == param


# --- infilling --------------------------------------------------------------------------------------------------------


def tokenizer_with(*marks: str) -> HFTokenizer:
    letters = {letter: index for index, letter in enumerate("abcdefgh")}
    made = HFTokenizersTokenizer(models.BPE(vocab=letters, merges=[]))
    made.add_special_tokens([*marks, "<s>"])
    return HFTokenizer(made)


@pytest.mark.parametrize("marks", [*MARKS, ("[PREFIX]", "[SUFFIX]")])
def test_a_suffix_is_what_comes_after_the_answer(marks: tuple[str, ...]) -> None:
    """Guards against the texts in each other's place, and an answer that goes on with the model's own marks."""
    engine = FakeEngineClient(Behaviour(text="x"))
    engine.tokenizer = tokenizer = tokenizer_with(*marks)
    first, second, *last = (tokenizer.encode(mark)[0] for mark in marks)
    response = send({"prompt": "ab", "suffix": "cd"}, COMPLETIONS, engine)
    assert response.status_code == 200, response.text
    expected = [first, 0, 1, second, 2, 3, *last] if last else [second, 2, 3, first, 0, 1]
    assert engine.seen[0][0] == expected
    assert set(engine.seen[0][1].stop_token_ids or ()) == {first, second, *last}
    assert error_of(send({"prompt": [1], "suffix": "cd"}, COMPLETIONS, engine))[0] == "suffix"
    assert error_of(send({"suffix": "cd", "echo": True}, COMPLETIONS, engine))[0] == "suffix"


def test_a_model_without_infilling() -> None:
    """Guards against marks spelt out in letters, which a model has never seen."""
    assert fill_in_of(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
    assert error_of(send({"suffix": "x"}, COMPLETIONS))[0] == "suffix"
    assert send({"suffix": ""}, COMPLETIONS).status_code == 200
