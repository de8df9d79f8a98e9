"""vLLM's parameters on a real engine: what they choose, report and refuse, with Transformers as the oracle."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from penstock import LLM, InvalidRequestError, RequestOutput, SamplingParams
from penstock.interface.sampling_params import RepetitionDetectionParams
from tests.hf_models import hf_logprobs, make_llama, random_ids
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
PROMPT = random_ids(9, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, LLM]]:
    model, path = make_llama(tmp_path_factory.mktemp("model"))
    with LLM(model=str(path), dtype="float32", max_model_len=64, threads=1, max_num_seqs=8) as llm:
        yield model, llm


def asked(llm: LLM, *each: dict[str, Any], prompt: list[int] = PROMPT) -> list[RequestOutput]:
    common = {"max_tokens": 5, "ignore_eos": True, "seed": 1, "detokenize": False}
    return llm.generate([prompt] * len(each), [SamplingParams(**{**common, **fields}) for fields in each])


def test_log_probabilities_of_the_whole_vocabulary(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against a limit of 20, and against rows with different numbers that get each other's."""
    model, llm = made
    size = model.config.vocab_size
    few, all_of_them, prompt = asked(llm, {"logprobs": 2}, {"logprobs": -1}, {"prompt_logprobs": -1, "max_tokens": 1})
    assert few.outputs[0].token_ids == all_of_them.outputs[0].token_ids
    assert all(len(at) in (2, 3) for at in few.outputs[0].logprobs or ())
    expected = hf_logprobs(model, PROMPT + all_of_them.outputs[0].token_ids).numpy()
    for place, at in enumerate(all_of_them.outputs[0].logprobs or ()):
        assert set(at) == set(range(size))
        found = np.array([at[token].logprob for token in range(size)])
        np.testing.assert_allclose(found, expected[len(PROMPT) - 1 + place], atol=1e-4)
    for place, entry in enumerate((prompt.prompt_logprobs or ())[1:]):
        assert entry is not None
        np.testing.assert_allclose([entry[token].logprob for token in range(size)], expected[place], atol=1e-4)


