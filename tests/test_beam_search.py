"""Beam search as users ask for it: equal to Transformers' generate(num_beams=...), with the same bits whatever happens
to it, offline, in asyncio programs and over HTTP."""

import asyncio
import os
import random
import signal
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock import (
    LLM,
    AsyncLLM,
    BeamSearchOutput,
    BeamSearchParams,
    InvalidRequestError,
    NotSupportedError,
    RequestOutput,
    SamplingParams,
)
from penstock.assembly import BuiltEngine, build_engine
from penstock.cli.main import main
from penstock.client.input_processor import PromptRequest
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineOutput, EngineRequest, Hypothesis
from penstock_lab.prove.scripted import ScriptedServer
from tests.hf_models import MAKERS, random_ids
from tests.kernels.packed import levels

KERNELS = "cpu" if levels() else "reference"
ENDS = [2, 7]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": ENDS,
}
PADDING = 1
STORY = "Once upon a time"
PARAMS = BeamSearchParams(beam_width=3, max_tokens=40, length_penalty=0.8, ignore_eos=True)


def build(path: Path, **options: Any) -> BuiltEngine:
    wanted = {"dtype": "float32", "kernels": KERNELS, "threads": 1, "max_model_len": 96, "max_num_seqs": 48}
    return build_engine(EngineConfig.from_options(model=str(path), **wanted | options))


def ask(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[Hypothesis]]:
    """What searches find, asked together."""
    outputs: dict[str, EngineOutput] = {}
    for item in requests:
        engine.add_request(item)
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.check_integrity()
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
    assert all(output.error is None for output in outputs.values())
    return {key: output.hypotheses or [] for key, output in outputs.items()}


# --- equal to Transformers --------------------------------------------------------------------------------------------


def random_searches(seed: int, count: int) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """Parameters, and ten prompts of one length for each."""
    source, made = random.Random(seed), []
    for _ in range(count):
        fields = {
            "n": source.randint(2, 6),
            "max_tokens": source.randint(1, 12),
            "length_penalty": source.choice([0.0, 0.5, 1.0, 1.3, 2.0, -0.7]),
            "early_stopping": source.choice([True, False, "never"]),
            "ignore_eos": source.random() < 0.2,
        }
        length = source.choice([3, 15, 16, 17, 29])
        made.append((fields, [[source.randrange(8, 64) for _ in range(length)] for _ in range(10)]))
    return made


def generate(model: Any, fields: dict[str, Any], prompts: list[list[int]]) -> list[list[tuple[list[int], float]]]:
    """The sequences that Transformers finds for each prompt, without prompt and padding, and their scores."""
    ids, width = torch.tensor(prompts), fields["n"]
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=fields["max_tokens"],
            length_penalty=fields["length_penalty"],
            early_stopping=fields["early_stopping"],
            eos_token_id=None if fields["ignore_eos"] else ENDS,
            pad_token_id=PADDING,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [_to_its_end(output, fields["ignore_eos"]) for output in found.sequences[:, ids.shape[1] :].tolist()]
    pairs = list(zip(outputs, found.sequences_scores.tolist(), strict=True))
    return [pairs[start : start + width] for start in range(0, len(pairs), width)]


def _to_its_end(output: list[int], ignore_eos: bool) -> list[int]:
    """Without the padding after an end token."""
    end = next((i + 1 for i, token in enumerate(output) if token in ENDS and not ignore_eos), len(output))
    assert set(output[end:]) <= {PADDING}
    return output[:end]


