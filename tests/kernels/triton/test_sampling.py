"""From logits to ids and log-probabilities, against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.sampling import gumbel_noise, truncate
from penstock.kernels.sampling import NO_TOKEN, SamplingTensors, pack_bits
from penstock.kernels.triton import sampling
from penstock.kernels.triton.ops import TritonOps
from tests.kernels.triton.compare import DEVICE, draw

TRITON, REFERENCE = TritonOps(torch.float32, DEVICE), ReferenceOps(torch.float32, DEVICE)
V = 700  # three blocks, the last of which is not filled
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum of a row of NaN


def keys(rows: int) -> Tensor:
    """Keys with words above 2^31, and a negative seed."""
    numbers = torch.arange(rows)
    return torch.stack([-(2**60) + numbers * 12345678901, numbers % 3, 2**31 + numbers], dim=1)


def logits(rows: int) -> Tensor:
    """Logits with many ties, on both sides of zero."""
    return (draw(rows, V) * 12).round() / 4


ROWS = torch.arange(6)
PAIRS = torch.tensor([[0, 3], [1, 699], [2, 256], [5, 0]])
HEAT = torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0, 0.5])
BITS = torch.from_numpy(np.stack([pack_bits(draw(V).cpu().numpy() > level) for level in (0, 2)])).to(DEVICE)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": torch.zeros(6)},
    "random": {"noise_key": keys(6)},
    "top_k": {"noise_key": keys(6), "top_k": torch.tensor([1, 5, 3, V, 0, 40])},
    "top_p": {"noise_key": keys(6), "top_p": torch.tensor([0.5, 0.5, 1e-6, 1.0, 0.9, 0.3])},
    "min_p": {"noise_key": keys(6), "min_p": torch.tensor([0.5, 0.1, 0.0, 0.01, 1.0, 0.2])},
    "all": {
        "noise_key": keys(6),
        "top_k": torch.tensor([9, 5, 3, V, 20, 40]),
        "top_p": torch.tensor([0.5, 0.5, 0.8, 0.9, 0.9, 1.0]),
        "min_p": torch.tensor([0.0, 0.1, 0.2, 0.01, 0.0, 0.2]),
    },
    "adjusted": {
        "noise_key": keys(6),
        "allowed": (torch.tensor([4, 1]), BITS),
        "masked": torch.tensor([[0, 5], [3, 600]]),
        "bias": (PAIRS, torch.tensor([9.0, 8.0, -3.0, 7.0])),
        "repetition": (torch.full((6,), 1.3), PAIRS),
        "counts": (torch.full((6,), 0.3), torch.full((6,), 0.2), PAIRS, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_choosing(name: str) -> None:
    """Guards against an id of another block, a tie that goes to a higher id, a cut that keeps too many or too few, and
    noise that is not Philox's."""
    params, x = SamplingTensors(**{"temperature": HEAT, **CASES[name]}), logits(6)
    before = x.clone()
    ids, healthy = TRITON.choose(x, params)
    assert torch.equal(ids, REFERENCE.choose(x, params)[0])
    assert healthy.all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("limits", [{"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3, "top_k": 30, "top_p": 0.5}])
def test_which_ids_are_left(limits: dict[str, float]) -> None:
    """Guards against ids that a draw would rarely show: every id is drawn that is left, and no other."""
    x = (draw(1, 40) * 4).round() / 2
    kinds = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    given = {name: torch.tensor([value], dtype=kinds[name]) for name, value in limits.items()}
    left = truncate(x, *(given.get(name) for name in ("top_k", "top_p", "min_p")))[0] > float("-inf")
    cuts = torch.empty(1, 2, dtype=torch.int64)
    numbers = x, torch.ones(1), *(given.get(name) for name in ("top_k", "top_p", "min_p")), cuts, 40
    sampling.launch(sampling.cut_row, (1,), *numbers, SIZE=16, DIGITS=16, warps=1)
    level, last = cuts[0].tolist()
    bits = x[0].add(0.0).view(torch.int32).long()
    key = torch.where(bits < 0, -1 - bits, bits + 2**31)
    assert torch.equal((key > level) | ((key == level) & (torch.arange(40) <= last)), left)


def test_rows_that_are_not_healthy() -> None:
    """Guards against a NaN that is passed over, or that reaches its neighbour, and an id where none is left."""
    x = logits(5)
    alone = TRITON.choose(x, SamplingTensors(torch.ones(5), noise_key=keys(5)))[0]
    x[0, 650], x[1, 3], x[2] = float("nan"), float("inf"), float("-inf")
    params = SamplingTensors(torch.ones(5), noise_key=keys(5), top_k=torch.full((5,), V))
    ids, healthy = TRITON.choose(x, params)
    assert healthy.tolist() == [False, False, False, True, True]
    assert torch.equal(ids[3:], alone[3:])
    assert ids[2] == NO_TOKEN
    scores = TRITON.token_scores(x, torch.tensor([1, 2, 3, 4, NO_TOKEN]), 2)
    assert scores.logprobs[:3].isnan().all()
    assert not scores.logprobs[3:].isnan().any()


def test_noise_is_that_of_the_cpu() -> None:
    """Guards against words in another order: with equal logits, the id with the largest noise is drawn."""
    ids, _ = TRITON.choose(torch.zeros(8, V), SamplingTensors(torch.ones(8), noise_key=keys(8)))
    assert torch.equal(ids, gumbel_noise(keys(8), V).argmax(dim=-1))


def test_scores() -> None:
    """Guards against ranks of ties, and likeliest ids that are not in order."""
    x, ids = logits(4), torch.tensor([0, 699, 300, 3])
    for num_top in (V, 100, 5):  # many are sorted, a few are searched for
        expected = REFERENCE.token_scores(x, ids, num_top)
        found = TRITON.token_scores(x, ids, num_top)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(TRITON.token_scores(x[1:2], ids[1:2], 5).logprobs, found.logprobs[1:2])
    few = TRITON.token_scores(x[:, :3].contiguous(), torch.tensor([0, 1, 2, 0]), 5)
    assert few.ids.shape == (4, 4)
    fetched = TRITON.fetch([found.ids, found.ranks])()
    assert fetched[0].tolist() == expected.ids.tolist()
