"""`penstock bench serve`: what it sends is what was asked for, and its figures are those of what came back."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidRequestError, ModelLoadError
from penstock_lab.bench.datasets import DATASETS, Dataset, Sample, Vocabulary, draw_samples
from penstock_lab.bench.http_client import HttpClient, HttpResponse
from penstock_lab.bench.outcomes import Load, Outcome, figures
from penstock_lab.bench.serving import BACKENDS, Target
from tests.server.fakes import FakeEngineClient
from tests.server.harness import running
from tests.test_cli import called

pytestmark = pytest.mark.covers("C21")
DEMO = Vocabulary("demo")
CONVERSATIONS = [
    {
        "conversations": [
            {"from": "human", "value": "Tell me a story about a fox."},
            {"from": "gpt", "value": "A fox ran away."},
        ]
    },
    {"conversations": [{"from": "human", "value": "No"}, {"from": "gpt", "value": "too short a question to be taken"}]},
    {"conversations": [{"from": "human", "value": "A question that nobody has answered"}]},
    {"other": 1},
    "rubbish",
]


def target(backend: str = "openai") -> Target:
    return Target(HttpClient("http://127.0.0.1:1", {}), backend, "m", {})


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + (json.dumps(event).encode() if event else b"[DONE]") + b"\n\n" for event in events)


STREAMS = {
    "openai": sse(
        {"choices": [{"text": "Once", "finish_reason": None}], "usage": None},
        {"choices": [{"text": "", "finish_reason": None}]},  # a token in mid-character
        {"choices": [{"text": " a", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
        None,
    ),
    "openai-chat": sse(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Once"}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
        None,
    ),
}


@given(st.sampled_from(sorted(BACKENDS)), st.data())
def test_tokens_are_counted_however_a_stream_is_cut(backend: str, data: st.DataObject) -> None:
    """Guards against an event that is lost or counted twice because the network cut it, and against counting roles."""
    stream = STREAMS[backend]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    parts = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    answer = HttpResponse(200, parts, [float(index) for index in range(len(parts))], is_whole=True)
    outcome = Outcome(3, -1.0)
    target(backend)._read(answer, outcome)
    assert (outcome.error, len(outcome.arrivals), outcome.output_len, outcome.prompt_len) == ("", 3, 4, 5)
    assert outcome.arrivals == sorted(outcome.arrivals)


@pytest.mark.parametrize(
    ("stream", "whole", "error"),
    [
        (STREAMS["openai"], False, "the connection ended in the middle of the answer"),
        (sse({"error": {"message": "out of luck"}}), True, "out of luck"),
        (sse(None), True, "no token"),
        (b"data: {rubbish\n\n", True, "not have OpenAI's format"),
        (b"", True, "no token"),
    ],
)
def test_what_breaks_off_is_a_failure(stream: bytes, whole: bool, error: str) -> None:
    """Guards against half an answer in the figures."""
    outcome = Outcome(3, -1.0)
    target()._read(HttpResponse(200, [stream], [0.0], is_whole=whole), outcome)
    assert error in outcome.error


class WithoutTexts(HttpClient):
    """A server of a model without a tokenizer, which shows the ids of its tokens to those who ask for them."""

    def __init__(self, *, shows_ids: bool) -> None:
        super().__init__("http://127.0.0.1:1", {})
        self.shows_ids, self.num_requests = shows_ids, 0

    async def request(self, method: str, route: str, body: bytes = b"") -> HttpResponse:
        self.num_requests += 1
        token: dict[str, Any] = {"text": "", "finish_reason": None, "token_ids": [7]}
        is_shown = self.shows_ids and json.loads(body).get("return_token_ids")
        ids = [{"choices": [token]}, {"choices": [{**token, "finish_reason": "length"}]}] if is_shown else []
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        parts = [sse(event) for event in [*ids, usage, None]]
        return HttpResponse(200, parts, [float(index) for index in range(len(parts))], is_whole=True)


@pytest.mark.parametrize("shows_ids", [True, False])
def test_tokens_without_a_text_are_counted_by_their_ids(*, shows_ids: bool) -> None:
    """Guards against a model without a tokenizer that cannot be measured, and against asking twice again and again."""
    client = WithoutTexts(shows_ids=shows_ids)
    server = Target(client, "openai", "m", {})
    for _ in range(2):
        outcome = asyncio.run(server.ask(Sample("x", 5, 2)))
        assert (len(outcome.arrivals), outcome.output_len) == ((2, 2) if shows_ids else (0, 2))
        assert ("without a tokenizer" in outcome.error) == (not shows_ids)
    assert client.num_requests == 3


def test_figures_are_those_of_the_outcomes() -> None:
    """Guards against vLLM's names with other meanings: failures count in nothing but `failed`."""
    outcomes = [
        Outcome(10, 0.0, 1.0, [0.25, 0.5, 1.0], 3),
        Outcome(30, 0.5, 2.0, [1.5, 2.0], 5),
        Outcome(7, 0.5, 0.75, [], 0, "status 500"),
        Outcome(1, 1.0, 2.0, [2.0], 1),
    ]
    found = figures(outcomes, Load(request_rate=2.0, goals={"ttft": 500.0, "tpot": 400.0}), [50, 99])
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, ["status 500"])
    assert (found["duration"], found["request_throughput"], found["output_throughput"]) == (2.0, 1.5, 4.5)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_token_throughput"]) == (41, 9, 25.0)
    assert found["request_goodput"] == 0.5
    assert found["p99_ttft_ms"] == pytest.approx(1000.0)
    assert found["std_ttft_ms"] == pytest.approx(math.sqrt((500**2 + 2 * 250**2) / 3))
    assert found["p99_tpot_ms"] == pytest.approx(125 + 0.99 * 250)
    assert found["p99_itl_ms"] == pytest.approx(500.0)
    assert found["p99_e2el_ms"] == pytest.approx(1490.0)
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["p50_ttft_ms"]) == (750.0, 1000.0, 1000.0)
    assert found["mean_tpot_ms"] == pytest.approx((375 + 125) / 2)
    assert (found["mean_itl_ms"], found["median_itl_ms"]) == (pytest.approx(1250 / 3), 500.0)
    assert found["mean_e2el_ms"] == pytest.approx(3500 / 3)
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, 5.0 / 2 + 1)
    nothing = figures([outcomes[2]], Load(), [99])
    assert (nothing["completed"], nothing["mean_ttft_ms"], nothing["request_goodput"]) == (0, None, None)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_have_the_rate_and_the_spread(burstiness: float) -> None:
    """Guards against a rate that is not the mean, and bursts that are none: gaps vary by 1 / sqrt(burstiness)."""
    load = Load(request_rate=8.0, burstiness=burstiness, seed=3)
    gaps = list(load.gaps(4000))
    assert gaps == list(load.gaps(4000))
    assert sum(gaps) == pytest.approx(500.0)
    spread = math.sqrt(sum((gap - 1 / 8) ** 2 for gap in gaps) / len(gaps)) * 8
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.15)
    assert list(Load().gaps(3)) == [0.0, 0.0, 0.0]


