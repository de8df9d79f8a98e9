"""Tiny random models made by Transformers, saved as it saves them: the oracle of every numerics test.

The weights are drawn so that logits differ clearly and every parameter matters (norms off 1, biases off 0); with
Transformers' own initialisation all tokens would be almost equally likely and most mistakes invisible.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

torch.set_num_threads(1)  # tiny products gain nothing from more, and tests often run beside other work

Made = tuple[PreTrainedModel, Path]


def make_llama(tmp_path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Made:
    """A random LlamaForCausalLM and its directory (config.json, model.safetensors; no tokenizer)."""
    return _make(LlamaForCausalLM, LlamaConfig(**TINY | overrides), tmp_path, seed, dtype)


def make_mistral(tmp_path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Made:
    """Like make_llama; the window is 16 tokens."""
    return _make(MistralForCausalLM, MistralConfig(**TINY | {"sliding_window": 16} | overrides), tmp_path, seed, dtype)


def make_qwen2(tmp_path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Made:
    """Like make_llama, with biases on q, k and v."""
    return _make(Qwen2ForCausalLM, Qwen2Config(**TINY | overrides), tmp_path, seed, dtype)


def make_qwen3(tmp_path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Made:
    """Like make_llama, with norms on q and k."""
    return _make(Qwen3ForCausalLM, Qwen3Config(**TINY | {"head_dim": 16} | overrides), tmp_path, seed, dtype)


MAKERS = {"llama": make_llama, "mistral": make_mistral, "qwen2": make_qwen2, "qwen3": make_qwen3}


def _make(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, tmp_path: Path, seed: int, dtype: torch.dtype
) -> Made:
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomise(model, seed)
    model = model.to(dtype)
    directory = tmp_path / f"{config.model_type}-{seed}"
    model.save_pretrained(directory)
    return model, directory


FACTORS = ("weight", "scale", "layer_scalar")  # the ends of names: a norm's, a router's, a layer's


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter anew, each of a size that keeps activations near 1 and logits a few units apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in all_values(model):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(FACTORS) and parameter.ndim == 1:  # made as 1, or as 0 where it is added to 1
                parameter.copy_(parameter.mean().round() + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif is_vocabulary(name):
                parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def all_values(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """List what a model saves, each once: its parameters, and the numbers that may be buffers."""
    buffers = [item for item in model.named_buffers() if item[0].endswith(("e_score_correction_bias", "layer_scalar"))]
    return [*model.named_parameters(), *buffers]


def is_vocabulary(name: str) -> bool:
    """Whether a parameter has a row for each token."""
    return any(part in name for part in ("embed", "wte", "lm_head"))


def random_ids(count: int, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def hf_logprobs(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Transformers' log-probabilities after each token, [len(ids), V] float32, in one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)
