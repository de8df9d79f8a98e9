"""The official openai client, and rubbish, against `penstock serve` with the demo model: real processes and sockets."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import msgspec
import openai
import pytest

from penstock_lab.prove.servers import QUICK
from tests.official import official_client
from tests.server.harness import get, stream, wait_until
from tests.test_values import BAD_SAMPLING

pytestmark = pytest.mark.covers("C20", "F38")
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
# Fields that the HTTP API does not have, or where null means "not given".
NOT_OVER_HTTP = {"detokenize", "output_kind", "bad_words_token_ids", "dry_sequence_breaker_ids"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0", "--served-model-name", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline()
        found = next(word for word in line.split() if word.startswith("http://"))
        assert get(f"{found}/health").status_code == 200  # the line is printed when the engine is ready
        yield found
        status = get(f"{found}/status").json()
        assert status["engine"]["restarts"] == 0
        assert status["kv_blocks"]["free"] == status["kv_blocks"]["total"]
        assert (status["running"], status["waiting"]) == (0, 0)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with official_client(url) as made:
        yield made


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 1024
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=12, temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint.startswith("penstock-")


def test_completions_of_several_prompts_and_choices_are_numbered(client):
    prompts = ["Once upon a time", "One day"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=6, seed=1, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model="tiny", prompt=[[1, 445, 426], [1]], max_tokens=3)
    assert len(ids.choices) == 2


def test_chat_knows_its_world(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert "7" in answer.choices[0].message.content


def test_chat_stream_with_usage_is_the_whole_answer(client):
    whole = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, stream=True, stream_options=options)
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_three_choices_differ_and_repeat_by_seed(client):
    asked = {"model": "tiny", "prompt": "Once upon a time", "n": 3, "max_tokens": 16, "seed": 11, "temperature": 1.0}
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    chunks = client.completions.create(**asked, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
    legacy = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=3, logprobs=2, echo=True)
    logprobs = legacy.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens[1:]) in legacy.choices[0].text
    assert len(logprobs.text_offset) == len(logprobs.tokens)


def test_stop_strings_are_never_shown(client):
    asked = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[20:27]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    chunks = client.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == stopped.text


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.completions.create(model="huge", prompt="x"), openai.NotFoundError),
        (lambda c: c.completions.create(model="tiny", prompt=""), openai.BadRequestError),
        (lambda c: c.completions.create(model="tiny", prompt=[10**9]), openai.BadRequestError),
        (lambda c: c.completions.create(model="tiny", prompt="x" * 100_000), openai.BadRequestError),
        (lambda c: c.chat.completions.create(model="tiny", messages=[]), openai.BadRequestError),
        (lambda c: c.chat.completions.create(model="tiny", messages=CHAT, temperature=9e9), openai.BadRequestError),
        (lambda c: c.embeddings.create(model="tiny", input=""), openai.BadRequestError),
        (lambda c: c.responses.retrieve("resp_0"), openai.NotFoundError),
    ],
)
def test_errors_are_what_the_client_expects(client, call, error):
    with pytest.raises(error):
        call(client)


ROUTES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": CHAT}}


@pytest.mark.parametrize("route", ROUTES)
def test_every_bad_value_over_http_is_a_400_that_names_the_field(url, route):
    """And the engine process that got them all is still the same one."""
    pid = get(f"{url}/status").json()["engine"]["pid"]
    chat = route.endswith("chat/completions")
    with httpx.Client(base_url=url, **QUICK) as http:
        for name, values in BAD_SAMPLING.items():
            field = "top_logprobs" if chat and name == "logprobs" else name
            more = {"logprobs": True} if field == "top_logprobs" else {}
            for value in values if name not in NOT_OVER_HTTP else ():
                if value is None or (name, value) == ("max_tokens", -1):  # over HTTP both mean "not given"
                    continue
                fields = {"model": "tiny", "max_tokens": 16, **ROUTES[route], **more, field: value}
                text = json.dumps(fields, default=str)
                answer = http.post(route, content=text, headers={"Content-Type": "application/json"})
                assert answer.status_code == 400, (field, value, answer.text)
                error = answer.json()["error"]
                if is_json(text):
                    assert (error["param"] or "").startswith(field), (field, value, error)
                else:
                    assert "JSON" in error["message"]
    assert get(f"{url}/status").json()["engine"]["pid"] == pid
    os.kill(pid, 0)


def is_json(text: str) -> bool:
    """Without NaN and Infinity, which Python's json writes and no JSON reader has to take."""
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def test_a_client_that_goes_away_is_not_computed_for(url):
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: not get(f"{url}/status").json()["running"])


def test_metrics_and_page(url):
    metrics = get(f"{url}/metrics").text
    assert "penstock_generation_tokens_total" in metrics
    page = get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://127.0.0.1", "").replace("http://www.w3.org", "")
