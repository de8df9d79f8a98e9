"""Llama-family decoder: Llama 2/3, Mistral, Ministral, Qwen2, Qwen3, Phi-3, and checkpoints that declare one of these.

block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm, rotary, grouped-query attention, SwiGLU
varies by ModelConfig only: windows, rotary scaling, biases, norms of q and k, tied head
not here: parameter names and sharding (llama.yaml, phi3.yaml), KV layout (runner), arithmetic and rounding
    (kernels/ops.py)
"""

from torch import Tensor, nn

from penstock.layers.attention import Attention
from penstock.layers.context import ForwardContext
from penstock.layers.decoder import DecoderLM
from penstock.layers.factory import LayerFactory
from penstock.layers.mlp import GatedMLP
from penstock.layers.rotary import Rotary
from penstock.model_config import ModelConfig
from penstock.models.registry import register


@register(
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    table="llama.yaml",
)
@register("Phi3ForCausalLM", table="phi3.yaml")
class LlamaForCausalLM(DecoderLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, LlamaModel)


class LlamaModel(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__()
        self.embed_tokens = make.embedding("embed_tokens")
        rotary = None if cfg.rope is None else make.rotary(cfg.rope, cfg)
        self.layers = nn.ModuleList(
            LlamaBlock(cfg, make.at(f"layers.{index}"), index, rotary) for index in range(cfg.num_hidden_layers)
        )
        self.norm = make.rms_norm("norm", cfg.norm_eps)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 -> [T, hidden] dtype."""
        x, h = self.embed_tokens(input_ids), None
        for block in self.layers:
            x, h = block(x, h, ctx)
        return self.norm.add(x, h)[1]


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each behind its norm; the last branch is left for the next norm to add."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory, index: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.input_layernorm = make.rms_norm("input_layernorm", cfg.norm_eps)
        self.self_attn = Attention(cfg, make.at("self_attn"), index, rotary)
        self.post_attention_layernorm = make.rms_norm("post_attention_layernorm", cfg.norm_eps)
        self.mlp = GatedMLP(make.at("mlp"), cfg.hidden_act)

    def forward(self, x: Tensor, h: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Residual stream x and the branch h not yet added, [T, hidden] float32 each -> the same, one block on."""
        x, y = self.input_layernorm.add(x, h)  # x + h, and its norm
        x, y = self.post_attention_layernorm.add(x, self.self_attn(y, ctx))
        return x, self.mlp(y)
