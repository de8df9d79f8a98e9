"""A tiny twin: a config shrunk to seconds of work that keeps every feature, and random weights that all matter."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.models.config_json import parse_model_config
from penstock.spec.model_config import ModelConfig

VOCAB_SIZE = 199  # odd, as many real ones are
HEAD_DIM = 16
HIDDEN_SIZE = 48  # where it does not follow from the heads
WINDOW = 16
CONTEXT, OLD_CONTEXT = 512, 64  # positions now, and before a scaling of the rotary frequencies
MAX_RATIO = 8  # query heads that share a kv head
EMBEDDING_RMS = 0.2  # so small that the epsilon of the first norm is seen

# Sizes by the names that configs have for them. Numbers that a config does not have, or leaves open, stay away.
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "sliding_window": WINDOW,
    "max_position_embeddings": CONTEXT,
    "original_max_position_embeddings": OLD_CONTEXT,
    "query_pre_attn_scalar": 24,
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
EXPERTS = ("num_local_experts", "num_experts")


def make_tiny(config: Any, model_class: Any, directory: Path, seed: int = 0) -> None:
    """Save a random model of Transformers' class with this config, shrunk, to the directory."""
    small = type(config).from_dict(shrink(config.to_dict() | {"architectures": [model_class.__name__]}, config))
    small._attn_implementation = "eager"
    model = model_class(small).eval()
    randomise(model, seed)
    model.save_pretrained(directory)


def shrink(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """A Transformers config as a dictionary -> the same with small sizes: all kinds of layers, one of each, and as many
    query heads to a kv head.

    config: the same, for its own spelling of common names.
    """
    numbers = parse_model_config(values)
    spelling = getattr(config, "attribute_map", {})
    result = dict(values)

    def put(name: str, value: Any) -> None:
        key = spelling.get(name, name)
        if result.get(key) is not None:
            result[key] = value

    for name, size in SMALL.items():
        old = result.get(spelling.get(name, name))
        put(name, min(old, size) if isinstance(old, int) else size)
    head_dim = _shrink_heads(numbers, values, put)
    if "head_dim" in result:  # also where it is left open
        result["head_dim"] = head_dim
    _shrink_layers(numbers, result, put)
    for name in EXPERTS:
        put(name, min(numbers.num_experts, max(4, numbers.num_experts_per_tok + 1)))
    _shrink_rope(result)
    _shrink_ids(result)
    return result | {"dtype": "float32"}


def _shrink_heads(numbers: ModelConfig, values: dict[str, Any], put: Any) -> int:
    """Heads, and what follows from them. Returns the size of one."""
    ratio = numbers.num_attention_heads // numbers.num_key_value_heads
    kv_heads = min(numbers.num_key_value_heads, 4 if ratio == 1 else 2)
    heads = kv_heads * (ratio if ratio <= MAX_RATIO else MAX_RATIO - ratio % 2)
    head_dim = min(numbers.head_dim, HEAD_DIM)
    put("num_attention_heads", heads)
    for name in KV_HEADS:  # some files repeat the number of query heads where there is one kv head
        put(name, heads if values.get(name) == numbers.num_attention_heads else kv_heads)
    follows = numbers.hidden_size == numbers.num_attention_heads * numbers.head_dim
    put("hidden_size", heads * head_dim if follows else HIDDEN_SIZE)
    return head_dim


def _shrink_layers(numbers: ModelConfig, result: dict[str, Any], put: Any) -> None:
    """The first layer of each kind, at least two, in their order."""
    count = numbers.num_hidden_layers
    sparse = numbers.sparse_layers or (False,) * count
    kinds = list(zip(numbers.layer_windows, sparse, strict=True))
    chosen = sorted({kinds.index(kind) for kind in kinds})
    chosen = sorted({*chosen, *range(min(count, 2))}) if len(chosen) < 2 else chosen
    for key, value in result.items():
        if isinstance(value, list) and len(value) == count:
            result[key] = [value[index] for index in chosen]
    put("num_hidden_layers", len(chosen))
    if "mlp_only_layers" in result:
        result["mlp_only_layers"] = [at for at, index in enumerate(chosen) if not sparse[index]]
        result["decoder_sparse_step"] = 1
    windows = [numbers.layer_windows[index] is not None for index in chosen]
    put("max_window_layers", windows.index(True) if any(windows) else len(chosen))


def _shrink_rope(result: dict[str, Any]) -> None:
    """The context before a scaling, so that the prompt reaches beyond it. There may be one mapping a kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = result.get(key)
        if isinstance(rope, dict):
            result[key] = {name: _small_rope(value) for name, value in _small_rope(rope).items()}


def _small_rope(rope: Any) -> Any:
    old = "original_max_position_embeddings"
    return rope | {old: min(rope[old], OLD_CONTEXT)} if isinstance(rope, dict) and rope.get(old) else rope


def _shrink_ids(result: dict[str, Any]) -> None:
    """Special tokens that the vocabulary has."""
    for key, value in result.items():
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and any(isinstance(item, int) and item >= VOCAB_SIZE for item in ids):
            result[key] = {"bos_token_id": 1, "eos_token_id": 2}.get(key)


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew, so that activations stay near 1, logits are a few units apart, and a change to any
    of them is seen: norms off 1, biases off 0, embeddings small. With an initialisation for training all tokens would
    be almost equally likely, and most mistakes invisible."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(EMBEDDING_RMS * noise)
            elif parameter.ndim < 2:  # a norm's is made as 1, or as 0 where it is added to 1; a bias as 0
                parameter.copy_(parameter.mean().round() + (0.2 if name.endswith("weight") else 0.3) * noise)
            else:
                parameter.copy_(noise * (2 if "head" in name else 1) / parameter.shape[-1] ** 0.5)
