"""The Llama family against Transformers: same weights, same tokens, same log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_models import LLAMA3_ROPE, MAKERS, hf_logprobs, random_ids
from tests.paged import PagedModel

TOLERANCE = 1e-4
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-head-10": ("llama", {"head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-16-per-kv-head": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 6}),
    "mistral-window": ("mistral", {}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-window-off": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", SLIDING | {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-window": ("qwen3", SLIDING | {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Guards against any slip in the mathematics, in a merge of weights or in a mask. 70 tokens are more than four
    windows and more than the old context of the Llama 3 scaling. Whole; token by token; in chunks of 7 behind a
    cached prefix; each of them packed with another sequence, through shuffled blocks among slots full of NaN."""
    family, overrides = CASES[case]
    hf_model, directory = MAKERS[family](tmp_path, **overrides)
    ids, other = random_ids(70), random_ids(33, seed=1)
    expected, expected_other = hf_logprobs(hf_model, ids), hf_logprobs(hf_model, other)

    paged = PagedModel(directory, num_seqs=4)
    whole = paged.step({0: ids, 1: other})
    torch.testing.assert_close(whole[0], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole[1], expected_other, atol=TOLERANCE, rtol=0)

    decoded = [paged.step({2: ids[:40]})[2]] + [paged.step({2: [token]})[2] for token in ids[40:]]
    torch.testing.assert_close(torch.cat(decoded), expected, atol=TOLERANCE, rtol=0)

    chunks = [paged.step({3: ids[start : start + 7], 1: [5]})[3] for start in range(0, len(ids), 7)]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=TOLERANCE, rtol=0)
