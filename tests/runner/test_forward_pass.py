"""`LLM.forward`: hidden states, attention weights and logits, equal to Transformers', and to the bit a request's."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, InvalidRequestError, NotSupportedError, SamplingParams
from penstock.kernels.cpu.library import load_library
from penstock.kernels.metadata import AttentionParams
from penstock.runner.forward_pass import ForwardOutput, attention_weights
from tests.families.case import Case, all_cases
from tests.hf_models import make_llama

KERNELS = ["reference", *(["cpu"] if load_library() is not None else [])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1)
EVERYTHING = {"output_hidden_states": True, "output_attentions": True}


@pytest.mark.covers("F25", "F40")
@pytest.mark.parametrize("case", all_cases(shapes=False), ids=str)
def test_equal_to_transformers(case: Case, tmp_path: Path) -> None:
    """Guards against a layer's state that lacks a branch, a norm too much, a window, a soft cap or a bias that the
    weights of attention forget, and against chunks that see one another's keys wrongly."""
    hf_model, directory = case.make(tmp_path)
    ids = np.random.default_rng(5).integers(3, 199, 40).tolist()
    with torch.no_grad():
        wanted = EVERYTHING | {"output_attentions": case.attention == "eager"}  # with it, others become eager
        theirs = hf_model(torch.tensor([ids]), **wanted, use_cache=False)
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 1, "threads": 1}
    with LLM(str(directory), kernels=KERNELS[-1], **options) as llm:
        ours = llm.forward(ids, **EVERYTHING)
    assert ours.hidden_states is not None
    assert ours.attentions is not None
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        np.testing.assert_allclose(mine, other[0], atol=2e-4)
    np.testing.assert_allclose(ours.logits, theirs.logits[0], atol=1e-3)
    if case.attention == "eager":
        assert len(ours.attentions) == len(theirs.attentions)
        for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
            np.testing.assert_allclose(mine, other[0], atol=1e-5)
    shares = np.sum(ours.attentions[-1], axis=-1)
    if any(name.endswith(".sinks") for name, _ in hf_model.named_parameters()):  # which take the rest
        assert (shares < 1).all()
    else:
        np.testing.assert_allclose(shares, 1.0, atol=1e-5)


