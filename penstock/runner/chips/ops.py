"""PlacedOps: attention on chips. Each has the queries and the cache of some key/value heads, and, where there are more
chips than such heads, of some users: a block of the cache is a user's row, all of its positions.

    16 chips, 8 key/value heads, 32 rows      chip 2h + j: head h of the rows 16j .. 16j + 15
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels import metadata
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, KVCache, own
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array, Tensor, as_array
from penstock.runner.chips.device import Work
from penstock.runner.chips.machine import Site
from penstock.runner.chips.parts import Heads, Range

UNLIMITED = 2**62  # tokens


class PlacedCache:
    """One layer's cache, in parts for the chips of its attention, which are made when the first token comes.

    Attributes:
        num_bytes: of all parts, as a placement counts them.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.num_bytes = spec.num_blocks * spec.block_size * self.token_bytes(spec.num_kv_heads)
        self.parts: list[KVCache] = []

    def token_bytes(self, kv_heads: int) -> int:
        """Return the bytes of a token's keys and values of some heads."""
        return 2 * kv_heads * self.spec.head_dim * int(self.spec.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class RowsOfStep:
    """What a step has of some rows of the cache.

    Attributes:
        tokens: their places in the step.
        cached: tokens that were stored before and are seen.
        pairs: of a token and one that it sees.
    """

    meta: AttentionMetadata
    tokens: Array
    cached: int
    pairs: int

    @classmethod
    def of(cls, meta: AttentionMetadata, rows: Range) -> "RowsOfStep":
        """Take the sequences out of a step whose blocks are in `rows`, and count blocks from there."""
        starts, lengths = as_array(meta.query_start_loc), as_array(meta.seq_lens)
        blocks = as_array(meta.block_table)[:, 0]
        chosen = np.flatnonzero((blocks >= rows[0]) & (blocks < rows[1]))
        new = (starts[1:] - starts[:-1])[chosen].astype(np.int64)
        tokens = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in chosen] or [np.arange(0)])
        slots = as_array(meta.slot_mapping)[tokens]
        own_meta = replace(
            meta,
            query_start_loc=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            seq_lens=lengths[chosen],
            block_table=(blocks[chosen] - rows[0])[:, None],
            slot_mapping=np.where(slots < 0, slots, slots - rows[0] * meta.block_size),
            plan=None,
        )
        cached, window = lengths[chosen] - new, meta.sliding_window or UNLIMITED
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(new) - new - cached, new)
        pairs = int(np.minimum(positions + 1, window).sum())
        return cls(own_meta, tokens, int(np.minimum(cached, window - 1).sum()), pairs)


class OnInner:
    """Operations of a backend, some of which a class below replaces. There are no recorded programs, which would pass
    the chips by."""

    def __init__(self, inner: Ops) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "record":
            raise AttributeError(name)
        return getattr(self._inner, name)


class PlacedOps(OnInner):
    """The operations of a model whose attention is on chips."""

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self._shared = Shared()

    def on(self, site: Site, heads: Sequence[Heads]) -> "AttentionOnChips":
        """Return the operations of one layer's attention, with each chip's part of it."""
        return AttentionOnChips(self._inner, site, tuple(heads), self._shared)

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        return PlacedCache(spec)

    def plan(self, meta: AttentionMetadata, heads: metadata.Heads, cache: KVCache) -> AttentionMetadata:
        """Check metadata. What each chip does is planned by `attend`, which knows the chips."""
        meta.check_blocks(own(cache, PlacedCache).spec.num_blocks)
        return meta


@dataclass(slots=True)
class Shared:
    """What layers whose attention is split alike share of a step: what each chip has of it, and its work."""

    meta: AttentionMetadata | None = None
    by_heads: dict[tuple[Heads, ...], tuple[list[RowsOfStep], list[Work]]] = field(default_factory=dict)


