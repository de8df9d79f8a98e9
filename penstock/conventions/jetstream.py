"""JetStream's calling convention: what a model that is written to it gets from the engine.

    class Model(nn.Module):
        def __init__(self, config: ModelConfig, env: Environment): ...
        def forward(self, tokens, input_pos, caches, mask): ...

tokens, input_pos [B, S] int64; caches, one a layer, with `update(k, v) -> (k_all, v_all)` in (B, heads, S, D); mask
[B, 1, S, keys] float32, 0 where a token sees a key and -inf where it does not, to be added to the scores. It returns
logits [B, S, V]. Rows are of different lengths and stand at different positions; what is missing is token 0 at position
0, and its logits are dropped.

Letters: B sequences, S new tokens of the one that has most, D head dim.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.conventions.cache_interface import CacheInterface, PagedCacheView
from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, KVCache
from penstock.kernels.ops import Ops
from penstock.layers.factory import LayerFactory
from penstock.quant.scheme import Scheme
from penstock.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Environment:
    """What a model's constructor gets beside its config: an argument, so two engines in one process never meet.

    Attributes:
        config: the model's numbers.
        ops: the backend.
        make: makes the engine's own layers by name, for a model that mixes them with torch's.
    """

    config: ModelConfig
    ops: Ops
    make: LayerFactory

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and of what products read."""
        return self.ops.dtype

    @property
    def device(self) -> torch.device:
        return self.ops.device

    @property
    def scheme(self) -> Scheme | None:
        """How weights are quantised; None: they are not. Products of nn.Linear follow it by themselves."""
        return self.make.scheme

    @property
    def num_positions(self) -> int:
        """Positions that will be asked for: how long a table of them has to be."""
        return self.make.max_positions or self.config.context

    def apply_sharding(self, x: Tensor, *, axis: int | None) -> Tensor:
        """Say which axis of x is split among devices (None: none). On one device, which there is, nothing is split.

        Raises:
            InvalidRequestError: x has no such axis.
        """
        if axis is not None and not -x.ndim <= axis < x.ndim:
            raise InvalidRequestError(f"axis: {axis} is not allowed; x has {x.ndim} axes", param="axis")
        return x


class LayerCache(PagedCacheView):
    """One layer's cache in the engine, for one step.

    Attributes:
        layer: index of the layer.
        additive_mask: [B, 1, S, keys] float32; a row of padding sees everything, so that nothing in it is NaN.
    """

    def __init__(self, ops: Ops, cache: KVCache, meta: AttentionMetadata, layer: int) -> None:
        super().__init__(ops, cache, meta)
        self.layer = layer
        hidden = ~self.mask & (self.positions >= 0)[:, None, :, None]
        self.additive_mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))

    def of_layer(self, layer: int, cache: KVCache) -> "LayerCache":
        """The same for another layer that sees the same tokens."""
        other = copy.copy(self)
        other.layer, other._cache = layer, cache
        return other

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As PagedCacheView, in the type of k and v."""
        keys, values = super().update(k, v)
        return keys.to(k.dtype), values.to(v.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """Store k and v, and attend with the backend's operator: (B, H, S, D) -> (B, H, S, D), zeros in padding."""
        dtype = self._ops.dtype
        q, k, v = (self._packed(item).to(dtype).contiguous() for item in (q, k, v))
        mixed = self._ops.attend(q, k, v, self._cache, self._meta, params)
        return self.unpack(mixed.view(q.shape))


class AttentionKernel:
    """Attention, with the reading and writing of the cache, for models of standard mathematics."""

    def __init__(self, env: Environment, layer_id: int) -> None:
        """
        Raises:
            NotSupportedError: the model's scores have a bias.
        """
        config = env.config
        if config.alibi:
            raise NotSupportedError("AttentionKernel: scores with a bias (alibi) are for penstock.layers.attention")
        self.layer_id = layer_id
        self.params = AttentionParams(
            scale=config.attention_scale or config.head_dim**-0.5, softcap=config.attn_logit_softcapping
        )

    def __call__(self, xq: Tensor, xk: Tensor, xv: Tensor, mask: Tensor | None, cache: CacheInterface) -> Tensor:
        """xq (B, H, S, D), xk and xv (B, Hkv, S, D) -> (B, H, S, D).

        The engine's cache with its own mask (or None) takes the backend's operator; any other cache or mask, which is
        added to the scores, plain arithmetic.

        Raises:
            InvalidRequestError: the cache is another layer's.
        """
        if not isinstance(cache, LayerCache):
            return self._plain(xq, *cache.update(xk, xv), mask)
        if cache.layer != self.layer_id:
            text = f"layer_id: layer {self.layer_id} was given the cache of layer {cache.layer}"
            raise InvalidRequestError(text, param="layer_id")
        if mask is None or mask is cache.additive_mask:
            return cache.attend(xq, xk, xv, self.params).to(xq.dtype)
        return self._plain(xq, *cache.update(xk, xv), mask)

    def _plain(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        keys, values = (item.repeat_interleave(group, dim=1) for item in (keys, values))
        scores = (q.float() @ keys.float().transpose(2, 3)) * self.params.scale
        if self.params.softcap is not None:
            scores = self.params.softcap * torch.tanh(scores / self.params.softcap)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(dim=-1) @ values.float()).to(q.dtype)
