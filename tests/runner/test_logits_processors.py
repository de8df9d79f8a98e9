"""Masks, bias and penalties against a reference that looks at the whole history again for every token."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest
from penstock.kernels.sampling import SamplingTensors
from penstock.runner.input_batch import InputBatch, Positions
from penstock.runner.logits import TokenCounts
from penstock.runner.sampler import adjusted_rows, sampling_tensors
from tests.fakes import FakeOps, adjusted

VOCAB = 12
CPU = torch.device("cpu")
EOS = (3, 7)

params_strategy = st.fixed_dictionaries(
    {
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "bad_words_token_ids": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(
            tuple
        ),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0])),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.25]),
    }
)
row_strategy = st.tuples(
    params_strategy, st.lists(st.integers(0, 4), min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=6)
)


def reference(logits: list[float], params: SamplingParams, prompt: list[int], outputs: list[int]) -> list[float]:
    """What vLLM's documentation says the parameters do, from the whole history."""
    result = list(logits)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)} if len(outputs) < params.min_tokens else set()
    history = prompt + outputs
    for word in params.bad_words_token_ids:
        start = list(word[:-1])
        if not start or history[-len(start) :] == start:
            ends.add(word[-1])
    for v in range(VOCAB):
        value = -math.inf if v in ends else result[v] + (params.logit_bias or {}).get(v, 0.0)
        if v in history:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = Counter(outputs)[v]
        result[v] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    return result


def fill(rows: list[Any]) -> tuple[InputBatch, np.ndarray]:
    """A batch that learnt half of each row's outputs with the request and the others one by one."""
    batch = InputBatch([CacheGroup((0,), None, 4, 16)], len(rows), 16, EOS)
    for index, (params, prompt, outputs) in enumerate(rows):
        known = prompt + outputs[: len(outputs) // 2]
        sampling = SamplingParams(temperature=0.0, max_tokens=None, **params)
        batch.add_request(NewRequest(str(index), known, len(prompt), sampling, 0, [[]]))
        for token in outputs[len(outputs) // 2 :]:
            batch.append(np.array([batch.row(str(index))]), np.array([token]), np.array([0]))
    return batch, np.array([batch.row(str(index)) for index in range(len(rows))])


def tensors_of(batch: InputBatch, indices: np.ndarray) -> SamplingTensors:
    positions = Positions(indices, np.zeros_like(indices))
    return sampling_tensors(batch, positions, VOCAB, FakeOps(), adjusted_rows(batch, positions))


@settings(max_examples=150)
@given(st.lists(row_strategy, min_size=1, max_size=4))
def test_processors_equal_reference(rows: list[Any]) -> None:
    """Guards against incremental counts that drift from the history, and pairs that land in a neighbour's row."""
    batch, indices = fill(rows)
    logits = torch.linspace(-3, 3, VOCAB).repeat(len(rows), 1)
    found = adjusted(logits, tensors_of(batch, indices))
    for row, (params, prompt, outputs) in zip(found, rows, strict=True):
        sampling = SamplingParams(temperature=0.0, max_tokens=None, **params)
        assert row == pytest.approx(reference(logits[0].tolist(), sampling, prompt, outputs), abs=1e-5)


def test_plain_greedy_rows_need_nothing() -> None:
    """Guards against passes over the logits that no row asked for; greedy rows ignore top_k, top_p and min_p."""
    rows = [({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, [1], []), ({}, [2], [1])]
    batch, indices = fill(rows)
    tensors = tensors_of(batch, indices)
    assert tensors.temperature.tolist() == [0.0, 0.0]
    others = [tensors.top_k, tensors.top_p, tensors.min_p, tensors.noise_key, tensors.masked, tensors.bias]
    assert all(item is None for item in [*others, tensors.repetition, tensors.counts])


def test_sampled_rows_carry_their_limits() -> None:
    """Guards against top_k = 0, -1 or above V reaching a kernel as such: V means off."""
    batch = InputBatch([CacheGroup((0,), None, 4, 16)], 4, 16)
    for name, top_k in [("a", 0), ("b", -1), ("c", 5), ("d", VOCAB + 1)]:
        params = SamplingParams(seed=9, top_k=top_k, top_p=0.5 if name == "a" else 1.0)
        batch.add_request(NewRequest(name, [1, 2, 3], 1, params, 6, [[]]))
    indices = np.array([batch.row(name) for name in "abcd"])
    tensors = tensors_of(batch, indices)
    assert tensors.top_k is not None
    assert tensors.top_k.tolist() == [VOCAB, VOCAB, 5, VOCAB]
    assert tensors.top_p is not None
    assert tensors.top_p.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert tensors.noise_key is not None
    assert tensors.noise_key.tolist() == [[9, 6, 2]] * 4


def test_ids_outside_the_vocabulary_are_dropped() -> None:
    """Guards against an end token or bad word of the tokenizer that the model has no logit for: an index error."""
    params = {"min_tokens": 1, "stop_token_ids": [VOCAB + 5, 2], "bad_words_token_ids": ((VOCAB,),)}
    rows = [({**params, "logit_bias": {VOCAB: 1.0, 4: 2.0}, "repetition_penalty": 2.0}, [VOCAB + 1, 1], [])]
    batch, indices = fill(rows)
    tensors = tensors_of(batch, indices)
    assert tensors.masked is not None
    assert sorted(tensors.masked.tolist()) == [[0, 2], [0, 3], [0, 7]]
    assert tensors.bias is not None
    assert [part.tolist() for part in tensors.bias] == [[[0, 4]], [2.0]]
    assert tensors.repetition is not None
    assert tensors.repetition[1].tolist() == [[0, 1]]


@given(st.lists(st.integers(0, 300), max_size=400))
@settings(max_examples=30)
def test_token_counts_grow(token_ids: list[int]) -> None:
    """Guards against a count lost when the arrays run out of spare room."""
    counts = TokenCounts(np.array(token_ids[:50], dtype=np.int32))
    for token_id in token_ids[50:]:
        counts.add(token_id)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(token_ids)


def test_min_tokens_holds_through_the_runner(bench: Callable[..., Any]) -> None:
    """Guards against min_tokens counted from the wrong end: the end token may be the third output, not before."""
    wants_end = {"logit_bias": {3: 90.0}, "max_tokens": 8}
    tokens = bench(eos_token_ids=EOS).generate("a", [1, 2], 4, min_tokens=2, **wants_end)
    assert 3 not in tokens[:2]
    assert tokens[2] == 3
    assert bench(eos_token_ids=EOS).generate("b", [1, 2], 1, min_tokens=2, ignore_eos=True, **wants_end) == [3]


def test_a_row_does_not_inherit(bench: Callable[..., Any]) -> None:
    """Guards against a bias or penalty left behind by the request that had the row before."""
    made = bench(max_num_seqs=1)
    plain = made.generate("a", [1, 2], 4)
    assert made.generate("b", [1, 2], 2, logit_bias={9: 100.0}) == [9, 9]
    assert made.generate("c", [1, 2], 4) == plain
