"""Stage: a part of a model's layers, on one rank of a pipeline. The model file is the one for a single device.

    first       embedding, layers 0 .. a       -> x, h
    middle      x, h -> layers a .. b          -> x, h
    last        x, h -> layers b .. n, final norm, LM head

A decoder (decoder.py) is an embedding, a list of blocks that map (x, h) to (x, h), and a final norm that adds both;
x is the residual stream and h the branch that has not been added yet, [T, hidden] float32 each. So a stage is the whole
model whose other parts are replaced by modules that have no parameters, take no memory and hand on what they are given.
"""

from itertools import pairwise
from typing import Any, cast

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.arena import Slot
from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.layers.decoder import DecoderLM
from penstock.layers.factory import LayerFactory
from penstock.layers.module import Module, children
from penstock.layers.weights import Embedding, WeightLayer

Handed = tuple[Tensor, Tensor | None]  # x and h; h is None in families that leave no branch to add


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, in order. Where they do not divide, the first stages have one more."""
    size, rest = divmod(num_layers, num_stages)
    cuts = [index * size + min(index, rest) for index in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


class Stage:
    """Some of a model's layers.

    Attributes:
        layers: their indices.
    """

    def __init__(self, layers: range, num_layers: int) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == num_layers
        self._num_layers = num_layers
        self._received: _Received | None = None

    def cut(self, model: Any, make: LayerFactory) -> None:
        """Drop what other stages have, in place. The model has no weights yet, so that only this part is loaded.

        Raises:
            NotSupportedError: the model is not made of penstock.layers.decoder.
        """
        if not isinstance(model, DecoderLM):
            message = (
                "pipeline_parallel_size: only families that are made of penstock.layers.decoder are cut into stages"
            )
            raise NotSupportedError(message, param="pipeline_parallel_size")
        decoder = model.decoder
        (blocks,) = (value for value in vars(decoder).values() if isinstance(value, list))
        if not self.is_first:
            for name, layer in list(children(decoder)):
                if isinstance(layer, Embedding):
                    setattr(decoder, name, _Nothing())
            self._received = _Received(make)
            blocks[: self.layers.start] = [_Passed()] * (self.layers.start - 1) + [self._received]
        if not self.is_last:
            (norm,) = (name for name, layer in children(decoder) if _is_norm(layer))
            setattr(decoder, norm, _HandedOn())
            setattr(model, "lm_head", _Nothing())  # noqa: B010  # it is an LMHead elsewhere
            blocks[self.layers.stop :] = [_Passed()] * (self._num_layers - self.layers.stop)

    def receive(self, x: Array, h: Array | None) -> None:
        """Take what the stage before has computed; the next call of the model goes on with it."""
        if self._received is not None:
            self._received.take(x, h)


def _is_norm(layer: object) -> bool:
    return isinstance(layer, WeightLayer) and not isinstance(layer, Embedding)


class _Nothing(Module):
    """In place of an embedding or a head."""

    def forward(self, *_: Any) -> None:
        return None


class _Passed(Module):
    """In place of a block."""

    def forward(self, x: Tensor, h: Tensor | None, ctx: Any) -> Handed:
        return x, h


class _Received(Module):
    """In place of the block before the first: what another stage has computed, in buffers of this one's."""

    def __init__(self, make: LayerFactory) -> None:
        self._make = make
        self._slots: tuple[Slot, Slot | None] | None = None
        self._rows = 0

    def take(self, x: Array, h: Array | None) -> None:
        if self._slots is None:
            columns = x.shape[1:]
            branch = None if h is None else self._make.slot("received branch", columns, "float32")
            self._slots = self._make.slot("received", columns, "float32"), branch
        self._rows = len(x)
        for slot, value in zip(self._slots, (x, h), strict=True):
            if slot is not None:
                np.copyto(as_array(slot(self._rows)), cast(Array, value))

    def forward(self, *_: Any) -> Handed:
        if self._slots is None:
            raise ValueError("the stage before has handed on nothing")
        x, h = self._slots
        return x(self._rows), None if h is None else h(self._rows)


class _HandedOn(Module):
    """In place of the final norm: the model's result is what the next stage goes on with."""

    def add(self, x: Tensor, h: Tensor | None) -> tuple[None, Handed]:
        return None, (x, h)
