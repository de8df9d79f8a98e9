"""Logits processors and truncations against Transformers' own on random logits; DRY against a slow definition."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation import logits_process as theirs

from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.sampling import SamplingTensors, adjust
from penstock.runner.logits import (
    OPTIONS,
    Draw,
    LogitAdjustments,
    Repetitions,
    _repeats,
    _repeats_of_all,
    log_probabilities,
    next_state,
    truncate,
)
from penstock.runner.sampler import AdjustedRow, adjusted_pairs
from tests.fakes import FakeOps
from tests.hf_models import make_llama

VOCAB, EOS = 500, (3, 7)
DRAW = Draw((1, 0, 0))
PROMPT = [5, 6, 7, 5, 6, 9, 5, 6]
OUTPUT = [11, 5, 6, 12, 11, 5]


def history_of(*parts: list[int]) -> np.ndarray:
    return np.array(list(itertools.chain(*parts)), dtype=np.int32)


def warped(logits: np.ndarray, prompt: list[int], output: list[int], draw: Draw = DRAW, **fields: Any) -> np.ndarray:
    params = SamplingParams(seed=0, **{"max_tokens": 40, **fields})
    history, some = history_of(prompt, output), logits[None].copy()
    made = LogitAdjustments(params, history, len(prompt), 64, EOS)
    pairs = adjusted_pairs([AdjustedRow(0, made, history, len(output))], *some.shape)
    adjust(some, SamplingTensors(np.zeros(1, np.float32), **pairs))
    return made.warp(some[0], history, len(output), draw)


def random_logits(seed: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)[0]


def of_transformers(model: Any, logits: np.ndarray, prompt: list[int], output: list[int], **fields: Any) -> np.ndarray:
    """What Transformers' own list of processors makes of the logits. It has min_p last of the three that we begin with;
    so that one is applied where ours is."""
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, "max_length": len(prompt) + 40, **fields})
    config._eos_token_tensor = torch.tensor(EOS)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu", model_kwargs={})
    order: tuple[Any, ...] = (theirs.TopKLogitsWarper, theirs.TopPLogitsWarper, theirs.TypicalLogitsWarper)
    order += (theirs.EpsilonLogitsWarper, theirs.EtaLogitsWarper)
    ours = [item for item in processors if not isinstance(item, theirs.MinPLogitsWarper)]
    for item in processors:
        if isinstance(item, theirs.MinPLogitsWarper):
            at = next((i for i, other in enumerate(ours) if isinstance(other, order)), len(ours))
            ours.insert(at, item)
    scores = torch.tensor(logits)[None]
    for processor in ours:
        scores = processor(torch.tensor([prompt + output]), scores)
    return scores[0].numpy()


ONE_BY_ONE: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 40},
    {"suppress_tokens": [0, 4, 499]},
    {"begin_suppress_tokens": [2, 8]},
    {"bad_words_ids": [[3], [9], [11, 5, 1], [6, 4], [5, 13]]},
    {"sequence_bias": [[[5], 2.5], [[11, 5, 1], -4.0], [[5, 20], 1.0], [[6, 20], 9.0]]},
    {"forced_bos_token_id": 21},
    {"forced_eos_token_id": 22},
    {"forced_eos_token_id": [22, 30], "suppress_tokens": [30]},
    {"min_length": 15},
    {"min_new_tokens": 7},
    {"exponential_decay_length_penalty": (2, 1.3)},
    {"exponential_decay_length_penalty": (60, 1.3)},
    {"repetition_penalty": 1.4},
    {"temperature": 0.6},
    {"top_k": 20},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_h": 0.4},
    {"top_h": 0.99},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"epsilon_cutoff": 0.01},
    {"epsilon_cutoff": 0.9},
    {"eta_cutoff": 0.02},
    {"eta_cutoff": 0.9},
]
PLACES = [(PROMPT, OUTPUT), (PROMPT, []), ([5], []), ([5], [8]), (PROMPT, [9] * 39)]


@pytest.mark.covers("C10", "C11", "F12")
@pytest.mark.parametrize("fields", ONE_BY_ONE, ids=str)
def test_each_field_is_transformers(model: LlamaForCausalLM, fields: dict[str, Any]) -> None:
    """Guards against a field with another meaning: at the start, in the middle, at the last token, and for the tail."""
    for seed, (prompt, output) in enumerate(PLACES):
        logits = random_logits(seed)
        expected = of_transformers(model, logits, prompt, output, **fields)
        np.testing.assert_allclose(warped(logits, prompt, output, **fields), expected, rtol=1e-5, atol=1e-6)


TOGETHER: dict[str, list[Any]] = {
    "temperature": [0.7, 1.0, 2.0],
    "repetition_penalty": [1.0, 1.3],
    "no_repeat_ngram_size": [0, 2, 3],
    "suppress_tokens": [None, [1, 2]],
    "begin_suppress_tokens": [None, [5]],
    "bad_words_ids": [None, [[4], [5, 6]]],
    "sequence_bias": [None, [[[8], 3.0], [[5, 9], -2.0]]],
    "min_new_tokens": [0, 8],
    "exponential_decay_length_penalty": [None, (1, 1.1)],
    "top_h": [None, 0.8],
    "min_p": [None, 0.002],
    "top_k": [0, 60],
    "top_p": [1.0, 0.9],
    "typical_p": [1.0, 0.9],
    "epsilon_cutoff": [0.0, 0.002],
    "eta_cutoff": [0.0, 0.003],
}


@pytest.mark.covers("C10", "C11", "F12")
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_all_together_in_their_order(model: LlamaForCausalLM, seed: int, data: st.DataObject) -> None:
    """Guards against another order of the processors than Transformers' (and ours for min_p)."""
    fields = {name: data.draw(st.sampled_from(values), label=name) for name, values in TOGETHER.items()}
    logits = random_logits(seed)
    expected = of_transformers(model, logits, PROMPT, OUTPUT, **fields)
    given_here = {name: value for name, value in fields.items() if value is not None}
    np.testing.assert_allclose(warped(logits, PROMPT, OUTPUT, **given_here), expected, rtol=1e-4, atol=1e-5)