@pytest.mark.covers("C12", "C17", "C24")
@pytest.mark.parametrize(("name", "kernels"), [("llama", KERNELS), ("mistral", "reference")])
def test_200_random_searches_find_what_transformers_finds(name: str, kernels: str, tmp_path: Path) -> None:
    """Guards against any other choice of continuations, end, penalty or order. Token for token; all cases of a model
    run as one crowd of 48 rows. Mistral's window of 16 tokens is shorter than most of its sequences."""
    model, path = MAKERS[name](tmp_path, **SHAPE)
    searches = random_searches(seed=len(name), count=10)
    engine = build(path, kernels=kernels).engine
    requests = [
        EngineRequest(f"{group} {index}", prompt, SamplingParams(use_beam_search=True, **fields))
        for group, (fields, prompts) in enumerate(searches)
        for index, prompt in enumerate(prompts)
    ]
    found, num_ended = ask(engine, requests), 0
    for group, (fields, prompts) in enumerate(searches):
        for index, wanted in enumerate(generate(model, fields, prompts)):
            ours = found[f"{group} {index}"]
            assert [item.token_ids for item in ours] == [ids for ids, _ in wanted], (fields, prompts[index])
            for item, (ids, score) in zip(ours, wanted, strict=True):
                got = item.cumulative_logprob / len(ids) ** fields["length_penalty"]
                assert got == pytest.approx(score, rel=1e-5, abs=1e-5)
                num_ended += item.finish_reason == "stop"
    assert num_ended > 50  # else the ends would prove nothing


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("C6", "C17")
@pytest.mark.parametrize("form", [{}, {"kv_cache_dtype": "int8"}], ids=["float32", "int8 cache"])
def test_the_same_bits_in_a_crowd_with_a_cached_prefix_and_preempted(form: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a search whose log-probabilities depend on other rows, on blocks that were copied or found, or on
    a preemption, so that a near tie is decided otherwise."""
    _, path = MAKERS["llama"](tmp_path, **SHAPE)
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=12, logprobs=3, early_stopping="never")
    prompts = [random_ids(length, seed, vocab_size=64) for seed, length in enumerate((5, 33, 40))]
    prompts.append([*prompts[2][:32], 9, 10, 11])

    def requests() -> list[EngineRequest]:
        return [EngineRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)]

    alone = build(path, enable_prefix_caching=False, **form).engine
    expected = {}
    for item in requests():
        expected |= ask(alone, [item])
    crowd = build(path, max_num_batched_tokens=24, threads=2, **form).engine
    assert ask(crowd, requests()) == expected
    assert ask(crowd, requests()) == expected
    assert crowd.stats().num_cached_tokens_total >= 32 + 32 + 32
    probe = build(path, **form)
    few = 7 * probe.cache_bytes // probe.engine.kv_cache.num_blocks
    for options in ({"kv_cache_memory_bytes": few}, {"block_size": 96, "max_num_seqs": 3}):
        engine = build(path, enable_prefix_caching=False, **form, **options).engine
        assert ask(engine, requests()) == expected
        assert engine.stats().num_preemptions_total or "kv_cache_memory_bytes" not in options


# --- LLM and AsyncLLM -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(model="demo", threads=1, max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> BeamSearchOutput:
    (output,) = llm.beam_search([STORY], PARAMS)
    return output


@pytest.mark.covers("C17")
def test_the_shape_of_vllm(llm: LLM, expected: BeamSearchOutput) -> None:
    """Guards against sequences in another order, or without what vLLM's have: prompt, text, sum."""
    ids, tokenizer = llm.client.tokenizer.encode(STORY), llm.client.tokenizer
    assert len(expected.sequences) == 3
    for sequence in expected.sequences:
        assert sequence.tokens[: len(ids)] == ids
        assert sequence.text == tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        assert STORY in sequence.text
        steps = zip(sequence.logprobs, sequence.tokens[len(ids) :], strict=True)
        assert sequence.cum_logprob == pytest.approx(sum(entry[token].logprob for entry, token in steps), abs=1e-3)
        assert all(len(entry) >= 6 for entry in sequence.logprobs)
    sums = [sequence.cum_logprob for sequence in expected.sequences]  # of one length
    assert sums == sorted(sums, reverse=True)
    assert len({tuple(sequence.tokens) for sequence in expected.sequences}) == 3
    (short,) = llm.beam_search([STORY], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    greedy = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))
    best = short.sequences[0].cum_logprob
    assert best is not None
    assert best >= greedy[0].outputs[0].cumulative_logprob - 1e-3  # what a search is for; over long texts it may lose


def test_one_beam_is_greedy(llm: LLM) -> None:
    """Guards against a search with one beam that is anything else."""
    (found,) = llm.beam_search(STORY, BeamSearchParams(1, 30))
    (greedy,) = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=30))
    assert found.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": 9.0}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1.0}, "early_stopping"),
    ],
)
def test_parameters_out_of_range(fields: dict[str, Any], param: str) -> None:
    """Guards against values that are accepted and mean nothing, and searches without bounds."""
    with pytest.raises(InvalidRequestError) as error:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **fields})
    assert error.value.param == param


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 1.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_tokens": 2},
        {"stop": "a"},
        {"stop_token_ids": [5]},
        {"bad_words": ["a"]},
        {"logit_bias": {5: 1.0}},
        {"logits_processors": ["x"]},
        {"prompt_logprobs": 1},
    ],
)
def test_constraints_are_refused_by_name(field: dict[str, Any]) -> None:
    """Guards against a constraint that a search takes and does not keep."""
    (name,) = field
    with pytest.raises(NotSupportedError) as error:
        SamplingParams(n=2, use_beam_search=True, **field)
    assert error.value.param == name


