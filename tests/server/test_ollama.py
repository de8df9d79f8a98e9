"""/api/... with Ollama's own client: chats, lines, tools, forms, options, embeddings; the same tokens as a chat."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import EngineOverloadedError, RequestFailedError
from penstock.server.options import ServerOptions
from penstock.tokenizer.fill_in import MARKS
from tests.official import official_client, ollama_client
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, app_client, running
from tests.server.test_embeddings import Angles, vector
from tests.server.test_tools import CALLED, TEMPLATE, THINKING, TWICE

ollama = pytest.importorskip("ollama", reason="the ollama client of the test extra is not installed")
KEY = "sk-test"
USER: Any = {"role": "user", "content": "What is 1 + 2?"}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMA = {"type": "object", "required": ["a", "b"], "properties": NUMBERS}  # in the order in which the client writes it
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {"model": "fake", "messages": [USER]}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = FakeEngineClient(max_model_len=8192, chat_template=TEMPLATE, marks=MARKS[0])
    with running(engine, ServerOptions(port=0, api_key=KEY, access_log=False)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    server.client.behaviour = Behaviour()
    server.client.seen.clear()
    with ollama_client(server.url, KEY) as client:
        yield client


def posted(path: str, body: dict[str, Any], text: str = "Three.", template: str = TEMPLATE) -> Any:
    """The answer to a body without a client, and the prompt and parameters that the engine saw, if it saw any."""
    engine = FakeEngineClient(Behaviour(text=text), max_model_len=8192, chat_template=template)
    response = app_client(engine, ServerOptions(port=0, access_log=False)).post(path, json={"model": "fake", **body})
    seen = engine.seen[0] if engine.seen else None
    return response, seen and bytes(i for i in seen[0] if i < 256).decode(), seen and seen[1]


def test_a_chat_and_its_lines(server: RunningServer, client: Any) -> None:
    """Guards against a stream that joins to another answer than the whole one, and counts that do not add up."""
    asked = {**ASKED, "options": {"num_predict": 12, "seed": 7, "temperature": 0.5}, "keep_alive": "5m"}
    whole = client.chat(**asked)
    assert (whole.model, whole.message.role, whole.done, whole.done_reason) == ("fake", "assistant", True, "length")
    lines = list(client.chat(**asked, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert len(whole.message.content) == 12
    assert [line.done for line in lines] == [False] * 12 + [True]
    prompt = len(server.client.seen[0][0])
    for last in (whole, lines[-1]):
        assert (last.prompt_eval_count, last.eval_count, last.done_reason) == (prompt, 12, "length")
        assert last.total_duration == pytest.approx(last.prompt_eval_duration + last.eval_duration, abs=2)
    assert (server.client.seen[0][1].seed, server.client.seen[0][1].temperature) == (7, 0.5)
    named = client.chat(**{**asked, "model": "fake:latest"})
    assert (named.model, named.message.content) == ("fake", whole.message.content)
    loaded = client.chat(model="fake")
    assert (loaded.done_reason, loaded.message.content) == ("load", "")


@pytest.mark.parametrize("streams", [False, True])
def test_ten_calls_are_those_of_a_chat(server: RunningServer, client: Any, streams: bool) -> None:
    """Guards against a conversation whose prompt differs between the two APIs: an agent that calls ten times, twice at
    once, and sends back what it got, with the openai client beside it."""
    messages: list[Any] = [USER]
    chat: list[Any] = [USER]
    with official_client(server.url, KEY) as other:
        for number in range(10):
            server.client.behaviour = Behaviour(text=TWICE if number == 3 else CALLED.replace("1", str(number)))
            asked = {"model": "fake", "messages": messages, "tools": [ADD, WEATHER]}
            parts = list(client.chat(**asked, stream=True)) if streams else [client.chat(**asked)]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            content = "".join(part.message.content for part in parts)
            assert [(call.function.name, call.function.arguments) for call in calls] == (
                [("add", {"a": 1, "b": 2}), ("weather", {})] if number == 3 else [("add", {"a": number, "b": 2})]
            )
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            for call in calls:
                messages.append({"role": "tool", "tool_name": call.function.name, "content": f"{number}"})

            answer = other.chat.completions.create(model="fake", messages=chat, tools=[ADD, WEATHER])
            chat.append(answer.choices[0].message.model_dump(exclude_none=True))
            for call in answer.choices[0].message.tool_calls or ():
                chat.append({"role": "tool", "tool_call_id": call.id, "content": f"{number}"})
            (own, own_params, _), (theirs, their_params, _) = server.client.seen[-2:]
            assert own == theirs
            assert own_params.settled(output_kind=None) == their_params.settled(output_kind=None)
    assert len(server.client.seen[-1][0]) > 900


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
def test_curl_may_leave_the_content_type_out(content_type: str | None) -> None:
    """Guards against refusing what Ollama's own examples send, and against a form or a text that the page of another
    site sends: browsers ask nobody before they send those, but say where they come from."""
    client, body = app_client(FakeEngineClient(Behaviour(text="Three."))), json.dumps({**ASKED, "stream": False})
    sent: dict[str, str] = {} if content_type is None else {"Content-Type": content_type}
    answer = client.post("/api/chat", content=body, headers=sent)
    assert answer.json()["message"]["content"] == "Three."
    for mark, status in (("Origin: null", 403), ("Origin: http://127.0.0.1:8000", 415), ("Sec-Fetch-Site: none", 415)):
        headers = {**sent, **dict([mark.split(": ")])}
        assert client.post("/api/chat", content=body, headers=headers).status_code == status
    assert client.post("/v1/messages", content=body, headers=sent).status_code == 415


def test_results_find_their_calls() -> None:
    """Guards against results that answer another call, and results of calls that were never made."""
    shown = "{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} "
    shown = "{% for m in messages %}" + shown + "{% endfor %}"
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("add", "weather", "add")]
    calls[1]["id"] = "own"

    def ids(*results: dict[str, str]) -> Any:
        turns = [USER, {"role": "assistant", "tool_calls": calls}]
        turns += [{"role": "tool", "content": "x", **result} for result in results]
        return posted("/api/chat", {"messages": turns}, template=shown)

    _, prompt, _ = ids({"tool_name": "weather"}, {"tool_name": "add"}, {})
    assert prompt.split() == ["c00010000", "own", "c00010002", "own", "c00010000", "c00010002"]
    assert all(len(made) == 9 and made.isalnum() for made in prompt.split() if made != "own")
    _, prompt, _ = ids({"tool_call_id": "own"})
    assert prompt.split()[-1] == "own"
    for wrong in ({"tool_name": "other"}, {"tool_call_id": "c1"}):
        response, _, _ = ids(wrong)
        assert (response.status_code, response.json()["param"]) == (400, "messages")
        assert response.json()["error"].startswith("messages[2].tool_name: ")


def test_options() -> None:
    """Guards against an option that is accepted without effect: each against the parameters that it stands for."""
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "seed": 5, "stop": ["x"],
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2,
    }  # fmt: skip
    more = {"num_predict": 3, "repeat_penalty": 1.5, "repeat_last_n": -1, "num_thread": 8, "use_mmap": True}
    _, _, params = posted("/api/chat", {"messages": [USER], "options": {**options, **more}})
    expected = {**options, "stop": ("x",), "max_tokens": 3, "repetition_penalty": 1.5}
    assert {name: getattr(params, name) for name in expected} == expected
    _, prompt, params = posted("/api/chat", {"messages": [USER], "options": {"num_predict": -1, "seed": -1}})
    assert (params.max_tokens, params.seed) == (None, None)
    for num_predict, most in ((-2, 4), (3, 3), (50, 4)):
        bound = {"num_ctx": len(prompt) + 4, "num_predict": num_predict}
        response, _, params = posted("/api/chat", {"messages": [USER], "stream": False, "options": bound})
        assert (params.max_tokens, response.json()["done_reason"]) == (most, "length")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/chat", {"options": {"num_ctx": 8193}}, "options.num_ctx"),
        ("/api/chat", {"options": {"num_ctx": 5}}, "options.num_ctx"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("/api/chat", {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ("/api/chat", {"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ("/api/chat", {"options": {"f16_kv": True}}, "options.f16_kv"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "keep_alive"),
        ("/api/chat", {"messages": [], "keep_alive": "0s"}, "keep_alive"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"think": True}, "think"),
        ("/api/chat", {"think": "high"}, "think"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
        ("/api/chat", {"messages": [{**USER, "images": ["AAAA"]}]}, "images"),
        ("/api/chat", {"messages": [{**USER, "tool_name": "add"}]}, "messages"),
        ("/api/chat", {"shift": True}, "shift"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"context": [1]}, "context"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
        ("/api/generate", {"suffix": "y", "think": True}, "think"),
        ("/api/generate", {"width": 8}, "width"),
        ("/api/embed", {"input": "x", "options": {"temperature": 0}}, "options.temperature"),
        ("/api/embed", {"input": "x", "truncate": False, "options": {"num_ctx": 8}}, "options.num_ctx"),
        ("/api/show", {"verbose": True}, "verbose"),
    ],
)  # fmt: skip
def test_refusals(path: str, body: dict[str, Any], named: str) -> None:
    """Guards against what is accepted and ignored, and errors that do not name the field as this API does."""
    fields: Any = {"/api/chat": {"messages": [USER]}, "/api/generate": {"prompt": "Hi"}}
    response, prompt, _ = posted(path, {**fields.get(path, {}), **body})
    found = response.json()
    assert (response.status_code, found["param"], prompt) == (400, named, None), found
    assert found.keys() == {"error", "code", "param"}
    assert named.split(".")[-1] in found["error"]


def test_generate(server: RunningServer, client: Any) -> None:
    """Guards against a template around a raw prompt, a prompt without one, and a system prompt that is lost."""
    server.client.behaviour = Behaviour(text="It is 3. And so on.")
    options = {"stop": ". And"}
    plain = client.generate(model="fake", prompt="Add.", system="Be brief.", options=options)
    assert (plain.response, plain.done_reason) == ("It is 3", "stop")
    assert bytes(server.client.seen[-1][0]).decode() == "<system>Be brief.<user>Add.<assistant>"
    raw = client.generate(model="fake", prompt="<user>Add.", raw=True, options=options, stream=True)
    assert "".join(part.response for part in raw) == "It is 3"
    assert server.client.seen[-1][0] == server.client.tokenizer.encode("<user>Add.")
    filled = client.generate(model="fake", prompt="def f():", suffix="f()", options=options)
    (ids, params, _), marks = server.client.seen[-1], [258, 259, 260]
    assert (filled.response, ids) == ("It is 3", [256, 258, *b"def f():", 259, *b"f()", 260])
    assert params.stop_token_ids == tuple(marks)
    scored = client.generate(model="fake", prompt="Add.", options={"num_predict": 2}, logprobs=True, top_logprobs=1)
    assert [(entry.token, len(entry.top_logprobs)) for entry in scored.logprobs] == [("I", 1), ("t", 1)]


@pytest.mark.parametrize("seconds", [10**40, 1e-45, 0.5, -1, "90", "1m30s", "-1m"])
def test_keep_alive_has_any_size(seconds: float | str) -> None:
    """Guards against a 500 for a number that is written with an exponent."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "keep_alive": seconds, "stream": False}
    assert app_client().post("/api/chat", json={"model": "fake", **body}).status_code in (200, 404)


