"""`--load-format mock`, and the scripted executor under it: servers and clients are tested without a model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import LLM, InvalidRequestError, NotSupportedError, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import EngineError
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock_lab.bench.meter import StepMeter
from penstock_lab.convert.pack import convert_model
from penstock_lab.mock import next_token
from tests.fakes_engine import ScriptedExecutor
from tests.hf_models import make_mistral

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", load_format="mock", max_num_seqs=4, max_num_batched_tokens=32, seed=3) as made:
        yield made


@pytest.mark.covers("J23")
def test_an_engine_without_a_model(llm: LLM) -> None:
    """Guards against a mock that answers otherwise than an engine does: seeds, choices, log-probabilities, a crowd and
    the prefix cache behave as with a model, and every block is accounted for."""
    prompts = ["Once upon a time " * 6 + f"there were {count} foxes" for count in range(12)]
    params = [SamplingParams(n=2, seed=seed, max_tokens=12, logprobs=2) for seed in range(12)]
    crowd = llm.generate(prompts, params)
    for prompt, item, output in zip(prompts, params, crowd, strict=True):
        first, second = output.outputs
        assert first.token_ids != second.token_ids
        assert first.text
        assert first.logprobs is not None
        assert [len(position) for position in first.logprobs] == [3] * len(first.token_ids)
        assert llm.generate(prompt, item)[0].outputs == output.outputs
    assert llm.generate(prompts[0], SAMPLED)[0].seed != llm.generate(prompts[0], SAMPLED)[0].seed
    assert llm.built.engine.stats().num_cached_tokens_total > 0
    llm.built.engine.check_integrity()
    assert "load_format" in llm.client.model_info.choices_made


def test_windows_and_no_weights(tmp_path: Path) -> None:
    """Guards against a mock that needs the weights' file, or that forgets a model's cache groups."""
    _, directory = make_mistral(tmp_path)
    (directory / "model.safetensors").unlink()
    prompt = list(range(3, 60))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(directory), load_format="mock") as llm:
        found = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(next_token(tokens, 199, window=16))
        assert found == tokens[57:]
        llm.built.engine.check_integrity()


def test_what_needs_a_model_is_refused(llm: LLM, tmp_path: Path) -> None:
    """Guards against figures, states or files of a model that is not there."""
    with pytest.raises(NotSupportedError, match="forward"):
        llm.forward("Once")
    with pytest.raises(InvalidRequestError, match="load_format: 'mock' is not allowed"):
        StepMeter(llm.built)
    with pytest.raises(InvalidRequestError, match="load_format: 'mock' is not allowed"):
        convert_model(EngineConfig.from_options(load_format="mock"), tmp_path / "packed")
    with pytest.raises(InvalidRequestError, match="load_format = mock reads no weights"):
        EngineConfig.from_options(load_format="mock", verify_files=True)


def test_a_wrong_block_is_noticed() -> None:
    """Guards against an executor that computes with whatever a block holds: every test on it would prove nothing."""
    executor = ScriptedExecutor([CacheGroup((0,), None, 4, 16)])
    greedy = SamplingParams(temperature=0.0)
    new = [NewRequest(name, [7] * 20, 20, greedy, 0, [blocks]) for name, blocks in (("a", [0, 1]), ("b", [2, 1]))]
    for request, start, blocks in ((new[0], 0, []), (new[1], 0, []), (None, 20, []), (None, 21, [])):
        name = request.request_id if request is not None else "a"
        item = ScheduledRequest(name, start, 20 if start == 0 else 1, [blocks], [0], 1)
        step = SchedulerOutput(0, [] if request is None else [request], [item])
        if start == 21:  # "a" and "b" share a block without sharing its content: their tokens differ in length only
            executor.slots[0][16] = 8
            with pytest.raises(EngineError, match="position 16: 8 in the cache"):
                executor.collect(executor.submit(step))
        else:
            executor.collect(executor.submit(step))
    with pytest.raises(EngineError, match="introduced twice"):
        executor.collect(executor.submit(SchedulerOutput(1, [new[0]], [])))
