"""Implementations of JetStream's CacheInterface, for models that compute attention themselves.

Such a model calls `k, v = cache.update(k, v)` and gets every key and value that its new tokens may see:

    view = PagedCacheView(self.ops, *ctx.layer(self.layer))
    q, k, v = view.unpack(q), view.unpack(k), view.unpack(v)       # packed [T, heads, D] -> (B, heads, n, D)
    k, v = view.update(k, v)                                       # (B, Hkv, S, D)
    scores = (q.float() @ k.transpose(2, 3)).masked_fill(~view.mask, float("-inf"))
    mixed = view.pack(scores.softmax(dim=-1) @ v)                  # [T, H * D]

`Ops.attend` does all of this at once, and faster. PagedCacheView reads the engine's own cache. The other classes keep
one layer in plain tensors, for experiments: before each step `begin` takes the positions of the new tokens. After that,
`key_positions` holds the positions of the keys that `update` will return, from which `visible` makes the mask.

Letters: B sequences, n new tokens of the sequence that has the most, S keys, T packed tokens, D head dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from penstock import InvalidRequestError
from penstock.kernels.metadata import AttentionMetadata, KVCache
from penstock.kernels.ops import Ops
from penstock.kernels.reference.attention import visible_keys
from penstock.kernels.reference.quantized_kv import dequantize, quantize_tokens

ABSENT = -1  # the position of a key or query that does not exist


class CacheInterface(Protocol):
    """The cache of one layer during one step."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, Hkv, n, D). Return all that the new tokens may see, (B, Hkv, S, D) each."""


def visible(
    queries: Tensor, keys: Tensor, window: int | None = None, num_sink_tokens: int = 0, *, chunked: bool = False
) -> Tensor:
    """Decide which query sees which key, [B, 1, n, S] bool, from their positions [B, n] and [B, S].

    A query sees no later keys, and only keys in its window, which counts the token itself, or among the first
    num_sink_tokens. Keys may come in any order, so a ring need not be unrotated. chunked: as in AttentionMetadata.
    """
    return visible_keys(queries[:, None, :, None], keys[:, None, None, :], window, num_sink_tokens, chunked=chunked)


class PagedCacheView:
    """One layer's paged cache as a CacheInterface, for the sequences of one step.

    Attributes:
        positions: [B, n] int64, positions of the new tokens; ABSENT where a sequence has fewer.
        key_positions: [B, S] int64, positions of the keys that `update` returns.
        mask: [B, 1, n, S] bool, true where a query sees a key. Absent queries see nothing; `pack` drops them.
    """

    def __init__(self, ops: Ops, cache: KVCache, meta: AttentionMetadata) -> None:
        self._ops, self._cache, self._meta = ops, cache, meta
        starts = meta.query_start_loc.long()
        counts = starts.diff()
        computed = (meta.seq_lens.long() - counts)[:, None]
        new = torch.arange(int(counts.max()), device=starts.device)
        self._is_new = new < counts[:, None]  # [B, n]; its true entries correspond to the packed tokens, in order
        self.positions = (computed + new).where(self._is_new, ABSENT)
        self._old_positions = _cached_positions(computed, meta)
        self.key_positions = torch.cat([self._old_positions, self.positions], dim=1)
        window = meta.sliding_window, meta.num_sink_tokens
        self.mask = visible(self.positions, self.key_positions, *window, chunked=meta.chunked)

    def unpack(self, x: Tensor) -> Tensor:
        """Spread packed tokens [T, heads, D] to (B, heads, n, D), with zeros where a sequence has fewer tokens."""
        rows = x.new_zeros(*self._is_new.shape, *x.shape[1:])
        rows[self._is_new] = x
        return rows.transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """Pack (B, heads, n, D) as tokens [T, heads * D]."""
        return self._packed(x).flatten(1)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens. Return old and new tokens in float32, rounded as the cache rounds them, with zeros at
        absent positions.

        New tokens that the cache does not keep (those of a chunk longer than a ring) are returned as given.
        """
        old_keys, old_values = self._load_old(k.shape[1], k.shape[3])  # before a ring overwrites them
        slots = self._meta.slot_mapping
        new_k, new_v = self._packed(k).to(self._ops.dtype), self._packed(v).to(self._ops.dtype)
        self._ops.store_kv(self._cache, new_k, new_v, slots)
        kept = slots >= 0
        new_k, new_v = new_k.float(), new_v.float()
        new_k[kept], new_v[kept] = self._ops.load_kv(self._cache, slots[kept])
        keys = torch.cat([old_keys, self.unpack(new_k)], dim=2)
        return keys, torch.cat([old_values, self.unpack(new_v)], dim=2)

    def _packed(self, x: Tensor) -> Tensor:
        """Pack (B, heads, n, D) as [T, heads, D]."""
        return x.transpose(1, 2)[self._is_new]

    def _load_old(self, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Load the cached keys and values at self._old_positions, (B, Hkv, S - n, D) each."""
        exists = self._old_positions >= 0
        at, block_size = self._old_positions.clamp(min=0), self._meta.block_size
        blocks = self._meta.block_table.long().gather(1, at // block_size)
        keys, values = self._ops.load_kv(self._cache, (blocks * block_size + at % block_size)[exists])
        rows = keys.new_zeros(2, *exists.shape, num_kv_heads, head_dim)
        rows[0, exists], rows[1, exists] = keys, values
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)


