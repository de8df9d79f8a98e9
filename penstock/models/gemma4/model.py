"""Text decoder of Gemma 4 (Google DeepMind, 2026), in its sizes 26B-A4B and 31B.

embed:  x = sqrt(hidden) * embedding
block:  x = x + norm(attn(norm(x)));  x = s (x + norm(mlp(norm(x))))      s: a trained number of each layer
        attn: q, k and v are normed, each head by itself, v without weights; scores are not scaled. In layers without a
        window, heads are larger and fewer, a part of each rotates, and values may be the keys before their norm
with experts:  x = s (x + norm(norm(mlp(norm(x))) + norm(experts(norm(x)))))      the router reads another norm of x
not here: parameter names and sharding (table.yaml), KV layout (runner), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import Attention, GatedMLP, MoE, RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class Gemma4ForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, Gemma4Block)


class Gemma4Block(Module):
    """Attention and feed-forward, each between two norms, and a factor of the residual stream."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        eps = cfg.norm_eps
        self.ops = make.ops
        self.input_layernorm = make.norm("input_layernorm", cfg)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.branch_norm("post_attention_layernorm", eps)
        self.pre_feedforward_layernorm = make.norm("pre_feedforward_layernorm", cfg)
        self.mlp = GatedMLP(make.at("mlp"), cfg.hidden_act)
        self.sparse = SparseBranch(cfg, make.at("sparse")) if cfg.sparse_layers[index] else None
        self.post_feedforward_layernorm = make.branch_norm("post_feedforward_layernorm", eps)
        self.layer_scalar = make.vector("layer_scalar")
        self._factor: float | None = None

    def forward(self, x: Tensor, h: None, ctx: ForwardContext) -> tuple[Tensor, None]:
        """Change the residual stream x [T, hidden] float32 in place, so that no branch is left to add."""
        branch = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ctx))
        x, y = self.pre_feedforward_layernorm.add(x, branch)
        branch = self.mlp(y)
        if self.sparse is not None:
            branch = self.sparse(x, branch)
        x = self.ops.add(x, self.post_feedforward_layernorm(branch))
        if self._factor is None:  # it is loaded now
            self._factor = self.layer_scalar.number()
        return (x if self._factor == 1.0 else self.ops.scale(x, self._factor)), None


class SparseBranch(Module):
    """Experts beside the dense branch: each of the two results is normed, then they are added."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        eps = cfg.norm_eps
        self.ops = make.ops
        self.dense_norm = make.branch_norm("dense_norm", eps)
        self.router_norm = make.rms_norm("router_norm", eps, factor=cfg.hidden_size**-0.5)
        self.input_norm = make.rms_norm("input_norm", eps)
        self.moe = MoE(cfg, make.at("moe"))
        self.output_norm = make.branch_norm("output_norm", eps)

    def forward(self, x: Tensor, dense: Tensor) -> Tensor:
        """Map the residual stream x and the dense branch, [T, hidden] float32 each, to both branches together."""
        mixed = self.moe(self.input_norm(x), self.router_norm(x))
        return self.ops.add(self.dense_norm(dense), self.output_norm(mixed))
