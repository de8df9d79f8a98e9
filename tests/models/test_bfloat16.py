"""How much a bfloat16 run loses, compared with what Transformers loses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf_models import Made, hf_logprobs, make_llama, make_qwen3, random_ids
from tests.paged import PagedModel

SEEDS = range(5)
LENGTH = 401  # 400 next tokens a seed, 2,000 in all


@pytest.mark.parametrize("make", [make_llama, make_qwen3])
def test_error_is_at_most_that_of_transformers(make: Callable[..., Made], tmp_path: Path) -> None:
    """Guards against a value that is rounded twice. The same bfloat16 weights, computed in float32, are the truth;
    the error is the RMS over the next-token log-probabilities of 2,000 positions."""
    ours, theirs = [], []
    for seed in SEEDS:
        bf16_model, directory = make(tmp_path, seed=seed, dtype=torch.bfloat16, num_hidden_layers=4)
        truth_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        ids = random_ids(LENGTH, seed=seed)
        pick = torch.arange(LENGTH - 1), torch.tensor(ids[1:])
        truth = hf_logprobs(truth_model, ids)[pick]
        theirs.append(hf_logprobs(bf16_model, ids)[pick] - truth)
        paged = PagedModel(directory, dtype="bfloat16", max_len=LENGTH)
        ours.append(paged.step({0: ids})[0][pick] - truth)
    our_error, their_error = (torch.cat(errors).square().mean().sqrt().item() for errors in (ours, theirs))
    assert our_error <= 1.1 * their_error, f"ours {our_error:.5f}, Transformers' {their_error:.5f}"
