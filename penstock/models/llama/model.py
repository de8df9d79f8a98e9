"""Llama-family decoder: Llama 2/3, Mistral, Ministral, Qwen2, Qwen3, Phi-3, ERNIE 4.5, and checkpoints that declare one
of these.

block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm, rotary, grouped-query attention, SwiGLU
varies by ModelConfig only: windows, rotary scaling, biases, norms of q and k, tied head
not here: parameter names and sharding (table.yaml, phi3/table.yaml), KV layout (runner), arithmetic and rounding
    (kernels/ops.py)
"""

from penstock.layers.decoder import Attention, GatedMLP, RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext, Module, Tensor
from penstock.layers.rotary import Rotary
from penstock.spec.model_config import ModelConfig


class LlamaForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, LlamaBlock)


class LlamaBlock(Module):
    """Attention and feed-forward, each after its norm; the next norm adds the last branch.

    Attributes:
        unit_offset: whether norms multiply by 1 + weight.
    """

    unit_offset = False

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        eps, offset = cfg.norm_eps, self.unit_offset
        self.input_layernorm = make.rms_norm("input_layernorm", eps, unit_offset=offset)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.rms_norm("post_attention_layernorm", eps, unit_offset=offset)
        self.mlp = self.make_mlp(cfg, make.at("mlp"), index)

    def make_mlp(self, cfg: ModelConfig, make: LayerFactory, index: int) -> Module:
        """Make the feed-forward branch of layer `index`; [T, hidden] dtype -> [T, hidden] float32."""
        return GatedMLP(make, cfg.hidden_act)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and the branch h not yet added, [T, hidden] float32 each, to the next x and h."""
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        x, y = self.post_attention_layernorm.add(x, self.self_attn(y, ctx))
        return x, self.mlp(y)
