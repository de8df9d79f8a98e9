"""Rows of parameters, read piece by piece (kernels.ops.RowSource), and how a checkpoint's tensors hold them.

`parameter_rows` makes a parameter from the tensors that hold it in a layout (spec/param_table.py); `tensor_rows` makes
those tensors from the parameter. Both only combine RowSources, so reading or writing a model keeps only the requested
rows in memory.

Coded weights (kernels/coding.py) stay coded where that is possible: `joined`, `cut` and `halved` make of CodedRows
CodedRows again. Neighbouring rows with different codings become a JoinedRows, whose `pieces` have one coding each. What
changes the columns otherwise (a transposition, a cut inside a block) reads values, so its result is decoded.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.kernels.coding import CodedRows, Coding, PartRows
from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import FLOAT32, FLOAT64, Array, ArrayType, Dtype, array_type, as_array, empty
from penstock.layers.factory import Runs
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
    """Several sources joined along `axis`: query, key and value rows, for instance.

    Attributes:
        pieces: the sources, if they are joined along the rows; otherwise the whole.
    """

    def __init__(self, parts: Sequence[RowSource], axis: int = 0) -> None:
        self._parts, self._axis = parts, axis
        self.pieces = (self,) if axis else tuple(parts)
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

    Row i of a head is the first row of pair i, row i + rotated/2 the second; rows from `rotated` on stay where they
    are. `back` converts halves to pairs. A matrix whose rows are heads has the elements in its columns (`axis` 1).
    """

    source: RowSource
    head: int
    rotated: int
    back: bool = False
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Array:
        if self.axis:
            return np.ascontiguousarray(read_rows(self.source, start, stop)[:, self._order()])
        first, last = start // self.head, -(-stop // self.head)  # whole heads
        rows = read_rows(self.source, first * self.head, last * self.head)
        turned: Array = rows.reshape(last - first, self.head, *self.shape[1:])[:, self._order()].reshape(rows.shape)
        return turned[start - first * self.head : stop - first * self.head]

    def _order(self) -> Array:
        """Return which element of the source's head comes at each place."""
        split = (2, self.rotated // 2) if self.back else (self.rotated // 2, 2)
        return np.append(np.arange(self.rotated).reshape(split).T, np.arange(self.rotated, self.head))


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


@dataclass(frozen=True, slots=True)
class RowMatrix:
    """A vector as a matrix of one row."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.source.shape)

    def read(self, start: int, stop: int) -> Array:
        return read_rows(self.source, 0, self.source.shape[0])[None][start:stop]


@dataclass(frozen=True, slots=True)
class FlatRow:
    """A matrix of one row as a vector."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[1:]

    def read(self, start: int, stop: int) -> Array:
        return read_rows(self.source, 0, 1)[0, start:stop]


def joined(parts: Sequence[RowSource], axis: int = 0) -> RowSource:
    """Join sources along an axis. Neighbouring rows of one coding become one CodedRows."""
    flat = [piece for part in parts for piece in pieces_of(part)]
    if axis or not any(isinstance(part, CodedRows) for part in flat):
        return parts[0] if len(parts) == 1 else JoinedRows(parts, axis)
    pieces = [_one_piece(list(group)) for group in _alike(flat)]
    return pieces[0] if len(pieces) == 1 else JoinedRows(pieces)


def cut(source: RowSource, begin: int, end: int, axis: int = 0) -> RowSource:
    """Return a range of a source along an axis. Columns of a coded weight stay coded if the range has whole blocks."""
    if axis == 0 and begin < end and len(pieces := pieces_of(source)) > 1:
        starts = [0, *itertools.accumulate(piece.shape[0] for piece in pieces)]
        ranges = [(max(begin - first, 0), min(end, last) - first) for first, last in itertools.pairwise(starts)]
        return joined([cut(piece, *some) for piece, some in zip(pieces, ranges, strict=True) if some[0] < some[1]])
    if not isinstance(source, CodedRows):
        return CutRows(source, begin, end, axis)
    if axis == 0:
        return source.map_rows(lambda part: CutRows(part, begin, end))
    if not is_cut_between_blocks(source.coding, begin, end, source.shape[axis]):
        return CutRows(source, begin, end, axis)
    coding, parts = source.coding, dict[str, PartRows]()
    for name, part in source.parts.items():
        size = {"codes": 1, "steps": coding.group, "step_mins": coding.group}.get(name, coding.block or source.shape[1])
        columns = begin // size, -(-end // size)
        parts[name] = part if name == "column_scales" else CutRows(part, *columns, axis)
    return replace(source, parts=parts)


def is_cut_between_blocks(coding: Coding, begin: int, end: int, k: int) -> bool:
    """Return whether columns begin .. end-1 of k are whole blocks, so that their codes can stand alone."""
    block = coding.block or 1
    return not coding.order and begin % block == 0 and (end % block == 0 or end == k)


def halved(source: RowSource, head: int, rotated: int, *, back: bool = False, axis: int = 0) -> RowSource:
    """Convert the rows of rotated heads as HalvedRows does."""
    if isinstance(source, CodedRows):
        return source.map_rows(lambda part: HalvedRows(part, head, rotated, back))
    return HalvedRows(source, head, rotated, back, axis)


def pieces_of(source: RowSource) -> tuple[RowSource, ...]:
    """Return the sources of neighbouring rows of which a source consists."""
    return source.pieces if isinstance(source, JoinedRows) else (source,)


def runs_of(source: RowSource) -> Runs:
    """Return how the rows of a source are coded; () if none of them is."""
    found = tuple((piece.shape[0], getattr(piece, "coding", None)) for piece in pieces_of(source))
    return found if any(coding is not None for _, coding in found) else ()


def _alike(sources: Sequence[RowSource]) -> list[list[RowSource]]:
    """Group neighbouring sources that can be one piece: floats, or codes of one coding and order."""
    groups: list[list[RowSource]] = []
    for source in sources:
        if groups and _is_alike(groups[-1][0], source):
            groups[-1].append(source)
        else:
            groups.append([source])
    return groups


def _is_alike(one: RowSource, other: RowSource) -> bool:
    if not isinstance(one, CodedRows) or not isinstance(other, CodedRows):
        return not isinstance(one, CodedRows) and not isinstance(other, CodedRows)
    if (one.coding, one.form) != (other.coding, other.form) or not one.coding.order:
        return (one.coding, one.form) == (other.coding, other.form)
    k, first, second = one.shape[1], one.parts["order"], other.parts["order"]
    return first is second or np.array_equal(first.read(0, k), second.read(0, k))


def _one_piece(sources: Sequence[RowSource]) -> RowSource:
    """Join sources that are alike."""
    coded = [item for item in sources if isinstance(item, CodedRows)]
    if len(sources) == 1 or not coded:
        return sources[0] if len(sources) == 1 else JoinedRows(sources)
    parts = {
        name: part if name == "order" else JoinedRows([item.parts[name] for item in coded])
        for name, part in coded[0].parts.items()
    }
    return replace(coded[0], parts=parts)


def parameter_rows(layout: Layout, find: FindRows) -> RowSource:
    """Join the parameter that a checkpoint holds in this layout."""
    parts = [_upright(find(name, layout.index), layout) for name in layout.sources]
    if layout.numbered:
        parts = [RowMatrix(part) for part in parts]
    if layout.paired_head:
        parts = _halved(parts, layout, back=False)
    whole = joined(parts, layout.join_axis)
    return _regrouped(whole, layout, back=False) if layout.groups > 1 else whole


def tensor_rows(layout: Layout, whole: RowSource) -> dict[str, RowSource]:
    """Split a parameter into the checkpoint tensors, by name, that hold it in this layout; for a stacked one, its
    slice."""
    parts = [_regrouped(whole, layout, back=True) if layout.groups > 1 else whole]
    if layout.numbered:
        parts = [FlatRow(cut(parts[0], row, row + 1)) for row in range(whole.shape[0])]
    elif len(layout.sources) > 1:
        ends = itertools.accumulate(layout.pieces)
        parts = [
            cut(parts[0], end - size, end, layout.join_axis) for size, end in zip(layout.pieces, ends, strict=True)
        ]
    if layout.paired_head:
        parts = _halved(parts, layout, back=True)
    return {name: _upright(part, layout) for name, part in zip(layout.sources, parts, strict=True)}


def _regrouped(rows: RowSource, layout: Layout, *, back: bool) -> RowSource:
    """Reorder rows from group by group, where each group has its share of every piece, to piece by piece.

    `back` does the reverse.
    """
    shares = [size // layout.groups for size in layout.pieces]
    if shares == [1, 1]:  # pairs of rows, as if all of them were one rotated head
        return halved(rows, rows.shape[0], rows.shape[0], back=back)
    by_piece = list(itertools.product(range(len(shares)), range(layout.groups)))
    by_group = sorted(by_piece, key=lambda place: place[1])
    source, target = (by_piece, by_group) if back else (by_group, by_piece)
    ends = dict(zip(source, itertools.accumulate(shares[piece] for piece, _ in source), strict=True))
    return joined([cut(rows, ends[place] - shares[place[0]], ends[place]) for place in target])


def _upright(rows: RowSource, layout: Layout) -> RowSource:
    return TransposedRows(rows) if layout.transposed else rows


def _halved(parts: list[RowSource], layout: Layout, *, back: bool) -> list[RowSource]:
    """Convert queries and keys between halves and pairs. The last of several pieces of rows, the values, is not
    rotated."""
    has_values = len(parts) > 1 and not layout.paired_axis
    rotated, values = (parts[:-1], parts[-1:]) if has_values else (parts, [])
    head, size, axis = layout.paired_head, layout.rotated, layout.paired_axis
    return [*(halved(part, head, size, back=back, axis=axis) for part in rotated), *values]
