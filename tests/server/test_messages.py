"""/v1/messages with Anthropic's own client: messages, events, tools, thinking, errors; the same tokens as a chat."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineOverloadedError, RequestFailedError
from penstock.server.options import ServerOptions
from tests.official import anthropic_client, official_client
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, app_client, running
from tests.server.test_tools import CALLED, SCHEMA, TEMPLATE, THINKING, TWICE

anthropic = pytest.importorskip("anthropic", reason="the anthropic client of the test extra is not installed")
KEY = "sk-test"
USER: Any = {"role": "user", "content": "What is 1 + 2?"}
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": [USER]}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = FakeEngineClient(max_model_len=8192, chat_template=TEMPLATE)
    with running(engine, ServerOptions(port=0, api_key=KEY, access_log=False)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    server.client.behaviour = Behaviour()
    server.client.seen.clear()
    with anthropic_client(server.url, KEY) as client:
        yield client


def posted(body: dict[str, Any], text: str = "", template: str = TEMPLATE, **options: Any) -> Any:
    """The answer to a body without a client, and the prompt and parameters that the engine saw, if it saw any."""
    engine = FakeEngineClient(Behaviour(text=text), max_model_len=8192, chat_template=template)
    response = app_client(engine, ServerOptions(port=0, access_log=False, **options)).post(
        "/v1/messages", json={**ASKED, **body}
    )
    seen = engine.seen[0] if engine.seen else None
    return response, seen and bytes(i for i in seen[0] if i < 256).decode(), seen and seen[1]


def test_a_message_and_its_events(server: RunningServer, client: Any) -> None:
    """Guards against a stream that joins to another message than the whole one, usage that does not add up, and a
    cut answer that seems complete."""
    asked = {**ASKED, "max_tokens": 12, "extra_body": {"seed": 7, "temperature": 0.5}}
    whole = client.messages.create(**asked)
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "fake", "max_tokens")
    assert len(whole.content[0].text) == 12
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[:2] + kinds[-3:] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [block.text for block in streamed.content] == [whole.content[0].text]
    assert (streamed.stop_reason, streamed.usage) == ("max_tokens", whole.usage)
    prompt = len(server.client.seen[0][0])
    usage = whole.usage
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (prompt, 12)
    assert usage.cache_read_input_tokens == prompt // 16 * 16
    assert usage.cache_creation_input_tokens == 0
    assert (server.client.seen[0][1].seed, server.client.seen[0][1].temperature) == (7, 0.5)
    assert whole.id.startswith("msg_")
    assert whole._request_id
    assert client.messages.count_tokens(model="fake", messages=[USER]).input_tokens == prompt


def test_system_stop_and_cache(server: RunningServer, client: Any) -> None:
    """Guards against a system prompt that is lost, a stop sequence that is not named, and a cache_control whose tokens
    are counted twice."""
    server.client.behaviour = Behaviour(text="It is 3. And so on.")
    system = [{"type": "text", "text": "Be brief.", **CACHED}, {"type": "text", "text": "Add."}]
    message = client.messages.create(**ASKED, system=system, stop_sequences=["nothing", ". And"])
    assert bytes(server.client.seen[0][0]).decode().startswith("<system>Be brief.\nAdd.<user>What is")
    assert (message.content[0].text, message.stop_reason) == ("It is 3", "stop_sequence")
    assert message.stop_sequence == ". And"
    usage, prompt = message.usage, len(server.client.seen[0][0])
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (0, prompt // 16 * 16)
    assert usage.cache_creation_input_tokens == prompt % 16
    assert client.messages.create(**ASKED, system="Be brief.").stop_reason == "end_turn"
    long = client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5})
    assert (long.stop_reason, long.content[0].text) == ("max_tokens", "It is")


def test_a_message_goes_on(client: Any, server: RunningServer) -> None:
    """Guards against an answer that begins anew instead of continuing what the client has begun."""
    server.client.behaviour = Behaviour(text=" 3.")
    parts = [{"type": "text", "text": text} for text in ("It ", "is")]
    begun = [{"role": "user", "content": "Well."}, USER, {"role": "assistant", "content": parts}]
    assert client.messages.create(**{**ASKED, "messages": begun}).content[0].text == " 3."
    assert bytes(server.client.seen[0][0]).decode() == "<user>Well.\nWhat is 1 + 2?<assistant>It is"


@pytest.mark.parametrize("streams", [False, True])
def test_ten_calls_are_those_of_a_chat(server: RunningServer, client: Any, streams: bool) -> None:
    """Guards against a conversation whose prompt differs between the two APIs: an agent that calls ten times, twice at
    once, and sends back what it got, with the openai client beside it."""
    tools = [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in
             (ADD, WEATHER)]  # fmt: skip
    tools[0]["function"]["description"] = "Adds."
    messages: list[Any] = [USER]
    chat: list[Any] = [USER]
    with official_client(server.url, KEY) as other:
        for number in range(10):
            server.client.behaviour = Behaviour(text=TWICE if number == 3 else CALLED.replace("1", str(number)))
            asked = {**ASKED, "messages": messages, "tools": [ADD, WEATHER]}
            if streams:
                with client.messages.stream(**asked) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**asked)
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "tool_use"
            assert [(call.name, call.input) for call in calls] == (
                [("add", {"a": 1, "b": 2}), ("weather", {})] if number == 3 else [("add", {"a": number, "b": 2})]
            )
            messages.append({"role": "assistant", "content": message.content})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{number}"} for call in calls]
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})

            answer = other.chat.completions.create(model="fake", messages=chat, tools=tools, max_tokens=400)
            chat.append(answer.choices[0].message.model_dump(exclude_none=True))
            for call in answer.choices[0].message.tool_calls:
                chat.append({"role": "tool", "tool_call_id": call.id, "content": f"{number}"})
            chat.append({"role": "user", "content": "Go on."})
            (own, _, _), (theirs, _, _) = server.client.seen[-2:]
            assert own == theirs
    assert len(server.client.seen[-1][0]) > 900


def test_tool_choice_and_forms() -> None:
    """Guards against a choice that is accepted and not enforced: each of them against the chat's parameters."""
    tools = [ADD, WEATHER]
    chat_tools = [{"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"],
                   **({"description": "Adds."} if tool is ADD else {})}} for tool in tools]  # fmt: skip
    named = {"type": "function", "function": {"name": "add"}}
    form = {"type": "json_schema", "schema": SCHEMA}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "tool", "name": "add"}}, {"tool_choice": named}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"output_config": {"format": form, "effort": "high"}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}),
        ({"top_k": 3, "top_p": 0.5}, {"top_k": 3, "top_p": 0.5}),
    ]  # fmt: skip
    for own, theirs in cases:
        response, prompt, params = posted({"tools": tools, **own}, CALLED)
        assert response.status_code == 200, response.text
        engine = FakeEngineClient(Behaviour(text=CALLED), max_model_len=8192, chat_template=TEMPLATE)
        body = {"messages": [USER], "max_tokens": 400, "tools": chat_tools, **theirs}
        assert app_client(engine).post("/v1/chat/completions", json=body).status_code == 200
        assert (prompt, params) == (bytes(engine.seen[0][0]).decode(), engine.seen[0][1])


