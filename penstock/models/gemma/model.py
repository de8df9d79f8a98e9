"""Gemma decoder, the first ("Gemma: Open Models Based on Gemini Research and Technology", 2024).

embed:  x = sqrt(hidden) * embedding
block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm whose weight is the distance from 1, rotary, GELU gate
varies by ModelConfig only: rotary scaling, biases, tied head, heads wider or narrower than hidden / heads
not here: parameter names and sharding (table.yaml), KV layout (runner), arithmetic and rounding (kernels/ops.py)
"""

from torch import Tensor, nn

from penstock.layers.attention import Attention
from penstock.layers.context import ForwardContext
from penstock.layers.decoder import DecoderLM, RMSNormDecoder
from penstock.layers.factory import LayerFactory
from penstock.layers.mlp import GatedMLP
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class GemmaForCausalLM(DecoderLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, lambda cfg, make: RMSNormDecoder(cfg, make, GemmaBlock, unit_offset=True))


class GemmaBlock(nn.Module):
    """Attention and feed-forward, each behind its norm; the last branch is left for the next norm to add."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.input_layernorm = make.rms_norm("input_layernorm", cfg.norm_eps, unit_offset=True)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.rms_norm("post_attention_layernorm", cfg.norm_eps, unit_offset=True)
        self.mlp = GatedMLP(make.at("mlp"), cfg.hidden_act)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h."""
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        x, y = self.post_attention_layernorm.add(x, self.self_attn(y, ctx))
        return x, self.mlp(y)
