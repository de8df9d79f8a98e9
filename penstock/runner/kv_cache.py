"""The caches of a model: one per decoder layer, in the sizes that the cache groups say.

It knows no layout: `ops.new_kv_cache` makes a cache and only the backend looks inside.
"""

from collections.abc import Sequence

import torch

from penstock.errors import EngineError
from penstock.kernels.ops import KVCache, Ops
from penstock.step import CacheGroup

CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def layer_groups(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """For each decoder layer, the index of its cache group.

    Raises:
        EngineError: a layer is in no group or in two.
    """
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    num_layers = sum(len(group.layers) for group in groups)
    if sorted(group_of) != list(range(num_layers)):
        raise EngineError("cache groups must hold every layer exactly once")
    return tuple(group_of[layer] for layer in range(num_layers))


def allocate_kv_caches(
    ops: Ops, groups: Sequence[CacheGroup], num_kv_heads: int, head_dim: int, kv_cache_dtype: str
) -> tuple[KVCache, ...]:
    """One empty cache a decoder layer, in the order of the layers. kv_cache_dtype is one of CACHE_DTYPES."""
    dtype = CACHE_DTYPES[kv_cache_dtype]
    caches = []
    for index in layer_groups(groups):
        group = groups[index]
        caches.append(ops.new_kv_cache(group.num_blocks, group.block_size, num_kv_heads, head_dim, dtype))
    return tuple(caches)
