"""ForwardContext: all that a forward pass needs besides token ids and weights, passed down as an argument.

There is no global context, so several engines can run in one process.
"""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.metadata import AttentionMetadata, KVCache


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
