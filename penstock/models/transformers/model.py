"""A decoder of Transformers, run by its own modules on one flat row of the tokens of all requests.

Its products, its token embedding and its head are the engine's, quantised as the engine quantises. So is its attention,
over the paged cache; it is registered in Transformers' attention interface. What torch still computes works on each
token by itself: norms, activations, rotations, additions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import initialization

from penstock.errors import NotSupportedError
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.swap import (
    PagedAttention,
    SwappedExperts,
    fix_buffers,
    keep_float32,
    swap_linears,
    swap_norms,
    swap_vocabulary,
    swap_weight,
    whole_rows,
)
from penstock.models.transformers.derive import blocks_of, derive, find_class, make_hf_config, saved_buffers
from penstock.models.transformers.probe import VECTOR, split_decoder
from penstock.spec.model_config import ModelConfig

_BUILDING = Lock()  # no_init_weights changes functions of torch's for the whole process
ATTENTION = "penstock"  # our name in Transformers' attention interface


class TransformersLM(nn.Module):
    """The decoder and its head: a CausalLM (layers/module.py) under the names of Transformers' modules."""

    repeats_torch = True  # it ran on the meta device, so what it calls depends on no value

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
        with _BUILDING, torch.device("cpu"), _LayersOnMeta(), initialization.no_init_weights():
            model = find_class(cfg.architecture)(config).eval()
        fix_buffers(model, [name for name, _ in saved_buffers(model)])
        self._step = SimpleNamespace(ctx=None)  # what attention needs beside its arguments, during a pass
        for layer, site in enumerate(found.sites):
            attention = PagedAttention(make, layer, site.head_dim, scale=site.scale, softcap=site.softcap)
            model.get_submodule(site.module)._penstock = attention, self._step
        for mixture in found.mixtures:
            experts = SwappedExperts(make.at(mixture.module), cfg, mixture.activation)
            _put(model, mixture.module, experts)
        for name in found.products:
            swap_weight(model, make, name)
        keep_float32(model, found.float32)
        swap_vocabulary(model, make, found.embedding, found.head)
        for product in swap_linears(model, make).values():  # some modules ask for the type of its weight
            product.__dict__["weight"] = torch.empty(product.spec.shape, dtype=make.ops.dtype, device="meta")
        swap_norms(model, make, found.float32)
        for name, module in model.named_children():
            self.add_module(name, module)
        self._parts = split_decoder(model)  # a tuple, whose modules are not this one's children
        parts = VECTOR // math.gcd(VECTOR, *make.part_widths())
        self._rows, self._head_rows = max(found.rows, parts), found.head_rows
        self._cfg, self._dtype, self._names = cfg, make.ops.dtype, (found.embedding, found.head)
        self._passed_on: _PassedOn | None = None

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Any:
        """Map ids [T] int64 to the hidden states [T, hidden] that the head reads."""
        self._step.ctx, decoder = ctx, self._parts[0]
        ids, positions = (whole_rows(item, self._rows)[None] for item in (input_ids, ctx.positions))
        out = decoder(input_ids=ids, position_ids=positions, use_cache=False)
        if self._passed_on is not None:
            return self._passed_on.states[0, : input_ids.shape[0]].float().contiguous(), None
        return cast(Tensor, out.last_hidden_state[0, : input_ids.shape[0]])

    def cut(self, layers: range, received: Callable[[], tuple[Tensor, None]]) -> None:
        """Keep only these layers, in place, before any weight is loaded. Without the first, the states that `received`
        returns are computed on; without the last, `forward` returns (states, None), float32, for the next stage.

        Raises:
            ModelLoadError: the layers pass on more than hidden states.
        """
        blocks = blocks_of(self._cfg.architecture, self._cfg.source)
        embedding, head = self._names
        for index, (name, length) in enumerate(blocks.items()):
            if index not in layers:
                _put(self, name, _PassedOn(length, self._dtype))
            if index == layers.start - 1:
                _put(self, name, _Received(length, self._dtype, received))
            if index == layers.stop:
                self._passed_on = cast(_PassedOn, self.get_submodule(name))
        if layers.start:
            _put(self, embedding, _NoStates(self._cfg.hidden_size, self._dtype))
        if self._passed_on is not None:
            _put(self, head, nn.Identity())

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [M, hidden] to logits [M, V] float32."""
        _, head, decoder = self._parts
        decoder.states = whole_rows(hidden, self._head_rows)[None]
        ids = torch.zeros(decoder.states.shape[:2], dtype=torch.int64)
        logits = head(input_ids=ids, use_cache=False).logits[0, : hidden.shape[0]]
        return cast(Tensor, logits.float().contiguous())


class _PassedOn(nn.Module):
    """Stands for a block of another stage: returns the states that it is given.

    Attributes:
        states: those of the last pass, [1, R, hidden].
    """

    states: Tensor

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        """length: of the tuple that the block returns; 0: it returns a tensor."""
        super().__init__()
        self._length, self._dtype = length, dtype

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if states.dtype is not self._dtype:
            raise NotSupportedError(f"a block passes on {states.dtype}", param="pipeline_parallel_size")
        self.states = states
        return (states, *[None] * (self._length - 1)) if self._length else states


class _Received(_PassedOn):
    """Stands for the last block of the stage before: returns what that stage has computed."""

    def __init__(self, length: int, dtype: torch.dtype, received: Callable[[], tuple[Tensor, None]]) -> None:
        super().__init__(length, dtype)
        self._received = received

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = whole_rows(self._received()[0].to(states.dtype), states.shape[1])
        return super().forward(x[None])


class _NoStates(nn.Module):
    """Stands for the embedding in later stages: returns zeros, which no block reads."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden, self._dtype = hidden, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((*ids.shape, self._hidden), dtype=self._dtype)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as Transformers' attention interface asks. Scale, softcap and window were noted when the class was
    examined."""
    attention, step = cast(Any, module)._penstock
    return attention(step.ctx, q, k, v, options.get("s_aux")), None


transformers.AttentionInterface.register(ATTENTION, _attend)  # without a function for masks, so none is made


class _LayersOnMeta(TorchFunctionMode):
    """Puts the parameters of torch's layers on the meta device, so that they take no memory before they are loaded.

    They create them with torch.empty(shape, device=None, dtype=None). Buffers, such as rotary frequencies, get values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and {"device", "dtype"} <= given.keys() and given["device"] is None:
            given["device"] = "meta"
        return func(*args, **given)
