"""Decoder of the first Gemma ("Gemma: Open Models Based on Gemini Research and Technology", 2024).

embed:  x = sqrt(hidden) * embedding
block:  x = x + attn(norm(x));  x = x + mlp(norm(x))      RMSNorm that multiplies by 1 + weight, rotary, GELU gate
varies by ModelConfig only: rotary scaling, biases, tied head, heads wider or narrower than hidden / heads
not here: parameter names and sharding (table.yaml), KV layout (runner), arithmetic and rounding (kernels/ops.py)
"""

from penstock.layers.decoder import RMSNormLM
from penstock.layers.factory import LayerFactory
from penstock.models.llama.model import LlamaBlock
from penstock.spec.model_config import ModelConfig


class GemmaForCausalLM(RMSNormLM):
    """The decoder and its head."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        super().__init__(cfg, make, GemmaBlock, unit_offset=True)


class GemmaBlock(LlamaBlock):
    """Llama's block with norms that multiply by 1 + weight."""

    unit_offset = True
