"""Draws against the exact distribution, through the sampler: warped in numpy, drawn by the kernels."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest
from penstock.kernels.backends import load_ops
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.sampling import uniform
from penstock.kernels.sampling import XTC_STREAM, philox4x32, uniform_at
from penstock.runner.input_batch import InputBatch, Positions
from penstock.runner.sampler import Sampler
from penstock.runner.structured import StructuredRows
from tests.kernels.packed import levels

COUNT, VOCAB = 1500, 24
LOGITS = (1.5 * np.random.default_rng(2).standard_normal(VOCAB)).astype(np.float32)
HISTORY = [4, 5, 6, 4, 5]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def of_kept(kept: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    return softmax(np.where(kept, LOGITS / temperature, -np.inf))


P = softmax(LOGITS)
ENTROPY = -(P * np.log(P)).sum()
ORDER = np.argsort(-LOGITS)


def typical(mass: float) -> np.ndarray:
    order = np.argsort(np.abs(-np.log(P) - ENTROPY))
    return np.isin(np.arange(VOCAB), order[: int((np.cumsum(P[order]) < mass).sum()) + 1])


def nucleus(mass: float, most: int = VOCAB) -> np.ndarray:
    """Of the `most` likeliest tokens as many as are needed to reach the mass: the one that crosses it stays."""
    kept, reached = [], 0.0
    for token in ORDER[:most]:
        if reached >= mass:
            break
        kept.append(token)
        reached += P[token] / P[ORDER[:most]].sum()
    return np.isin(np.arange(VOCAB), kept)


def without_top_choices(threshold: float) -> np.ndarray:
    likely = [token for token in ORDER if P[token] >= threshold]
    return ~np.isin(np.arange(VOCAB), likely[:-1])


def repeated_less() -> np.ndarray:
    """After 4 5 6 4 5, the token 6 would make a repetition of two into one of three."""
    return softmax(LOGITS - np.where(np.arange(VOCAB) == 6, 0.8, 0.0))


EXACT: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "plain": ({}, P),
    "top-k and top-p": ({"temperature": 1.0, "top_k": 5, "top_p": 0.9}, of_kept(nucleus(0.9, most=5))),
    "top-p": ({"top_p": 0.7}, of_kept(nucleus(0.7))),
    "typical": ({"typical_p": 0.6}, of_kept(typical(0.6))),
    "epsilon": ({"epsilon_cutoff": 0.03, "temperature": 1.0}, of_kept(P >= 0.03)),
    "eta": ({"eta_cutoff": 0.1}, of_kept(min(0.1, np.sqrt(0.1) * np.exp(-ENTROPY)) <= P)),
    "XTC": ({"xtc_probability": 0.4, "xtc_threshold": 0.08}, 0.4 * of_kept(without_top_choices(0.08)) + 0.6 * P),
    "mirostat": ({"mirostat": 2, "mirostat_tau": 1.7}, of_kept(-np.log2(P) <= 3.4)),
    "DRY": ({"dry_multiplier": 0.8}, repeated_less()),
    "suppressed": ({"suppress_tokens": ORDER[:2].tolist()}, of_kept(~np.isin(np.arange(VOCAB), ORDER[:2]))),
}


def crowd(fields: dict[str, Any]) -> InputBatch:
    """That many choices of one prompt."""
    params = SamplingParams(**{"seed": 1234, **fields})
    batch = InputBatch([CacheGroup((0,), None, 4, 16)], COUNT, 16)
    for choice in range(COUNT):
        batch.add_request(NewRequest(str(choice), HISTORY, len(HISTORY), params, choice, [[]]))
    return batch


def draws(ops: Any, batch: InputBatch) -> np.ndarray:
    """One draw of each, as a step of the runner makes it."""
    rows = np.array([batch.row(str(choice)) for choice in range(COUNT)])
    sampler = Sampler(ops, batch, StructuredRows(None, batch))
    draws = sampler.begin(ops.tensor(np.tile(LOGITS, (COUNT, 1))), Positions(rows, np.zeros_like(rows)))
    return sampler.finish(draws, None)[0].token_ids


@pytest.mark.covers("C12", "F12")
@pytest.mark.parametrize("name", EXACT)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    """Guards against a sampler that draws from something else, or whose own noise follows that of the tokens. The
    noise is counter-based, so the statistic is a constant: a right sampler has p below 0.001 for one seed in 1000."""
    fields, exact = EXACT[name]
    batch = crowd(fields)
    ids = draws(ReferenceOps(torch.float32), batch)
    if levels():
        native = draws(load_ops("cpu", np.dtype(np.float32)), batch)
        assert (ids == native).mean() > 0.999, "logarithms may differ in their last bit, choices hardly ever"
    seen, expected = np.bincount(ids, minlength=VOCAB), COUNT * exact
    assert seen[expected == 0].sum() == 0, "a token that was cut off"
    alive = expected > 0
    statistic = ((seen[alive] - expected[alive]) ** 2 / expected[alive]).sum()
    freedom = torch.tensor((alive.sum() - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))
    assert p_value > 0.001, f"p = {p_value:.2e}"


def test_the_noise_of_xtc_is_another_stream_of_philox() -> None:
    """Guards against XTC that draws with a token's noise: then whether it acts would decide which token comes."""
    for seed, choice, position in ((0, 0, 0), (2**63 + 5, 3, 77), (-1, 127, 2**20)):
        key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF)
        counter = tuple(torch.tensor(word) for word in (choice, position, 0, XTC_STREAM))
        assert uniform_at((seed, choice, position), XTC_STREAM) == float(uniform(philox4x32(counter, key)[0]))
    found = [uniform_at((7, 0, position), XTC_STREAM) for position in range(2000)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.02)
    assert uniform_at((7, 0, 0), 0) != found[0]
