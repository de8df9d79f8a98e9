"""The caches of a model: one per decoder layer, in the sizes that the cache groups say.

It knows no layout: `ops.new_kv_cache` makes a cache and only the backend looks inside.
"""

from collections.abc import Sequence

import torch

from penstock.errors import EngineError
from penstock.interface.step import CacheGroup
from penstock.kernels.ops import KVCache, KVScales, Ops

CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


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
    ops: Ops,
    groups: Sequence[CacheGroup],
    num_kv_heads: int,
    head_dim: int,
    kv_cache_dtype: str,
    *,
    slices: int = 0,
    scales: Sequence[KVScales] | None = None,
) -> tuple[KVCache, ...]:
    """One empty cache a decoder layer, in the order of the layers. kv_cache_dtype is one of CACHE_DTYPES; `slices` and
    `scales` (one a layer, or none) are for int8, as in `ops.new_kv_cache`.

    Raises:
        EngineError: the groups do not hold every layer exactly once, or there are not as many scales as layers.
    """
    layers = layer_groups(groups)
    if scales is not None and len(scales) != len(layers):
        raise EngineError(f"scales of {len(scales)} caches for {len(layers)} layers")
    return tuple(
        ops.new_kv_cache(
            groups[index].num_blocks,
            groups[index].block_size,
            num_kv_heads,
            head_dim,
            CACHE_DTYPES[kv_cache_dtype],
            slices=slices,
            scales=None if scales is None else scales[layer],
        )
        for layer, index in enumerate(layers)
    )
