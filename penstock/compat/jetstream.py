"""JetStream's names for models written to its calling convention; docs/adding_a_model.md has the steps of a port.

@register_model("MineForCausalLM", table="mine.yaml", convention="jetstream")
class MineForCausalLM(nn.Module):
    def __init__(self, config: ModelConfig, env: Environment): ...
    def forward(self, tokens, input_pos, caches: list[CacheInterface], mask): ...    # logits [B, S, V]
"""

from penstock.layers.cache_interface import CacheInterface
from penstock.layers.jetstream import AttentionKernel, Environment
from penstock.model_config import ModelConfig
from penstock.models.registry import register as register_model

__all__ = ["AttentionKernel", "CacheInterface", "Environment", "ModelConfig", "register_model"]
