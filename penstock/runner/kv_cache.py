"""The KV caches of a model: one per decoder layer, in the sizes of its cache group.

Only the backend knows the layout: `ops.new_kv_cache` makes a cache, and nothing else looks inside.
"""

from collections.abc import Sequence

import torch

from penstock.config import EngineConfig
from penstock.errors import EngineError
from penstock.interface.step import CacheGroup
from penstock.kernels.metadata import CacheSpec, KVCache, KVScales
from penstock.kernels.ops import Ops
from penstock.spec.model_config import ModelConfig

CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


def layer_groups(groups: Sequence[CacheGroup], num_layers: int) -> tuple[int, ...]:
    """Return the index of each decoder layer's cache group.

    Raises:
        EngineError: a layer is in no group or in two.
    """
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    if sorted(layer for group in groups for layer in group.layers) != list(range(num_layers)):
        raise EngineError(f"cache groups must hold each of the {num_layers} layers exactly once")
    return tuple(group_of[layer] for layer in range(num_layers))


def allocate_kv_caches(
    ops: Ops,
    groups: Sequence[CacheGroup],
    config: EngineConfig,
    model_config: ModelConfig,
    scales: Sequence[KVScales] | None = None,
) -> tuple[KVCache, ...]:
    """Allocate one cache per decoder layer, in layer order. scales: per-channel scales of an int8 cache, one per layer.

    Raises:
        EngineError: the groups do not hold every layer exactly once, or there are not as many scales as layers.
    """
    layers = layer_groups(groups, model_config.num_hidden_layers)
    if scales is not None and len(scales) != len(layers):
        raise EngineError(f"KV scales of {len(scales)} layers for {len(layers)} layers")
    return tuple(
        ops.new_kv_cache(
            CacheSpec(
                groups[index].num_blocks,
                groups[index].block_size,
                model_config.num_key_value_heads,
                model_config.head_dim,
                CACHE_DTYPES[config.cache.kv_cache_dtype],
                slices=config.kv_cache_slices,
                scales=None if scales is None else scales[layer],
            )
        )
        for layer, index in enumerate(layers)
    )
