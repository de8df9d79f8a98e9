"""Wires: products whose input or result is not what the product itself takes or gives, because a sharding map splits
the weights of a branch otherwise than the features in between (spec/cuts.py)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.layers.weights import ActivatedLinear, GatedLinear, Linear
from penstock.spec.cuts import Wiring


class Ranks(Protocol):
    """How a rank meets the others. All ranks of a block call the same method at the same place."""

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> Sequence[Array]:
        """Return what each rank of this rank's block of `degree` gave, in the order of ranks; not to be written to.

        The arrays are valid until the next call. shapes: of each, where they differ from x.

        Raises:
            ExecutorLostError: a rank of the group ended, or does not answer.
        """


class Wires:
    """Does with the input and the result of a product what its wiring says (spec/cuts.py)."""

    def __init__(self, wiring: Wiring, ranks: Ranks) -> None:
        self.wiring = wiring
        self.ranks = ranks

    def input(self, x: Tensor) -> Tensor:
        """Return the columns that the product multiplies, of x [M, K or a part of it] dtype."""
        if self.wiring.gathers_input:
            return self._gathered(x, self.wiring.gathers_input)
        return _taken(x, self.wiring.takes_input)

    def result(self, y: Tensor) -> Tensor:
        """Return the columns that come after the product, of its result y."""
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
    """A product between wires."""

    def __init__(self, *args: Any, wires: Wires) -> None:
        super().__init__(*args)
        self.wires = wires

    def forward(self, x: Tensor) -> Tensor:
        return self.wires.result(super().forward(self.wires.input(x)))


class WiredLinear(_Wired):
    """A Linear between wires."""


class WiredActivatedLinear(_Wired, ActivatedLinear):
    """An ActivatedLinear between wires."""


class WiredGatedLinear(_Wired, GatedLinear):
    """A GatedLinear between wires."""
