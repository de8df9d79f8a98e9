"""PlacedOps: attention on chips. Each chip has the queries and the cache of some key/value heads, and, if there are
more chips than such heads, of some users only. A block of the cache is a row: all positions of one user.

    16 chips, 8 key/value heads, 32 rows      chip 2h + j: head h of the rows 16j .. 16j + 15
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.errors import unsupported
from penstock.kernels import metadata
from penstock.kernels.attention.items import first_seen
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, KVCache, own
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array, Int64, Tensor, as_array
from penstock_lab.chips.machine import Site, Work
from penstock_lab.chips.parts import Heads, Range, share
from penstock_lab.planner.placement import WEIGHT_BYTES

NORMS = ("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm")


class PlacedCache:
    """One layer's cache, in parts for the chips of its attention. The parts are made when the first token comes.

    Attributes:
        num_bytes: the size of all parts, as a placement counts it.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.num_bytes = spec.num_blocks * spec.block_size * self.token_bytes(spec.num_kv_heads)
        self.parts: list[KVCache] = []

    def token_bytes(self, kv_heads: int) -> int:
        """Count the bytes of one token's keys and values in `kv_heads` heads."""
        return 2 * kv_heads * self.spec.head_dim * int(self.spec.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class RowsOfStep:
    """The part of a step that belongs to some rows of the cache.

    Attributes:
        tokens: the places of its tokens in the step.
        cached: the number of tokens stored earlier that its tokens attend to.
        pairs: the number of pairs of a token and a token that it attends to.
    """

    meta: AttentionMetadata
    tokens: Array
    cached: int
    pairs: int

    @classmethod
    def of(cls, meta: AttentionMetadata, rows: Range) -> "RowsOfStep":
        """Take those sequences of a step whose blocks are in `rows`, and count their blocks from rows[0]."""
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
        cached = lengths[chosen] - new
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(new) - new - cached, new)
        reads, pairs = (int(_tokens_before(at, meta).sum()) for at in (cached, positions))
        return cls(own_meta, tokens, reads, pairs + len(positions))


def _tokens_before(positions: Int64, meta: AttentionMetadata) -> Int64:
    """Count the tokens before each position that a token there sees."""
    if meta.sliding_window is None:
        return positions
    return positions - np.maximum(first_seen(positions, meta.sliding_window, chunked=meta.chunked), 0)


class OnInner:
    """A backend's operations, some of which a subclass replaces. Programs are not recorded: they would bypass the
    chips."""

    def __init__(self, inner: Ops) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "record":
            raise AttributeError(name)
        return getattr(self._inner, name)


class ElementsOnChips(OnInner):
    """A backend's operations, of which some element-wise ones are computed on chips of their own. Each chip receives an
    even share of the columns; the weights of norms are read when their branch begins."""

    def __init__(self, inner: Ops, site: Site, what: str, columns: int, names: Collection[str]) -> None:
        """names: the operations. columns: of their operand."""
        super().__init__(inner)
        self._site, self._what, self._names = site, what, names
        site.reserve(self._works(site.machine.placement.rows, columns))

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name not in self._names:
            return call

        def reported(x: Tensor, *args: Any, **options: Any) -> Any:
            self.report(x.shape[0], int(np.prod(x.shape[1:])))
            return call(x, *args, **options)

        return reported

    def report(self, tokens: int, columns: int) -> None:
        """Record the chips' work for an operand [tokens, columns]."""
        self._site.run(self._what, self._works(tokens, columns))

    def _works(self, tokens: int, columns: int) -> list[Work]:
        shares = [share(index, len(self._site.chips), columns) for index in range(len(self._site.chips))]
        sizes = [WEIGHT_BYTES * tokens * (end - begin) for begin, end in shares]
        return [Work(chip, received=size, buffers=2 * size) for chip, size in zip(self._site.chips, sizes, strict=True)]


class PlacedOps(OnInner):
    """The operations of a model whose attention is on chips."""

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self._shared = Shared()

    def on(self, site: Site, heads: Sequence[Heads], has_operands: bool) -> "AttentionOnChips":
        """Bind the operations to one layer's attention, with each chip's part of it. has_operands: the same chips
        compute the queries, keys and values."""
        return AttentionOnChips(self._inner, site, tuple(heads), self._shared, has_operands)

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        return PlacedCache(spec)

    def plan(self, meta: AttentionMetadata, heads: metadata.Heads, cache: KVCache) -> AttentionMetadata:
        """Check metadata. `attend` plans each chip's part, because it knows the chips.

        The copy is new in every step, also where the runner changes the metadata of the last step in place, so `attend`
        can tell by it which step a part belongs to.
        """
        meta.check_blocks(own(cache, PlacedCache).spec.num_blocks)
        return replace(meta)


