"""Decoders whose feed-forward branch is a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5,
ERNIE 4.5 MoE, MiniMax-M2.

block:  x = x + attn(norm(x));  x = x + moe(norm(x))      Llama's block with experts instead of the SwiGLU branch
varies by ModelConfig only: which layers are sparse, the number of experts in all and per token, how the router chooses
    and weighs them, the shared expert; windows, biases, norms of q and k
not here: parameter names (table.yaml, qwen3_moe.yaml), routing (layers/decoder.py), KV layout (runner), arithmetic
"""

from penstock.layers.decoder import MoE, RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import Module
from penstock.models.llama.model import LlamaBlock
from penstock.spec.model_config import ModelConfig


class MixtralForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, MixtralBlock)


class MixtralBlock(LlamaBlock):
    """Llama's block; the feed-forward branch of a sparse layer is a mixture of experts."""

    def make_mlp(self, cfg: ModelConfig, make: LayerFactory, index: int) -> Module:
        return MoE(cfg, make) if cfg.sparse_layers[index] else super().make_mlp(cfg, make, index)
