"""Tools and reasoning in /v1/responses, through the official client: items, events, and calls that come back."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from penstock.server.options import ServerOptions
from tests.official import official_client
from tests.server.fakes import Behaviour
from tests.server.harness import RunningServer, running, send
from tests.server.test_tools import ADD, CALLED, THINKING, TWICE, WEATHER, fake

QUESTION = "What is 1 + 2?"
FUNCTIONS: list[Any] = [ADD["function"], WEATHER["function"]]
TOOLS: Any = [{"type": "function", **function} for function in FUNCTIONS]
THOUGHTS = f"Hm, so.\n</think>\n\n{TWICE}"
ASKED: Any = {"model": "fake", "input": QUESTION, "tools": TOOLS, "extra_body": {"seed": 7}}
KINDS = ["reasoning", "message", "function_call", "function_call"]
TEXTS = ["Hm, so.", "Let me see.", '{"a": 1, "b": 2}', "{}"]


class Add(BaseModel):
    """Adds."""

    a: int
    b: int


class Sum(BaseModel):
    total: int


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(fake("", THINKING)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.client.behaviour = Behaviour(text=THOUGHTS)
    with official_client(server.url) as client:
        yield client


def text_of(item: Any) -> str:
    """What an item of the output says."""
    return str(item.arguments if item.type == "function_call" else item.content[0].text)


def seen(server: RunningServer) -> str:
    """The prompt that the engine saw last."""
    return bytes(server.client.seen[-1][0]).decode()


def test_items(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against markup and thoughts in the text, calls without names, ids that repeat, and uncounted thoughts."""
    answer = client.responses.create(**ASKED)
    assert (answer.status, [item.type for item in answer.output]) == ("completed", KINDS)
    assert [text_of(item) for item in answer.output] == TEXTS
    assert answer.output_text == "Let me see."
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["add", "weather"]
    ids = [item.id for item in answer.output] + [call.call_id for call in calls]
    assert len(set(ids)) == 6
    assert [str(name).partition("_")[0] for name in ids] == ["rs", "msg", "fc", "fc", "call", "call"]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm, so.\n</think>")
    assert [tool.name for tool in answer.tools if tool.type == "function"] == ["add", "weather"]
    assert client.responses.retrieve(answer.id) == answer
    cut = client.responses.create(**ASKED, max_output_tokens=len(THOUGHTS) - 40)
    assert (cut.status, [item.status for item in cut.output]) == ("incomplete", ["completed"] * 3 + ["incomplete"])


def test_events(client: openai.OpenAI) -> None:
    """Guards against an item whose pieces and end differ, events out of order, and gaps in their numbers."""
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts, done = [""] * 4, 0
    kinds: list[str] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(kinds) == done  # one item at a time
            kinds.append(event.item.type)
        elif event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
        elif event.type == "response.output_item.done":
            done += 1
            assert text_of(event.item) == texts[event.output_index]
        elif event.type.endswith((".output_text.done", ".reasoning_text.done")):
            assert event.text == texts[event.output_index]
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == texts[event.output_index]
    assert (kinds, texts, done) == (KINDS, TEXTS, 4)
    assert events[-1].type == "response.completed"
    assert [text_of(item) for item in events[-1].response.output] == TEXTS


