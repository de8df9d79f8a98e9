"""A decoder of Transformers, run by its own modules on one flat row of tokens of all requests.

Its nn.Linear, its token embedding and its head are the engine's products, quantised as the engine quantises; its
attention is the engine's, over the paged cache, registered in Transformers' attention interface. What remains of torch
works on each token by itself: norms, activations, rotations, additions.
"""

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import initialization
from transformers.modeling_outputs import MoeModelOutputWithPast

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import AttentionParams
from penstock.kernels.ops import Ops
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.swap import swap_linears
from penstock.layers.weights import Embedding, LMHead
from penstock.models.transformers.derive import Site, derive, find_class, make_hf_config, saved_buffers
from penstock.spec.model_config import ModelConfig

ATTENTION = "penstock"  # our name in Transformers' attention interface


class TransformersLM(nn.Module):
    """The decoder and its head: a CausalLM (layers/module.py) under the names of Transformers' modules."""

    def __init__(self, cfg: ModelConfig, make: LayerFactory) -> None:
        """Build the modules without weights.

        Raises:
            NotSupportedError: the engine cannot compute the class, or the head is to be split or padded.
        """
        super().__init__()
        if not make.head.is_plain:
            text = "lm_head_pieces, pad_vocab_multiple: a model of Transformers has its own head"
            raise NotSupportedError(text, param="lm_head_pieces")
        found = derive(cfg.architecture, cfg.source)
        config = make_hf_config(cfg.architecture, cfg.source, ATTENTION)
        with torch.device("cpu"), _LayersOnMeta(), initialization.no_init_weights():
            model = find_class(cfg.architecture)(config).eval()
        for name, value in saved_buffers(model):
            owner, _, key = name.rpartition(".")
            del model.get_submodule(owner)._buffers[key]
            model.get_submodule(owner).register_parameter(key, nn.Parameter(value, requires_grad=False))
        self._step = SimpleNamespace(ctx=None)
        for index, site in enumerate(found.sites):
            model.get_submodule(site.module)._penstock = _Attention(make.ops, index, site, self._step)
        _put(model, found.head, SwappedHead.made(make.lm_head(found.head)))
        if type(model.get_submodule(found.embedding)) is nn.Embedding:
            _put(model, found.embedding, SwappedEmbedding.made(make.embedding(found.embedding)))
        swap_linears(model, make)
        for name, module in model.named_children():
            self.add_module(name, module)
        stub = _Hidden()
        head = copy.copy(model)  # the head's own arithmetic, without the decoder before it
        head._modules = {**model._modules, model.base_model_prefix: stub}
        self._parts = model.base_model, head, stub  # a tuple, whose modules are not this one's children

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Map ids [T] int64 to the hidden states [T, hidden] that the head reads."""
        self._step.ctx = ctx
        decoder = self._parts[0]
        out = decoder(input_ids=input_ids[None], position_ids=ctx.positions[None], use_cache=False)
        return cast(Tensor, out.last_hidden_state[0])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] to logits [M, V] float32."""
        _, head, stub = self._parts
        stub.hidden = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64)
        return cast(Tensor, head(input_ids=ids, use_cache=False).logits[0].float().contiguous())


class _Hidden(nn.Module):
    """Stands for the decoder when only the head computes."""

    hidden: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class _Attention:
    """The engine's attention for one layer."""

    def __init__(self, ops: Ops, layer: int, site: Site, step: SimpleNamespace) -> None:
        self._ops, self._layer, self._site, self._step = ops, layer, site, step
        self._params: AttentionParams | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Map q [1, H, T, D], k and v [1, Hkv, T, D] to [1, T, H, D]."""
        if self._params is None:  # sinks are weights, which are loaded now
            logits = None if sinks is None else sinks.detach().float().contiguous()
            self._params = AttentionParams(self._site.scale, self._site.softcap, sink_logits=logits)
        cache, meta = self._step.ctx.layer(self._layer)
        rows = [self._rows(item) for item in (q, k, v)]
        mixed = self._ops.attend(*rows, cache, meta, self._params).view(rows[0].shape)
        return cast(Tensor, mixed[None, ..., : self._site.value_dim])

    def _rows(self, x: Tensor) -> Tensor:
        """Rearrange [1, heads, T, d] as [T, heads, D]; zeros are added to smaller heads, which change no score."""
        x = x[0].transpose(0, 1).to(self._ops.dtype)
        missing = self._site.head_dim - x.shape[-1]
        return (nn.functional.pad(x, (0, missing)) if missing else x).contiguous()


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as Transformers' attention interface asks; how the layer does it was noted when the class was examined."""
    attention: Any = module._penstock
    return attention(q, k, v, options.get("s_aux")), None


transformers.AttentionInterface.register(ATTENTION, _attend)  # without a function for masks: none is made


class SwappedHead(LMHead, nn.Module):
    """The head as a torch.nn.Module: x [..., K] -> logits [..., V] float32."""

    @classmethod
    def made(cls, head: LMHead) -> "SwappedHead":
        """Make it as the factory made a head."""
        return cls(head.ops, head.spec, head.out)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x.reshape(-1, x.shape[-1]).to(self.ops.dtype).contiguous())
        return logits.view(*x.shape[:-1], -1)


class SwappedEmbedding(Embedding, nn.Module):
    """The token embedding as a torch.nn.Module: ids [...] -> [..., hidden] dtype."""

    @classmethod
    def made(cls, embedding: Embedding) -> "SwappedEmbedding":
        """Make it as the factory made an embedding."""
        return cls(embedding.ops, embedding.shapes["weight"], embedding.out, packing=embedding.packing)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = super().forward(ids.reshape(-1).contiguous())
        return rows.to(self.ops.dtype, copy=True).view(*ids.shape, -1)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


class _LayersOnMeta(TorchFunctionMode):
    """Puts the parameters of torch's layers on the meta device, so that they take no memory before they are loaded.

    They create them with torch.empty(shape, device=None, dtype=None). Buffers, such as rotary frequencies, are computed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and {"device", "dtype"} <= given.keys() and given["device"] is None:
            given["device"] = "meta"
        return func(*args, **given)
