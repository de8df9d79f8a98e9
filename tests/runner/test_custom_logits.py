"""Logits processors of a user's own file: here, in the engine process, over HTTP, in ColossalAI's spelling."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import penstock
from penstock import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from penstock.interface.plugins import PROCESSORS
from penstock.server.inputs import completion_params
from penstock.server.openai_requests import CompletionRequest
from penstock_lab.compat.colossalai import InferenceConfig, InferenceEngine, register_logit_processor
from tests.hf_models import make_llama, random_ids

OWN = """
import penstock


@penstock.register_logits_processor("only_even")
def only_even(logits, args):
    logits[:, 1::2] = float("-inf")
    return logits


@penstock.register_logits_processor("never_twice")
def never_twice(logits, args, token_ids):
    logits[:, token_ids] = float("-inf")
    return logits
"""
PROMPTS = [random_ids(length, length) for length in (5, 9, 3)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **fields)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(PROCESSORS)
    yield
    PROCESSORS.clear()
    PROCESSORS.update(before)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(model=str(make_llama(tmp_path_factory.mktemp("model"))[1]), **OPTIONS) as made:
        yield made


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.covers("C14")
def test_each_row_has_its_own(llm: LLM) -> None:
    """Guards against processors that change their neighbours' rows, run in another order, or get another history."""
    seen: list[tuple[tuple[int, ...], Any, list[int]]] = []

    @penstock.register_logits_processor("plus")
    def plus(logits: Tensor, args: Any, token_ids: list[int]) -> Tensor:
        seen.append((tuple(logits.shape), args, token_ids))
        assert logits.dtype == torch.float32
        logits[:, args["id"]] += args["by"]
        return logits

    @penstock.register_logits_processor("zero")
    def zero(logits: Tensor, args: Any) -> Tensor:
        return torch.zeros_like(logits)

    free = tokens(llm, greedy())
    forced = greedy(logits_processors={"zero": None, "plus": {"id": 7, "by": 1.5}})
    undone = greedy(logits_processors={"plus": {"id": 7, "by": 1e6}, "zero": None})
    assert tokens(llm, [greedy(), forced, undone]) == [free[0], [7] * 12, [0] * 12]
    shapes, arguments, histories = zip(*seen, strict=True)
    assert set(shapes) == {(1, 199)}
    assert {argument["by"] for argument in arguments} == {1.5, 1e6}
    assert PROMPTS[1] + [7] * 11 in histories


