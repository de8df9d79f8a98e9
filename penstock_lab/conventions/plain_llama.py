"""Llama written out with torch's own layers in JetStream's calling convention: the version "plain".

block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm, rotary, grouped-query attention, SwiGLU
It shows every line of the arithmetic, to read or to change. LLM(model, model_impl="plain") uses it. It rounds where
torch does, and does not guarantee identical bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.spec.model_config import ModelConfig
from penstock_lab.conventions.jetstream import Environment

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class PlainLlama(nn.Module):
    """The decoder and its head."""

    def __init__(self, config: ModelConfig, env: Environment) -> None:
        super().__init__()
        self.model = PlainDecoder(config, env)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, input_pos: Tensor, caches: Sequence[Any], mask: Tensor) -> Tensor:
        """Map tokens and their positions, [B, S] each, to logits [B, S, V]."""
        logits: Tensor = self.lm_head(self.model(tokens, input_pos, caches, mask))
        return logits


class PlainDecoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, config: ModelConfig, env: Environment) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = PlainNorm(config)
        self.cos_sin = None if config.rope is None else env.make.rotary(config.rope, config).cos_sin

    def forward(self, tokens: Tensor, input_pos: Tensor, caches: Sequence[Any], mask: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        rotary = None if self.cos_sin is None else self.cos_sin[input_pos][:, None]  # (B, 1, S, D)
        for block, cache in zip(self.layers, caches, strict=True):
            x = block(x, rotary, cache, mask)
        normed: Tensor = self.norm(x)
        return normed


class PlainBlock(nn.Module):
    """Attention and feed-forward, each after its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = PlainNorm(config)
        self.self_attn = PlainAttention(config)
        self.post_attention_layernorm = PlainNorm(config)
        self.mlp = PlainMLP(config)

    def forward(self, x: Tensor, rotary: Tensor | None, cache: Any, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, cache, mask)
        branch: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + branch


class PlainAttention(nn.Module):
    """softmax(q k^T / sqrt(D) + mask) v over the keys and values in the cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        q, kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, q, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv, bias=config.attention_bias)
        self.o_proj = nn.Linear(q, hidden, bias=config.attention_out_bias)

    def forward(self, x: Tensor, rotary: Tensor | None, cache: Any, mask: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, S, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        keys, values = (item.repeat_interleave(self.group, dim=1) for item in cache.update(k, v))
        scores = q.float() @ keys.float().transpose(2, 3) * self.head_dim**-0.5 + mask
        mixed = scores.softmax(dim=-1).to(values.dtype) @ values
        branch: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return branch


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the two halves of each head [..., D]; `rotary` holds cosines, then sines."""
    cos, sin = rotary.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class PlainMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(hidden, wide, bias=bias)
        self.up_proj = nn.Linear(hidden, wide, bias=bias)
        self.down_proj = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return branch


class PlainNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)
