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
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import EngineError, ModelLoadError, NotSupportedError
from penstock.config import DEGREES
from penstock.errors import invalid
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, KVCache
from penstock.kernels.ops import Ops
from penstock.kernels.reference.quantized_weights import quantize_int8
from penstock.kernels.scheme import Scheme
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.swap import OverAxes, swap_linears
from penstock.ranks.layers import RankFactory, Split
from penstock.ranks.sharding import DIRECT, Part, general
from penstock.spec.model_config import ModelConfig
from penstock_lab.conventions.caches import CacheInterface, PagedCacheView
from penstock_lab.conventions.sharded import Borders, Sharded, part, whole

INT8 = Scheme.parse("int8-x3")  # of an Int8QuantizedLinear


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
    def enable_weight_quantization(self) -> bool:
        """Tell whether the engine quantises weights."""
        return self.scheme is not None

    @property
    def sharding(self) -> dict[str, int | None]:
        """The axis along which ranks split each parameter, by its name with * for numbers, as the sharding file or the
        table says; None: every rank has the whole. Empty on a single device."""
        cuts = {} if self.split is None else self.split.cuts
        return {general(name): cut.axis if cut.ranges else None for name, cut in cuts.items()}

    @property
    def num_positions(self) -> int:
        """The number of positions that a rotary or position table needs."""
        return self.make.max_positions or self.config.context

    @property
    def split(self) -> Split | None:
        """This rank's part of the model; None on a single device."""
        return self.make.split if isinstance(self.make, RankFactory) else None

    def apply_sharding(self, x: Tensor, *, axis: int | None) -> Tensor:
        """Split x along an axis among the ranks from here on (None: every rank has the whole), and return it.

        No value changes, only what the ranks compute and exchange. An axis with fewer elements than ranks is split
        among as many ranks as it has elements.

        Raises:
            InvalidRequestError: x has no such axis.
        """
        if axis is not None and not -x.ndim <= axis < x.ndim:
            raise invalid("axis", f"{axis} is not allowed; x has {x.ndim} axes")
        if self.split is None:
            return x
        if axis is None:
            return cast(Tensor, whole(x))
        length, size = x.shape[axis], self.split.share.degrees.size
        degree = max(item for item in DEGREES if item <= min(size, length))
        if degree == 1:
            return cast(Tensor, whole(x))
        borders = _borders(self.split, degree, length, length)
        return Sharded(part(x, axis, borders), axis % x.ndim, borders)

    def head_borders(self) -> tuple[Borders, Borders] | None:
        """Say how queries' and keys' heads are split over the ranks; None if every rank has all."""
        degrees = None if self.split is None else self.split.share.degrees
        if self.split is None or degrees is None or degrees.attention == 1:
            return None
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        queries, keys = (_borders(self.split, degrees.attention, groups, length) for length in (heads, groups))
        return queries, keys


