"""Self-attention over the paged cache: softmax(q k^T / sqrt(D)) v, causal, with grouped query heads."""

import numpy as np

from penstock.kernels.metadata import AttentionParams, RotaryParams
from penstock.kernels.tensors import FLOAT32, Array, Tensor
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class Attention(Module):
    """One product for q, k and v, optional norms of q and k, rotary, attention, and the product that joins the heads.

    The sliding window, if any, comes with the context's metadata for this layer. The norms are over each head or over
    all heads of a token, depending on the size of their weights in the parameter table.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        make: LayerFactory,
        layer: int,
        rotary: Rotary | None = None,
        *,
        unit_offset: bool = False,
        scale: float | None = None,
    ) -> None:
        """rotary: None means no rotation. unit_offset: as in RMSNorm, for the norms of q and k. scale: the factor of
        the scores; None: the config's."""
        self.ops = make.ops
        self.layer = layer
        self.rotary = rotary
        self.heads = heads = make.heads(cfg)
        self.eps = cfg.norm_eps
        slopes = make.own_heads(alibi_slopes(cfg.num_attention_heads), cfg)
        self.params = AttentionParams(
            scale=scale or cfg.attention_scale or heads.head_dim**-0.5,
            softcap=cfg.attn_logit_softcapping,
            alibi_slopes=make.ops.tensor(slopes) if cfg.alibi else None,
            bias_before_scale=cfg.alibi,
        )
        self.qkv_proj = make.linear("qkv_proj")
        self.q_norm = make.rms_norm("q_norm", self.eps, unit_offset=unit_offset) if cfg.qk_norm else None
        self.k_norm = make.rms_norm("k_norm", self.eps, unit_offset=unit_offset) if cfg.qk_norm else None
        self.o_proj = make.linear("o_proj")
        self.q_out = make.slot("q", (heads.num_heads, heads.head_dim))
        self.k_out, self.v_out = (make.slot(name, (heads.num_kv_heads, heads.head_dim)) for name in ("k", "v"))
        self.mixed_out = make.slot("mixed", (heads.num_heads * heads.head_dim,))

    @property
    def rotary_params(self) -> RotaryParams:
        """The heads, rotary table and norms of this layer. Read it after the weights are loaded."""
        return RotaryParams(
            self.heads,
            None if self.rotary is None else self.rotary.cos_sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
        )

    def forward(self, y: Tensor, ctx: ForwardContext) -> Tensor:
        """Map y [T, hidden] dtype to [T, hidden] float32. Stores the new keys and values."""
        tokens = y.shape[0]
        out = self.q_out(tokens), self.k_out(tokens), self.v_out(tokens)
        q, k, v = self.ops.rotary_qkv(self.qkv_proj(y), ctx.positions, self.rotary_params, out=out)
        cache, meta = ctx.layer(self.layer)
        mixed = self.ops.attend(q, k, v, cache, meta, self.params, out=self.mixed_out(tokens))
        return self.o_proj(mixed)


def alibi_slopes(num_heads: int) -> Array:
    """Return the slope by which each head's scores fall with the distance, [H] float32.

    Press et al., "Train Short, Test Long", 2022: 2^(-8 i / n) for i = 1 .. n, where n is the greatest power of two up
    to num_heads. The other heads take every second slope of a model with 2n heads.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return np.array(slopes, dtype=FLOAT32)
