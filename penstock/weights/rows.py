"""Rows of parameters, read piece by piece (kernels.ops.RowSource), and how a checkpoint's tensors hold them.

`parameter_rows` makes a parameter from the tensors that hold it in a layout (spec/param_table.py); `tensor_rows` makes
those tensors from the parameter. Both only combine RowSources, so reading or writing a model keeps only the requested
rows in memory.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import FLOAT32, FLOAT64, Array, ArrayType, Dtype, array_type, as_array, empty
from penstock.spec.param_table import Layout

PIECE_BYTES = 2**24  # bytes read at once from a tensor that has to be converted

FindRows = Callable[[str, int | None], RowSource]  # (name, index): a checkpoint tensor, or one slice of a stacked one


def read_rows(source: RowSource, start: int, stop: int) -> Array:
    return as_array(source.read(start, stop))


def common_type(types: Iterable[ArrayType]) -> ArrayType:
    """Find the float type that holds the values of all these types."""
    distinct = set(types)
    if len(distinct) == 1:
        return distinct.pop()
    return FLOAT64 if FLOAT64 in distinct else FLOAT32


class JoinedRows:
    """Several sources joined along `axis`: query, key and value rows, for instance."""

    def __init__(self, parts: Sequence[RowSource], axis: int = 0) -> None:
        self._parts, self._axis = parts, axis
        self._ends = list(itertools.accumulate(part.shape[axis] for part in parts))
        shape = parts[0].shape
        self.shape = (*shape[:axis], self._ends[-1], *shape[axis + 1 :])

    def read(self, start: int, stop: int) -> Array:
        if self._axis:
            return np.concatenate([read_rows(part, start, stop) for part in self._parts], axis=self._axis)
        pieces, row, index = [], start, bisect.bisect_right(self._ends, start)
        while row < stop:
            end, offset = self._ends[index], self._ends[index] - self._parts[index].shape[0]
            last = min(end, stop)
            if row < last:
                pieces.append(read_rows(self._parts[index], row - offset, last - offset))
            row, index = last, index + 1
        if len(pieces) == 1:
            return pieces[0]
        result: Array = empty((stop - start, *self.shape[1:]), common_type(piece.dtype for piece in pieces))
        row = 0
        for piece in pieces:
            result[row : row + len(piece)] = piece
            row += len(piece)
        return result


@dataclass(frozen=True, slots=True)
class CutRows:
    """A range of another source along `axis`: the query rows of a fused weight, for instance."""

    source: RowSource
    begin: int
    end: int
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.source.shape
        return (*shape[: self.axis], self.end - self.begin, *shape[self.axis + 1 :])

    def read(self, start: int, stop: int) -> Array:
        if self.axis == 0:
            return read_rows(self.source, self.begin + start, self.begin + stop)
        if self.axis == 1 and hasattr(self.source, "read_columns"):
            return as_array(self.source.read_columns(start, stop, self.begin, self.end))
        columns = (slice(None),) * self.axis + (slice(self.begin, self.end),)
        return np.ascontiguousarray(read_rows(self.source, start, stop)[columns])


class TransposedRows:
    """A transposed matrix. The first read transposes all of it, because every row needs all rows of the source."""

    def __init__(self, source: RowSource) -> None:
        self.shape = source.shape[::-1]
        self._source = source
        self._whole: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        if self._whole is None:
            self._whole = self._transpose()
        return self._whole[start:stop]

    def _transpose(self) -> Array:
        """Transpose piece by piece, so that memory never holds the whole matrix twice."""
        rows, columns = self._source.shape
        step = max(1, PIECE_BYTES // (4 * columns))
        first = read_rows(self._source, 0, min(step, rows))
        result: Array = empty(self.shape, first.dtype)
        result[:, : len(first)] = first.T
        for start in range(step, rows, step):
            result[:, start : start + step] = read_rows(self._source, start, min(start + step, rows)).T
        return result


@dataclass(frozen=True, slots=True)
class HalvedRows:
    """Rows of rotated heads: the source interleaves the rows of each head as pairs, here they are two halves.

    Row i of a head is the first row of pair i, row i + head/2 the second. `back` converts halves to pairs.
    """

    source: RowSource
    head: int
    back: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Array:
        first, last = start // self.head, -(-stop // self.head)  # whole heads
        rows = read_rows(self.source, first * self.head, last * self.head)
        split = (2, self.head // 2) if self.back else (self.head // 2, 2)
        turned = rows.reshape(last - first, *split, *self.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return turned[start - first * self.head : stop - first * self.head]


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A source converted to another type piece by piece, so that memory never holds all of it in both types."""

    source: RowSource
    dtype: Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Array:
        step = max(1, PIECE_BYTES // (4 * math.prod(self.shape[1:])))
        rows, dtype = read_rows(self.source, start, min(start + step, stop)), array_type(self.dtype)
        if len(rows) == stop - start and rows.dtype == dtype:
            return rows
        result: Array = empty((stop - start, *self.shape[1:]), dtype)
        result[: len(rows)] = rows
        for first in range(start + step, stop, step):
            result[first - start : first - start + step] = read_rows(self.source, first, min(first + step, stop))
        return result


def parameter_rows(layout: Layout, find: FindRows) -> RowSource:
    """Join the parameter that a checkpoint holds in this layout."""
    parts = [_upright(find(name, layout.index), layout) for name in layout.sources]
    if layout.paired_head:
        parts = _halved(parts, layout, back=False)
    whole = parts[0] if len(parts) == 1 else JoinedRows(parts, layout.join_axis)
    return _regrouped(whole, layout, back=False) if layout.groups > 1 else whole


def tensor_rows(layout: Layout, whole: RowSource) -> dict[str, RowSource]:
    """Split a parameter into the checkpoint tensors, by name, that hold it in this layout; for a stacked one, its
    slice."""
    parts = [_regrouped(whole, layout, back=True) if layout.groups > 1 else whole]
    if len(layout.sources) > 1:
        ends = itertools.accumulate(layout.pieces)
        parts = [
            CutRows(parts[0], end - size, end, layout.join_axis) for size, end in zip(layout.pieces, ends, strict=True)
        ]
    if layout.paired_head:
        parts = _halved(parts, layout, back=True)
    return {name: _upright(part, layout) for name, part in zip(layout.sources, parts, strict=True)}


def _regrouped(rows: RowSource, layout: Layout, *, back: bool) -> RowSource:
    """Reorder rows from group by group, where each group has its share of every piece, to piece by piece.

    `back` does the reverse.
    """
    shares = [size // layout.groups for size in layout.pieces]
    by_piece = list(itertools.product(range(len(shares)), range(layout.groups)))
    by_group = sorted(by_piece, key=lambda place: place[1])
    source, target = (by_piece, by_group) if back else (by_group, by_piece)
    ends = dict(zip(source, itertools.accumulate(shares[piece] for piece, _ in source), strict=True))
    return JoinedRows([CutRows(rows, ends[place] - shares[place[0]], ends[place]) for place in target])


def _upright(rows: RowSource, layout: Layout) -> RowSource:
    return TransposedRows(rows) if layout.transposed else rows


def _halved(parts: list[RowSource], layout: Layout, *, back: bool) -> list[RowSource]:
    """Convert queries and keys between halves and pairs; the last piece, the values, is not rotated."""
    *rotated, values = parts
    return [*(HalvedRows(part, layout.paired_head, back) for part in rotated), values]
