"""Where a parameter's values come from, as kernels.ops.RowSources: nobody holds more than the rows he asked for."""

import functools
import hashlib
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
