"""The official client works unchanged, over real sockets."""

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.errors import EngineOverloadedError, RequestFailedError
from penstock.server.options import ServerOptions
from tests.official import official_client
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, running

USER: Any = [{"role": "user", "content": "Hi"}]
KEY = "sk-test"
pytestmark = pytest.mark.covers("F38")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeEngineClient(), ServerOptions(port=0, api_key=KEY, access_log=False)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.client.behaviour = Behaviour()
    with official_client(server.url, KEY) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    """Guards against a model list that the client cannot page through, or a card without its fields."""
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "penstock")
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("../../etc/passwd")


def test_completion(client: openai.OpenAI) -> None:
    """Guards against a wrong default of max_tokens, and usage that does not add up."""
    answer = client.completions.create(model="fake", prompt="Once", temperature=0)
    assert (answer.object, answer.model, answer.system_fingerprint) == ("text_completion", "fake", "fp-fake")
    assert len(answer.choices[0].text) == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 16, 21)


def test_chat(client: openai.OpenAI) -> None:
    """Guards against a chat answer cut at the completions' 16 tokens, and against fields outside `message`."""
    answer = client.chat.completions.create(model="fake", messages=USER, max_completion_tokens=20)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content or "") == 20
    assert answer.choices[0].logprobs is None
    rest = client.chat.completions.create(model="fake", messages=USER)
    assert rest.usage is not None
    assert rest.usage.total_tokens == 512
    assert rest.usage.prompt_tokens_details is not None
    assert rest.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    """Guards against a stream without a role, with two usages, or whose text differs from the whole answer's."""
    whole = client.chat.completions.create(model="fake", messages=USER, max_tokens=12, seed=7)
    with client.chat.completions.create(
        model="fake", messages=USER, max_tokens=12, seed=7, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    *texts, last, usage = chunks
    assert (texts[0].choices[0].delta.role, texts[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole.choices[0].message.content
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_stream(client: openai.OpenAI) -> None:
    """Guards against chunks that do not join to the whole text, and usage where none was asked for."""
    whole = client.completions.create(model="fake", prompt="a", seed=3)
    with client.completions.create(model="fake", prompt="a", seed=3, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices_repeat_by_seed(client: openai.OpenAI, stream: bool) -> None:
    """Guards against choices that are copies of one another, or that do not repeat with the seed."""
    first, again = (_three(client, stream), _three(client, stream))
    assert first == again
    assert len(set(first.values())) == 3


def _three(client: openai.OpenAI, stream: bool) -> dict[int, str]:
    if not stream:
        answer = client.chat.completions.create(model="fake", messages=USER, n=3, seed=5, max_tokens=9)
        return {choice.index: choice.message.content or "" for choice in answer.choices}
    texts = dict.fromkeys(range(3), "")
    with client.chat.completions.create(model="fake", messages=USER, n=3, seed=5, max_tokens=9, stream=True) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    return texts


def test_seed_comes_back(client: openai.OpenAI) -> None:
    """Guards against an answer that cannot be repeated because its seed is unknown."""
    first = client.chat.completions.create(model="fake", messages=USER, max_tokens=9)
    assert first.model_extra is not None
    again = client.chat.completions.create(model="fake", messages=USER, max_tokens=9, seed=first.model_extra["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_stop(client: openai.OpenAI) -> None:
    """Guards against a stop string that is shown, or a finish reason of "length" after it."""
    whole = client.completions.create(model="fake", prompt="a", seed=3).choices[0].text
    cut = client.completions.create(model="fake", prompt="a", seed=3, stop=[whole[4:6], "never"]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(whole[4:6])], "stop")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    """Guards against the chosen token missing, more alternatives than asked for, and -inf, which is no JSON."""
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for place, letter in zip(logprobs.content, answer.choices[0].message.content or "", strict=True):
        assert (place.token, place.logprob, place.bytes) == (letter, -0.5, [ord(letter)])
        assert [top.logprob for top in place.top_logprobs] == [-0.1, -0.5, -9999.0]
    one = client.chat.completions.create(model="fake", messages=USER, max_tokens=1, logprobs=True, top_logprobs=1)
    assert one.choices[0].logprobs is not None
    assert [len(place.top_logprobs) for place in one.choices[0].logprobs.content or []] == [1]


def test_errors_have_their_classes(server: RunningServer, client: openai.OpenAI) -> None:
    """Guards against statuses and codes that the client's exceptions do not carry."""
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=USER, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.post("/chat/completions/render", body={}, cast_to=object)
    assert missing.value.code == "not_implemented"
    server.client.behaviour = Behaviour(failure=EngineOverloadedError("the queue is full", retry_after_s=2.5))
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="fake", prompt="a")
    assert full.value.response.headers["retry-after"] == "3"


def test_error_within_a_stream_raises(server: RunningServer, client: openai.OpenAI) -> None:
    """Guards against a failure in mid-stream that looks like a normal end."""
    server.client.behaviour = Behaviour(failure=RequestFailedError("numbers went bad"), fail_at=3)
    with client.completions.create(model="fake", prompt="a", stream=True) as stream:
        assert all(chunk.choices[0].text for chunk in itertools.islice(stream, 3))
        with pytest.raises(openai.APIError, match="numbers went bad"):
            next(stream)