def test_samples_have_the_lengths_and_share_what_they_should() -> None:
    """Guards against prompts that hit a cache by accident, or miss it, and against other lengths than asked for."""
    plain = draw_samples(Dataset(input_len=40, output_len=7), DEMO, 6, 0, as_text=False)
    assert {(len(one.prompt), one.prompt_len, one.output_len) for one in plain} == {(40, 40, 7)}
    assert len({tuple(one.prompt[:8]) for one in plain}) == 6
    assert plain == draw_samples(Dataset(input_len=40, output_len=7), DEMO, 6, 0, as_text=False)
    grouped = draw_samples(Dataset("prefix_repetition", prefix_len=20, num_prefixes=2), DEMO, 6, 0, as_text=False)
    assert len({tuple(one.prompt[:20]) for one in grouped}) == 2
    assert len({tuple(one.prompt) for one in grouped}) == 6
    repetitive = draw_samples(Dataset("repetitive", input_len=50), DEMO, 2, 0, as_text=False)
    assert all(one.prompt[16:] == one.prompt[:-16] and len(one.prompt) == 50 for one in repetitive)
    varied = draw_samples(Dataset(input_len=40, output_len=10, range_ratio=0.5), DEMO, 200, 0, as_text=False)
    assert (min(one.prompt_len for one in varied), max(one.prompt_len for one in varied)) == (20, 60)
    assert {one.output_len for one in varied} == set(range(5, 16))
    texts = draw_samples(Dataset(input_len=12), DEMO, 2, 0, as_text=True)
    assert all(isinstance(one.prompt, str) and one.prompt for one in texts)


