"""Stage: a part of a model's layers, on one rank of a pipeline. The model file is the same as for a single device.

    first       embedding, layers 0 .. a       -> x, h
    middle      x, h -> layers a .. b          -> x, h
    last        x, h -> layers b .. n, final norm, LM head

A decoder (decoder.py) is an embedding, a list of blocks that map (x, h) to (x, h), and a final norm that adds both. x
is the residual stream and h the branch that has not been added yet, [T, hidden] float32 each. So a stage is the whole
model, with the other stages' parts replaced by modules that have no parameters and only pass on x and h.
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

Handed = tuple[Tensor, Tensor | None]  # x and h; h is None in families whose blocks add their branches themselves


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, in order. If they do not divide evenly, the first stages have one more."""
    size, rest = divmod(num_layers, num_stages)
    cuts = [index * size + min(index, rest) for index in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


class Stage:
    """Some of a model's layers.

    Attributes:
        layers: the indices of the stage's layers.
    """

    def __init__(self, layers: range, num_layers: int) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == num_layers
        self._num_layers = num_layers
        self._received: _Received | None = None

    def cut(self, model: Any, make: LayerFactory) -> None:
        """Remove the other stages' parts from the model, in place. Its weights are not loaded yet, so only this stage's
        will be.

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
        """Take what the stage before has computed. The next call of the model continues from it."""
        if self._received is not None:
            self._received.take(x, h)


def _is_norm(layer: object) -> bool:
    return isinstance(layer, WeightLayer) and not isinstance(layer, Embedding)


class _Nothing(Module):
    """Replaces an embedding or a head."""

    def forward(self, *_: Any) -> None:
        return None


class _Passed(Module):
    """Replaces a block: passes on x and h."""

    def forward(self, x: Tensor, h: Tensor | None, ctx: Any) -> Handed:
        return x, h


class _Received(Module):
    """Replaces the block before this stage's first one: returns what the stage before has computed, copied into buffers
    of this stage."""

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
            raise ValueError("the previous stage has sent nothing")
        x, h = self._slots
        return x(self._rows), None if h is None else h(self._rows)


class _HandedOn(Module):
    """Replaces the final norm: makes x and h for the next stage the model's result."""

    def add(self, x: Tensor, h: Tensor | None) -> tuple[None, Handed]:
        return None, (x, h)
