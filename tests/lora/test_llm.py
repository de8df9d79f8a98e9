"""Adapters in LLM: named by each call as in vLLM, in this process or in another one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from tests.hf_models import make_llama, random_ids
from tests.lora.peft_adapters import make_adapter

PROMPT, SHORT = {"prompt_token_ids": random_ids(20)}, {"prompt_token_ids": random_ids(7, 3)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A model and two adapters."""
    at = tmp_path_factory.mktemp("llm")
    model, directory = make_llama(at)
    for seed, name in enumerate("ab"):
        make_adapter(model, at / name, seed=seed).unload()
    return str(directory), str(at / "a"), str(at / "b")


@pytest.mark.parametrize("in_process", [True, False], ids=["in this process", "in another process"])
def test_generate(paths: tuple[str, str, str], in_process: bool, tmp_path: Path) -> None:
    """Guards against an adapter that a call gets although it names another one, or none; and against a name that keeps
    its old content when its files have changed."""
    directory, first, second = paths
    options = {"dtype": "float32", "max_model_len": 64, "threads": 1, "engine_in_process": in_process}
    one, other = LoRARequest("one", first), LoRARequest("other", second)
    with LLM(model=directory, enable_lora=True, max_loras=2, lora_modules=[f"one={first}"], **options) as llm:
        found = llm.generate([PROMPT] * 4, GREEDY, lora_request=[None, one, other, one])
        texts = [output.outputs[0].token_ids for output in found]
        assert texts[1] == texts[3]
        assert len({tuple(ids) for ids in texts}) == 3
        (base,) = llm.generate([PROMPT], GREEDY)
        (again,) = llm.generate([PROMPT], GREEDY, lora_request=other)
        assert (base.outputs[0].token_ids, again.outputs[0].token_ids) == (texts[0], texts[2])
        (moved,) = llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("other", first))
        assert moved.outputs[0].token_ids == texts[1]
        (search,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4), lora_request=one)
        (plain,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))
        assert search.sequences[0].cum_logprob != plain.sequences[0].cum_logprob
        with pytest.raises(InvalidRequestError, match="lora_request: 1 for 2 prompts"):
            llm.generate([PROMPT] * 2, GREEDY, lora_request=[one])
        with pytest.raises(InvalidRequestError, match="adapter_config"):
            llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("none", str(tmp_path)))


def test_vectors(paths: tuple[str, str, str]) -> None:
    """Guards against a method that takes an adapter and computes the base model, and one given to another prompt."""
    directory, first, second = paths
    one, other = LoRARequest("one", first), LoRARequest("other", second)
    with LLM(model=directory, enable_lora=True, max_loras=2, dtype="float32", max_model_len=64, threads=1) as llm:
        found = llm.encode([PROMPT] * 4, lora_request=[None, one, other, one])
        states = [output.outputs.data.tobytes() for output in found]
        assert states[1] == states[3]
        assert len(set(states)) == 3
        (alone,) = llm.embed(PROMPT, lora_request=other)
        assert np.array(alone.outputs.embedding, np.float32).tobytes() == states[2]
        scores = [llm.score(PROMPT, SHORT, lora_request=item)[0].outputs.score for item in (None, one, other)]
        assert len(set(scores)) == 3
        pair = [llm.embed(prompt, lora_request=one)[0].outputs.embedding for prompt in (PROMPT, SHORT)]
        assert scores[1] == pytest.approx(np.dot(*pair), abs=1e-6)


def test_vectors_of_another_process(paths: tuple[str, str, str]) -> None:
    """Guards against a method of AsyncLLM that takes an adapter and computes the base model."""

    async def run() -> None:
        async with AsyncLLM(paths[0], enable_lora=True, dtype="float32", max_model_len=64, threads=1) as llm:
            adapter = LoRARequest("one", paths[1])
            base, one = [await llm.embed(PROMPT, lora_request=item) for item in (None, adapter)]
            states = await llm.encode(PROMPT, PoolingParams(normalize=False), lora_request=adapter)
            found = states.outputs.data / np.linalg.norm(states.outputs.data)
            assert one.outputs.embedding != base.outputs.embedding
            np.testing.assert_allclose(found, one.outputs.embedding, atol=1e-6)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_an_encoder(kind: str, tmp_path: Path) -> None:
    """Guards against names of PEFT's tensors that are those of no product of an encoder, with PEFT as the oracle."""
    from tests.test_encoders import LABELS, make

    model, directory = make(tmp_path, "Bert", kind, **(LABELS if kind != "Model" else {}))
    products = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["query", "value", "intermediate.dense"]}
    adapted = make_adapter(model, tmp_path / "a", **products)
    adapter, ids = LoRARequest("a", str(tmp_path / "a")), torch.tensor([PROMPT["prompt_token_ids"]])
    with torch.no_grad():
        found = adapted.base_model.model(ids)
    with LLM(model=str(directory), enable_lora=True, dtype="float32", threads=1) as llm:
        if kind == "Model":
            (output,) = llm.embed(PROMPT, lora_request=adapter)
            expected, given = found.last_hidden_state[0].mean(dim=0), output.outputs.embedding
            (base,) = llm.embed(PROMPT)
            assert base.outputs.embedding != given
        else:
            (classes,) = llm.classify(PROMPT, lora_request=adapter)
            expected, given = found.logits[0].softmax(dim=0), classes.outputs.probs
        np.testing.assert_allclose(given, expected.numpy(), atol=1e-5)


def test_without_adapters(paths: tuple[str, str, str]) -> None:
    """Guards against an adapter that is ignored because the engine has no room for any."""
    with LLM(model=paths[0], max_model_len=64) as llm, pytest.raises(InvalidRequestError, match="enable_lora"):
        llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("a", paths[1]))
    with pytest.raises(InvalidRequestError, match="lora_path"):
        LoRARequest("a", 1)  # type: ignore[arg-type]  # the number that vLLM has there