def test_a_long_tail_is_cut_where_transformers_cuts_it(model: LlamaForCausalLM) -> None:
    """Guards against a partial sort that stops too early: more tokens stay than are looked at first."""
    logits = np.random.default_rng(5).standard_normal(VOCAB).astype(np.float32) * 0.01
    for fields in ({"top_p": 0.97}, {"typical_p": 0.97}, {"top_k": 400}, {"top_h": 0.5}):
        expected = of_transformers(model, logits, PROMPT, [], **fields)
        assert np.array_equal(np.isinf(warped(logits, PROMPT, [], **fields)), np.isinf(expected)), fields


@pytest.mark.covers("C11")
def test_an_overwhelming_end_token_stays_finite_at_a_low_temperature() -> None:
    """Guards against a logit that the temperature makes infinite: the softmax of two of them is not a number."""
    found = warped(
        random_logits(3), PROMPT, [9] * 39, exponential_decay_length_penalty=(1, 12.0), temperature=0.5, top_p=0.9
    )
    assert np.isfinite(found.max())
    assert not np.isnan(found).any()


def test_greedy_requests_are_not_truncated() -> None:
    """Guards against a greedy request whose most likely token is dropped: Transformers truncates only what it draws."""
    logits = random_logits(1)
    off: dict[str, Any] = {"typical_p": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.0, "mirostat": 2}
    assert np.array_equal(warped(logits, PROMPT, OUTPUT, temperature=0.0, **off), logits)


# --- XTC, mirostat --------------------------------------------------------------------------------------------------


def test_xtc_leaves_the_least_likely_of_the_likely() -> None:
    """Guards against XTC that drops the last likely token, or drops where one alone is likely."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
    kept = np.isfinite(warped(logits, [1], [], xtc_probability=1.0, xtc_threshold=0.12))
    assert kept.tolist() == [False, False, True, True, True]
    assert np.isfinite(warped(logits, [1], [], xtc_probability=1.0, xtc_threshold=0.35)).all()
    assert np.isfinite(warped(logits, [1], [], xtc_probability=1.0, xtc_threshold=0.51)).all()


def test_mirostat_2_keeps_surprises_up_to_mu() -> None:
    """Guards against surprises in nats, and a cut that leaves nothing."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    for mu, count in ((-1.0, 1), (0.5, 1), (1.001, 1), (2.001, 2), (3.001, 4)):
        found = warped(logits, [1], [], Draw((0, 0, 0), (mu,)), mirostat=2)
        assert np.isfinite(found).sum() == count, mu
        assert np.isfinite(found[0])


