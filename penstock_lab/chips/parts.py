"""Parts: which chip has which part of a weight. The parameter table says along which axis a weight is split.

    columns of the result   each chip computes an even share of every joined piece (q, k and v)
    depth (a sum)           cut between the table's 8 leaves, so that sums have one order; if there are more than 8
                            chips, or 3, several chips have the same leaves and share the columns of the result

So every number of chips gives the bits of one device (spec/shares.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock import InvalidRequestError
from penstock.config import DEGREES
from penstock.errors import invalid
from penstock.kernels.tensors import Array
from penstock.ranks.sharding import LEAVES
from penstock.spec.param_table import Parameter, leaf_bounds
from penstock_lab.planner.placement import WEIGHT_BYTES

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One chip's part of a weight [N, K].

    Attributes:
        rows: its ranges of N, joined in this order.
        depth: its range of K.
        ends: where the leaves of the part end, counted from its start; () if it is not part of a sum.
        leaves: the index of the part of the sum that it belongs to.
    """

    chip: int
    rows: tuple[Range, ...]
    depth: Range
    ends: tuple[int, ...] = ()
    leaves: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the part."""
        return sum(end - begin for begin, end in self.rows), self.depth[1] - self.depth[0]

    @property
    def num_elements(self) -> int:
        rows, depth = self.shape
        return rows * depth

    @property
    def num_bytes(self) -> int:
        """Its bytes as a placement counts them; this machine's packed form may differ."""
        return WEIGHT_BYTES * self.num_elements

    def of(self, weight: Array) -> Array:
        """Cut the part out of a weight [N, K], or of a bias [N]."""
        rows = np.concatenate([weight[begin:end] for begin, end in self.rows])
        return rows if weight.ndim == 1 else np.ascontiguousarray(rows[:, slice(*self.depth)])


def parts_of(parameter: Parameter, chips: Sequence[int]) -> list[Part]:
    """Split a weight [N, K] over some chips.

    Raises:
        InvalidRequestError: it cannot be split over that many.
    """
    return _of_sum(parameter, chips) if parameter.leaves > 1 else _of_columns(parameter, chips)


def _of_columns(parameter: Parameter, chips: Sequence[int]) -> list[Part]:
    layout = parameter.layouts[-1]
    pieces = (layout.pieces if layout.join_axis == 0 else ()) or parameter.shape[:1]
    if parameter.shard is None:
        chips = chips[:1]
    if min(pieces) < len(chips):
        raise _too_many(parameter, chips, min(pieces))
    parts = []
    for index, chip in enumerate(chips):
        ranges, start = [], 0
        for size in pieces:
            begin, end = share(index, len(chips), size)
            ranges.append((start + begin, start + end))
            start += size
        parts.append(Part(chip, tuple(ranges), (0, parameter.shape[1])))
    return parts


def _of_sum(parameter: Parameter, chips: Sequence[int]) -> list[Part]:
    """Split the sum into as many groups of leaves as possible: their number must divide that of the chips, and none may
    be empty. Chips with the same leaves share the columns of the result."""
    bounds = leaf_bounds(parameter.shape[1], LEAVES, parameter.unit_size)
    groups = [_joined(bounds, degree) for degree in reversed(DEGREES) if len(chips) % degree == 0]
    own = next(found for found in groups if all(leaves[0][0] < leaves[-1][1] for leaves in found))
    together = len(chips) // len(own)
    if parameter.shape[0] < together:
        raise _too_many(parameter, chips, parameter.shape[0] * len(own))
    parts = []
    for index, chip in enumerate(chips):
        group, place = divmod(index, together)
        first, last = own[group][0][0], own[group][-1][1]
        rows = share(place, together, parameter.shape[0])
        parts.append(Part(chip, (rows,), (first, last), tuple(end - first for _, end in own[group]), group))
    return parts


def _joined(bounds: list[Range], degree: int) -> list[list[Range]]:
    """Distribute the leaves over `degree` parts."""
    each = LEAVES // degree
    return [bounds[start : start + each] for start in range(0, LEAVES, each)]


@dataclass(frozen=True, slots=True)
class Heads:
    """One chip's part of a layer's attention: some key/value heads in some rows of the cache."""

    chip: int
    kv_heads: Range
    rows: Range

    @property
    def count(self) -> int:
        """The number of key/value heads."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


def heads_of(name: str, chips: Sequence[int], kv_heads: int, rows: int) -> list[Heads]:
    """Split an operation's attention. If there are more chips than heads, chips share a head's rows.

    Raises:
        InvalidRequestError: the heads or the rows do not divide evenly.
    """
    count = len(chips)
    together = max(1, count // kv_heads)  # the number of chips that have the same heads
    if kv_heads % count and count % kv_heads:
        message = f"{count} is no divisor and no multiple of its {kv_heads} key/value heads"
    elif rows % together:
        message = f"{together} chips of a key/value head cannot share {rows} rows evenly"
    else:
        message = ""
    if message:
        raise invalid("placement", f"{name} cannot be split over {count} chips: {message}")
    parts = []
    for index, chip in enumerate(chips):
        heads, place = divmod(index, together)
        parts.append(Heads(chip, share(heads, count // together, kv_heads), share(place, together, rows)))
    return parts


def share(index: int, count: int, size: int) -> Range:
    """Find the range of part `index`, when `size` is divided evenly into `count` parts."""
    return index * size // count, (index + 1) * size // count


def _too_many(parameter: Parameter, chips: Sequence[int], most: int) -> InvalidRequestError:
    message = f"placement: {parameter.name} cannot be split over {len(chips)} chips, only over up to {most}"
    return InvalidRequestError(message, param="placement")
