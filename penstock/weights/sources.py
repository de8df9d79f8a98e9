"""Where a parameter's values come from, as kernels.ops.RowSources: nobody holds more than the rows he asked for."""

import bisect
import functools
import hashlib
import itertools
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.ops import RowSource

PIECE_BYTES = 2**24  # what is read at once of a tensor that has to be converted
OWN_PAGES = 2**18  # bytes of rows from which they are kept apart from the heap; far fewer than a huge page has
DUMMY_BLOCK = 2**16  # elements that come from one random stream


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for rows. Many of them get pages of their own, which go back to the system with them.

    The heap would keep the holes: a scale or a norm settles in each, and the next rows find no room there.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the pages as long as it lives


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Several sources as one, joined along `axis`: query, key and value rows, for instance."""

    parts: Sequence[RowSource]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self, start: int, stop: int) -> Tensor:
        if self.axis:
            return torch.cat([part.read(start, stop) for part in self.parts], dim=self.axis)
        pieces, begin = [], 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                pieces.append(part.read(first, last))
            begin += part.shape[0]
        if len(pieces) == 1:
            return pieces[0]
        dtype = functools.reduce(torch.promote_types, (piece.dtype for piece in pieces))
        return torch.cat(pieces, out=empty_rows((stop - start, *self.shape[1:]), dtype))


@dataclass(frozen=True, slots=True)
class CutRows:
    """A stretch of another source along `axis`: the query rows of a fused weight, for instance."""

    source: RowSource
    begin: int
    end: int
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.source.shape)
        shape[self.axis] = self.end - self.begin
        return tuple(shape)

    def read(self, start: int, stop: int) -> Tensor:
        if self.axis == 0:
            return self.source.read(self.begin + start, self.begin + stop)
        return self.source.read(start, stop).narrow(self.axis, self.begin, self.end - self.begin).contiguous()


class MovedRows:
    """A source with its rows in another order, given as runs of it: (first row, how many)."""

    def __init__(self, source: RowSource, runs: Sequence[tuple[int, int]]) -> None:
        self.shape = source.shape
        self._source = source
        self._runs = runs
        self._begins = list(itertools.accumulate((count for _, count in runs), initial=0))

    def read(self, start: int, stop: int) -> Tensor:
        pieces, row = [], start
        at = bisect.bisect_right(self._begins, start) - 1
        while row < stop:
            first, count = self._runs[at]
            skip = row - self._begins[at]
            take = min(count - skip, stop - row)
            pieces.append(self._source.read(first + skip, first + skip + take))
            row, at = row + take, at + 1
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, out=empty_rows((stop - start, *self.shape[1:]), pieces[0].dtype))


class TransposedRows:
    """A matrix on its side. It is held as it is stored, from the first read on, for every row here needs all there."""

    def __init__(self, source: RowSource) -> None:
        self.shape = source.shape[::-1]
        self._source = source
        self._whole: Tensor | None = None

    def read(self, start: int, stop: int) -> Tensor:
        if self._whole is None:
            self._whole = self._turn()
        return self._whole[start:stop]

    def _turn(self) -> Tensor:
        """Piece by piece, so that not all of it is there both ways."""
        rows, columns = self._source.shape
        step = max(1, PIECE_BYTES // (4 * columns))
        first = self._source.read(0, min(step, rows))
        result = empty_rows(self.shape, first.dtype)
        result[:, : len(first)] = first.t()
        for at in range(step, rows, step):
            result[:, at : at + step] = self._source.read(at, min(at + step, rows)).t()
        return result


@dataclass(frozen=True, slots=True)
class HalvedRows:
    """Rows of heads to be rotated, each head as two halves where the source has pairs.

    Row i of a head is the first of pair i, row i + head/2 its second. `back` goes the other way.
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
    """A source in another type. It is converted piece by piece, so that the whole is never there in both types."""

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


@dataclass(frozen=True, slots=True)
class DummyRows:
    """Random values, each a function of the parameter's name and of its place in it alone.

    Uniform and centred, with standard deviation 1 / sqrt(K), so that products keep the size of what goes through them;
    norms are 1, biases small.
    """

    name: str
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        if self.name.endswith("norm.weight"):
            return torch.ones(stop - start, *self.shape[1:])
        width = math.prod(self.shape[1:])
        first, last = start * width, stop * width
        result = empty_rows((stop - start, *self.shape[1:]), torch.float32)
        values = result.view(-1).numpy()  # numpy: torch would share out pieces as small as these among its threads
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        for block in range(first // DUMMY_BLOCK, -(-last // DUMMY_BLOCK)):
            origin = block * DUMMY_BLOCK
            low, high = max(first, origin), min(last, origin + DUMMY_BLOCK)
            self._fill(values[low - first : high - first], _random_bytes(seed, block)[low - origin : high - origin])
        return result

    def _fill(self, values: np.ndarray, random: np.ndarray) -> None:
        """One random byte a value: -127.5 .. 127.5 in steps of 1, scaled."""
        deviation = 0.02 if len(self.shape) == 1 else self.shape[-1] ** -0.5
        np.add(random, np.float32(0.5), out=values)
        values *= np.float32(deviation * math.sqrt(12) / 256)


def _random_bytes(seed: int, block: int) -> np.ndarray:
    """DUMMY_BLOCK of them, int8."""
    words = np.random.PCG64DXSM([seed, block]).random_raw(DUMMY_BLOCK // 8)
    return words.astype("<u8", copy=False).view(np.int8)