def test_forms(server: RunningServer, client: Any) -> None:
    """Guards against a form that is accepted and not enforced."""
    named = {"name": "answer", "schema": SCHEMA}
    kinds: list[Any] = [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}]
    for form, kind in zip(("json", SCHEMA), kinds, strict=True):
        client.chat(**ASKED, format=form)
        with official_client(server.url, KEY) as other:
            other.chat.completions.create(model="fake", messages=[USER], response_format=kind)
        (_, own, _), (_, theirs, _) = server.client.seen[-2:]
        assert own.structured_outputs == theirs.structured_outputs
        assert own.structured_outputs is not None


@pytest.mark.parametrize("streams", [False, True])
def test_thinking(streams: bool) -> None:
    """Guards against thoughts in the text, or lost on the way back, and a switch that turns nothing."""
    body = {"messages": [USER], "stream": streams, "think": True}
    response, _, _ = posted("/api/chat", body, "Hm.\n</think>\n\nThree.", THINKING)
    lines = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(line.get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["content"] for line in lines) == "Three."
    shows = THINKING + "{{ messages[1].reasoning_content }}{{ enable_thinking }}"
    again = [USER, {"role": "assistant", "content": "Three.", "thinking": "Hm."}, USER]
    for think in (True, False):
        _, prompt, _ = posted("/api/chat", {"messages": again, "think": think}, template=shows)
        assert prompt.endswith(f"Hm.{think}")
    response, _, _ = posted("/api/chat", {**body, "think": False}, template=THINKING)
    assert response.json()["error"].startswith("think: false is not supported")


