"""Text decoder of Gemma 2 and 3 ("Gemma 2: Improving Open Language Models at a Practical Size", 2024; "Gemma 3", 2025).

embed:  x = sqrt(hidden) * embedding
block:  x = x + norm(attn(norm(x)));  x = x + norm(mlp(norm(x)))      four RMSNorms that multiply by 1 + weight
varies by ModelConfig only: which layers have a window, soft caps of scores and logits (Gemma 2), norms of q and k and a
    separate rotary base for the layers with a window (Gemma 3), the scale of scores, rotary scaling, biases
not here: parameter names and sharding (table.yaml), KV layout (runner), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import Attention, GatedMLP, RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class Gemma2ForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, Gemma2Block)


class Gemma2Block(Module):
    """Attention and feed-forward, each between two norms; the next norm adds the last branch."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        eps, offset = cfg.norm_eps, cfg.norm_unit_offset
        self.input_layernorm = make.norm("input_layernorm", cfg)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.branch_norm("post_attention_layernorm", eps, unit_offset=offset)
        self.pre_feedforward_layernorm = make.norm("pre_feedforward_layernorm", cfg)
        self.mlp = GatedMLP(make.at("mlp"), cfg.hidden_act)
        self.post_feedforward_layernorm = make.branch_norm("post_feedforward_layernorm", eps, unit_offset=offset)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h."""
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        h = self.post_attention_layernorm(self.self_attn(y, ctx))
        x, y = self.pre_feedforward_layernorm.add(x, h)
        return x, self.post_feedforward_layernorm(self.mlp(y))
