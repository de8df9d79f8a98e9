"""The tiny twin: small, and with every feature of the model that it stands for."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MinistralConfig, Qwen3Config

from penstock.models.config_json import parse_model_config
from penstock.spec.model_config import ModelConfig
from penstock_lab.check.target import make_tiny, randomise, shrink
from tests.hf_models import LLAMA3_ROPE

LARGE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
}


def shrunk(config: Any, architecture: str) -> ModelConfig:
    return parse_model_config(shrink(config.to_dict() | {"architectures": [architecture]}, config))


def test_what_matters_stays() -> None:
    """Guards against a twin that lacks what the model has: grouped heads, a scaled rotation, a kind of layer."""
    small = shrunk(LlamaConfig(**LARGE, head_dim=128, rope_parameters=LLAMA3_ROPE), "LlamaForCausalLM")
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (8, 2, 16)
    assert small.hidden_size == 8 * 16
    assert small.num_hidden_layers == 2
    assert small.vocab_size < 200
    assert all(token < small.vocab_size for token in small.eos_token_ids)
    assert small.rope is not None
    assert (small.rope.rope_type, small.rope.factor) == ("llama3", 8.0)
    # Longer heads than hidden_size / heads, and one key/value head for all.
    small = shrunk(Qwen3Config(**LARGE | {"num_key_value_heads": 1}, head_dim=256), "Qwen3ForCausalLM")
    assert small.num_key_value_heads == 1
    assert small.hidden_size != small.num_attention_heads * small.head_dim

    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6
    config = MinistralConfig(**LARGE, head_dim=128, sliding_window=4096, layer_types=kinds)
    assert shrunk(config, "MinistralForCausalLM").layer_windows == (16, None)


def test_every_parameter_is_drawn(tmp_path: Path) -> None:
    """Guards against parameters that stay as they were made: norms of 1 and biases of 0 hide mistakes."""
    config = LlamaConfig(**LARGE | {"attention_bias": True})
    make_tiny(config, LlamaForCausalLM, tmp_path / "tiny")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny")
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.05, name
        assert 0.5 < parameter.mean() < 1.5 if "norm" in name else parameter.mean().abs() < 0.2, name
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    randomise(model, 1)
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