def test_embeddings() -> None:
    """Guards against vectors in another order, texts that are not cut, and counts of other tokens."""
    with running(Angles()) as server, ollama_client(server.url) as client:
        found = client.embed(model="fake", input=["Hi", "Once"])
        assert found.embeddings == [pytest.approx(vector(text)) for text in ("Hi", "Once")]
        assert found.prompt_eval_count == len("Hi") + len("Once") + 2
        assert client.embed(model="fake", input="Hi" * 400).prompt_eval_count == 512
        cut = client.embed(model="fake", input="Hike", options={"num_ctx": 3})
        assert cut.embeddings == [pytest.approx(vector("Hi"))]
        assert client.embeddings(model="fake", prompt="Hi").embedding == pytest.approx(vector("Hi"))
        with pytest.raises(ollama.ResponseError, match="truncate") as caught:
            client.embed(model="fake", input="Hi" * 400, truncate=False)
        assert caught.value.status_code == 400


def test_what_is_served(client: Any) -> None:
    """Guards against a model that clients do not find, or whose tools and context they do not see."""
    (card,) = client.list().models
    (loaded,) = client.ps().models
    assert (card.model, loaded.name, loaded.context_length) == ("fake", "fake", 8192)
    assert card.digest == loaded.digest
    shown = client.show("fake")
    assert shown.template == TEMPLATE
    assert {"completion", "tools", "embedding"} == set(shown.capabilities)
    assert shown.modelinfo["penstock.context_length"] == 8192
    assert client.pull("fake").status == "success"
    assert [line.status for line in client.pull("fake", stream=True)] == ["success"]
    for refused, name in ((client.pull, "other"), (client.show, "other"), (client.delete, "fake")):
        with pytest.raises(ollama.ResponseError) as caught:
            refused(name)
        assert caught.value.status_code == 404


