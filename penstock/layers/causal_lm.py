"""CausalLM: the interface of a model. Its class is called with (ModelConfig, LayerFactory)."""

from typing import Protocol

from torch import Tensor

from penstock.layers.context import ForwardContext


class CausalLM(Protocol):
    """A decoder and, as a call of its own, its head, so that logits are computed only where they are needed."""

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to [T, hidden] dtype after the final norm. Stores keys and values in the caches of ctx."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype to logits [M, V] float32."""
