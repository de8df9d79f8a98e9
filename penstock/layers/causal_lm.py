"""CausalLM: what a model is to those who call it. Its class takes (ModelConfig, LayerFactory)."""

from typing import Protocol

from torch import Tensor

from penstock.layers.context import ForwardContext


class CausalLM(Protocol):
    """A decoder, and its head apart from it, so that logits are computed only where somebody looks."""

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 -> [T, hidden] dtype, after the final norm; stores keys and values in the caches of ctx."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] dtype -> [M, V] float32."""
