"""Adapters that PEFT makes for tiny models of Transformers, saved as it saves them: the oracle of these tests."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

TARGETS: dict[str, list[str]] = {  # the products of a layer, as Transformers names them; "all" where not listed
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZE = 0.15  # of the random values: an adapter that changes every token, and keeps the logits in their range


def make_adapter(
    model: PreTrainedModel, directory: Path, *, seed: int = 0, size: float = SIZE, **fields: Any
) -> PeftModel:
    """Give a model a random adapter in place, and save that. fields: of LoraConfig.

    The base model's own layers stay reachable: PeftModel.disable_adapter gives its results.
    """
    name = next((key for key in TARGETS if model.config.model_type.startswith(key)), "")
    config = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS.get(name, USUAL), "lora_dropout": 0.1}
    config |= {"task_type": "CAUSAL_LM"} | fields
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that are [in, out], and of biases of B
        adapted = get_peft_model(model, LoraConfig(**config)).eval()
        _randomise(adapted, seed, size)
        adapted.save_pretrained(directory)
    return adapted


def _randomise(adapted: PeftModel, seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    for key, value in adapted.named_parameters():
        if "lora_magnitude" in key:
            value.data *= 1 + 0.2 * torch.randn(value.shape, generator=draw)
        elif "lora_" in key or (value.requires_grad and "bias" in key):
            value.data = size * torch.randn(value.shape, generator=draw)


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits after each token, [T, V] float32."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return found


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The next tokens, each the likeliest after those before it."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[-count:]
