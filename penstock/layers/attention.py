"""Self-attention over the paged cache: softmax(q k^T / sqrt(D)) v, causal, with grouped query heads."""

import torch
from torch import Tensor, nn

from penstock.kernels.ops import AttentionParams
from penstock.layers.context import ForwardContext
from penstock.layers.factory import LayerFactory
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class Attention(nn.Module):
    """q, k and v in one product; optional norms of q and k; rotary; attention; the product that joins the heads.

    The window, where there is one, comes with the context's metadata for this layer. The norms are of each head or of
    all heads of a token together, as large as their weights in the parameter table are.
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
        """rotary: None rotates nothing. unit_offset: of the norms of q and k. scale: None is what the config says."""
        super().__init__()
        self.ops = make.ops
        self.layer = layer
        self.rotary = rotary
        self.heads = num_heads, num_kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.eps = cfg.norm_eps
        self.params = AttentionParams(
            scale=scale or cfg.attention_scale or head_dim**-0.5,
            softcap=cfg.attn_logit_softcapping,
            alibi_slopes=alibi_slopes(num_heads, make.ops.device) if cfg.alibi else None,
            bias_before_scale=cfg.alibi,
        )
        self.qkv_proj = make.linear("qkv_proj")
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if cfg.qk_norm:
            self.q_norm, self.k_norm = (
                make.rms_norm(name, self.eps, unit_offset=unit_offset) for name in ("q_norm", "k_norm")
            )
        self.o_proj = make.linear("o_proj")
        self.q_out = make.slot("q", (num_heads, head_dim))
        self.k_out, self.v_out = (make.slot(name, (num_kv_heads, head_dim)) for name in ("k", "v"))
        self.mixed_out = make.slot("mixed", (num_heads * head_dim,))

    def forward(self, y: Tensor, ctx: ForwardContext) -> Tensor:
        """y [T, hidden] dtype -> [T, hidden] float32. Stores the new keys and values."""
        tokens = y.shape[0]
        q, k, v = self.ops.rotary_qkv(
            self.qkv_proj(y),
            ctx.positions,
            None if self.rotary is None else self.rotary.cos_sin,
            self.heads,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            out=(self.q_out(tokens), self.k_out(tokens), self.v_out(tokens)),
        )
        cache, meta = ctx.layer(self.layer)
        mixed = self.ops.attend(q, k, v, cache, meta, self.params, out=self.mixed_out(tokens))
        branch: Tensor = self.o_proj(mixed)
        return branch


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """How fast each head's scores fall with the distance (Press et al., "Train Short, Test Long", 2022) -> [H] float32.

    2^(-8 i / n) for i = 1 .. n, n the greatest power of two up to num_heads; the other heads take every second slope
    of twice as many.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