def test_log_probabilities_of_some_tokens(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against the scores of another row or place, and against ranks that would be places in the list."""
    _, llm = made
    listed = [7, 3, 150]
    whole, some, both = asked(
        llm, {"logprobs": -1}, {"logprob_token_ids": listed}, {"logprob_token_ids": listed, "logprobs": 1}
    )
    for full, found, more in zip(*(out.outputs[0].logprobs or () for out in (whole, some, both)), strict=True):
        chosen = next(iter(full))
        assert list(found) == list(dict.fromkeys([chosen, *listed]))
        assert {token: found[token].logprob for token in found} == {token: full[token].logprob for token in found}
        assert all(found[token].rank is None for token in listed if token != chosen)
        best = min(full, key=lambda token: full[token].rank or 0)
        assert set(more) == {chosen, best, *listed}


def test_too_many_log_probabilities_are_refused(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against one request whose report takes the memory of the server."""
    for name, num_prompt_tokens in (("logprobs", 1), ("prompt_logprobs", 5)):
        params = SamplingParams(n=1 + (num_prompt_tokens == 1) * 4, **{name: -1})
        with pytest.raises(InvalidRequestError, match=rf"^{name}: 5 tokens with 131072 .*at most 2 ") as caught:
            params.settle_logprobs(num_prompt_tokens, 1, 2**17)
        assert caught.value.param == name
    few = SamplingParams(logprobs=20, n=128).settle_logprobs(2**20, 2**20, 2**17)  # as OpenAI allows
    assert few == {"logprobs": 20, "prompt_logprobs": None}
    _, llm = made
    with pytest.raises(InvalidRequestError, match="at most 1317 tokens"):
        asked(llm, {"logprobs": 10**6, "n": 100, "max_tokens": 50})


def test_only_allowed_tokens_are_chosen(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against a mask that is lost beside rows without one, and against scores of masked logits."""
    _, llm = made
    allowed = [5, 77, 130, 131]
    free, plain, scored, drawn = asked(
        llm,
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "allowed_token_ids": allowed},
        {"temperature": 0.0, "allowed_token_ids": allowed, "logprobs": -1},
        {"temperature": 3.0, "allowed_token_ids": allowed, "max_tokens": 40, "dry_multiplier": 0.5},
    )
    assert not set(free.outputs[0].token_ids) <= set(allowed)
    assert plain.outputs[0].token_ids == scored.outputs[0].token_ids
    assert set(drawn.outputs[0].token_ids) == set(allowed)
    at = (scored.outputs[0].logprobs or [{}])[0]
    assert plain.outputs[0].token_ids[0] == max(allowed, key=lambda token: at[token].logprob)
    (alone,) = asked(llm, {"temperature": 0.0, "allowed_token_ids": allowed, "logprobs": -1})  # all rows are scored
    for found in (at, (alone.outputs[0].logprobs or [{}])[0]):
        assert sum(np.exp(entry.logprob) for entry in found.values()) == pytest.approx(1.0, abs=1e-5)
        assert len(found) > len(allowed)
        assert all(np.isfinite(entry.logprob) for entry in found.values())  # also of those that are not allowed


@pytest.mark.parametrize(("fields", "kept"), [
    ({"truncate_prompt_tokens": 4}, PROMPT[-4:]),
    ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, PROMPT[:4]),
    ({"truncate_prompt_tokens": 40}, PROMPT),
])  # fmt: skip
def test_prompts_are_cut(made: tuple[PreTrainedModel, LLM], fields: dict[str, Any], kept: list[int]) -> None:
    """Guards against the wrong end, and against a prompt whose outputs are those of the whole."""
    _, llm = made
    cut, expected = asked(llm, {"temperature": 0.0, **fields})[0], asked(llm, {"temperature": 0.0}, prompt=kept)[0]
    assert cut.prompt_token_ids == kept
    assert cut.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_prompt_beyond_the_context_is_cut(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against -1 that leaves no room for the answer asked for."""
    _, llm = made
    long = random_ids(100, 5)
    (found,) = asked(llm, {"truncate_prompt_tokens": -1}, prompt=long)
    assert found.prompt_token_ids == long[-(64 - 5) :]
    with pytest.raises(InvalidRequestError, match="64 tokens must hold"):
        asked(llm, {"truncate_prompt_tokens": 70}, prompt=long)


def test_an_endless_repetition_ends(made: tuple[PreTrainedModel, LLM]) -> None:
    """Guards against an answer that ends one token late, or before min_tokens."""
    _, llm = made
    only = {"allowed_token_ids": [5], "max_tokens": 20}
    wanted = {"max_pattern_size": 3, "min_count": 4}
    longer = {**wanted, "min_pattern_size": 2}
    plain, late = asked(
        llm, {**only, "repetition_detection": wanted}, {**only, "repetition_detection": longer, "min_tokens": 9}
    )
    assert [len(out.outputs[0].token_ids) for out in (plain, late)] == [4, 9]
    assert (plain.outputs[0].finish_reason, plain.outputs[0].stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize(("ids", "expected"), [
    ([1, 2, 3, 1, 2, 3], True), ([1, 2, 3, 1, 2, 4], False), ([9, 1, 2, 1, 2], True), ([4, 4], False), ([], False),
    ([1, 2, 3, 4, 1, 2, 3, 4], False),
])  # fmt: skip
def test_what_repeats(ids: list[int], expected: bool) -> None:
    """Guards against patterns that are too short or too long, and against indices before the answer."""
    assert RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=2).found_in(ids) is expected


@pytest.mark.parametrize(("begin", "expected"), [((), 3), ((5,), 6), ((5, 6), None)])
def test_reasoning_ends_at_its_budget(made: tuple[PreTrainedModel, LLM], begin: Any, expected: int | None) -> None:
    """Guards against a budget that counts other tokens, is off by one, or ends what is not reasoning."""
    _, llm = made
    (free,) = asked(llm, {"temperature": 0.0, "max_tokens": 12})
    outputs = free.outputs[0].token_ids
    end = next(token for token in range(300) if token not in outputs)
    begin = tuple(outputs[2 : 2 + len(begin)]) if begin != (5, 6) else (end, end)
    params = {"thinking_token_budget": 3, "thinking_token_ids": (begin, (end,))}
    (found,) = asked(llm, {"temperature": 0.0, "max_tokens": 12, **params})
    ids = found.outputs[0].token_ids
    if expected is None:
        assert ids == outputs
    else:
        first = outputs.index(begin[0]) + 1 if begin else 0
        assert ids[: first + 4] == [*outputs[: first + 3], end]