@pytest.mark.parametrize("before_scale", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_weights(before_scale: bool, window: int | None) -> None:
    """Guards against parts of the score in another order than AttentionParams tells, which no tiny model would show:
    written down once more, with loops, in float64."""
    rng = np.random.default_rng(7)
    q, keys = rng.normal(size=(6, 4, 8)).astype("f"), rng.normal(size=(6, 2, 8)).astype("f")
    slopes, sinks = rng.random(4).astype("f"), rng.normal(size=4).astype("f")
    found = attention_weights(q, keys, AttentionParams(0.3, 2.0, slopes, before_scale, sinks), window)
    for h, t in itertools.product(range(4), range(6)):
        seen = [s for s in range(t + 1) if window is None or s > t - window]
        powers = {}
        for s in seen:
            bias = float(slopes[h]) * (s - t)
            score = q[t, h].astype("d") @ keys[s, h // 2].astype("d")
            score = (score + bias if before_scale else score) * 0.3
            powers[s] = math.exp(2.0 * math.tanh(score / 2.0) + (0.0 if before_scale else bias))
        total = sum(powers.values()) + math.exp(sinks[h])
        np.testing.assert_allclose(found[h, t], [powers.get(s, 0.0) / total for s in range(6)], atol=1e-6)


@pytest.fixture(scope="module", params=[{}, {"kv_cache_dtype": "int8", "quantization": "int8"}], ids=["bf16", "int8"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if "cpu" not in KERNELS:
        pytest.skip("no native library was built")
    with LLM("demo", threads=1, max_num_seqs=4, max_num_batched_tokens=32, **request.param) as made:
        yield made


@pytest.mark.covers("F25", "F40")
def test_flags_change_outputs_only_as_documented(llm: LLM) -> None:
    """Guards against a pass whose bits are not the request's, a flag that changes another result, and a pass in the
    middle of other requests that changes a token of theirs or leaves something behind."""
    prompts = ["Once upon a time there was a fox", "One day"]
    before = llm.generate(prompts, GREEDY)
    answer = before[0]
    ids = answer.prompt_token_ids + answer.outputs[0].token_ids
    llm.engine.add_request("a", prompts[0], GREEDY)
    llm.engine.add_request("b", prompts[1], GREEDY)
    passes = [llm.forward(ids)]
    made: dict[str, list[int]] = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            made[output.request_id] = output.outputs[0].token_ids
        wanted = {name: len(passes) >> bit & 1 == 1 for bit, name in enumerate([*EVERYTHING, "skip_lm_head"])}
        if len(passes) < 8:
            passes.append(llm.forward({"prompt_token_ids": ids}, **wanted))
            check_fields(passes[-1], **wanted)
    assert [made["a"], made["b"]] == [output.outputs[0].token_ids for output in before]
    for found in passes[1:]:
        assert np.array_equal(found.last_hidden_state, passes[0].last_hidden_state)
        assert found.logits is None or np.array_equal(found.logits, passes[0].logits)
    assert llm.generate(prompts, GREEDY)[1].outputs[0].logprobs == before[1].outputs[0].logprobs
    check_logprobs(llm, passes[0], ids, answer)


def check_fields(
    found: ForwardOutput, *, output_hidden_states: bool, output_attentions: bool, skip_lm_head: bool
) -> None:
    assert (found.hidden_states is not None) == output_hidden_states
    assert (found.attentions is not None) == output_attentions
    assert (found.logits is None) == skip_lm_head
    if found.hidden_states is not None:
        assert np.array_equal(found.hidden_states[-1], found.last_hidden_state)


def check_logprobs(llm: LLM, found: ForwardOutput, ids: list[int], answer: Any) -> None:
    """The pass's log-probabilities of the tokens are, to the bit, what the request was told."""
    logprobs = llm.built.ops.log_softmax(found.logits)
    told = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    assert len(told) == len(ids) - 1
    for row, token, entry in zip(logprobs, ids[1:], told, strict=False):
        assert float(row[token]) == entry[token].logprob


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_head_applied_to_the_states_gives_the_logits(kernels: str, tmp_path: Path) -> None:
    """Guards against a head that is left out and still has an effect, and against columns of padding in the logits."""
    _, directory = make_llama(tmp_path)
    with LLM(str(directory), kernels=kernels, dtype="float32", pad_vocab_multiple=64, threads=1) as llm:
        whole, states = llm.forward([5, 6, 7]), llm.forward([5, 6, 7], skip_lm_head=True)
        assert whole.logits is not None
        assert whole.logits.shape == (3, 199)
        head = llm.built.model.compute_logits(llm.built.ops.tensor(states.last_hidden_state))
        assert np.array_equal(np.asarray(head)[:, :199], whole.logits)


@pytest.mark.covers("F36")
def test_embeddings_out_of_the_head_or_of_a_table(llm: LLM) -> None:
    """Guards against rows that depend on where they lie: a tied head keeps them for the embedding, and one that is in
    pieces leaves it a table of its own."""
    numerics = llm.config.numerics
    options = {"kv_cache_dtype": llm.config.cache.kv_cache_dtype, "quantization": numerics.quantization}
    with LLM("demo", threads=1, max_num_seqs=4, lm_head_pieces=2, **options) as other:
        mine, others = (item.forward("Once upon a time", output_hidden_states=True) for item in (llm, other))
    assert mine.hidden_states is not None
    assert others.hidden_states is not None
    assert all(np.array_equal(a, b) for a, b in zip(mine.hidden_states, others.hidden_states, strict=True))
    assert np.array_equal(mine.logits, others.logits)


def test_what_is_too_large_or_wrong_is_refused(llm: LLM) -> None:
    """Guards against a pass that fills the memory, or ends in an error of numpy."""
    ids = [5] * llm.client.model_info.max_model_len
    with pytest.raises(
        InvalidRequestError, match=r"output_attentions: 1024 tokens make results of .* max_bytes allows"
    ):
        llm.forward(ids, output_attentions=True, max_bytes=10_000_000)
    assert llm.forward(ids, skip_lm_head=True).last_hidden_state.shape[0] == len(ids)
    for prompt in ([*ids, 5], [], "", [-1], [10**6], None, [1.5], {"text": "a"}, True):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.forward(prompt)
    with pytest.raises(InvalidRequestError, match="skip_lm_head"):
        llm.forward("a", skip_lm_head=1)
    with pytest.raises(InvalidRequestError, match="max_bytes"):
        llm.forward("a", max_bytes=0)


def test_a_model_whose_inside_is_not_known(tmp_path: Path) -> None:
    """Guards against states that are made up for a model of another calling convention."""
    _, directory = make_llama(tmp_path)
    with (
        LLM(str(directory), model_impl="plain", dtype="float32") as llm,
        pytest.raises(NotSupportedError, match=r"not made of penstock\.layers"),
    ):
        llm.forward([5, 6])