@dataclass(slots=True)
class Shared:
    """The parts of a step that layers with the same split of attention share: each chip's rows, and its work."""

    meta: AttentionMetadata | None = None
    by_heads: dict[tuple[tuple[Heads, ...], bool], tuple[list[RowsOfStep], list[Work]]] = field(default_factory=dict)


class AttentionOnChips(OnInner):
    """The operations of one layer's attention. It reserves the buffers of every chip."""

    def __init__(
        self, inner: Ops, site: Site, heads: tuple[Heads, ...], shared: Shared, has_operands: bool = True
    ) -> None:
        """has_operands: the same chips compute the queries, keys and values."""
        super().__init__(inner)
        self._site, self._has_operands = site, has_operands
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
        """Attend as Ops specifies, each chip for its own heads and rows. Raise NotSupportedError for `lse`."""
        if lse is not None:
            raise unsupported("lse", "simulated chips do not give it")
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
                self._copy_heads(q, step, heads),
                self._copy_heads(k_new, step, kv_heads),
                self._copy_heads(v_new, step, kv_heads),
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
        """Plan each chip's part of a step, and count each chip's work."""
        shared = self._shared
        if shared.meta is not meta:
            shared.meta, shared.by_heads = meta, {}
        key = self._heads, self._has_operands
        if key not in shared.by_heads:
            rows: dict[Range, RowsOfStep] = {}
            for item, part in zip(self._heads, cache.parts, strict=True):
                if item.rows not in rows:
                    rows[item.rows] = self._planned(meta, item, part)
            steps = [rows[item.rows] for item in self._heads]
            works = [self._work(item, step, cache) for item, step in zip(self._heads, steps, strict=True)]
            shared.by_heads[key] = steps, works
        return shared.by_heads[key]

    def _planned(self, meta: AttentionMetadata, item: Heads, part: KVCache) -> RowsOfStep:
        step = RowsOfStep.of(meta, item.rows)
        if not len(step.tokens):
            return step
        heads = metadata.Heads(item.count * self._group, item.count, self._dim)
        return replace(step, meta=self._inner.plan(step.meta, heads, part))

    def _work(self, item: Heads, step: RowsOfStep, cache: PlacedCache) -> Work:
        """Count a chip's work.

        It receives those queries, keys and values of its rows that other chips computed. Its cache comes from the host,
        and new tokens go back to it.
        """
        tokens, num_heads = len(step.tokens), item.count * self._group
        together = sum(other.kv_heads == item.kv_heads for other in self._heads)
        taken = tokens * (num_heads + 2 * item.count) * self._dim * int(self._inner.dtype.itemsize)
        return Work(
            item.chip,
            operations=4 * step.pairs * num_heads * self._dim,
            received=taken - taken // together if self._has_operands else taken,
            from_host=step.cached * cache.token_bytes(item.count),
            to_host=tokens * cache.token_bytes(item.count),
            buffers=self._buffers(item, tokens),
        )

    def _buffers(self, item: Heads, tokens: int) -> int:
        """Count the bytes of the queries, keys, values and results of `tokens` tokens."""
        return tokens * item.count * (2 * self._group + 2) * self._dim * int(self._inner.dtype.itemsize)

    def _copy_heads(self, x: Tensor, step: RowsOfStep, heads: slice) -> Tensor:
        """Copy the heads `heads` of the tokens of `step` from x [T, H, D]."""
        chosen = as_array(x)[step.tokens, heads]
        mine = self._inner.empty(chosen.shape, str(chosen.dtype))
        as_array(mine)[:] = chosen
        return mine

    def _params_of(self, index: int, heads: slice, params: AttentionParams) -> AttentionParams:
        """Cut the layer's parameters to a chip's query heads."""
        if params.alibi_slopes is None and params.sink_logits is None:
            return params
        if index not in self._params:
            slopes, sinks = (
                None if value is None else self._inner.tensor(as_array(value)[heads].copy())
                for value in (params.alibi_slopes, params.sink_logits)
            )
            self._params[index] = replace(params, alibi_slopes=slopes, sink_logits=sinks)
        return self._params[index]
