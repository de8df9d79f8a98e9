"""JetStream's calling convention: models that follow it are built and served like the engine's own.

    class Model(nn.Module):
        def __init__(self, config: ModelConfig, env: Environment): ...
        def forward(self, tokens, input_pos, caches, mask): ...

tokens, input_pos: [B, S] int64. caches: one per layer, with `update(k, v) -> (k_all, v_all)` in (B, heads, S, D).
mask: [B, 1, S, keys] float32, added to the scores: 0 where a token sees a key, -inf where it does not. Returns logits
[B, S, V]. Rows differ in length and position. A shorter row is padded with token 0 at position 0; the logits of the
padding are dropped.

Letters: B sequences, S new tokens of the sequence that has the most, T packed tokens, D head dim, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import EngineError, InvalidRequestError, ModelLoadError, NotSupportedError
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, KVCache
from penstock.kernels.ops import Ops
from penstock.kernels.scheme import Scheme
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.swap import swap_linears
from penstock.spec.model_config import ModelConfig
from penstock_lab.conventions.caches import CacheInterface, PagedCacheView


@dataclass(frozen=True, slots=True)
class Environment:
    """All that a model's constructor gets from the engine. An argument, so two engines in one process share nothing.

    Attributes:
        config: the model's hyperparameters.
        ops: the backend.
        make: makes the engine's own layers by name, for a model that mixes them with torch's.
    """

    config: ModelConfig
    ops: Ops
    make: LayerFactory

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        dtype: torch.dtype = self.ops.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        return torch.device(str(self.ops.device))

    @property
    def scheme(self) -> Scheme | None:
        """The quantisation of weights, or None. It is applied to every nn.Linear without further code."""
        return self.make.scheme

    @property
    def num_positions(self) -> int:
        """The number of positions that a rotary or position table needs."""
        return self.make.max_positions or self.config.context

    def apply_sharding(self, x: Tensor, *, axis: int | None) -> Tensor:
        """Declare which axis of x is split among devices (None: no axis). Return x unchanged: there is one device.

        Raises:
            InvalidRequestError: x has no such axis.
        """
        if axis is not None and not -x.ndim <= axis < x.ndim:
            raise InvalidRequestError(f"axis: {axis} is not allowed; x has {x.ndim} axes", param="axis")
        return x


class LayerCache(PagedCacheView):
    """The engine's cache of one layer during one step.

    Attributes:
        layer: index of the layer.
        additive_mask: [B, 1, S, keys] float32. Rows of padding see everything, so that they do not become NaN.
    """

    def __init__(self, ops: Ops, cache: KVCache, meta: AttentionMetadata, layer: int) -> None:
        super().__init__(ops, cache, meta)
        self.layer = layer
        hidden = ~self.mask & (self.positions >= 0)[:, None, :, None]
        self.additive_mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))

    def at_layer(self, layer: int, cache: KVCache) -> "LayerCache":
        """View another layer's cache in the same way. The layers' tokens must see the same keys."""
        other = copy.copy(self)
        other.layer, other._cache = layer, cache
        return other

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Update as PagedCacheView does, and return the result in the type of k and v."""
        keys, values = super().update(k, v)
        return keys.to(k.dtype), values.to(v.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """Store k and v, and attend with the backend's operator: (B, H, S, D) -> (B, H, S, D). Padding gives zeros."""
        q, k, v = (self._packed(item).to(self._ops.dtype).contiguous() for item in (q, k, v))
        mixed = self._ops.attend(q, k, v, self._cache, self._meta, params)
        return self.unpack(mixed.view(q.shape))


class AttentionKernel:
    """Attention that also reads and writes the cache, for models whose scores have no bias.

    Raises:
        NotSupportedError: the model's scores have a bias (alibi).
    """

    def __init__(self, env: Environment, layer_id: int) -> None:
        config = env.config
        if config.alibi:
            raise NotSupportedError("AttentionKernel: alibi scores are not supported; use penstock.layers.decoder")
        self.layer_id = layer_id
        scale = config.attention_scale or config.head_dim**-0.5
        self.params = AttentionParams(scale=scale, softcap=config.attn_logit_softcapping)

    def __call__(self, xq: Tensor, xk: Tensor, xv: Tensor, mask: Tensor | None, cache: CacheInterface) -> Tensor:
        """Compute softmax(xq xk^T + mask) xv over all cached tokens, (B, H, S, D).

        xq is (B, H, S, D), xk and xv are (B, Hkv, S, D). With the engine's cache and its own mask (or None), the
        backend's operator computes; with any other cache or mask, plain torch does.

        Raises:
            InvalidRequestError: the cache belongs to another layer.
        """
        if isinstance(cache, LayerCache):
            if cache.layer != self.layer_id:
                text = f"layer_id: layer {self.layer_id} was given the cache of layer {cache.layer}"
                raise InvalidRequestError(text, param="layer_id")
            if mask is None or mask is cache.additive_mask:
                return cache.attend(xq, xk, xv, self.params).to(xq.dtype)
        group = xq.shape[1] // xk.shape[1]
        keys, values = (item.repeat_interleave(group, dim=1).float() for item in cache.update(xk, xv))
        scores = (xq.float() @ keys.transpose(2, 3)) * self.params.scale
        if self.params.softcap is not None:
            scores = self.params.softcap * torch.tanh(scores / self.params.softcap)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(dim=-1) @ values).to(xq.dtype)


