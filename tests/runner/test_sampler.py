"""Log-probabilities: order, ties, ranks; and the noise position of sampled rows."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.sampling import score_tokens
from penstock.runner.sampler import token_logprobs

few_values = st.lists(st.sampled_from([-2.0, -1.0, -0.5, -math.inf]), min_size=7, max_size=7)


@settings(max_examples=100)
@given(st.lists(few_values, min_size=1, max_size=4), st.integers(1, 7), st.integers(0, 6))
def test_top_ids_ranks_and_ties(rows: list[list[float]], count: int, token: int) -> None:
    """Guards against topk's free choice among equal values: ties go to the lowest id, at the boundary too."""
    logprobs = np.array(rows, dtype=np.float32)
    best = [sorted(range(7), key=lambda v: (-row[v], v))[:count] for row in rows]
    scores = score_tokens(logprobs, np.full(len(rows), token), count)
    found = token_logprobs([scores.ids, scores.logprobs, scores.ranks], [count] * len(rows))
    for entry, row, ids in zip(found, rows, best, strict=True):
        assert entry.token_ids == [token, *ids]
        assert entry.logprobs == [row[token], *(row[v] for v in ids)]
        assert entry.rank == 1 + sum(value > row[token] for value in row)


def test_each_row_gets_as_many_as_it_asks_for() -> None:
    """Guards against the widest row's number given to all; 20 of a vocabulary of 4 are 4."""
    scores = score_tokens(np.arange(8.0, dtype=np.float32).reshape(2, 4), np.array([0, 3]), 20)
    found = token_logprobs([scores.ids, scores.logprobs, scores.ranks], [0, 20])
    assert found[0].token_ids == [0]
    assert found[1].token_ids == [3, 3, 2, 1, 0]


def test_logprobs_are_raw(bench: Callable[..., Any]) -> None:
    """Guards against log-probabilities taken after bias, penalties or temperature."""
    made = bench()
    made.scheduler.add("a", [5, 6], logprobs=3, logit_bias={9: 100.0}, repetition_penalty=2.0)
    made.scheduler.add("b", [5, 7])
    made.scheduler.add("c", [5, 8], logprobs=0, temperature=3.0, seed=1)
    results = made.step()
    raw, raw_c = (torch.log_softmax(made.model.logits(token, 1), -1) for token in (6, 8))
    assert results["a"].new_token_ids == [9]
    entry = results["a"].logprobs[0]
    assert entry.token_ids == [9, *raw.topk(3).indices.tolist()]
    assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist(), abs=1e-6)
    assert entry.rank == 1 + int((raw > raw[9]).sum())
    assert results["b"].logprobs is None
    chosen = results["c"].new_token_ids[0]
    assert results["c"].logprobs[0].token_ids == [chosen]
    assert results["c"].logprobs[0].logprobs == pytest.approx([float(raw_c[chosen])], abs=1e-6)


def test_choices_of_one_seed_differ_and_repeat(bench: Callable[..., Any]) -> None:
    """Guards against a choice index left out of the noise. 12 tokens of 40: equal by chance about 1 in 10^10."""
    runs = []
    for _ in range(2):
        made = bench()
        runs.append([made.generate(str(c), [1], 12, temperature=2.0, seed=-7, choice=c) for c in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_resumed_request_goes_on_with_the_same_noise(bench: Callable[..., Any]) -> None:
    """Guards against noise positions counted from the resumption, and counts that forget the earlier outputs."""
    params = {"temperature": 1.5, "seed": 2**64 - 3, "choice": 2, "frequency_penalty": 1.5, "min_tokens": 6}
    whole = bench(eos_token_ids=(3,)).generate("a", [1, 2, 3], 12, max_tokens=99, **params)
    for half in (1, 5, 9):
        rest = bench(eos_token_ids=(3,)).generate(
            "b", [1, 2, 3], 12 - half, max_tokens=99, outputs=whole[:half], **params
        )
        assert whole[:half] + rest == whole


def test_tokens_do_not_depend_on_the_batch(bench: Callable[..., Any]) -> None:
    """Guards against rows mixed up between requests with different parameters, whatever order they are packed in."""
    wanted = {
        "a": {"temperature": 1.0, "seed": 1},
        "b": {"temperature": 0.0, "logprobs": 2},
        "c": {"temperature": 2.0, "seed": 1, "presence_penalty": 1.0},
    }
    alone = {name: bench().generate(name, [ord(name) - 90], 6, **params) for name, params in wanted.items()}
    made = bench()
    for name, params in wanted.items():
        made.scheduler.add(name, [ord(name) - 90], **params)
        made.step()
    for _ in range(5):
        made.step()
    assert {name: r.token_ids[1:7] for name, r in made.scheduler.requests.items()} == alone


def test_a_row_that_changes_hands_changes_its_parameters(bench: Callable[..., Any]) -> None:
    """Guards against sampling parameters kept for a request that has left: the next one in its row has its own."""
    expected = bench().generate("b", [7], 5, temperature=2.0, seed=5, top_k=3)
    made = bench()
    made.generate("a", [3], 5, temperature=2.0, seed=9, top_p=0.5)
    assert made.generate("b", [7], 5, temperature=2.0, seed=5, top_k=3) == expected
