"""The decoder of Llama, and of the families that differ from it by numbers of the config only.

block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm, rotary, grouped-query attention, SwiGLU
        x = x + attn(y) + mlp(y), y = norm(x)             with num_parallel_norms = 1
        x = x + norm(attn(norm(x)));  x = x + norm(mlp(norm(x)))      with branch_norms
varies by ModelConfig only: windows, rotary embedding, biases, norms of q and k, tied head, the kind of the norms, the
    gate and the activation of the feed-forward branch
not here: parameter names and sharding (the tables beside this file, and those of other families that use this class),
    KV layout (runner), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import Attention, RMSNormLM, feed_forward
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class LlamaForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, LlamaBlock)


class LlamaBlock(Module):
    """Attention and feed-forward, each after its norm (or between two), or side by side after a shared norm; the next
    norm adds the last branch."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        self.ops = make.ops
        self.input_layernorm = make.norm("input_layernorm", cfg)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        is_parallel = cfg.num_parallel_norms == 1
        self.post_attention_layernorm = None if is_parallel else make.norm("post_attention_layernorm", cfg)
        self.mlp = self.make_mlp(cfg, make.at("mlp"), index)
        if cfg.branch_norms:
            self.post_self_attn_layernorm = make.branch_norm("post_self_attn_layernorm", cfg.norm_eps)
            self.post_mlp_layernorm = make.branch_norm("post_mlp_layernorm", cfg.norm_eps)
        self.has_branch_norms = cfg.branch_norms

    def make_mlp(self, cfg: ModelConfig, make: LayerFactory, index: int) -> Module:
        """Make the feed-forward branch of layer `index`; [T, hidden] dtype -> [T, hidden] float32."""
        return feed_forward(cfg, make)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h."""
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        if self.post_attention_layernorm is None:
            return self.ops.add(x, self.self_attn(y, ctx)), self.mlp(y)
        if self.has_branch_norms:
            x, y = self.post_attention_layernorm.add(x, self.post_self_attn_layernorm(self.self_attn(y, ctx)))
            return x, self.post_mlp_layernorm(self.mlp(y))
        x, y = self.post_attention_layernorm.add(x, self.self_attn(y, ctx))
        return x, self.mlp(y)
