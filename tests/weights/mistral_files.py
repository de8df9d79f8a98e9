"""Models in Mistral's own format: params.json and consolidated.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf_models import TINY

PARAMS: dict[str, Any] = {
    "dim": TINY["hidden_size"],
    "n_layers": TINY["num_hidden_layers"],
    "head_dim": TINY["hidden_size"] // TINY["num_attention_heads"],
    "hidden_dim": TINY["intermediate_size"],
    "n_heads": TINY["num_attention_heads"],
    "n_kv_heads": TINY["num_key_value_heads"],
    "norm_eps": 1e-6,
    "vocab_size": TINY["vocab_size"],
    "sliding_window": 16,
    "max_seq_len": 512,
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "block_sparse_moe": "feed_forward",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_mistral(name: str, value: Tensor) -> tuple[str, Tensor]:
    """A tensor of Transformers in Mistral's format: elements i and i + D/2 of a rotated head become neighbours."""
    head = PARAMS["head_dim"]
    if "q_proj" in name or "k_proj" in name:
        value = torch.stack(value.unflatten(0, (-1, head)).split(head // 2, dim=1), dim=2).reshape(value.shape)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name, value.contiguous()


def write_mistral(directory: Path, target: Path, **params: Any) -> Path:
    """Write the model of a directory, in Transformers' format, in Mistral's."""
    target.mkdir()
    tensors = dict(as_mistral(name, value) for name, value in load_file(directory / "model.safetensors").items())
    save_file(tensors, target / "consolidated.safetensors")
    (target / "params.json").write_text(json.dumps(PARAMS | params))
    return target
