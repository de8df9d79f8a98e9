"""Where a parameter's values come from, as kernels.ops.RowSources: nobody holds more than the rows he asked for."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.ops import RowSource

PIECE_BYTES = 2**24  # what is read at once of a tensor that has to be converted
DUMMY_BLOCK = 2**16  # elements that come from one random stream


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
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
        if stop - start <= step:
            return self.source.read(start, stop).to(self.dtype)
        result = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            result[first - start : last - start] = self.source.read(first, last)
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
        result = torch.empty(last - first)
        for block in range(first // DUMMY_BLOCK, -(-last // DUMMY_BLOCK)):
            origin = block * DUMMY_BLOCK
            low, high = max(first, origin), min(last, origin + DUMMY_BLOCK)
            result[low - first : high - first] = self._block(block)[low - origin : high - origin]
        return result.view(stop - start, *self.shape[1:])

    def _block(self, block: int) -> Tensor:
        """One random byte a value: -127.5 .. 127.5 in steps of 1, scaled."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        words = np.random.PCG64DXSM([seed, block]).random_raw(DUMMY_BLOCK // 8)
        deviation = 0.02 if len(self.shape) == 1 else self.shape[-1] ** -0.5
        values = torch.from_numpy(words.astype("<u8", copy=False).view(np.int8)).float()
        return values.add_(0.5).mul_(deviation * math.sqrt(12) / 256)
