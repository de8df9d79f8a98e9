"""Wires: convert the input and the result of a product, where a sharding map splits a branch's weights differently from
the features between them (spec/cuts.py)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.layers.weights import ActivatedLinear, GatedLinear, Linear
from penstock.spec.cuts import Wiring


class Ranks(Protocol):
    """How a rank exchanges arrays with the others. All ranks of a block make the same calls in the same order."""

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Sequence[Array]:
        """Return the `x` of each rank in this rank's block of `degree` ranks, in the order of ranks.

        The arrays must not be written to, and are valid until the next call. shapes: each rank's shape, if they differ
        from that of x.

        Raises:
            ExecutorLostError: a rank of the group ended, or does not answer.
        """


class Wires:
    """Gathers or selects columns of a product's input and result, as its wiring says (spec/cuts.py)."""

    def __init__(self, wiring: Wiring, ranks: Ranks) -> None:
        self.wiring = wiring
        self.ranks = ranks

    def input(self, x: Tensor) -> Tensor:
        """Return the columns that the product multiplies, from x [M, K or a part of it] dtype."""
        if self.wiring.gathers_input:
            return self._gathered(x, self.wiring.gathers_input)
        return _taken(x, self.wiring.takes_input)

    def result(self, y: Tensor) -> Tensor:
        """Return the columns that the next layer takes, from the product's result y."""
        if self.wiring.gathers_result:
            return self._gathered(y, self.wiring.gathers_result)
        return _taken(y, self.wiring.takes_result)

    def _gathered(self, x: Tensor, borders: Sequence[int]) -> Tensor:
        own = as_array(x)
        shapes = [(len(own), end - begin) for begin, end in pairwise(borders)]
        return np.concatenate(self.ranks.gather(own, len(shapes), shapes), axis=1)


def _taken(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return np.concatenate([as_array(x)[:, begin:end] for begin, end in ranges], axis=1) if ranges else x


class _Wired(Linear):
    """A product whose input and result pass through Wires."""

    def __init__(self, *args: Any, wires: Wires) -> None:
        super().__init__(*args)
        self.wires = wires

    def forward(self, x: Tensor) -> Tensor:
        return self.wires.result(super().forward(self.wires.input(x)))


class WiredLinear(_Wired):
    """A Linear whose input and result pass through Wires."""


class WiredActivatedLinear(_Wired, ActivatedLinear):
    """An ActivatedLinear whose input and result pass through Wires."""


class WiredGatedLinear(_Wired, GatedLinear):
    """A GatedLinear whose input and result pass through Wires."""
