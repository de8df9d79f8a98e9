"""Replaces torch's layers by the engine's, so that a model written with them is quantised, and attends to the cache."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.metadata import AttentionParams
from penstock.layers.factory import LayerFactory
from penstock.layers.module import ForwardContext
from penstock.layers.weights import Embedding, Linear, LMHead


class SwappedLinear(Linear, nn.Module):
    """Computes as nn.Linear does: x [..., K] dtype -> [..., N] dtype, a new tensor. It is also a torch.nn.Module, so
    that it can replace one."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = super().forward(x.reshape(-1, x.shape[-1]).contiguous())
        return rows.to(self.ops.dtype, copy=True).view(*x.shape[:-1], -1)


class SwappedHead(LMHead, nn.Module):
    """The head as a torch.nn.Module: x [..., K] dtype -> logits [..., V] float32."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x.reshape(-1, x.shape[-1]).contiguous())
        return logits.view(*x.shape[:-1], -1)


class SwappedEmbedding(Embedding, nn.Module):
    """The token embedding as a torch.nn.Module: ids [...] -> [..., hidden] dtype, a new tensor."""

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = super().forward(ids.reshape(-1).contiguous())
        return rows.to(self.ops.dtype, copy=True).view(*ids.shape, -1)


def swap_linears(model: nn.Module, make: LayerFactory) -> None:
    """Replace every nn.Linear in a model by a product that is quantised as the parameter table allows.

    Call it at the end of the model's __init__, with the LayerFactory that __init__ received.

    Raises:
        ModelLoadError: a weight is not in the table.
    """
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, _ in linears:
        made = make.linear(name)
        _put(model, name, SwappedLinear(make.ops, made.spec, made.out))


def swap_vocabulary(model: nn.Module, make: LayerFactory, embedding: str, head: str) -> None:
    """Replace the embedding and the head with these names, so that one can hold the rows of both. An embedding of
    another class than torch's is kept."""
    made = make.lm_head(head)
    _put(model, head, SwappedHead(make.ops, made.spec, made.out))
    if type(model.get_submodule(embedding)) is nn.Embedding:
        table = make.embedding(embedding)
        _put(model, embedding, SwappedEmbedding(make.ops, table.shapes["weight"], table.out, packing=table.packing))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


class PagedAttention:
    """The engine's attention of one layer, for queries, keys and values as torch's models arrange them."""

    def __init__(self, make: LayerFactory, layer: int, head_dim: int, *, scale: float, softcap: float | None) -> None:
        """head_dim: that of the cache; keys and values with smaller heads are filled up."""
        self._ops, self._layer, self._head_dim = make.ops, layer, head_dim
        self._scale, self._softcap = scale, softcap
        self._params: AttentionParams | None = None

    def __call__(self, ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Map q [1, H, R, d], k [1, Hkv, R, d] and v [1, Hkv, R, e] to [1, R, H, e]. Store the new keys and values.

        The rows from the step's tokens on are padding; their results are zeros.
        """
        if self._params is None:  # sinks are weights, which are loaded now
            logits = None if sinks is None else sinks.detach().float().contiguous()
            self._params = AttentionParams(self._scale, self._softcap, sink_logits=logits)
        cache, meta = ctx.layer(self._layer)
        queries, keys, values = (self._rows(item, ctx.positions.shape[0]) for item in (q, k, v))
        mixed: Tensor = self._ops.attend(queries, keys, values, cache, meta, self._params).view(queries.shape)
        return whole_rows(mixed, q.shape[2])[None, ..., : v.shape[3]]

    def _rows(self, x: Tensor, tokens: int) -> Tensor:
        """Rearrange [1, heads, R, d] as [T, heads, D]. The zeros that fill up a head change no score."""
        x = x[0].transpose(0, 1)[:tokens].to(self._ops.dtype)
        missing = self._head_dim - x.shape[-1]
        return (nn.functional.pad(x, (0, missing)) if missing else x).contiguous()


def whole_rows(x: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros, so that their number is a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


def fix_buffers(model: nn.Module, names: list[str]) -> None:
    """Make parameters of buffers, which are read from checkpoints, too."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        owner.register_parameter(leaf, nn.Parameter(owner._buffers.pop(leaf), requires_grad=False))