def test_the_clients_own_readers(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against shapes that parse() and stream() of the official client refuse, or cannot send back."""
    add = openai.pydantic_function_tool(Add, name="add")
    tools: Any = [add, TOOLS[1]]
    parsed = client.responses.parse(model="fake", input=QUESTION, tools=tools)
    calls = [item for item in parsed.output if item.type == "function_call"]
    assert calls[0].parsed_arguments == Add(a=1, b=2)
    with client.responses.stream(model="fake", input=QUESTION, tools=tools) as stream:
        deltas = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert deltas[-1].snapshot == "{}"
    assert [text_of(item) for item in final.output] == TEXTS
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    history: Any = [{"role": "user", "content": QUESTION}, *parsed.output, *results]
    server.client.behaviour = Behaviour(text='So.</think>{"total": 3}')
    ended = client.responses.parse(model="fake", input=history, tools=tools, tool_choice="none", text_format=Sum)
    assert ended.output_parsed == Sum(total=3)
    by_hand = seen(server)
    more: Any = {"tools": TOOLS, "tool_choice": "none", "previous_response_id": parsed.id}
    client.responses.create(model="fake", input=results, **more)
    assert seen(server) == by_hand
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert f"<assistant>Let me see.{call}<tool_call>" in by_hand
    assert by_hand.endswith("<tool>3<tool>3<assistant><think>\n")


NOTE: Any = {"type": "custom", "name": "note", "description": "Notes a text."}
NOTED = 'Take "it":\n\t\\é🎈 {"input": "x"}'  # quotes, escapes, long characters, and what looks like a call
NOTES = (
    f'Hm.</think>So.<tool_call>{{"name": "note", "arguments": {{"input": {json.dumps(NOTED)}}}}}</tool_call>{CALLED}'
)


def test_a_custom_tool(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against a text that comes as JSON, in pieces that are no text, or that does not come back as it went; and
    against a call of a function that is taken for one of a custom tool."""
    server.client.behaviour = Behaviour(text=NOTES)
    asked: Any = {**ASKED, "tools": [NOTE, *TOOLS]}
    answer = client.responses.create(**asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "custom_tool_call", "function_call"]
    call, called = cast(Any, answer.output[2]), cast(Any, answer.output[3])
    assert (call.name, call.input, call.id[:4], call.call_id[:5]) == ("note", NOTED, "ctc_", "call_")
    assert text_of(answer.output[3]) == '{"a": 1, "b": 2}'
    assert answer.tools[0].to_dict() == NOTE
    shown = json.loads(seen(server).partition("<tools>")[2].partition("\n")[0])[0]["function"]
    assert (shown["name"], list(shown["parameters"]["properties"])) == ("note", ["input"])
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert ("".join(pieces), len(pieces)) == (NOTED, len(NOTED))
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert (done.input, done.output_index) == (NOTED, 2)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in events[-1].response.output] == [item.type for item in answer.output]

    outputs: Any = [
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"},
        {"type": "function_call_output", "call_id": called.call_id, "output": "3"},
    ]
    history: Any = [{"role": "user", "content": QUESTION}, *answer.output, *outputs]
    client.responses.create(model="fake", input=history, tools=[NOTE, *TOOLS])
    by_hand = seen(server)
    more = client.responses.create(model="fake", input=outputs, tools=[NOTE, *TOOLS], previous_response_id=answer.id)
    assert seen(server) == by_hand
    written = by_hand.partition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(written)["arguments"] == {"input": NOTED}
    assert by_hand.endswith("<tool>noted<tool>3<assistant><think>\n")
    listed: Any = list(client.responses.input_items.list(more.id))
    assert [item.type for item in listed[:4]] == [
        "function_call_output", "custom_tool_call_output", "function_call", "custom_tool_call"
    ]  # fmt: skip
    assert (listed[1].output, listed[1].id[:5], listed[3].input, listed[3].id) == ("noted", "ctco_", NOTED, call.id)


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_the_form_of_a_custom_tools_text(server: RunningServer, path: str) -> None:
    """Guards against a form that is accepted and not demanded, also of escaped characters, and one that cannot be
    demanded and is accepted; over both APIs."""
    server.client.behaviour = Behaviour(text=NOTES)

    def ask(form: Any, **more: Any) -> Any:
        nested = path != "responses"
        tool = {**{name: NOTE[name] for name in ("name", "description")}, "format": form}
        if nested and form["type"] == "grammar":
            tool["format"] = {"type": "grammar", "grammar": {name: form[name] for name in ("syntax", "definition")}}
        body: Any = {"tools": [{"type": "custom", "custom": tool} if nested else {"type": "custom", **tool}], **more}
        asked = {"messages": [{"role": "user", "content": QUESTION}]} if nested else {"input": QUESTION}
        return send(f"{server.url}/v1/{path}", json={**asked, **body})

    def follows(text: str) -> bool:
        grammar, tokens = server.client.seen[-1][1].structured_outputs.grammar, LLTokenizer("byte")
        call = f'x</think><tool_call>\n{{"name": "note", "arguments": {{"input": {json.dumps(text)}}}}}\n</tool_call>'
        ids = tokens.tokenize_str(call)
        return bool(LLMatcher(tokens, grammar).try_consume_tokens(ids) == len(ids))

    assert ask({"type": "text"}).status_code == 200
    assert follows("anything")
    for choice in ("auto", "required"):
        assert (
            ask({"type": "grammar", "syntax": "regex", "definition": 'a+\n"|b'}, tool_choice=choice).status_code == 200
        )
        assert [follows(text) for text in ('aa\n"', "b", "ab", "a", "")] == [True, True, False, False, False]
    lark = ask({"type": "grammar", "syntax": "lark", "definition": 'start: "a"'})
    assert (lark.status_code, lark.json()["error"]["code"]) == (400, "not_implemented"), lark.text
    assert "lark" in lark.json()["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "name": "add"}},
        {"tool_choice": {"type": "custom", "name": "add"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}},
        {"text": {"format": {"type": "json_object"}}},
    ],
)
def test_a_response_is_a_chat(server: RunningServer, choice: dict[str, Any]) -> None:
    """Guards against a tool_choice, a form or a tool that a response does not hand on to the chat that it is."""
    server.client.behaviour = Behaviour(text=f"</think>{CALLED}")
    of_chat = dict(choice)
    value = choice.get("tool_choice")
    if isinstance(value, dict) and "name" in value:
        of_chat["tool_choice"] = {"type": value["type"], value["type"]: {"name": value["name"]}}
    elif isinstance(value, dict):
        tools = [{"type": "function", "function": {"name": "weather"}}]
        of_chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    if "text" in of_chat:
        of_chat["response_format"] = of_chat.pop("text")["format"]
    chat = {"messages": [{"role": "user", "content": QUESTION}], "tools": [ADD, WEATHER], "seed": 7, **of_chat}
    found = []
    response = {"input": QUESTION, "tools": TOOLS, "seed": 7, **choice}
    for path, body in (("responses", response), ("chat/completions", chat)):
        answer = send(f"{server.url}/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        ids, params, _ = server.client.seen[-1]
        found.append((ids, params.structured_outputs))
    assert found[0] == found[1]
    assert (found[0][1] is None) == (value in ("auto", "none"))


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_a_required_call_leaves_no_text_to_give_a_form(server: RunningServer, path: str) -> None:
    """Guards against refusing instructor, which gives the form of the call a second time, and against text instead."""
    server.client.behaviour = Behaviour(text=f"</think>{CALLED}")
    form = {"name": "add", "strict": True, "schema": FUNCTIONS[0]["parameters"]}
    if path == "responses":
        body = {"input": QUESTION, "tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}}
        formed = {"text": {"format": {"type": "json_schema", **form}}}
    else:
        body = {"messages": [{"role": "user", "content": QUESTION}], "tools": [ADD, WEATHER], "tool_choice": "required"}
        formed = {"response_format": {"type": "json_schema", "json_schema": form}}
    found = []
    for more in ({}, formed):
        answer = send(f"{server.url}/v1/{path}", json={**body, **more})
        assert answer.status_code == 200, answer.text
        ids, params, _ = server.client.seen[-1]
        found.append((ids, params.structured_outputs))
    assert found[0] == found[1]
    assert found[0][1] is not None


def test_errors_in_a_responses_words(server: RunningServer) -> None:
    """Guards against errors that name a chat's field, or place, where the caller has sent a response's."""
    error = send(f"{server.url}/v1/responses", json={"input": QUESTION, "tools": TOOLS[:1] * 2}).json()["error"]
    assert (error["param"], error["message"]) == ("tools", "tools[1].name: add is the name of two tools")


def test_a_stream_with_calls_goes_on(tmp_path: Any) -> None:
    """Guards against numbers that mean another place once a new server, or another reader, tells of the same calls.

    A copy of the journal, taken in the middle of the second call, is what a kill would leave.
    """
    options = ServerOptions(port=0, access_log=False, journal=str(tmp_path / "j"))
    with running(fake(THOUGHTS, THINKING), options) as server, official_client(server.url) as client:
        whole = list(client.responses.create(**ASKED, stream=True))
        server.client.behaviour = Behaviour(text=THOUGHTS, hang_at=len(THOUGHTS) - 15)  # behind its first bracket
        begun = client.responses.create(**ASKED, background=True)
        with client.responses.retrieve(begun.id, stream=True) as stream:
            shown: list[Any] = []
            for event in stream:
                shown.append(event)
                if event.type == "response.output_item.added" and event.output_index == 3:
                    break
        gone = client.responses.create(**ASKED, background=True)
        client.responses.delete(gone.id)  # what came before is on the disk with it
        shutil.copy(tmp_path / "j", tmp_path / "copy")
    options = replace(options, journal=str(tmp_path / "copy"))
    with running(fake(THOUGHTS, THINKING), options) as server, official_client(server.url) as client:
        for cut in (0, len(shown) // 2, len(shown) - 1):
            rest: list[Any] = list(
                client.responses.retrieve(begun.id, stream=True, starting_after=shown[cut].sequence_number)
            )
            told = [*shown[: cut + 1], *rest]
            assert [event.sequence_number for event in told] == list(range(len(whole)))
            assert [event.type for event in told] == [event.type for event in whole]
        answer = client.responses.retrieve(begun.id)
        assert [text_of(item) for item in answer.output] == TEXTS
        assert answer.output == told[-1].response.output