def _borders(split: Split, degree: int, units: int, length: int) -> Borders:
    """Split an axis of some units over `degree` ranks."""
    ends = [Part(index, degree).bounds(units)[1] * (length // units) for index in range(degree)]
    return Borders((0, *ends), split.share.rank % degree, split.links)


class ShardedProduct(OverAxes):
    """A product of which a rank has a part: x [..., K] -> [..., N], where x may be Sharded, and the result is if the
    rows of the weight are split.

    Attributes:
        reads, writes: how the columns of x and of the result are split.
        order: where each column of the whole result is in the parts one after the other, if they are in another order.
    """

    reads: Borders | None = None
    writes: Borders | None = None
    order: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(whole(x) if self.reads is None else part(x, -1, self.reads))
        if self.writes is None:
            return rows
        result = Sharded(rows, rows.ndim - 1, self.writes)
        return result if self.order is None else result.whole()[..., self.order]


class Int8QuantizedLinear(nn.Linear):
    """An nn.Linear with an int8 weight and a scale for each output channel, to be put in an nn.Linear's place by hand.

    In a model that the engine serves, it becomes the engine's int8 product, also without the option `quantization`;
    its activations are split into three int8 slices, close to float32, or as that option says if it is an int8 scheme.
    Elsewhere plain torch computes it, with floating-point activations.

    Attributes:
        codes, scales: [N, K] int8 and [N] float32, once its weight has been quantised; `weight` is then None.
    """

    codes: Tensor
    scales: Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantise the weight of a layer of torch's."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.quantize()
        return made

    def quantize(self) -> None:
        """Replace the weight by its int8 codes and their scales."""
        codes, scales = quantize_int8(self.weight.detach().float())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x @ W^T + bias, [..., K] -> [..., N], in the type of x. The first call quantises the weight."""
        if self.weight is not None:
            self.quantize()
        rows = (x.float() @ self.codes.float().T) * self.scales
        return (rows if self.bias is None else rows + self.bias.float()).to(x.dtype)


class LayerCache(PagedCacheView):
    """The engine's cache of one layer during one step.

    Attributes:
        layer: index of the layer.
        heads: how queries' and keys' heads are split over ranks, each of which caches its own; None: all are here.
        additive_mask: [B, 1, S, keys] float32. Rows of padding see everything, so that they do not become NaN.
    """

    def __init__(
        self,
        ops: Ops,
        cache: KVCache,
        meta: AttentionMetadata,
        layer: int,
        heads: tuple[Borders, Borders] | None = None,
    ) -> None:
        super().__init__(ops, cache, meta)
        self.layer = layer
        self.heads = heads
        hidden = ~self.mask & (self.positions >= 0)[:, None, :, None]
        self.additive_mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))

    def at_layer(self, layer: int, cache: KVCache) -> "LayerCache":
        """View another layer's cache in the same way. The layers' tokens must see the same keys."""
        other = copy.copy(self)
        other.layer, other._cache = layer, cache
        return other

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Update as PagedCacheView does, and return the result in the type of k and v."""
        keys, values = super().update(self._own(k, 1), self._own(v, 1))
        return self._all(keys.to(k.dtype), 1), self._all(values.to(v.dtype), 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """Store k and v, and attend with the backend's operator: (B, H, S, D) -> (B, H, S, D). Padding gives zeros."""
        own = self._own(q, 0), self._own(k, 1), self._own(v, 1)
        q, k, v = (self._packed(item).to(self._ops.dtype).contiguous() for item in own)
        mixed = self._ops.attend(q, k, v, self._cache, self._meta, params)
        return self._all(self.unpack(mixed.view(q.shape)), 0)

    def _own(self, x: Tensor, kind: int) -> Tensor:
        """Return the heads of x that this rank has. kind: 0 for queries, 1 for keys and values."""
        return cast(Tensor, whole(x)) if self.heads is None else part(x, 1, self.heads[kind])

    def _all(self, x: Tensor, kind: int) -> Tensor:
        return x if self.heads is None else Sharded(x, 1, self.heads[kind])


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
                raise invalid("layer_id", f"layer {self.layer_id} was given the cache of layer {cache.layer}")
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
        first = LayerCache(self.env.ops, *ctx.layer(0), layer=0, heads=self.env.head_borders())
        caches = [first, *(first.at_layer(i, cache) for i, cache in enumerate(ctx.kv_caches) if i > 0)]
        tokens = first.unpack(input_ids[:, None, None])[:, 0, :, 0]
        logits = self.model(tokens, first.positions.clamp(min=0), caches, first.additive_mask)
        expected = (*tokens.shape, self.env.config.vocab_size)
        if tuple(logits.shape) != expected:
            raise EngineError(f"{type(self.model).__name__} returned {list(logits.shape)}, not {list(expected)}")
        return first.pack(whole(logits)[:, None]).float().contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Pass on `hidden`, which are logits already."""
        return hidden


def adapt(model: nn.Module, config: ModelConfig, make: LayerFactory) -> JetStreamModel:
    """Wrap a model that `build` made, so that the engine can call it."""
    return JetStreamModel(model, Environment(config, make.ops, make))


def build(model_class: type[nn.Module], config: ModelConfig, make: LayerFactory) -> nn.Module:
    """Build the model without weights. Its nn.Linear become the engine's products, quantised as the table allows; its
    Int8QuantizedLinear become int8 ones.

    Raises:
        NotSupportedError: layers have different windows or heads, for which one mask and shape do not suffice; or the
            head is to be split or padded.
        ModelLoadError: a layer's shape differs from the parameter table.
    """
    if len(config.cache_groups()) > 1:
        raise NotSupportedError(
            f"{config.architecture}: layers with different windows or heads need more than the one mask and shape of "
            f"JetStream's calling convention"
        )
    if not make.head.is_plain:
        text = "lm_head_pieces, pad_vocab_multiple: a model of JetStream's calling convention has its own head"
        raise NotSupportedError(text, param="lm_head_pieces")
    with torch.device(str(make.ops.device)), _LayersOnMeta():
        model = model_class(config, Environment(config, make.ops, make))
    _check_linears(model, make)
    own = make.scheme if make.scheme is not None and make.scheme.weight_bits == 8 else INT8
    for kind, scheme in ((nn.Linear, make.scheme), (Int8QuantizedLinear, own)):
        chosen = make if scheme is make.scheme else replace(make, scheme=scheme)
        if isinstance(chosen, RankFactory):
            made = _swap_split(model, chosen, kind)
        else:
            made = swap_linears(model, chosen, kind=kind)
        floats = [
            name
            for name, layer in made.items()
            if kind is not nn.Linear and layer.spec.packing.scheme is None and layer.spec.packing.coding is None
        ]
        if floats:
            raise ModelLoadError(f"{floats[0]} is an Int8QuantizedLinear, but its table's row has no quant: true")
    return model


def _swap_split(model: nn.Module, make: RankFactory, kind: type[nn.Linear]) -> dict[str, Any]:
    """Replace the layers of a rank, and return them. What they exchange is decided by the tensors that they get
    (sharded.py), not by wires."""
    split = make.split
    direct = {name: replace(cut, wiring=DIRECT) for name, cut in split.cuts.items()}
    layers = swap_linears(model, replace(make, split=replace(split, cuts=direct)), ShardedProduct, kind)
    for name, layer in layers.items():
        cut = split.cuts[f"{name}.weight"]
        if not cut.ranges:
            continue
        columns = [[at for begin, end in ranges for at in range(begin, end)] for ranges in cut.columns()]
        borders = Borders((0, *accumulate(map(len, columns))), cut.part.index, split.links)
        layer.reads, layer.writes = (borders, None) if cut.is_summed else (None, borders)
        if len(cut.ranges) > 1:
            layer.order = torch.tensor([*chain(*columns)]).argsort()
    return layers


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
        if of_linear and name in make.parameters and make.torch_parameter(name).shape != tuple(value.shape):
            raise ModelLoadError(
                f"{name} has the shape {list(value.shape)} in the model; its parameter table makes it "
                f"{list(make.torch_parameter(name).shape)}"
            )
