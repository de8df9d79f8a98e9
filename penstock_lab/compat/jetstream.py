"""JetStream's names, for models that follow its calling convention. docs/other_engines.md describes a port.

@register_model("MineForCausalLM", table="mine.yaml", convention="jetstream")
class MineForCausalLM(nn.Module):
    def __init__(self, config: ModelConfig, env: Environment): ...
    def forward(self, tokens, input_pos, caches: list[CacheInterface], mask): ...    # logits [B, S, V]
"""

from penstock import register_model
from penstock.spec.model_config import ModelConfig
from penstock_lab.conventions.caches import CacheInterface
from penstock_lab.conventions.jetstream import AttentionKernel, Environment, Int8QuantizedLinear

__all__ = ["AttentionKernel", "CacheInterface", "Environment", "Int8QuantizedLinear", "ModelConfig", "register_model"]
