"""Rotary tables."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.config_reader import ConfigReader
from penstock.layers.rotary import Rotary, inverse_frequencies
from penstock.rope_config import RopeConfig, read_rope
from tests.hf_models import LLAMA3_ROPE

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-bounds": {
        "rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 4096,
        "beta_fast": 20, "beta_slow": 2, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn-attention": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}  # fmt: skip


def ours(parameters: dict[str, Any]) -> RopeConfig:
    return read_rope(ConfigReader({"rope_parameters": parameters}, "config.json"), 512)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    """Guards against a scaling that is blended the wrong way round; the Llama 3 case has kept, blended and divided
    frequencies. And against cosines without YaRN's factor."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(KINDS[kind]))
    theirs = LlamaRotaryEmbedding(config)
    rope = ours(KINDS[kind])
    frequencies = inverse_frequencies(rope, 64)
    torch.testing.assert_close(frequencies, theirs.inv_freq.double(), rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)
    cos, sin = theirs(torch.zeros(1), torch.arange(20)[None])
    expected = torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=1)
    torch.testing.assert_close(Rotary(rope, 64, 20, CPU).cos_sin, expected, atol=1e-5, rtol=0)
    if kind == "llama3":
        plain = inverse_frequencies(RopeConfig(theta=500000.0), 64)
        ratio = plain / frequencies
        assert (ratio == 1).any()
        assert ((ratio > 1.001) & (ratio < 7.999)).any()
        assert torch.isclose(ratio, torch.tensor(8.0).double()).any()


def test_an_entry_depends_on_its_position_alone() -> None:
    """Guards against tables that change with the context they are made for, and against float32 angles: at position
    100,000 these are off by 4e-3."""
    rope = RopeConfig()
    short, long = Rotary(rope, 8, 50, CPU).cos_sin, Rotary(rope, 8, 100_001, CPU).cos_sin
    assert torch.equal(long[:50], short)
    assert short.dtype == torch.float32
    exact = 100_000 * inverse_frequencies(rope, 8)
    assert torch.equal(long[100_000], torch.cat([exact.cos(), exact.sin()]).float())