def test_conversations_give_prompts_and_lengths(tmp_path: Path) -> None:
    """Guards against a file whose entries differ from ShareGPT's in a detail, and against endless answers."""
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(CONVERSATIONS))
    samples = draw_samples(Dataset("sharegpt", str(file)), DEMO, 3, 0, as_text=True)
    answer = DEMO.tokenizer.encode("A fox ran away.", add_special_tokens=False)
    question = DEMO.tokenizer.encode("Tell me a story about a fox.")
    assert samples == [Sample("Tell me a story about a fox.", len(question), len(answer))] * 3
    for content, reason in (("[", "not JSON"), ("{}", "must be a list"), ("[]", "fitting length")):
        file.write_text(content)
        with pytest.raises(InvalidRequestError, match=reason):
            draw_samples(Dataset("sharegpt", str(file)), DEMO, 1, 0, as_text=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-url", "ftp://x"], "--base-url: 'ftp://x' is not a URL"),
        (["--base-url", "http://x:99999"], "--base-url: 'http://x:99999' is not a URL"),
        (["--backend", "tgi"], "--backend: 'tgi' is not allowed; it must be one of openai, openai-chat"),
        (["--dataset-name", "sonnet"], "it must be one of " + ", ".join(DATASETS)),
        (["--dataset-name", "sharegpt"], "--dataset-path: --dataset-name sharegpt needs it"),
        (["--request-rate", "0"], "--request-rate: 0.0 is not allowed"),
        (["--request-rate", "nan"], "--request-rate: nan is not allowed"),
        (["--goodput", "itl:5"], "'itl' is not allowed; it must be one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], '--goodput: "" is not a number'),
        (["--percentile-metrics", "ttfb"], "'ttfb' is not allowed"),
        (["--metric-percentiles", "101"], "--metric-percentiles: 101.0 is not allowed"),
        (["--num-prompts", "0"], "--num-prompts: must be 1 or more"),
        (["--header", "X"], "--header: 'X' is not NAME=VALUE"),
        (["--header", "X=a\r\nY: b"], "--header: a header is one line"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(words: list[str], message: str) -> None:
    """Guards against a run of minutes that ends with a complaint."""
    done = called("bench", "serve", "demo", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_server_is_measured(backend: str, tmp_path: Path) -> None:
    """Guards against figures that are not the server's: tokens, lengths and requests are known here."""
    plot, model = tmp_path / "plot.svg", "demo"
    if backend == "openai":  # prompts of ids need no tokenizer
        (tmp_path / "config.json").write_text('{"vocab_size": 256}')
        model = str(tmp_path)
    with running(FakeEngineClient()) as server:
        words = ["bench", "serve", model, "--base-url", server.url, "--backend", backend, "--num-prompts", "6"]
        words += ["--input-len", "9", "--output-len", "3", "--ignore-eos", "--max-concurrency", "2"]
        done = called(*words, "--json", "-")
        swept = called(*words, "--request-rate", "500", "inf", "--plot", str(plot), "--goodput", "ttft:60000")
        refused = called(*words, "--extra-body", '{"top_p": 7}')
        _, params, _ = server.client.seen[-1]
    assert (done.returncode, swept.returncode) == (0, 0), done.stderr + swept.stderr
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 18)
    assert (found["model_id"], found["endpoint"]) == (server.client.model_info.model, BACKENDS[backend])
    assert found["max_concurrent_requests"] <= 2
    assert found["total_input_tokens"] == 54 or backend == "openai-chat"
    assert swept.stdout.count("Serving Benchmark Result") == 2
    assert "By request rate" in swept.stdout
    assert plot.read_text().startswith("<?xml")
    assert (params.ignore_eos, params.max_tokens, params.temperature) == (True, 3, 0.0)
    assert refused.returncode == 1
    assert "the first request failed" in refused.stderr
    assert "top_p" in refused.stderr


def test_no_server_is_one_line() -> None:
    """Guards against a traceback, and against figures of a server that is not there."""
    done = called("bench", "serve", "demo", "--base-url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "the server cannot be reached" in done.stderr
    with pytest.raises(ModelLoadError):
        Vocabulary("/nowhere")
