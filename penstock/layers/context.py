"""ForwardContext: all that a forward pass needs besides token ids and weights, handed down as an argument.

There is no global context: two engines in one process never meet.
"""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.metadata import AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's positions and caches.

    Attributes:
        positions: [T] int64, each token's absolute position in its own sequence.
        kv_caches: one cache a decoder layer.
        attention: metadata of each cache group.
        layer_group: index into `attention` for each decoder layer.
    """

    positions: Tensor
    kv_caches: tuple[KVCache, ...]
    attention: tuple[AttentionMetadata, ...]
    layer_group: tuple[int, ...]

    def layer(self, index: int) -> tuple[KVCache, AttentionMetadata]:
        """Cache and metadata for decoder layer `index`."""
        return self.kv_caches[index], self.attention[self.layer_group[index]]