def test_mirostat_1_follows_the_paper() -> None:
    """Guards against another estimate than k = (e 2^mu / (1 - N^-e))^(1 / s), with s from the 100 likeliest tokens."""
    logits = random_logits(4)
    best = np.sort(log_probabilities(logits))[::-1][:100]
    steps = [np.log((i + 2) / (i + 1)) for i in range(99)]
    exponent = sum(t * b for t, b in zip(steps, best[:-1] - best[1:], strict=True)) / sum(t * t for t in steps)
    excess = exponent - 1.0
    for mu in (2.0, 5.0, 9.0):
        count = int((excess * 2.0**mu / (1 - VOCAB**-excess)) ** (1 / exponent))
        found = warped(logits, [1], [], Draw((0, 0, 0), (mu,)), mirostat=1)
        assert np.isfinite(found).sum() == min(max(count, 1), VOCAB)
    flat = np.zeros(VOCAB, dtype=np.float32)
    for mu in (-50.0, 0.0, 1e9):  # no estimate overflows or divides by 0
        assert np.isfinite(warped(flat, [1], [], Draw((0, 0, 0), (mu,)), mirostat=1)).any()


def test_mirostat_finds_its_target() -> None:
    """Guards against a feedback with the wrong sign: the mean surprise comes to tau."""
    random, params = np.random.default_rng(0), SamplingParams(mirostat=2, mirostat_tau=3.0)
    mu, surprises = 2.0 * params.mirostat_tau, []
    for _ in range(600):
        logits = (2.0 * random.standard_normal(300)).astype(np.float32)
        kept = truncate(logits, params, Draw((0, 0, 0), (mu,)))
        logs = log_probabilities(kept)
        token_id = int(random.choice(300, p=np.exp(logs) / np.exp(logs).sum()))
        surprises.append(-logs[token_id] / np.log(2.0))
        (mu,) = next_state(kept, token_id, params, (mu,))
    assert np.mean(surprises[100:]) == pytest.approx(3.0, abs=0.1)


EFFECTIVE: dict[str, Any] = {
    "min_tokens": 9, "min_new_tokens": 9, "min_length": 12, "bad_words_token_ids": lambda first: (tuple(first[:2]),),
    "bad_words_ids": lambda first: [first[:2]], "no_repeat_ngram_size": 1, "suppress_tokens": [*range(0, 40, 2)],
    "begin_suppress_tokens": [*range(0, 40, 2)], "logit_bias": {9: 100.0}, "sequence_bias": [[[9], 100.0]],
    "repetition_penalty": 9.0, "frequency_penalty": 2.0, "presence_penalty": 2.0, "dry_multiplier": 9.0,
    "forced_bos_token_id": 21, "forced_eos_token_id": 22, "exponential_decay_length_penalty": (1, 2.0),
    "top_h": 0.01, "min_p": 0.9, "top_k": 1, "top_p": 0.01, "typical_p": 0.01, "epsilon_cutoff": 0.9,
    "eta_cutoff": 0.9, "xtc_probability": 1.0, "mirostat": 2, "thinking_token_ids": ((), (22,)),
}  # fmt: skip