class JetStreamModel(nn.Module):
    """Adapts a model of this convention to the engine: packed tokens in, packed logits out.

    The model includes its head, so it returns logits where a CausalLM returns hidden states, and a step computes logits
    for all of its tokens.
    """

    def __init__(self, model: nn.Module, env: Environment) -> None:
        super().__init__()
        self.model = model
        self.env = env

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute logits [T, V] float32 of tokens [T] int64.

        Raises:
            EngineError: the model returned another shape.
        """
        first = LayerCache(self.env.ops, *ctx.layer(0), layer=0)
        caches = [first, *(first.at_layer(i, cache) for i, cache in enumerate(ctx.kv_caches) if i > 0)]
        tokens = first.unpack(input_ids[:, None, None])[:, 0, :, 0]
        logits = self.model(tokens, first.positions.clamp(min=0), caches, first.additive_mask)
        expected = (*tokens.shape, self.env.config.vocab_size)
        if tuple(logits.shape) != expected:
            raise EngineError(f"{type(self.model).__name__} returned {list(logits.shape)}, not {list(expected)}")
        return first.pack(logits[:, None]).float().contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Pass on `hidden`, which are logits already."""
        return hidden


def adapt(model: nn.Module, config: ModelConfig, make: LayerFactory) -> JetStreamModel:
    """Wrap a model that `build` made, so that the engine can call it."""
    return JetStreamModel(model, Environment(config, make.ops, make))


def build(model_class: type[nn.Module], config: ModelConfig, make: LayerFactory) -> nn.Module:
    """Build the model without weights. Its nn.Linear become the engine's products, quantised as the table allows.

    Raises:
        NotSupportedError: layers have different windows, for which one mask does not suffice; or the head is to be
            split or padded.
        ModelLoadError: a layer's shape differs from the parameter table.
    """
    if len(set(config.layer_windows)) > 1:
        raise NotSupportedError(
            f"{config.architecture}: layers with different windows need more than the one mask of JetStream's calling "
            f"convention"
        )
    if not make.head.is_plain:
        text = "lm_head_pieces, pad_vocab_multiple: a model of JetStream's calling convention has its own head"
        raise NotSupportedError(text, param="lm_head_pieces")
    with torch.device(str(make.ops.device)), _LayersOnMeta():
        model = model_class(config, Environment(config, make.ops, make))
    _check_linears(model, make)
    swap_linears(model, make)
    return model


class _LayersOnMeta(TorchFunctionMode):
    """Puts the parameters of torch's layers on the meta device, so that they take no memory before weights are loaded.

    Those layers create parameters with torch.empty(shape, device=device, dtype=dtype), where device is None unless
    their caller names one. A tensor that the model itself creates without either keyword, or with a device, keeps its
    memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and {"device", "dtype"} <= given.keys() and given["device"] is None:
            given["device"] = "meta"
        return func(*args, **given)


def _check_linears(model: nn.Module, make: LayerFactory) -> None:
    for name, value in model.named_parameters(remove_duplicate=False):
        of_linear = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        if of_linear and name in make.parameters and make.parameters[name].shape != tuple(value.shape):
            raise ModelLoadError(
                f"{name} has the shape {list(value.shape)} in the model; its parameter table makes it "
                f"{list(make.parameters[name].shape)}"
            )
