"""POST /v1/completions, field by field."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from penstock.errors import EngineDeadError, RequestFailedError
from penstock.server.generation import merged
from tests.server.fakes import BOS, Behaviour, FakeEngineClient
from tests.server.harness import app_client, running, send

PATH = "/v1/completions"


def complete(body: dict[str, Any], fake: FakeEngineClient | None = None) -> dict[str, Any]:
    response = app_client(fake).post(PATH, json={"max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(path: str, body: dict[str, Any], fake: FakeEngineClient | None = None) -> list[dict[str, Any]]:
    response = app_client(fake).post(path, json={"max_tokens": 4, **body, "stream": True})
    assert response.status_code == 200, response.text
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_exact_shape() -> None:
    """Guards against a field too many, too few or misspelt."""
    answer = complete({"prompt": "a"})
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "seed"}
    assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_four_kinds_of_prompt(prompt: Any, ids: list[list[int]], stream: bool) -> None:
    """Guards against a kind of prompt taken for another, and choices that are not numbered prompt * n + i."""
    fake = FakeEngineClient()
    body = {"prompt": prompt, "n": 2, "seed": 1}
    answers = chunks(PATH, body, fake) if stream else [complete(body, fake)]
    assert sorted(seen for seen, _, _ in fake.seen) == sorted(ids)
    indices = [choice["index"] for answer in answers for choice in answer["choices"]]
    assert set(indices) == set(range(2 * len(ids)))
    if not stream:
        assert indices == sorted(indices)
        assert answers[0]["usage"]["completion_tokens"] == 4 * 2 * len(ids)
        assert answers[0]["seed"] == ([1] * len(ids) if len(ids) > 1 else 1)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        [1.5],
        [True],
        [[True]],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [[[1]]],
        [None],
        {"a": 1},
        None,
        5,
        [-1],
        [300],
        [2**40],
        [2**80],
        [1] * 512,
        "a" * 5000,
        [["a"]],
        ["a"] * 30_000,
        [[1]] * 30_000,
    ],
)
def test_bad_prompts(prompt: Any) -> None:
    """Guards against empty prompts (CVE-2024-8768), ids outside the vocabulary, and 30,000 prompts in one call
    (CVE-2026-73559)."""
    fake = FakeEngineClient()
    response = app_client(fake).post(PATH, json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not fake.seen


def test_prompt_that_fills_the_context() -> None:
    """Guards against a code that clients cannot recognise, and against an off-by-one at the edge of the context."""
    client = app_client()
    error = client.post(PATH, json={"prompt": [1] * 512}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert client.post(PATH, json={"prompt": [1] * 511}).json()["usage"]["completion_tokens"] == 1


def test_the_work_for_an_output_does_not_grow_with_the_prompts() -> None:
    """Guards against a call of many prompts that looks at all of them whenever one has an output: on the event loop."""

    class Counted(asyncio.Task[Any]):
        num_callbacks = 0

        def add_done_callback(self, *args: Any, **options: Any) -> None:
            Counted.num_callbacks += 1
            super().add_done_callback(*args, **options)

    async def stream(index: int) -> AsyncGenerator[Any, None]:
        for number in range(10):
            for _ in range(1 + (index + number) % 50):  # so that they come one by one
                await asyncio.sleep(0)
            yield "output"

    async def scenario() -> int:
        asyncio.get_running_loop().set_task_factory(lambda loop, work, **more: Counted(work, loop=loop, **more))
        return len([item async for item in merged([*map(stream, range(50))], lambda: 9.0)])

    assert asyncio.run(scenario()) == 500
    assert Counted.num_callbacks < 2000


def test_too_many_choices() -> None:
    """Guards against prompts * n getting out of hand although each alone is allowed."""
    client = app_client()
    assert client.post(PATH, json={"prompt": ["a"] * 100, "n": 3}).json()["error"]["param"] == "prompt"
    assert client.post(PATH, json={"prompt": ["a"] * 64, "n": 4, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(stream: bool) -> None:
    """Guards against the shape that evaluation harnesses sum up: the first prompt token has no log-probability, and
    the lists run on through the answer."""
    body = {"prompt": [97, 98], "echo": True, "logprobs": 1, "max_tokens": 2, "seed": 3}
    parts = [answer["choices"][0] for answer in (chunks(PATH, body) if stream else [complete(body)])]
    text = "".join(part["text"] for part in parts)
    joined = {
        name: [item for part in parts for item in part["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert text.startswith("ab")
    assert joined["tokens"] == list(text)
    assert joined["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert joined["top_logprobs"][0] is None
    assert joined["top_logprobs"][1] == {"b": -0.5, "c": -0.1}
    assert joined["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("resumable", [False, True])
def test_prompts_alone_are_scored(stream: bool, logprobs: int | None, resumable: bool) -> None:
    """Guards against an evaluation that counts a generated token: max_tokens: 0 with echo returns the prompts alone."""
    body = {
        "prompt": ["abc", "d"],
        "n": 2,
        "echo": True,
        "max_tokens": 0,
        "logprobs": logprobs,
        "return_token_ids": True,
    }
    for behaviour in (Behaviour(), Behaviour(text="")):  # the second ends with its first token
        with running(FakeEngineClient(behaviour)) as server:
            options = {"stream_options": {"include_usage": True}, "resumable": resumable} if stream else {}
            answer = send(f"{server.url}{PATH}", json={**body, **options, "stream": stream})
            assert answer.status_code == 200, answer.text
            whole = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            parts = whole if stream else [answer.json()]
            assert server.client.num_tokens > 0
        choices = sorted((choice for part in parts for choice in part["choices"]), key=lambda choice: choice["index"])
        texts = ["<s>abc", "<s>abc", "<s>d", "<s>d"] if logprobs is not None else ["abc", "abc", "d", "d"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [(choice["finish_reason"], choice["token_ids"]) for choice in choices] == [("length", [])] * 4
        if logprobs is None:
            assert [choice["text"] for choice in choices] == texts
        else:
            assert ["".join(choice["logprobs"]["tokens"]) for choice in choices] == texts
            first = choices[0]["logprobs"]
            assert [len(first[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [4] * 4
            assert first["token_logprobs"][0] is None
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 0, 6)


def test_prompts_alone_fail_as_others_do() -> None:
    """Guards against an engine's failure that looks like an empty answer, and against values that contradict."""
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}
    for failure in (RequestFailedError("lost"), EngineDeadError("dead")):
        response = app_client(FakeEngineClient(Behaviour(failure=failure))).post(PATH, json=body)
        assert response.status_code >= 500
    wrong: dict[str, dict[str, Any]] = {
        "max_tokens": {"echo": False}, "min_tokens": {"min_tokens": 1}, "use_beam_search": {"use_beam_search": True},
    }  # fmt: skip
    for param, fields in wrong.items():
        response = app_client().post(PATH, json={**body, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_echo_alone() -> None:
    """Guards against an echo that computes log-probabilities that were not requested, or changes the prompt's text."""
    fake = FakeEngineClient()
    choice = complete({"prompt": "h\u00e9 ", "echo": True}, fake)["choices"][0]
    assert choice["text"].startswith("h\u00e9 ")
    assert choice["logprobs"] is None
    assert fake.seen[0][1].prompt_logprobs is None


def test_text_offset_counts_characters() -> None:
    """Guards against offsets that count bytes or tokens: a character of two tokens counts once."""
    fake = FakeEngineClient(Behaviour(text="\u00e9\u20acx"))
    choice = complete({"prompt": "a", "logprobs": 0, "max_tokens": 10}, fake)["choices"][0]
    assert choice["text"] == "\u00e9\u20acx"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3]
    assert len(choice["logprobs"]["tokens"]) == 7


def test_no_half_characters_in_a_stream() -> None:
    """Guards against chunks without text for the tokens that do not complete a character."""
    parts = chunks(PATH, {"prompt": "a", "max_tokens": 10}, FakeEngineClient(Behaviour(text="\u00e9\u20acx")))
    assert [part["choices"][0]["text"] for part in parts] == ["\u00e9", "\u20ac", "x", ""]


def test_tokens_as_ids() -> None:
    """Guards against alternatives that are indistinguishable because they have the same text."""
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(body)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{choice['token_ids'][0]}"]
    assert choice["prompt_token_ids"] == [BOS, 97]


def test_prompt_logprobs() -> None:
    """Guards against vLLM's shape being changed: null first, then objects by token id."""
    choice = complete({"prompt": "ab", "prompt_logprobs": 0})["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"}},
        {"98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"}},
    ]