def test_errors(server: RunningServer, client: Any) -> None:
    """Guards against errors in another shape, at once, before the body, in a stream and without a key."""
    with pytest.raises(ollama.ResponseError, match="The model 'other' does not exist") as caught:
        client.chat(model="other", messages=[USER])
    assert caught.value.status_code == 404
    server.client.behaviour = Behaviour(fail_at=2, failure=RequestFailedError("it broke"))
    with pytest.raises(ollama.ResponseError, match="it broke") as caught:
        list(client.chat(**ASKED, stream=True, options={"num_predict": 9}))
    assert len(list(server.client.seen)) == 1
    with (
        ollama_client(server.url, "wrong") as other,
        pytest.raises(ollama.ResponseError, match="API key is missing or wrong") as caught,
    ):
        other.list()
    assert caught.value.status_code == 401
    server.client.overload = EngineOverloadedError("full", retry_after_s=1)
    try:
        with pytest.raises(ollama.ResponseError, match="full") as caught:
            client.generate(model="fake", prompt="Hi")
        assert caught.value.status_code == 429
    finally:
        server.client.overload = None


@pytest.mark.parametrize("keep_alive", [1e-45, 1e300, -1e-45, "1h30m", "-1", 10**20])
def test_every_keep_alive_is_a_time(keep_alive: float | str) -> None:
    """Guards against a number that is read as a text, whose exponent is no unit."""
    response, _, _ = posted("/api/chat", {"messages": [USER], "stream": False, "keep_alive": keep_alive})
    assert response.status_code == 200