@pytest.mark.covers("C14")
def test_a_sampler_of_ones_own(llm: LLM) -> None:
    """Guards against a choice of the user's that the engine's own sampling changes, alone or in a crowd."""
    chosen: dict[tuple[int, ...], int] = {}

    @penstock.register_logits_processor("gumbel")
    def gumbel(logits: Tensor, args: Any, token_ids: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(args["seed"] + len(token_ids))
        noise = -torch.rand(logits.shape, generator=generator).log()
        best = (logits / args["temperature"] - noise.log()).argmax()
        assert chosen.setdefault(tuple(token_ids), int(best)) == int(best)
        return torch.full_like(logits, float("-inf")).index_fill_(1, best, 0.0)

    params = [greedy(logits_processors={"gumbel": {"seed": seed, "temperature": 2.0}}) for seed in (5, 50, 500)]
    together = tokens(llm, params)
    assert [llm.generate(PROMPTS[i], params[i])[0].outputs[0].token_ids for i in range(3)] == together
    assert together != tokens(llm, greedy())
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer == [chosen[(*prompt, *answer[:place])] for place in range(len(answer))]


@pytest.mark.covers("C14")
def test_log_probabilities_and_penalties(llm: LLM) -> None:
    """Guards against reported log-probabilities of what a processor made, and a mask that comes before it."""

    @penstock.register_logits_processor("shift")
    def shift(logits: Tensor, args: Any) -> Tensor:
        return logits + torch.arange(logits.shape[1]) * 1000.0

    plain = llm.generate(PROMPTS[0], greedy(logprobs=5))[0].outputs[0]
    shifted = llm.generate(PROMPTS[0], greedy(logprobs=5, logits_processors=["shift"]))[0].outputs[0]
    assert shifted.token_ids[0] == 198
    assert plain.logprobs is not None
    assert shifted.logprobs is not None
    top = {i: entry.logprob for i, entry in plain.logprobs[0].items()}
    assert {i: entry.logprob for i, entry in shifted.logprobs[0].items() if i in top} == top
    masked = llm.generate(PROMPTS[0], greedy(logits_processors=["shift"], logit_bias={197: 100.0}, min_tokens=1))[0]
    assert masked.outputs[0].token_ids[0] == 198


@pytest.mark.covers("C14")
def test_a_mistake_costs_its_own_request(llm: LLM) -> None:
    """Guards against a user's exception, shape or NaN that ends the step of everybody."""

    @penstock.register_logits_processor("raises")
    def raises(logits: Tensor, args: Any) -> Tensor:
        raise ValueError("no\nway")

    @penstock.register_logits_processor("shape")
    def shape(logits: Tensor, args: Any) -> Tensor:
        return logits[:, :-1]

    @penstock.register_logits_processor("fills")
    def fills(logits: Tensor, args: Any) -> Tensor:
        return logits.fill_(float(args))

    free = tokens(llm, greedy())
    for asked, message in (
        (["raises"], "logits_processors: raises: ValueError: no way"),
        (["shape"], r"logits_processors: shape: returned [1, 198]; it must be a tensor [1, 199] of floats"),
        ({"fills": "nan"}, "logits_processors: fills: returned NaN or +inf, or left no token to choose"),
        ({"fills": "inf"}, "logits_processors: fills: returned NaN or +inf, or left no token to choose"),
        ({"fills": "-inf"}, "logits_processors: fills: returned NaN or +inf, or left no token to choose"),
    ):
        outputs = llm.generate(PROMPTS, [greedy(), greedy(logits_processors=asked, logprobs=1), greedy()])
        assert outputs[1].error == message
        assert outputs[1].outputs[0].token_ids == []
        assert [outputs[index].outputs[0].token_ids for index in (0, 2)] == [free[0], free[2]]


def test_names_are_checked(llm: LLM) -> None:
    """Guards against a processor that is asked for and silently not there, and a second one that silently wins."""
    with pytest.raises(InvalidRequestError, match="logits_processors: 'never' is not registered"):
        llm.generate(PROMPTS, greedy(logits_processors=["never"]))
    assert not llm.engine.has_unfinished_requests()

    @penstock.register_logits_processor("mine")
    def mine(logits: Tensor, args: Any) -> Tensor:
        return logits

    assert penstock.register_logits_processor("mine")(mine) is mine
    with pytest.raises(InvalidRequestError, match="'mine' is registered already"):
        penstock.register_logits_processor("mine")(lambda logits, args: logits)
    with pytest.raises(InvalidRequestError, match=r"must take \(logits, args\)"):
        penstock.register_logits_processor("other")(lambda logits: logits)


@pytest.mark.covers("C14")
def test_the_engine_process_and_http(tmp_path: Path, llm: LLM) -> None:
    """Guards against a file that only the user's own process has imported."""
    (tmp_path / "own.py").write_text(OWN)
    info = llm.engine.model_info
    body = CompletionRequest(prompt="x", temperature=0.0, logits_processors=["only_even", "never_twice"], max_tokens=12)
    body.check()
    asked = completion_params(body, info)

    async def answer(params: SamplingParams) -> list[int]:
        options = {**OPTIONS, "imports": [str(tmp_path / "own.py")]}
        async with AsyncLLM(model=info.model, **options) as async_llm:
            async for output in async_llm.generate({"prompt_token_ids": PROMPTS[0]}, params):
                ids = output.outputs[0].token_ids
            with pytest.raises(
                InvalidRequestError, match="'absent' is not registered; there are never_twice, only_even"
            ):
                async for _ in async_llm.generate({"prompt_token_ids": [1]}, greedy(logits_processors=["absent"])):
                    pass
        return ids

    ids = asyncio.run(answer(asked))
    assert len(ids) == 12
    assert not any(token % 2 for token in ids)
    assert len({*ids, *PROMPTS[0]}) == 12 + len(set(PROMPTS[0]))


@pytest.mark.covers("C14")
def test_colossalai_s_spelling(tmp_path: Path) -> None:
    """Guards against a decorator that registers what no generation config can ask for."""

    @register_logit_processor("ban")
    def xx_logit_processor(logits: Tensor, args: Any) -> Tensor:
        logits[..., args] = -float("inf")
        return logits

    model, _ = make_llama(tmp_path)
    engine = InferenceEngine(model, None, InferenceConfig(dtype="fp32", max_input_len=32, max_output_len=16))
    free = engine.generate(prompts_token_ids=PROMPTS[0], return_token_ids=True)[1][0]
    config = GenerationConfig(ban=[free[0], free[1]], max_new_tokens=8)
    banned = engine.generate(None, PROMPTS[0], True, config)[1][0]
    assert not {free[0], free[1]} & set(banned)
    assert len(banned) == 8