def test_prompt_without_special_tokens() -> None:
    """Guards against special tokens in the prompt although the request wants none."""
    fake = FakeEngineClient()
    complete({"prompt": "a", "add_special_tokens": False}, fake)
    assert fake.seen[0][0] == [97]


def test_continuous_usage() -> None:
    """Guards against load generators that count tokens by the usage of each chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(PATH, {"prompt": "a", "stream_options": options})
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 4]


def test_fields_reach_sampling_params() -> None:
    """Guards against a field that is accepted and then forgotten."""
    fake = FakeEngineClient()
    given = {
        "n": 2,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "seed": 2**63,
        "stop": ["\u00e4"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logit_bias": {"7": 5, "8": -1.5},
        "bad_words": ["no"],
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 2,
        "max_tokens": 4,
    }
    complete({"prompt": "a", **given}, fake)
    params = fake.seen[0][1]
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == ({7: 5, 8: -1.5} if name == "logit_bias" else expected), name


def test_defaults_come_from_the_model() -> None:
    """Guards against a generation_config.json that is ignored, or that beats what the request says."""
    fake = FakeEngineClient()
    object.__setattr__(fake.info, "default_sampling", {"temperature": 0.6, "top_k": 20})
    complete({"prompt": "a", "top_k": 5, "temperature": None}, fake)
    assert (fake.seen[0][1].temperature, fake.seen[0][1].top_k) == (0.6, 5)


def test_labels_change_nothing() -> None:
    """Guards against refusing what every client sends, and against labels that reach the engine."""
    plain = complete({"prompt": "a", "seed": 1})
    labels = {"user": "me", "metadata": {"run": "1"}, "request_id": "x", "session_id": "y", "safety_identifier": "z"}
    assert complete({"prompt": "a", "seed": 1, **labels})["choices"] == plain["choices"]
