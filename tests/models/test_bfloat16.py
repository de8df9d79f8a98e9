"""How much a bfloat16 run loses, compared with what Transformers loses."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.hf_models import MAKERS, hf_logprobs, random_ids
from tests.paged import PagedModel

SEEDS = range(5)
LENGTH = 401  # 400 next tokens a seed, 2,000 in all
NUM_SEQS = 4  # decoded side by side, so that 2,000 positions take 500 steps


def next_token(logprobs: Tensor, ids: list[int]) -> Tensor:
    """Log-probabilities after each token, [n, V] -> those of the token that follows, [n - 1]."""
    return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def decoded(directory: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Log-probabilities after each token of each sequence, one token a step through the bfloat16 cache."""
    paged = PagedModel(directory, dtype="bfloat16", num_seqs=len(sequences), max_len=len(sequences[0]))
    steps = [paged.step({row: [ids[at]] for row, ids in enumerate(sequences)}) for at in range(len(sequences[0]))]
    return [torch.cat([step[row] for step in steps]) for row in range(len(sequences))]


@pytest.mark.parametrize("way", ["prefill", "decode"])
@pytest.mark.parametrize("family", MAKERS)
def test_error_is_at_most_that_of_transformers(family: str, way: str, tmp_path: Path) -> None:
    """Guards against a value that is rounded twice. The same bfloat16 weights, computed in float32, are the truth;
    the error is the RMS over the next-token log-probabilities of 2,000 positions, five seeds pooled."""
    ours, theirs = [], []
    length = LENGTH if way == "prefill" else 1 + (LENGTH - 1) // NUM_SEQS
    for seed in SEEDS:
        bf16_model, directory = MAKERS[family](tmp_path, seed=seed, dtype=torch.bfloat16, num_hidden_layers=4)
        truth_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        if way == "prefill":
            sequences = [random_ids(length, seed=seed)]
            found = [PagedModel(directory, dtype="bfloat16", max_len=length).step({0: sequences[0]})[0]]
        else:
            sequences = [random_ids(length, seed=NUM_SEQS * seed + row) for row in range(NUM_SEQS)]
            found = decoded(directory, sequences)
        for ids, logprobs in zip(sequences, found, strict=True):
            truth = next_token(hf_logprobs(truth_model, ids), ids)
            theirs.append(next_token(hf_logprobs(bf16_model, ids), ids) - truth)
            ours.append(next_token(logprobs, ids) - truth)
    assert sum(len(errors) for errors in ours) >= 2000
    our_error, their_error = (torch.cat(errors).square().mean().sqrt().item() for errors in (ours, theirs))
    assert our_error <= 1.1 * their_error, f"ours {our_error:.5f}, Transformers' {their_error:.5f}"
