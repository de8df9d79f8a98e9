"""Decoder of OLMo 2 and 3 (OLMo team, "2 OLMo 2 Furious", 2025) and of EXAONE 4 (LG AI Research, 2025).

block:  x = x + norm(attn(x));  x = x + norm(mlp(x))      norms after the branches, not before them
        attention normalises q and k, over all heads together or each by itself, then rotates them; SwiGLU
varies by ModelConfig only: windows, which layers rotate, biases of attention, rotary scaling, tied head
not here: parameter names and sharding (table.yaml, exaone4.yaml), KV layout (runner), arithmetic (kernels/ops.py)
"""

from penstock.layers.decoder import Attention, GatedMLP, RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class Olmo2ForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, Olmo2Block)


class Olmo2Block(Module):
    """Attention and feed-forward. Each reads the residual stream directly; its result is normalised, then added."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        self.ops = make.ops
        self.rounded = make.slot("rounded", (cfg.hidden_size,))
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.branch_norm("post_attention_layernorm", cfg.norm_eps)
        self.mlp = GatedMLP(make.at("mlp"), cfg.hidden_act)
        self.post_feedforward_layernorm = make.branch_norm("post_feedforward_layernorm", cfg.norm_eps)

    def forward(self, x: Tensor, h: None, ctx: ForwardContext) -> tuple[Tensor, None]:
        """Add both branches to the residual stream x [T, hidden] float32 in place, so that no branch is left to add."""
        ops, rounded = self.ops, self.rounded(x.shape[0])
        branch = self.self_attn(ops.round(x, out=rounded), ctx)
        x = ops.add(x, self.post_attention_layernorm(branch))
        branch = self.mlp(ops.round(x, out=rounded))
        return ops.add(x, self.post_feedforward_layernorm(branch)), None
