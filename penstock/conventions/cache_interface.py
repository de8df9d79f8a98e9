"""CacheInterface: what hand-written attention needs of a cache, which is one call.

A model that computes attention by itself calls `k, v = cache.update(k, v)` and gets every key and value that its new
tokens may look at. Where they were kept is none of its business:

    view = PagedCacheView(self.ops, *ctx.layer(self.layer))
    q, k, v = view.unpack(q), view.unpack(k), view.unpack(v)       # packed [T, heads, D] -> (B, heads, n, D)
    k, v = view.update(k, v)                                       # (B, Hkv, S, D)
    scores = (q.float() @ k.transpose(2, 3)).masked_fill(~view.mask, float("-inf"))
    mixed = view.pack(scores.softmax(dim=-1) @ v)                  # [T, H * D]

`Ops.attend` does all of this at once, and faster. Letters: n new tokens of the sequence that has most, S keys.
"""

from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.metadata import AttentionMetadata, KVCache
from penstock.kernels.ops import Ops

ABSENT = -1  # the position of a key or query that does not exist


class CacheInterface(Protocol):
    """The cache of one layer during one step."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values (B, Hkv, n, D) -> all that they may look at, themselves included: (B, Hkv, S, D)."""


def visible(queries: Tensor, keys: Tensor, window: int | None = None, num_sink_tokens: int = 0) -> Tensor:
    """Who sees whom, from positions [B, n] and [B, S], ABSENT where nothing is -> [B, 1, n, S] bool.

    Causal; within the window, which counts the token itself, or among the first num_sink_tokens. It goes by position,
    so a ring need not be unrotated.
    """
    at, key_at = queries[:, None, :, None], keys[:, None, None, :]
    seen = (key_at >= 0) & (key_at <= at)
    return seen if window is None else seen & ((key_at > at - window) | (key_at < num_sink_tokens))


class PagedCacheView:
    """One layer's paged cache as a CacheInterface, for the sequences of one step.

    Attributes:
        positions: [B, n] int64 of the new tokens, ABSENT in rows that have fewer.
        key_positions: [B, S] int64 of the keys that `update` returns.
        mask: [B, 1, n, S] bool, true where a query sees a key. Rows of absent queries see nothing; `pack` drops them.
    """

    def __init__(self, ops: Ops, cache: KVCache, meta: AttentionMetadata) -> None:
        self._ops, self._cache, self._meta = ops, cache, meta
        starts = meta.query_start_loc.long()
        counts, seq_lens = starts.diff(), meta.seq_lens.long()
        new = torch.arange(int(counts.max()), device=starts.device)
        self._is_new = new < counts[:, None]  # [B, n]; in order, these are the packed tokens
        computed = (seq_lens - counts)[:, None]
        self.positions = (computed + new).where(self._is_new, ABSENT)
        self._old_positions = _old_positions(computed, meta)
        self.key_positions = torch.cat([self._old_positions, self.positions], dim=1)
        self.mask = visible(self.positions, self.key_positions, meta.sliding_window, meta.num_sink_tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """Packed tokens [T, heads, D] -> (B, heads, n, D), zeros where a sequence has fewer."""
        rows = x.new_zeros(*self._is_new.shape, *x.shape[1:])
        rows[self._is_new] = x
        return rows.transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """(B, heads, n, D) -> packed tokens [T, heads * D]."""
        return self._packed(x).flatten(1)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As CacheInterface. Stores the new tokens; all come back in float32, rounded as the cache rounds them, zeros
        at absent positions. New tokens that the cache does not keep (a long chunk through a ring) come back as given.
        """
        old_keys, old_values = self._load_old(k.shape[1], k.shape[3])  # a ring's are gone once the new ones are stored
        slots = self._meta.slot_mapping
        new_k, new_v = self._packed(k).to(self._ops.dtype), self._packed(v).to(self._ops.dtype)
        self._ops.store_kv(self._cache, new_k, new_v, slots)
        kept = slots >= 0
        new_k, new_v = new_k.float(), new_v.float()
        new_k[kept], new_v[kept] = self._ops.load_kv(self._cache, slots[kept])
        keys = torch.cat([old_keys, self.unpack(new_k)], dim=2)
        return keys, torch.cat([old_values, self.unpack(new_v)], dim=2)

    def _packed(self, x: Tensor) -> Tensor:
        """(B, heads, n, D) -> [T, heads, D]."""
        return x.transpose(1, 2)[self._is_new]

    def _load_old(self, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """What is cached at self._old_positions: (B, Hkv, S - n, D) twice."""
        there = self._old_positions >= 0
        at, block_size = self._old_positions.clamp(min=0), self._meta.block_size
        blocks = self._meta.block_table.long().gather(1, at // block_size)
        keys, values = self._ops.load_kv(self._cache, (blocks * block_size + at % block_size)[there])
        rows = keys.new_zeros(2, *there.shape, num_kv_heads, head_dim)
        rows[0, there], rows[1, there] = keys, values
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)


def _old_positions(computed: Tensor, meta: AttentionMetadata) -> Tensor:
    """The cached positions that any new token sees, of sequences with `computed` [B, 1] cached tokens -> [B, S']."""
    if meta.sliding_window is None:
        first = torch.zeros_like(computed)
    else:
        first = (computed - meta.sliding_window + 1).clamp(min=0)
    near = first + torch.arange(int((computed - first).max()), device=computed.device)
    near = near.where(near < computed, ABSENT)
    sinks = torch.arange(meta.num_sink_tokens, device=computed.device).expand(len(computed), -1)
    return torch.cat([sinks.where(sinks < first, ABSENT), near], dim=1)