@pytest.mark.covers("C17")
async def test_after_the_death_of_the_engine(
    expected: BeamSearchOutput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a search that is lost with its engine, or begins anew and finds something else; against AsyncLLM
    finding another answer than LLM; and against a record without the copies of blocks, which replays to other bits."""
    async with AsyncLLM(model="demo", max_num_seqs=8, record_dir=str(tmp_path)) as llm:
        steps = llm.status().stats.num_steps_total
        task = asyncio.create_task(llm.beam_search(STORY, PARAMS))
        while llm.status().stats.num_steps_total < steps + 20:
            await asyncio.sleep(0.001)
        assert not task.done()
        os.kill(llm.status().pid or 0, signal.SIGKILL)
        assert await task == expected
        assert llm.status().restarts == 1
        assert llm.status().stats.num_running == 0
    (file,) = tmp_path.iterdir()
    if levels():
        assert main(["replay", str(file), "--json"]) == 0
        report = msgspec.json.decode(capsys.readouterr().out)
        assert report["passed"]
        assert report["computed"]
        assert report["tokens"] > 30


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Scripted:
    """The application on a scripted engine; each call gets its whole answer."""

    def __init__(self) -> None:
        self.server = ScriptedServer("demo")

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        headers = [(b"content-type", b"application/json")]
        answer = asyncio.run(self.server.call("POST", path, msgspec.json.encode(body), headers))
        assert self.server.client.leftovers() is None
        return answer.status, answer.body

    def complete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return msgspec.json.decode(answer, type=dict)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": STORY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": STORY}]},
}
SEARCH = {"use_beam_search": True, "n": 3, "max_tokens": 6, "length_penalty": 0.5, "early_stopping": "never"}


@pytest.mark.parametrize("path", BODIES)
def test_over_http_whole_and_as_a_stream(path: str) -> None:
    """Guards against choices that are not the n best, a usage that leaves beams out, and a stream that is refused."""
    scripted = Scripted()
    body = {**BODIES[path], **SEARCH, "return_token_ids": True, "seed": 5}  # which changes what the script says
    answer = scripted.complete(path, body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    status, events = scripted.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert status == 200
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    chunks = [msgspec.json.decode(line) for line in lines]
    assert chunks[-1]["usage"] == answer["usage"]
    for choice in choices:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token for part in parts for token in part.get("token_ids") or []] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_logprobs_over_http() -> None:
    """Guards against log-probabilities of another beam than the one that is shown."""
    (choice, _, _) = Scripted().complete("/v1/completions", {"prompt": STORY, **SEARCH, "logprobs": 2})["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(value in [-k / 8 for k in range(1, 65)] for value in choice["logprobs"]["token_logprobs"])
    assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    ("field", "param", "code"),
    [
        ({"resumable": True, "stream": True}, "resumable", None),
        ({"top_p": 0.9}, "top_p", "not_implemented"),
        ({"temperature": 0.7}, "temperature", None),
        ({"n": 100}, "n", None),
        ({"early_stopping": "sometimes"}, "early_stopping", None),
        ({"best_of": 128}, "best_of", None),
    ],
)
def test_what_a_search_over_http_cannot_have(field: dict[str, Any], param: str, code: str | None) -> None:
    """Guards against parameters that a search takes and ignores."""
    status, answer = Scripted().post("/v1/completions", {"prompt": STORY, **SEARCH, **field})
    error = msgspec.json.decode(answer)["error"]
    assert (status, error["param"]) == (400, param)
    assert code is None or error["code"] == code


def test_without_a_search_its_parameters_mean_nothing_and_are_refused() -> None:
    """Guards against a forgotten use_beam_search that goes unnoticed."""
    for name, value in (("length_penalty", 0.5), ("early_stopping", True)):
        with pytest.raises(InvalidRequestError, match="only allowed with use_beam_search"):
            SamplingParams(**{name: value})


def test_a_model_that_samples_by_default_searches_all_the_same() -> None:
    """Guards against the temperature of a generation_config.json that makes every search an error."""
    scripted = Scripted()
    client = scripted.server.client
    client.model_info = replace(client.model_info, default_sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 40})
    assert scripted.complete("/v1/completions", {"prompt": STORY, **SEARCH})["choices"]


async def test_leaving_ends_the_search() -> None:
    """Guards against beams that nobody waits for any more."""
    server = ScriptedServer("demo")
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=60, ignore_eos=True)
    async with aclosing(server.client.generate(PromptRequest.of(STORY, params))) as outputs:
        pending: asyncio.Task[RequestOutput] = asyncio.ensure_future(anext(outputs))
        while not server.client.engine.stats().num_running:
            await asyncio.sleep(0)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    assert server.client.leftovers() is None
