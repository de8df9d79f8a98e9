"""Self-attention over the paged cache: softmax(q k^T / sqrt(D)) v, causal, with grouped query heads."""

from torch import Tensor, nn

from penstock.kernels.ops import AttentionParams
from penstock.layers.context import ForwardContext
from penstock.layers.factory import LayerFactory
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.model_config import ModelConfig


class Attention(nn.Module):
    """q, k and v in one product; optional norms of each head; rotary; attention; the product that joins the heads.

    The window, where there is one, comes with the context's metadata for this layer.
    """

    def __init__(self, cfg: ModelConfig, make: LayerFactory, layer: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.ops = make.ops
        self.layer = layer
        self.rotary = rotary
        self.heads = num_heads, num_kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.eps = cfg.rms_norm_eps
        self.params = AttentionParams(scale=head_dim**-0.5)
        self.qkv_proj = make.linear("qkv_proj")
        self.q_norm: RMSNorm | None = make.rms_norm("q_norm", cfg) if cfg.qk_norm else None
        self.k_norm: RMSNorm | None = make.rms_norm("k_norm", cfg) if cfg.qk_norm else None
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