class AttentionOnChips(OnInner):
    """The operations of one layer's attention, for which every chip has reserved buffers."""

    def __init__(self, inner: Ops, site: Site, heads: tuple[Heads, ...], shared: Shared) -> None:
        super().__init__(inner)
        self._site = site
        self._heads = heads
        self._shared = shared
        self._params: dict[int, AttentionParams] = {}
        model = site.machine.model
        self._group, self._dim = model.num_attention_heads // model.num_key_value_heads, model.head_dim
        works = [Work(item.chip, buffers=self._buffers(item, item.num_rows)) for item in heads]
        site.reserve(works)

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        params: AttentionParams,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend as Ops says, each chip to its own heads and rows. Raise NotSupportedError for `lse`."""
        if lse is not None:
            raise NotSupportedError("lse: simulated chips do not give it", param="lse")
        placed, group = own(cache, PlacedCache), self._group
        self._make_parts(placed)
        steps, works = self._shares_of(meta, placed)
        self._site.run("attention", works)
        result = self._inner.empty((len(q), q.shape[1] * self._dim), str(q.dtype)) if out is None else out
        for index, (item, step) in enumerate(zip(self._heads, steps, strict=True)):
            if not len(step.tokens):
                continue
            first, last = item.kv_heads
            heads, kv_heads = slice(first * group, last * group), slice(first, last)
            mixed = self._inner.attend(
                self._take(q, step, heads),
                self._take(k_new, step, kv_heads),
                self._take(v_new, step, kv_heads),
                placed.parts[index],
                step.meta,
                self._params_of(index, heads, params),
            )
            as_array(result)[step.tokens, heads.start * self._dim : heads.stop * self._dim] = as_array(mixed)
        return result

    def _make_parts(self, cache: PlacedCache) -> None:
        if not cache.parts:
            specs = [replace(cache.spec, num_blocks=item.num_rows, num_kv_heads=item.count) for item in self._heads]
            cache.parts += [self._inner.new_kv_cache(spec) for spec in specs]

    def _shares_of(self, meta: AttentionMetadata, cache: PlacedCache) -> tuple[list[RowsOfStep], list[Work]]:
        """Return what each chip has of a step, planned, and its work."""
        shared = self._shared
        if shared.meta is not meta:
            shared.meta, shared.by_heads = meta, {}
        if self._heads not in shared.by_heads:
            rows: dict[Range, RowsOfStep] = {}
            for item, part in zip(self._heads, cache.parts, strict=True):
                if item.rows not in rows:
                    rows[item.rows] = self._planned(meta, item, part)
            steps = [rows[item.rows] for item in self._heads]
            works = [self._work(item, step, cache) for item, step in zip(self._heads, steps, strict=True)]
            shared.by_heads[self._heads] = steps, works
        return shared.by_heads[self._heads]

    def _planned(self, meta: AttentionMetadata, item: Heads, part: KVCache) -> RowsOfStep:
        step = RowsOfStep.of(meta, item.rows)
        if not len(step.tokens):
            return step
        heads = metadata.Heads(item.count * self._group, item.count, self._dim)
        return replace(step, meta=self._inner.plan(step.meta, heads, part))

    def _work(self, item: Heads, step: RowsOfStep, cache: PlacedCache) -> Work:
        """Return a chip's work: its rows' queries, keys and values, of which others have computed some, and its cache,
        which comes from the host and gets the new tokens there."""
        tokens, num_heads = len(step.tokens), item.count * self._group
        together = sum(other.kv_heads == item.kv_heads for other in self._heads)
        taken = tokens * (num_heads + 2 * item.count) * self._dim * int(self._inner.dtype.itemsize)
        return Work(
            item.chip,
            operations=4 * step.pairs * num_heads * self._dim,
            received=taken - taken // together,
            from_host=step.cached * cache.token_bytes(item.count),
            to_host=tokens * cache.token_bytes(item.count),
            buffers=self._buffers(item, tokens),
        )

    def _buffers(self, item: Heads, tokens: int) -> int:
        """Return the bytes of so many tokens' queries, keys, values and results."""
        return tokens * item.count * (2 * self._group + 2) * self._dim * int(self._inner.dtype.itemsize)

    def _take(self, x: Tensor, step: RowsOfStep, heads: slice) -> Tensor:
        """Return the own tokens' heads of x [T, H, D]."""
        chosen = as_array(x)[step.tokens, heads]
        mine = self._inner.empty(chosen.shape, str(chosen.dtype))
        as_array(mine)[:] = chosen
        return mine

    def _params_of(self, index: int, heads: slice, params: AttentionParams) -> AttentionParams:
        """Return a layer's parameters for a chip's query heads."""
        if params.alibi_slopes is None and params.sink_logits is None:
            return params
        if index not in self._params:
            slopes, sinks = (
                None if value is None else self._inner.tensor(as_array(value)[heads].copy())
                for value in (params.alibi_slopes, params.sink_logits)
            )
            self._params[index] = replace(params, alibi_slopes=slopes, sink_logits=sinks)
        return self._params[index]
