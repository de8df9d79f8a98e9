"""/v1/responses through the official client, over real sockets."""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from msgspec import structs

from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, EngineOverloadedError, RequestFailedError
from penstock.server import journal
from penstock.server.kept_calls import Begun, decode_record, encode_record
from penstock.server.options import ServerOptions
from penstock.server.serve import EXIT_ENGINE_FAILED
from tests.official import official_client
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, app_client, get, running, send, wait_until

WHOLE: Any = {"model": "fake", "input": "Hi", "max_output_tokens": 12, "extra_body": {"seed": 7}}
SLOW = Behaviour(delay_s=0.02)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeEngineClient()) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.client.behaviour = Behaviour()
    with official_client(server.url) as client:
        yield client


def until_ended(client: openai.OpenAI, call_id: str) -> Any:
    wait_until(lambda: client.responses.retrieve(call_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(call_id)


def test_whole(client: openai.OpenAI) -> None:
    """Guards against an answer whose shape, usage or reason differs from OpenAI's."""
    answer = client.responses.create(**WHOLE)
    assert len(answer.output_text) == 12
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "fake")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    (item,) = answer.output
    assert (item.type, item.status, item.id[:4]) == ("message", "incomplete", "msg_")
    assert client.responses.retrieve(answer.id) == answer
    same_prompt = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, seed=7
    )
    assert same_prompt.choices[0].message.content == answer.output_text


def test_completed(client: openai.OpenAI, server: RunningServer) -> None:
    server.client.behaviour = Behaviour(text="Hello")
    answer = client.responses.create(model="fake", input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.instructions) == ("completed", "Hello", "Be brief.")
    assert answer.metadata == {"a": "b"}
    assert answer.error is None
    ids, _, _ = server.client.seen[-1]
    assert bytes(i for i in ids if i < 256) == b"<system>Be brief.\n<user>Hi\n<assistant>"