class Sampling(FakeOps):
    """FakeOps with all options of the kernels."""

    def choose(self, logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
        return ReferenceOps(torch.float32).choose(logits, params)


@pytest.mark.parametrize("field", [option.field for option in OPTIONS])
def test_every_option_reaches_the_draw(bench: Callable[..., Any], field: str) -> None:
    """Guards against an option that is accepted and ignored: neither a kernel nor a warped row applies it."""
    common = {"temperature": 2.0, "seed": 3, "mirostat_tau": 0.5, "dry_allowed_length": 1, "max_tokens": 20}
    common["thinking_token_budget"] = 3

    def drawn(prompt: list[int], **params: Any) -> Any:
        return bench(ops=Sampling()).generate("a", prompt, 20, ignore_eos=True, **common, **params)

    first = drawn([7] * 4)
    prompt = [7] if field == "forced_bos_token_id" else [*first[:3], 7]  # of one token; so that DRY finds a repetition
    value, ends = EFFECTIVE[field], {"stop_token_ids": (first[1],)}
    assert drawn(prompt, **ends, **{field: value(first) if callable(value) else value}) != drawn(prompt, **ends)


def test_every_truncation_leaves_something_of_anything() -> None:
    """Guards against a row that a truncation empties, or makes NaN of: one token, ties, far values, all but one out."""
    rows = [
        np.zeros(300),
        np.full(300, -np.inf),
        np.full(300, 1e30),
        np.linspace(0, 1e4, 300),
        np.array([2.0, -np.inf]),
    ]
    rows[1][5] = -3e38
    extremes: dict[str, list[Any]] = {
        "top_h": [1e-6, 1.0], "min_p": [1.0], "top_k": [1], "top_p": [1e-6], "typical_p": [1e-6, 0.999999],
        "epsilon_cutoff": [0.999], "eta_cutoff": [0.999], "xtc_probability": [1.0], "mirostat": [1, 2],
    }  # fmt: skip
    assert set(extremes) == {option.field for option in OPTIONS if option.truncation}
    for row, (name, values) in itertools.product(rows, extremes.items()):
        for value in values:
            found = truncate(row.astype(np.float32), SamplingParams(**{name: value}), Draw((0, 0, 0), (-5.0,)))
            assert np.isfinite(found).any(), (name, value)
            assert not np.isnan(found).any(), (name, value)


# --- DRY ------------------------------------------------------------------------------------------------------------


def dry_by_definition(ids: list[int], params: SamplingParams) -> dict[int, float]:
    """The paper's definition with loops: the longest end of the text that is also followed by a token elsewhere."""
    last_n = params.dry_penalty_last_n
    window = ids if last_n < 0 else ids[len(ids) - min(last_n, len(ids)) :]
    breakers = list(params.dry_sequence_breaker_ids)
    limit = len(window)
    for index in range(len(window)):  # tokens after the place where the last breaker ends
        at = len(window) - 1 - index
        ends = [len(b) - 1 for b in breakers if tuple(window[at : at + len(b)]) == b]
        if ends:
            limit = index - max(ends)
            break
    longest: dict[int, int] = {}
    for end in range(len(window) - 1):
        length = 0
        while length <= end and window[end - length] == window[len(window) - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= params.dry_allowed_length and (window[end + 1],) not in breakers:
            longest[window[end + 1]] = max(longest.get(window[end + 1], 0), length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
    }


@pytest.mark.covers("C11")
@settings(max_examples=200)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    allowed=st.integers(1, 4),
    last_n=st.sampled_from([-1, 0, 3, 20]),
    breakers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=2, unique=True),
)
def test_dry_is_its_definition(ids: list[int], allowed: int, last_n: int, breakers: list[tuple[int, ...]]) -> None:
    """Guards against repetitions that are missed, counted across a breaker, or looked for too far back."""
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breaker_ids=tuple(breakers),
    )
    found_ids, values = Repetitions(params).penalties(history_of(ids))
    found = dict(zip(found_ids.tolist(), values.tolist(), strict=True))
    assert found == pytest.approx(dry_by_definition(ids, params), rel=1e-5)
    window = history_of(ids)
    assert sorted(_repeats(window, allowed)) == sorted(_repeats_of_all(ids, allowed))


def test_dry_of_a_text_that_repeats_one_token_takes_no_longer() -> None:
    """Guards against a search whose time grows with the square of the history: 2^17 equal tokens, and no overflow."""
    params = SamplingParams(dry_multiplier=1.0, dry_base=4.0)
    ids, values = Repetitions(params).penalties(np.ones(2**17, dtype=np.int32))
    assert ids.tolist() == [1]
    assert np.isfinite(values).all()
    assert warped(random_logits(3), [1] * 30, [], dry_multiplier=100.0, dry_base=100.0).min() < -1e37