def _cached_positions(computed: Tensor, meta: AttentionMetadata) -> Tensor:
    """List the cached positions that any new token sees, [B, S - n]. computed: [B, 1], numbers of cached tokens."""
    if meta.sliding_window is None:
        first = torch.zeros_like(computed)
    else:
        first = (computed - meta.sliding_window + 1).clamp(min=0)
    near = first + torch.arange(int((computed - first).max()), device=computed.device)
    sinks = torch.arange(meta.num_sink_tokens, device=computed.device).expand(len(computed), -1)
    return torch.cat([sinks.where(sinks < first, ABSENT), near.where(near < computed, ABSENT)], dim=1)


class PlainCache(CacheInterface, Protocol):
    """A cache in plain tensors.

    Attributes:
        key_positions: [B, S] int64, ABSENT where a returned key does not exist.
    """

    key_positions: Tensor

    def begin(self, positions: Tensor) -> None:
        """Begin a step with new tokens at positions [B, n] int64, ascending, then ABSENT if a sequence has fewer."""


class ContiguousCache(PlainCache):
    """A cache that stores tokens in one tensor, each at the index of its position."""

    def __init__(self, batch_size: int, num_kv_heads: int, max_len: int, head_dim: int) -> None:
        self._kept = self.encode(torch.zeros(2, batch_size, max_len, num_kv_heads, head_dim))  # keys, then values
        self._lengths = torch.zeros(batch_size, 1, dtype=torch.int64)

    def begin(self, positions: Tensor) -> None:
        self._new = positions
        self._lengths = torch.maximum(self._lengths, positions.amax(dim=1, keepdim=True) + 1)
        at = torch.arange(int(self._lengths.max()))
        self.key_positions = at.where(at < self._lengths, ABSENT)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        row, column = (self._new >= 0).nonzero(as_tuple=True)
        new = self.encode(torch.stack([k, v]).transpose(2, 3)[:, row, column])
        for kept, x in zip(self._kept, new, strict=True):
            kept[:, row, self._new[row, column]] = x
        longest = self.key_positions.shape[1]
        keys, values = self.decode(*(kept[:, :, :longest] for kept in self._kept)).transpose(2, 3)
        return keys, values

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Make the tensors that store x [..., D]."""
        return (x.float(),)

    def decode(self, *kept: Tensor) -> Tensor:
        """Restore the values that `encode` stored, in float32."""
        return kept[0]


class Int8Cache(ContiguousCache):
    """A ContiguousCache of int8 with one scale and one offset per token and head (reference/quantized_kv.py)."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return quantize_tokens(x)

    def decode(self, *kept: Tensor) -> Tensor:
        values, scales, offsets = kept
        return dequantize(values, scales[..., None], offsets[..., None])


class RingCache(PlainCache):
    """A cache of the last `size` tokens, the token at position p in row p % size. `size` must be at least the window.

    New tokens see the old ones before they overwrite them, so a step may bring more tokens than the ring holds. With
    `unroll`, rows are returned in the order of their positions, empty rows first; otherwise as they are stored. With
    `lazy`, a step leaves the ring as it is, and its end stores the new tokens: call `finalize`, as in JetStream, where
    one write for all layers is cheaper than one in each.
    """

    def __init__(
        self, batch_size: int, num_kv_heads: int, size: int, head_dim: int, *, unroll: bool = False, lazy: bool = False
    ) -> None:
        self._size, self._unroll, self._lazy = size, unroll, lazy
        self._pending: Tensor | None = None  # [2, B, n, Hkv, D], the new tokens that are not stored yet
        self._held = torch.full((batch_size, size), ABSENT)  # the position in each row
        self._kept = torch.zeros(2, batch_size, size, num_kv_heads, head_dim)  # keys, then values

    def begin(self, positions: Tensor) -> None:
        if self._pending is not None:
            raise InvalidRequestError("finalize: the tokens of the step before are not stored yet")
        self._new = positions
        stored = torch.arange(self._size).expand_as(self._held)
        self._order = self._held.argsort(dim=1, stable=True) if self._unroll else stored
        self.key_positions = torch.cat([self._held.gather(1, self._order), positions], dim=1)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.stack([k, v]).transpose(2, 3).float()  # [2, B, n, Hkv, D]
        old = self._kept[:, torch.arange(len(k))[:, None], self._order]
        self._pending = new
        if not self._lazy:
            self.finalize()
        keys, values = torch.cat([old, new], dim=2).transpose(2, 3)
        return keys, values

    def finalize(self) -> None:
        """Store the tokens that `update` has taken, if they are not stored yet."""
        if self._pending is None:
            return
        last = self._new.amax(dim=1, keepdim=True)
        row, column = ((self._new >= 0) & (self._new > last - self._size)).nonzero(as_tuple=True)
        at = self._new[row, column]
        self._held[row, at % self._size] = at
        self._kept[:, row, at % self._size] = self._pending[:, row, column]
        self._pending = None


class PrefillOnlyCache(PlainCache):
    """A cache that keeps nothing: every step brings whole sequences, or `begin` raises InvalidRequestError."""

    def begin(self, positions: Tensor) -> None:
        if bool((positions[:, 0] > 0).any()):
            raise InvalidRequestError("positions: a cache that keeps nothing needs every sequence from its start")
        self.key_positions = positions

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.float(), v.float()