def test_neighbouring_turns_of_the_assistant_are_one() -> None:
    """Guards against a 500 for a text after a turn that has only calls, whose content is null by then."""
    call, text = {"type": "tool_use", "id": "a", "name": "add", "input": {}}, {"type": "text", "text": "Then"}
    apart = [{"role": "assistant", "content": [block]} for block in (call, text)]
    prompts = [
        posted({"messages": [USER, *turns, USER], "tools": [ADD]}, "Sorry.")[1]
        for turns in (apart, [{"role": "assistant", "content": [call, text]}])
    ]
    assert prompts[0] == prompts[1]
    assert "Then" in prompts[0]


def test_results_that_are_errors_and_calls_that_are_cut() -> None:
    """Guards against a failed tool that looks like one that worked, and a cut call whose text is lost."""
    response, _, _ = posted({"tools": [ADD], "max_tokens": 50}, CALLED)
    (call,) = response.json()["content"]
    assert response.json()["stop_reason"] == "max_tokens"
    assert CALLED.startswith('<tool_call>\n{"name": "add", "arguments": ' + call["input"]["INVALID_JSON"])
    texts = [{"type": "text", "text": "no"}, {"type": "text", "text": "such number", **CACHED}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": texts, "is_error": True}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    response, prompt, _ = posted({"messages": messages, "tools": [ADD]}, "Sorry.")
    assert response.json()["content"] == [{"type": "text", "text": "Sorry."}]
    assert "<tool>Error: no\nsuch number<" in prompt
    assert json.dumps(call["input"]["INVALID_JSON"])[1:-1] in prompt


def test_thinking(tmp_path: Path) -> None:
    """Guards against thoughts in the text, or lost on the way back, and a switch that turns nothing."""
    engine = FakeEngineClient(Behaviour(text="Hm.\n</think>\n\nThree."), max_model_len=8192, chat_template=THINKING)
    with running(engine) as server, anthropic_client(server.url) as client:
        asked = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for found in (message, streamed):
            assert [block.type for block in found.content] == ["thinking", "text"]
            assert (found.content[0].thinking, found.content[1].text) == ("Hm.", "Three.")
            assert found.content[0].signature == found.id
            assert found.usage.output_tokens_details.thinking_tokens == len("Hm.\n</think>")
        with pytest.raises(anthropic.BadRequestError, match="cannot turn its reasoning off"):
            client.messages.create(**ASKED, thinking={"type": "disabled"})
    shows = TEMPLATE + "{{ messages[1].reasoning_content }}{{ enable_thinking }}"
    again = [USER, {"role": "assistant", "content": [block.model_dump() for block in message.content]}, USER]
    for thinking, shown in (("enabled", "Hm.True"), ("adaptive", "Hm.True"), ("disabled", "Hm.False")):
        response, prompt, _ = posted({"messages": again, "thinking": {"type": thinking}}, "3", shows)
        assert response.status_code == 200, response.text
        assert prompt.endswith(shown)
    levels = TEMPLATE + "{{ reasoning_effort }}"
    assert posted({"output_config": {"effort": "low"}}, "3", levels)[1].endswith("low")
    assert posted({"output_config": {"effort": "low"}}, "3")[0].headers["x-ignored-fields"] == "reasoning_effort"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'} is not supported"),
    "an image of a tool": (
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]}, "'image'} is not supported",
    ),
    "thoughts that cannot be read": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "'redacted_thinking'} is not supported",
    ),
    "a tool of their servers": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "'web_search_20250305'}",
    ),
    "a tool of the client's screen": ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "'computer_2"),
    "a result of no call": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "tool_call_id",
    ),
    "a call of the user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "no blocks of type tool_use",
    ),
    "a result of the assistant": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "no blocks of type tool_result",
    ),
    "edits of the context": ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_m"),
    "a tool of no object": ({"tools": [{**ADD, "input_schema": {"type": "array"}}]}, r"tools\[0\].input_schema"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: 0"),
    "a choice of no tool": ({"tools": [ADD], "tool_choice": {"type": "tool"}}, r"tool_choice.name: required"),
    "a stop sequence of nothing": ({"stop_sequences": [""]}, "stop_sequences: ''"),
    "a budget for no thinking": ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
    "hidden thinking": ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    "an unknown field": ({"tempreature": 1}, "tempreature: unknown field; did you mean temperature"),
    "a cache of another kind": ({"cache_control": {"type": "forever"}}, "cache_control.type"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(client: Any, name: str) -> None:
    """Guards against a part of a conversation that the model never sees, and errors in OpenAI's shape."""
    body, message = REFUSED[name]
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.messages.create(**ASKED, extra_body=body)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id == caught.value.body["request_id"]


def test_what_agents_send_beside_it(client: Any) -> None:
    """Guards against a coding agent that is refused for a field that changes nothing."""
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    message = client.beta.messages.create(
        **{**ASKED, "max_tokens": 3}, metadata={"user_id": "u-1"}, service_tier="auto", thinking={"type": "adaptive"},
        tools=[{**ADD, "type": "custom", "eager_input_streaming": True, **CACHED}], betas=["some-beta-2026-01-01"],
        extra_body={"context_management": keeps, "output_config": {"effort": "high"}, **CACHED},
    )  # fmt: skip
    assert len(message.content[0].text) == 3


def test_keys_and_errors(server: RunningServer, client: Any) -> None:
    """Guards against a key that only the other header carries, two headers of which the wrong one counts, and failures
    in a shape or a stream that this client does not read."""
    assert client.models.list().data[0].id == client.models.retrieve("fake").id == "fake"
    bearer = anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0)
    assert bearer.messages.count_tokens(model="fake", messages=[USER]).input_tokens > 0
    both = {"default_headers": {"Authorization": "Bearer sk-other"}}  # counts before the other header
    for key, options in (("sk-other", {}), (KEY, both)):
        with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"):
            anthropic_client(server.url, key, **options).messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ASKED, "model": "claude"})
    server.client.overload = EngineOverloadedError("the queue is full", retry_after_s=2.0)
    with pytest.raises(anthropic.RateLimitError, match="queue is full") as caught:
        client.messages.create(**ASKED)
    assert caught.value.response.headers["retry-after"] == "2"
    server.client.overload = None
    server.client.behaviour = Behaviour(fail_at=4, failure=RequestFailedError("it broke"))
    with client.messages.stream(**ASKED) as stream, pytest.raises(anthropic.APIStatusError, match="it broke") as failed:
        for _ in stream:
            pass
    assert failed.value.type == "api_error"
