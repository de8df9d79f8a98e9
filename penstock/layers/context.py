"""CausalLM, the interface of a model, and ForwardContext, all that a forward pass needs besides token ids and weights.

The context is passed down as an argument. There is no global context, so several engines can run in one process.
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.kernels.metadata import AttentionMetadata, KVCache
from penstock.kernels.tensors import Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's positions and caches.

    Attributes:
        positions: [T] int64, each token's absolute position in its own sequence.
        kv_caches: one cache per decoder layer.
        attention: metadata of each cache group.
        layer_group: index into `attention` for each decoder layer.
    """

    positions: Tensor
    kv_caches: tuple[KVCache, ...]
    attention: tuple[AttentionMetadata, ...]
    layer_group: tuple[int, ...]

    def layer(self, index: int) -> tuple[KVCache, AttentionMetadata]:
        """Return the cache and the metadata of a decoder layer."""
        return self.kv_caches[index], self.attention[self.layer_group[index]]


class CausalLM(Protocol):
    """A decoder and its head. The head is called separately, so that logits are computed only where they are needed.

    Its class is called with (ModelConfig, LayerFactory).
    """

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to [T, hidden] dtype after the final norm. Stores keys and values in the caches of ctx."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] dtype, at the wanted positions only, to logits [M, V] float32."""
