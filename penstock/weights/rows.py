"""Rows of parameters, read piece by piece (kernels.ops.RowSource), and how a checkpoint's tensors hold them.

`parameter_rows` makes a parameter of the tensors that hold it in a layout (spec/param_table.py), `tensor_rows` makes
those tensors of the parameter. Both only combine RowSources, so reading or writing a model holds the requested rows in
memory and no more.
"""

import bisect
import functools
import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.ops import RowSource
from penstock.spec.param_table import Layout

PIECE_BYTES = 2**24  # read at once from a tensor that has to be converted
OWN_PAGES = 2**18  # bytes from which rows get pages of their own; far fewer than a huge page has

FindRows = Callable[[str, int | None], RowSource]  # (name, index): a checkpoint tensor, or one slice of a stacked one


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory for rows. Large buffers get pages of their own, returned to the system when freed.

    On the heap they would leave holes: small tensors, such as scales and norms, settle in each, and the next rows no
    longer fit there.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages provides small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps the pages alive


class JoinedRows:
    """Several sources as one, joined along `axis`: query, key and value rows, for instance."""

    def __init__(self, parts: Sequence[RowSource], axis: int = 0) -> None:
        self._parts, self._axis = parts, axis
        self._ends = list(itertools.accumulate(part.shape[axis] for part in parts))
        shape = parts[0].shape
        self.shape = (*shape[:axis], self._ends[-1], *shape[axis + 1 :])

    def read(self, start: int, stop: int) -> Tensor:
        if self._axis:
            return torch.cat([part.read(start, stop) for part in self._parts], dim=self._axis)
        pieces, row, index = [], start, bisect.bisect_right(self._ends, start)
        while row < stop:
            end, offset = self._ends[index], self._ends[index] - self._parts[index].shape[0]
            last = min(end, stop)
            if row < last:
                pieces.append(self._parts[index].read(row - offset, last - offset))
            row, index = last, index + 1
        if len(pieces) == 1:
            return pieces[0]
        dtype = functools.reduce(torch.promote_types, (piece.dtype for piece in pieces))
        return torch.cat(pieces, out=empty_rows((stop - start, *self.shape[1:]), dtype))


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

    def read(self, start: int, stop: int) -> Tensor:
        if self.axis == 0:
            return self.source.read(self.begin + start, self.begin + stop)
        return self.source.read(start, stop).narrow(self.axis, self.begin, self.end - self.begin).contiguous()


class TransposedRows:
    """A transposed matrix. The first read transposes all of it, because every row here needs all rows of the source."""

    def __init__(self, source: RowSource) -> None:
        self.shape = source.shape[::-1]
        self._source = source
        self._whole: Tensor | None = None

    def read(self, start: int, stop: int) -> Tensor:
        if self._whole is None:
            self._whole = self._transpose()
        return self._whole[start:stop]

    def _transpose(self) -> Tensor:
        """Transpose piece by piece, so that the whole matrix is never in memory both ways."""
        rows, columns = self._source.shape
        step = max(1, PIECE_BYTES // (4 * columns))
        first = self._source.read(0, min(step, rows))
        result = empty_rows(self.shape, first.dtype)
        result[:, : len(first)] = first.t()
        for start in range(step, rows, step):
            result[:, start : start + step] = self._source.read(start, min(start + step, rows)).t()
        return result


@dataclass(frozen=True, slots=True)
class HalvedRows:
    """Rows of rotated heads, each head in two halves where the source interleaves them as pairs.

    Row i of a head is the first of pair i, row i + head/2 the second. `back` converts halves to pairs.
    """

    source: RowSource
    head: int
    back: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Tensor:
        first, last = start // self.head, -(-stop // self.head)  # whole heads
        rows = self.source.read(first * self.head, last * self.head)
        split = (2, self.head // 2) if self.back else (self.head // 2, 2)
        turned = rows.view(last - first, *split, *self.shape[1:]).transpose(1, 2).reshape(rows.shape)
        return turned[start - first * self.head : stop - first * self.head]


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A source in another type, converted piece by piece, so that the whole is never in memory in both types."""

    source: RowSource
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Tensor:
        step = max(1, PIECE_BYTES // (4 * math.prod(self.shape[1:])))
        rows = self.source.read(start, min(start + step, stop))
        if len(rows) == stop - start and rows.dtype == self.dtype:
            return rows
        result = empty_rows((stop - start, *self.shape[1:]), self.dtype)
        result[: len(rows)] = rows
        for first in range(start + step, stop, step):
            result[first - start : first - start + step] = self.source.read(first, min(first + step, stop))
        return result


def parameter_rows(layout: Layout, find: FindRows) -> RowSource:
    """Return the parameter that a checkpoint holds in this layout."""
    parts = [_upright(find(name, layout.index), layout) for name in layout.sources]
    if layout.paired_head:
        parts = _halved(parts, layout, back=False)
    whole = parts[0] if len(parts) == 1 else JoinedRows(parts, layout.join_axis)
    return _regrouped(whole, layout, back=False) if layout.groups > 1 else whole


def tensor_rows(layout: Layout, whole: RowSource) -> dict[str, RowSource]:
    """Return the checkpoint tensors, by name, that hold a parameter in this layout; of a stack, its slice."""
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
    """Reorder rows that come group by group, each with its share of every piece, to one piece after the other.

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
    """Convert queries and keys between halves and pairs; values, the last piece, are not rotated."""
    *rotated, values = parts
    return [*(HalvedRows(part, layout.paired_head, back) for part in rotated), values]