def test_stream(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against events out of OpenAI's order, gaps in their numbers, and text that differs from the whole."""
    whole = client.responses.create(**WHOLE)
    events = list(client.responses.create(**WHOLE, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage
    server.client.behaviour = Behaviour(text="Hello")
    with client.responses.stream(model="fake", input="Hi") as stream:  # the client's own reader
        assert stream.get_final_response().output_text == "Hello"


def test_parts_and_items_come_back(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against an answer that cannot be sent back as input, as clients without stored responses do."""
    server.client.behaviour = Behaviour(text="Hello")
    first = client.responses.create(model="fake", input="Hi", store=False)
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    client.responses.create(model="fake", input=[*history, {"role": "user", "content": "And?"}])
    ids, _, _ = server.client.seen[-1]
    by_hand = bytes(i for i in ids if i < 256)
    assert by_hand == b"<user>Hi\n<assistant>Hello\n<user>And?\n<assistant>"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)  # it was not to be stored


def test_previous_response(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against a conversation that loses a turn, or keeps the instructions of an earlier one."""
    server.client.behaviour = Behaviour(text="One")
    first = client.responses.create(model="fake", input="Hi", instructions="Old")
    second = client.responses.create(model="fake", input="And?", previous_response_id=first.id)
    client.responses.create(model="fake", input="So?", previous_response_id=second.id)
    ids, _, _ = server.client.seen[-1]
    shown = b"<user>Hi\n<assistant>One\n<user>And?\n<assistant>One\n<user>So?\n<assistant>"
    assert bytes(i for i in ids if i < 256) == shown
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="fake", input="So?", previous_response_id="resp_0")


def test_input_items(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against pages that repeat or leave out an item, ids that change or are two items', and a conversation of
    which only the last turn is listed."""
    server.client.behaviour = Behaviour(text="One")
    first = client.responses.create(model="fake", input="Hi", instructions="Be brief.")
    answer = first.output[0]
    given: Any = [
        {"role": "user", "content": "And?", "id": "mine"},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}], "id": "mine"},
    ]
    second = client.responses.create(model="fake", input=given, previous_response_id=first.id)
    items: list[Any] = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.content[0].text for item in items] == ["Hi", "One", "And?", "So?"]
    assert [item.content[0].type for item in items] == ["input_text", "output_text", "input_text", "input_text"]
    ids = [item.id for item in items]
    assert ids[1:3] == [answer.id, "mine"]
    assert len(set(ids)) == 4
    for limit in (1, 2, 3, 4, 100):
        assert list(client.responses.input_items.list(second.id, limit=limit)) == items[::-1]
    page: Any = client.responses.input_items.list(second.id, limit=3)
    assert (page.data, page.has_more, page.first_id, page.last_id) == (items[:0:-1], True, ids[3], ids[1])
    rest = client.responses.input_items.list(second.id, after=ids[1], include=["reasoning.encrypted_content"])
    assert (rest.data, rest.has_more) == (items[:1], False)
    server.client.behaviour = Behaviour(hang_at=3)
    begun = client.responses.create(**WHOLE, background=True)
    items = list(client.responses.input_items.list(begun.id))
    assert [item.content[0].text for item in items] == ["Hi"]
    client.responses.delete(begun.id)
    for query in ("limit=0", "limit=101", "limit=²", "order=up", "after=x", "include=a", "include[]=a", "before=x"):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        wrong = get(f"{server.url}/v1/responses/{first.id}/input_items?{query}", headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, query.partition("=")[0].removesuffix("[]"))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}<think></think>", "{{ messages[0].content }}"])
def test_logprobs(template: str) -> None:
    """Guards against log-probabilities of thoughts and markup, of another text than the deltas', and of too few
    tokens; and against an answer that is retrieved, or sent back, without them."""
    engine = FakeEngineClient(Behaviour(text="<think>Hé, o.</think>\n\nHéllo, a<b."), chat_template=template)
    asked: Any = {**WHOLE, "max_output_tokens": 99, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with running(engine) as server, official_client(server.url) as client:
        whole = client.responses.create(**asked)
        part: Any = whole.output[-1].content[0]  # type: ignore[union-attr]
        text = "Héllo, a<b." if "think" in template else str(engine.behaviour.text)
        assert (part.text, whole.top_logprobs) == (text, 2)
        assert bytes(byte for entry in part.logprobs for byte in entry.bytes) == text.encode()
        assert {(entry.logprob, len(entry.top_logprobs)) for entry in part.logprobs} == {(-0.5, 2)}
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        for event in deltas:
            assert "".join(map(chr, (byte for entry in event.logprobs for byte in entry.bytes or ()))).encode(
                "latin-1"
            ) == event.delta.encode()  # fmt: skip
        (done,) = (event for event in events if event.type == "response.output_text.done")
        assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in done.logprobs]
        assert events[-1].response.output[-1].content == whole.output[-1].content  # type: ignore[union-attr]
        assert client.responses.retrieve(whole.id).output == whole.output
        more = client.responses.create(model="fake", input="So?", previous_response_id=whole.id)
        for include, count in ((["message.output_text.logprobs"], len(part.logprobs)), ([], 0)):
            items = list(client.responses.input_items.list(more.id, include=include))  # type: ignore[arg-type]
            assert len(items[1].content[0].logprobs) == count  # type: ignore[union-attr]


def test_background(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against a background response that ends with its connection, or a stream from a number that repeats."""
    server.client.behaviour = SLOW
    begun = client.responses.create(**WHOLE, background=True)
    assert begun.status == "queued"
    with client.responses.retrieve(begun.id, stream=True) as stream:
        first = list(itertools.islice(stream, 7))
    rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=first[-1].sequence_number))
    numbers = [event.sequence_number for event in first + rest]
    assert numbers == list(range(len(numbers)))
    ended = until_ended(client, begun.id)
    text = "".join(event.delta for event in first + rest if event.type == "response.output_text.delta")
    assert text == ended.output_text == client.responses.create(**WHOLE).output_text
    again = list(client.responses.retrieve(begun.id, stream=True, starting_after=first[-1].sequence_number))
    assert again == rest


def test_cancel_and_delete(client: openai.OpenAI, server: RunningServer) -> None:
    server.client.behaviour = Behaviour(hang_at=3)
    begun = client.responses.create(**WHOLE, background=True)
    events = client.responses.retrieve(begun.id, stream=True)
    shown = list(itertools.islice(events, 7))  # 4 of them before the first text
    assert client.responses.retrieve(begun.id).status == "in_progress"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text == "".join(e.delta for e in shown if e.type == "response.output_text.delta")
    assert list(events) == []
    assert client.responses.cancel(begun.id) == cancelled == client.responses.retrieve(begun.id)
    assert server.client.open == set()
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
    running = client.responses.create(**WHOLE, background=True)
    client.responses.delete(running.id)
    wait_until(lambda: server.client.open == set())
    server.client.behaviour = Behaviour()
    stored = client.responses.create(**WHOLE)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(stored.id)


def test_a_client_that_leaves_is_not_computed_for(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against a foreground response that runs on for nobody."""
    server.client.behaviour = Behaviour(hang_at=3)
    stream = client.responses.create(**WHOLE, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    wait_until(lambda: server.client.open == set())
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(RequestFailedError("NaN"), 500, "server_error"), (EngineDeadError("gone"), 503, "server_error")],
)
def test_failures(client: openai.OpenAI, server: RunningServer, failure: Exception, status: int, code: str) -> None:
    """Guards against a failure that looks like an answer: at once it is a status, later it is response.failed."""
    server.client.behaviour = Behaviour(fail_at=0, failure=failure)
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**WHOLE, stream=True)
    assert caught.value.status_code == status
    begun = client.responses.create(**WHOLE, background=True)
    ended = until_ended(client, begun.id)
    assert (ended.status, ended.output) == ("failed", [])
    assert (ended.error.code, ended.error.message) == (code, str(failure))
    server.client.behaviour = Behaviour(fail_at=3, failure=failure)
    events = list(client.responses.create(**WHOLE, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"


def test_a_full_queue(client: openai.OpenAI, server: RunningServer) -> None:
    """Guards against a background response that fails because it came at a bad moment; in the foreground it is 429."""
    server.client.behaviour = Behaviour(failure=EngineOverloadedError("full", retry_after_s=0.02))
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(**WHOLE)
    assert caught.value.response.headers["retry-after"] == "1"
    begun = client.responses.create(**WHOLE, background=True)
    wait_until(lambda: sum(begun.id in request_id for _, _, request_id in server.client.seen) > 2)
    assert client.responses.retrieve(begun.id).status == "queued"
    server.client.behaviour = Behaviour()
    assert until_ended(client, begun.id).status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens: 0 is not allowed", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name: ", "missing_field"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools: {'type': 'mcp'} is not", "not_implemented"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name: 'a b' is not", "invalid_value"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools: the model's chat template does not", "no_tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice: there are no tools", "invalid_value"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type: ", "invalid_type"),
        ({"text": {"verbosity": "much"}}, "text.verbosity: 'much' is not", "invalid_value"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort: ", "invalid_type"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget: ", "unknown_field"),
        ({"truncation": "all"}, "truncation: ", "invalid_type"),
        ({"truncation": "auto", "input": "x" * 10**5}, "input: ", "context_length_exceeded"),
        ({"input": []}, "input: 0 items", "invalid_value"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input: items of type", "not_implemented"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.call_id: ", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.call_id: 'c' is not", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": ["c"]}]}, "input.call_id: ['c'] is", "invalid_value"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input: ", "invalid_value"),
        ({"input": [{"type": ["x"]}]}, "input: items of type", "not_implemented"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input: parts of type",
            "not_implemented",
        ),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", "invalid_type"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input.y: unknown field", "unknown_field"),
        ({"input": "x" * 10**5}, "input: ", "context_length_exceeded"),
        ({"max_tokens": 3}, "max_tokens: unknown field", "unknown_field"),
        ({"background": True, "store": False}, "background: ", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs: only allowed with include", "invalid_value"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs: 21", "invalid_value"),
    ],
)
def test_refusals(server: RunningServer, fields: dict[str, Any], message: str, code: str) -> None:
    """Guards against a field that is accepted and ignored."""
    answer = send(f"{server.url}/v1/responses", json={"input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    assert answer.json()["error"]["message"].startswith(message)


def test_include_where_nothing_would_be_included() -> None:
    """Guards against refusing agents that always ask for encrypted thoughts, which are in the answer anyhow."""
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }}<think></think>"):
        fake = FakeEngineClient(Behaviour(text="<think>Hm.</think>Yes"), chat_template=template)
        include = ["reasoning.encrypted_content", "web_search_call.action.sources"]
        answer = app_client(fake).post("/v1/responses", json={"input": "Hi", "include": include})
        assert answer.status_code == 200, answer.text
        kinds = [item["type"] for item in answer.json()["output"]]
        assert kinds == ["message"] if "think" not in template else ["reasoning", "message"]
    for other in (["message.output_text.logprob"], ["reasoning.encrypted_content", "a"], "a"):
        answer = app_client().post("/v1/responses", json={"input": "Hi", "include": other})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


LEVELS = "{{ messages[0].content }}{{ reasoning_effort }}{{ verbosity }}"


def test_levels_reach_the_template() -> None:
    """Guards against levels of reasoning and verbosity that change nothing, and an echo that denies them."""
    levels = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low", "verbosity": "high"}
    for path, body in (("responses", {"input": "Hi", **levels}), ("chat/completions", chat)):
        fake = FakeEngineClient(chat_template=LEVELS)
        answer = app_client(fake).post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert bytes(fake.seen[0][0]).decode() == "Hilowhigh"
        if path == "responses":
            assert answer.json()["reasoning"] == levels["reasoning"]
            assert answer.json()["text"] == {"format": {"type": "text"}, "verbosity": "high"}
    contradicted = {**chat, "chat_template_kwargs": {"verbosity": "low"}}
    error = app_client(fake).post("/v1/chat/completions", json=contradicted).json()["error"]
    assert error["param"] == "verbosity"
    medium = {"input": "Hi", "text": {"verbosity": "medium"}}
    assert app_client().post("/v1/responses", json=medium).status_code == 200


def test_summaries_that_are_not_made() -> None:
    """Guards against an answer whose thoughts have no summary although a kind of summary was asked for."""
    thinks = "{{ messages[0].content }}<think></think>"
    for template, summary, status in ((thinks, "auto", 200), (thinks, "detailed", 400), ("x", "detailed", 200)):
        body = {"input": "Hi", "reasoning": {"summary": summary}}
        answer = app_client(FakeEngineClient(chat_template=template)).post("/v1/responses", json=body)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["param"] == "reasoning.summary"


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4, 5, 9])
def test_the_oldest_turns_are_left_out(num_turns: int) -> None:
    """Guards against turns that are cut in the middle, more of them left out than necessary, no room for an answer, or
    the loss of what the system says; and against a conversation that is cut unasked."""
    fake = FakeEngineClient()
    fake.info = replace(fake.info, max_model_len=400)
    rules = "s" * 40
    turns = [[("user", f"{at}" * 50), ("assistant", f"{at}" * 20)] for at in range(num_turns)]
    turns[-1] = turns[-1][:1]
    items = [{"role": role, "content": text} for turn in turns for role, text in turn]
    body = {"instructions": rules, "input": items, "max_output_tokens": 60}

    def prompt(kept: list[list[tuple[str, str]]]) -> str:
        told = [("system", rules), *itertools.chain(*kept)]
        return "".join(f"<{role}>{text}\n" for role, text in told) + "<assistant>"

    expected = next(at for at in range(num_turns) if len(prompt(turns[at:])) <= 340)
    answer = app_client(fake).post("/v1/responses", json={**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    assert bytes(fake.seen[0][0]).decode() == prompt(turns[expected:])
    whole = app_client(fake).post("/v1/responses", json=body)
    assert whole.status_code == (200 if len(prompt(turns)) < 400 else 400)


@pytest.mark.parametrize("query", ["stream=yes", "starting_after=3", "stream=true&starting_after=-1", "include=a"])
def test_wrong_queries(server: RunningServer, query: str) -> None:
    assert get(f"{server.url}/v1/responses/resp_1?{query}").status_code == 400


def test_another_key_sees_nothing(server: RunningServer, client: openai.OpenAI) -> None:
    """Guards against a client that reads, or ends, what another one has stored."""
    stored = client.responses.create(**WHOLE)
    with official_client(server.url, key="another") as other:
        listed = other.responses.input_items.list
        for attempt in (other.responses.retrieve, other.responses.cancel, other.responses.delete, listed):
            with pytest.raises(openai.NotFoundError):
                attempt(stored.id)
    assert client.responses.retrieve(stored.id) == stored


def test_memory_is_bounded() -> None:
    """Guards against stored answers that fill the memory: the oldest ones make room."""
    options = ServerOptions(port=0, access_log=False, max_kept_bytes=64_000, drain_timeout_s=0.05)
    with running(FakeEngineClient(), options) as server, official_client(server.url) as client:
        answers = [client.responses.create(**WHOLE) for _ in range(20)]
        assert client.responses.retrieve(answers[-1].id) == answers[-1]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answers[0].id)
        assert len(server.kept) < 15
        server.client.behaviour = Behaviour(hang_at=1)

        def fill() -> None:
            for _ in range(20):
                client.responses.create(**WHOLE, background=True)

        with pytest.raises(openai.RateLimitError, match="unfinished"):
            fill()


def test_answers_expire() -> None:
    """Guards against a retention that is never applied."""
    options = ServerOptions(port=0, access_log=False, response_retention_s=0.05)
    with running(FakeEngineClient(), options) as server, official_client(server.url) as client:
        client.responses.create(**WHOLE)
        wait_until(lambda: len(server.kept) == 0)


def test_a_new_server_goes_on(tmp_path: Any) -> None:
    """Guards against a journal from which a killed server's responses come back wrong, or not at all.

    A copy of the file, taken while the server runs, is what a kill would leave.
    """
    options = ServerOptions(port=0, access_log=False, journal=str(tmp_path / "j"))
    with running(FakeEngineClient(), options) as server, official_client(server.url) as client:
        ended = client.responses.create(**WHOLE)
        server.client.behaviour = Behaviour(hang_at=6)
        begun = client.responses.create(**WHOLE, background=True)
        with client.responses.retrieve(begun.id, stream=True) as stream:
            shown = list(itertools.islice(stream, 10))  # 6 of them with text
        listed = list(client.responses.input_items.list(begun.id))
        gone = client.responses.create(**WHOLE, background=True)
        client.responses.delete(gone.id)  # what came before is on the disk with it
        shutil.copy(tmp_path / "j", tmp_path / "copy")
    engine = FakeEngineClient()
    options = replace(options, journal=str(tmp_path / "copy"))
    with running(engine, options) as server, official_client(server.url) as client:
        assert client.responses.retrieve(ended.id) == ended
        rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=shown[-1].sequence_number))
        numbers = [event.sequence_number for event in shown + rest]
        assert numbers == list(range(len(numbers)))
        assert rest[-1].response.output_text == ended.output_text
        assert client.responses.retrieve(begun.id).output_text == ended.output_text
        assert list(client.responses.input_items.list(begun.id)) == listed
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
        with official_client(server.url, key="another") as other, pytest.raises(openai.NotFoundError):
            other.responses.retrieve(begun.id)
    text = ended.output_text.encode()
    assert list(engine.resumed.values()) == [[list(text[:5])]]  # the last of the 6 is computed again


def test_another_engine_does_not_go_on(tmp_path: Any) -> None:
    """Guards against an answer whose second half comes from a model that has changed."""
    options = ServerOptions(port=0, access_log=False, journal=str(tmp_path / "j"))
    with running(FakeEngineClient(Behaviour(hang_at=6)), options) as server, official_client(server.url) as client:
        begun = client.responses.create(**WHOLE, background=True)
    changed = FakeEngineClient()
    changed.info = replace(changed.info, system_fingerprint="fp-2")
    with running(changed, options) as server, official_client(server.url) as client:
        ended = client.responses.retrieve(begun.id)
        assert ended.status == "failed"
        assert ended.error is not None
        assert "fp-fake became fp-2" in ended.error.message


def test_a_call_that_cannot_be_read_ends_alone(tmp_path: Any) -> None:
    """Guards against a call in the journal, written by another version, that ends the watch over the engine: the server
    was never announced, the calls after this one hung, and an engine that failed later was not noticed."""
    options = ServerOptions(port=0, access_log=False, journal=str(tmp_path / "j"))
    with running(FakeEngineClient(Behaviour(hang_at=6)), options) as server, official_client(server.url) as client:
        damaged, whole = (client.responses.create(**WHOLE, background=True) for _ in range(2))
    bodies = journal.unpack((tmp_path / "j").read_bytes()).bodies
    begun = [record for record in map(decode_record, bodies) if isinstance(record, Begun)]
    assert [record.id for record in begun] == [damaged.id, whole.id]
    changed = [structs.replace(begun[0], body=b'{"a_later_field": 1}'), begun[1]]
    (tmp_path / "j").write_bytes(journal.MAGIC + b"".join(journal.pack(encode_record(record)) for record in changed))
    engine = FakeEngineClient()
    with running(engine, options) as server:
        with official_client(server.url) as client:
            wait_until(lambda: client.responses.retrieve(whole.id).status == "incomplete")
            with pytest.raises(openai.InternalServerError, match="cannot read this request of before"):
                client.responses.retrieve(damaged.id)
            with pytest.raises(openai.APIError, match="cannot read this request of before"):
                list(client.responses.retrieve(damaged.id, stream=True))
        engine.state = EngineState.FAILED
        server.join()
    assert server.exit_code == EXIT_ENGINE_FAILED


def test_no_answer_before_the_request_is_on_the_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a background response that is promised while the journal cannot be written."""
    options = ServerOptions(port=0, access_log=False, journal=str(tmp_path / "j"))
    with running(FakeEngineClient(), options) as server, official_client(server.url) as client:

        def fail(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fdatasync", fail)
        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(openai.InternalServerError, match="No space left"):
            client.responses.create(**WHOLE, background=True)
        assert client.responses.create(**WHOLE).status == "incomplete"  # needs no journal
        assert "No space left" in get(f"{server.url}/status").json()["journal"]["file"]["error"]
        assert get(f"{server.url}/health").status_code == 200
