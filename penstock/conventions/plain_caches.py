"""Caches in plain tensors for hand-written attention: contiguous, int8, ring, rolling, prefill only.

The engine's own cache is the paged one (cache_interface.py); these serve experiments and show what a cache is. Each is
one layer's. Before a step, `begin` is told where the new tokens stand; afterwards `key_positions` says which keys
`update` will return, from which `visible` makes the mask.
"""

from typing import Protocol

import torch
from torch import Tensor

from penstock.conventions.cache_interface import ABSENT, CacheInterface
from penstock.errors import InvalidRequestError
from penstock.quant.kv import dequantize, quantize_tokens


class PlainCache(CacheInterface, Protocol):
    """What the caches of this file share.

    Attributes:
        key_positions: [B, S] int64, ABSENT where a returned key does not exist.
    """

    key_positions: Tensor

    def begin(self, positions: Tensor) -> None:
        """The new tokens' positions [B, n] int64: ascending, then ABSENT where a sequence has fewer."""


class ContiguousCache(PlainCache):
    """Every token at its own place in one piece of memory, as long as the longest sequence may get."""

    def __init__(self, batch_size: int, num_kv_heads: int, max_len: int, head_dim: int) -> None:
        self._allocate((batch_size, max_len, num_kv_heads), head_dim)
        self._lengths = torch.zeros(batch_size, 1, dtype=torch.int64)

    def begin(self, positions: Tensor) -> None:
        self._new = positions
        self._lengths = torch.maximum(self._lengths, positions.amax(dim=1, keepdim=True) + 1)
        at = torch.arange(int(self._lengths.max()))
        self.key_positions = at.where(at < self._lengths, ABSENT)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        row, column = (self._new >= 0).nonzero(as_tuple=True)
        at = row, self._new[row, column]
        self._write(at, k.transpose(1, 2)[row, column], v.transpose(1, 2)[row, column])
        keys, values = self._read(self.key_positions.shape[1])
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _allocate(self, shape: tuple[int, int, int], head_dim: int) -> None:
        """shape: batch size, max_len, kv heads."""
        self._keys, self._values = torch.zeros(*shape, head_dim), torch.zeros(*shape, head_dim)

    def _write(self, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """k, v [N, Hkv, D] at (row, position)."""
        self._keys[at], self._values[at] = k.float(), v.float()

    def _read(self, longest: int) -> tuple[Tensor, Tensor]:
        """[B, longest, Hkv, D] twice."""
        return self._keys[:, :longest], self._values[:, :longest]


class Int8Cache(ContiguousCache):
    """Contiguous, with one byte an element, and a scale and an offset of each token and head."""

    def _allocate(self, shape: tuple[int, int, int], head_dim: int) -> None:
        self._integers = torch.zeros(2, *shape, head_dim, dtype=torch.int8)
        self._scales, self._offsets = torch.zeros(2, *shape), torch.zeros(2, *shape)

    def _write(self, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        for which, x in enumerate((k, v)):
            self._integers[which][at], self._scales[which][at], self._offsets[which][at] = quantize_tokens(x)

    def _read(self, longest: int) -> tuple[Tensor, Tensor]:
        both = dequantize(
            self._integers[:, :, :longest],
            self._scales[:, :, :longest, :, None],
            self._offsets[:, :, :longest, :, None],
        )
        return both[0], both[1]


class RingCache(PlainCache):
    """The last `size` tokens, the one at position p in row p % size. `size` must not be less than the window.

    New tokens see what was there before they take its place, so a step may bring more of them than the ring holds.
    """

    def __init__(self, batch_size: int, num_kv_heads: int, size: int, head_dim: int) -> None:
        self._size = size
        self._held = torch.full((batch_size, size), ABSENT)  # the position in each row
        self._keys = torch.zeros(batch_size, size, num_kv_heads, head_dim)
        self._values = torch.zeros_like(self._keys)

    def begin(self, positions: Tensor) -> None:
        self._new = positions
        self._order = self._rows_in_order()
        self.key_positions = torch.cat([self._held.gather(1, self._order), positions], dim=1)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.transpose(1, 2).float(), v.transpose(1, 2).float()
        order = self._order[:, :, None, None].expand_as(self._keys)
        keys = torch.cat([self._keys.gather(1, order), k], dim=1)
        values = torch.cat([self._values.gather(1, order), v], dim=1)
        self._store(k, v)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _rows_in_order(self) -> Tensor:
        """[B, size]: the order in which rows are returned; here, as they lie."""
        return torch.arange(self._size).expand_as(self._held)

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Keep the last `size` of the new tokens, k and v [B, n, Hkv, D]."""
        last = self._new.amax(dim=1, keepdim=True)
        row, column = ((self._new >= 0) & (self._new > last - self._size)).nonzero(as_tuple=True)
        at = row, self._new[row, column] % self._size
        self._held[at] = self._new[row, column]
        self._keys[at], self._values[at] = k[row, column], v[row, column]


class RollingCache(RingCache):
    """A ring whose rows come back unrotated: in the order of their positions, rows that hold nothing first."""

    def _rows_in_order(self) -> Tensor:
        return self._held.argsort(dim=1, stable=True)


class PrefillOnlyCache(PlainCache):
    """Keeps nothing: every step brings whole sequences."""

    def begin(self, positions: Tensor) -> None:
        """As PlainCache.

        Raises:
            InvalidRequestError: a sequence does not begin at position 0.
        """
        if bool((positions[:, 0] > 0).any()):
            raise InvalidRequestError("positions: a cache that keeps nothing needs every sequence from its start")
        self.key_positions = positions

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.float(), v.float()
