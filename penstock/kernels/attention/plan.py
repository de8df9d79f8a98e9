"""Attention plans: the items of work of a step, and where each core begins. Made before the step, without torch.

An item is some query rows of some kv heads over some spans of one sequence's cache. Tiles and spans at absolute
positions fix the arithmetic of a row (items.py), so a plan decides only which core computes what: another number of
cores gives another plan and the same bits.

As in Huawei's IncreFlashAttention operator, work is split by sequence and head first, and by spans if cores would
otherwise be idle. The operator does so (its flash decoding) for B * N2 < 0.4 * cores; here the loads of items decide,
because one long sequence among many short ones idles cores just as well. A core works through a contiguous range of
items and then steals from other cores.

The key of a plan is one integer in which each decimal digit is a choice, so that a trace can say which kernel ran and
why. It is modelled on the tiling key of the same operator. A leading 1 preserves leading zeros; the digits follow in
the order of CHOICES. A key decides nothing: it records the choices made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from penstock.kernels.attention.items import (
    GRANULE,
    MAX_ITEM_ROWS,
    ROW_CAPACITY,
    STREAM_ROWS,
    TILE,
    AttentionShape,
    Items,
    RowBlocks,
    Sequences,
    combines,
    cut,
    first_seen,
    look_alike,
    ragged,
    row_blocks,
    scratch_bytes,
    share_prefixes,
    workspace_bytes,
)
from penstock.kernels.tensors import Bools, Int32, Int64

# Columns of AttentionPlan.items and .combines, as in native/abi.h.
SEQUENCE, HEAD_BEGIN, HEAD_END, ROW_BEGIN, ROW_END, SPAN_BEGIN, SPAN_END, PARTIAL = range(8)

# Bytes of an item's rows that every tile touches, which must stay in a core's own cache. Operands count in the types of
# the cache; levels that widen them take up to twice as much for them.
SCRATCH_BUDGET = 192 * 2**10
MIN_BLOCK_ROWS = 96  # when rows are cut only to share the load; shorter blocks would read more than they multiply
BLOCKS_PER_CORE = 8
REMEMBERED_PLANS = 16  # of a planner
ONE: Int32 = np.array(1, dtype=np.int32)

# For each field of a key: the choice that each digit stands for, and its text in a description; "" is left out.
CHOICES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # whether every sequence has exactly one new token, none has, or some have
        "phase": {"decode": "decode", "chunk": "chunks of prompts", "mixed": "decode and chunks of prompts"},
        "query": {"float32": "float32 query", "bfloat16": "bfloat16 query"},
        "cache": {"float32": "float32 cache", "bfloat16": "bfloat16 cache", "int8": "int8 cache"},
        "output": {"float32": "float32 output", "bfloat16": "bfloat16 output", "int8": "int8 output"},
        # int8 caches: what a scale belongs to, and how many int8 rows represent a query row
        "scales": {"none": "", "token": "scales of tokens", "channel": "scales of channels"},
        "slices": {"0": "", "1": "1 slice", "2": "2 slices", "3": "3 slices"},
        # items take few rows of many heads in memory order, or a block of rows of one head; or the step has both
        "template": {
            "stream": "few rows, heads together",
            "blocks": "blocks of rows, one head",
            "both": "few rows with heads together, blocks of rows with one head",
        },
        "split": {"no": "", "spans": "split over spans"},  # one sequence's spans are computed separately and combined
        # blocks of a block table, one block per sequence, or one block repeated
        "memory": {"paged": "paged", "rows": "whole rows", "ring": "rings"},
        # whether some row does not see all positions before it, and whether it keeps the first ones
        "window": {"none": "", "window": "window", "sinks": "window and first tokens"},
        "prefix": {"own": "", "shared": "shared prefix"},  # shared: some spans are read once for several sequences
        # the instruction level, where the backend names it
        "level": {
            "any": "",
            "portable": "portable",
            "avx2": "avx2",
            "avx512f": "avx512f",
            "avx512": "avx512",
            "avx512fma": "avx512fma",
            "amx": "amx",
        },
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step for the layers of one cache group.

    A row of the packed step is token * group + g: query head (kv head) * group + g of that token. An item's rows may
    belong to several neighbouring sequences that share the blocks of its spans (a shared prefix): then every position
    of those spans is cached for all of them.

    Attributes:
        items: [I, 8] int32: sequence whose block table is read; kv heads begin, end; rows begin, end; spans begin, end;
            the first partial row that the item writes, or -1 if its results are final. In a partial item, row r of
            head h and span s is partial row
            partial + ((s - span begin) * heads + h - head begin) * rows + r - row begin.
        starts: [cores + 1] int64: the first item of each core, then the number of items.
        combines: [C, 6] int32: kv heads begin, end; rows begin, end; references begin, end.
        references: [R] int32: the items that a combine folds, spans ascending; each covers its heads and rows.
        positions: [T] int32: the last position that each token sees: its own or, in both directions, the sequence's.
        staged: [B+1] int32: where the new tokens of each sequence lie in the workspace, in granules per kv head:
            sequence b has granules staged[b] to staged[b+1] - 1. The first may also hold older tokens.
        loads: [I] int64: the cost of each item: rows times tiles times heads, plus the cost of reading.
        partial_rows: the number of partial rows of all items together.
        workspace_bytes: the memory that the cores share while the step runs, wherever in a granule the new tokens of a
            sequence begin; the reference needs none.
        scratch_bytes: the memory that each core needs for itself.
        key: names the kind of plan; see CHOICES.
        shape: the shape of the layers for which the plan was made.
    """

    items: Int32
    starts: Int64
    combines: Int32
    references: Int32
    positions: Int32
    staged: Int32
    loads: Int64
    partial_rows: int
    workspace_bytes: int
    scratch_bytes: int
    key: int
    shape: AttentionShape


@dataclass(slots=True, eq=False)
class Planner:
    """Plans the steps of one cache group.

    A step with few new tokens per sequence mostly sees the same tiles as an earlier one. In that case only `positions`
    and `staged` differ, and the earlier plan is used again.

    Attributes: as in kernels.metadata.AttentionMetadata, and the number of cores that share a step.
    """

    shape: AttentionShape
    block_size: int
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    num_cores: int = 1
    chunked: bool = False
    bidirectional: bool = False
    _plans: dict[tuple[int, bytes, bytes], AttentionPlan] = field(default_factory=dict)  # by what they depend on
    _seen: tuple[int, bytes, bytes] | None = None  # what the last plan depends on; None if it cannot be used again
    _new: "_NewTokens | None" = None  # of the last step with few new tokens per sequence

    def plan(self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32) -> AttentionPlan:
        """Plan a step. The arguments are as in kernels.metadata.AttentionMetadata, on the host."""
        self._seen = self._dependencies(query_start_loc, seq_lens, block_table)
        known = None if self._seen is None else self._plans.get(self._seen)
        if known is not None and self._new is not None:
            return replace(known, positions=self._new.positions(seq_lens), staged=self._new.staged(seq_lens))
        window, group = (self.sliding_window, self.num_sink_tokens), self.shape.group
        rules = {"chunked": self.chunked, "bidirectional": self.bidirectional}
        step = Sequences.of(query_start_loc, seq_lens, group, *window, **rules)
        made = self._new_plan(step, block_table)
        if self._seen is not None:
            if len(self._plans) >= REMEMBERED_PLANS:
                self._plans.clear()
            self._plans[self._seen] = made
        return made

    def renew(self, plan: AttentionPlan, seq_lens: Int32) -> bool:
        """Change the last plan in place to that of the next step. Return False if the step needs another plan.

        The step differs from the planned one only in its lengths, seq_lens: [B] int32.
        """
        if self._seen is None or self._new is None or self._tiles(self._new, seq_lens) != self._seen[2]:
            return False
        plan.positions[:] = self._new.positions(seq_lens)
        if self._new.counts is not ONE:
            plan.staged[:] = self._new.staged(seq_lens)
        return True

    def _dependencies(
        self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32
    ) -> tuple[int, bytes, bytes] | None:
        """Collect everything on which the plan of a step depends, besides positions and the granules in `staged`.

        None for a step without sequences, with more than ROW_CAPACITY rows of a sequence, or with a prefix that may be
        shared.
        """
        starts = query_start_loc.tobytes()
        if self._new is None or starts != self._new.starts:
            most = ROW_CAPACITY // self.shape.group
            self._new = _NewTokens.of(query_start_loc, starts, most)
        if self._new is None or look_alike(block_table):
            return None
        return min(block_table.shape[1], 2), starts, self._tiles(self._new, seq_lens)

    def _tiles(self, new: "_NewTokens", seq_lens: Int32) -> bytes:
        """Encode the tiles that the sequences see."""
        if self.bidirectional:  # an encoder's texts are new in each step
            return seq_lens.tobytes()
        tiles = ((seq_lens - 1) // TILE).tobytes()
        if self.sliding_window is not None:
            # The number of positions that the first new token does not see.
            hidden = first_seen(seq_lens - new.counts, self.sliding_window, chunked=self.chunked)
            tiles += (hidden // TILE).tobytes() + (hidden > 0).tobytes() + (seq_lens > self.sliding_window).tobytes()
        return tiles

    def _new_plan(self, step: Sequences, block_table: Int32) -> AttentionPlan:
        shape, num_cores = self.shape, self.num_cores
        own = row_blocks(step, _block_rows(shape, step.tokens, num_cores))
        shared = share_prefixes(step, own, block_table, self.block_size, most_rows(shape))
        blocks, chains = (own, None) if shared is None else (shared.blocks, shared.chains)
        pieces, items, starts = cut(blocks, shape.num_kv_heads, _head_limits(shape)[blocks.rows], num_cores)

        partial = pieces.spans > 1 if shared is None else (pieces.spans > 1) | shared.is_partial
        targets = np.flatnonzero(partial[: len(own.sequence)])
        combined, references = combines(blocks, targets, chains, pieces, items, shape.num_kv_heads)
        table, partial_rows = _item_table(blocks, items, partial)
        states = np.where(partial[items.block], 0, 1 + (items.span_end - items.span_begin > 1))
        return AttentionPlan(
            items=table,
            starts=np.array(starts, dtype=np.int64),
            combines=combined,
            references=references,
            positions=_positions(step),
            staged=_staged(step),
            loads=items.loads,
            partial_rows=partial_rows,
            workspace_bytes=workspace_bytes(shape, _most_staged(step), partial_rows),
            scratch_bytes=scratch_bytes(shape, items.head_end - items.head_begin, blocks.rows[items.block], states),
            key=_key(step, shape, blocks, block_table, split=partial_rows > 0, shared=shared is not None),
            shape=shape,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _NewTokens:
    """The new tokens of a step that has few of each sequence.

    Attributes:
        starts: query_start_loc as bytes.
        counts: [B] new tokens of each sequence; ONE if every sequence has one.
        sequences, offsets: [T] each token's sequence, and its index among the new tokens of this.
    """

    starts: bytes
    counts: Int32
    sequences: Int64
    offsets: Int32

    @classmethod
    def of(cls, query_start_loc: Int32, starts: bytes, limit: int) -> "_NewTokens | None":
        """Describe a step's tokens. None if it has no sequence, or one without or with more than `limit` tokens."""
        counts = query_start_loc[1:] - query_start_loc[:-1]
        if not len(counts) or counts.min() < 1 or counts.max() > max(limit, 1):
            return None
        sequences, offsets = ragged(counts)
        return cls(starts, ONE if counts.max() == 1 else counts, sequences, offsets.astype(np.int32))

    def positions(self, seq_lens: Int32) -> Int32:
        """Compute AttentionPlan.positions of a step with these lengths [B]."""
        first: Int32 = seq_lens - self.counts
        return first if self.counts is ONE else first[self.sequences] + self.offsets

    def staged(self, seq_lens: Int32) -> Int32:
        """Compute AttentionPlan.staged, [B + 1], of a step with these lengths [B]."""
        staged = np.arange(len(seq_lens) + 1, dtype=np.int32)
        if self.counts is not ONE:
            np.cumsum(-(-seq_lens // GRANULE) - (seq_lens - self.counts) // GRANULE, out=staged[1:])
        return staged


def steps_with_same_tiles(seq_lens: Int32, sliding_window: int | None, *, chunked: bool = False) -> Int32:
    """Count the decode steps in which each sequence sees the same tiles, that with lengths seq_lens included: [B]."""
    steps = TILE - (seq_lens - 1) % TILE
    if sliding_window is None:
        return steps
    if chunked:
        return np.minimum(steps, sliding_window - (seq_lens - 1) % sliding_window)
    hidden = seq_lens - sliding_window
    return np.minimum(steps, np.where(hidden > 0, TILE - hidden % TILE, 1 - hidden))


def _positions(step: Sequences) -> Int32:
    """Compute AttentionPlan.positions."""
    if step.is_decode:
        return step.computed.astype(np.int32)
    return (np.repeat(step.computed - step.begins, step.counts) + np.arange(step.tokens)).astype(np.int32)


def _staged(step: Sequences) -> Int32:
    """Compute AttentionPlan.staged, [B + 1]."""
    staged = np.arange(len(step.counts) + 1, dtype=np.int32)
    if not step.is_decode:
        granules = -(-step.lengths // GRANULE) - step.computed // GRANULE
        np.cumsum(np.where(step.counts > 0, granules, 0), out=staged[1:])
    return staged


def _most_staged(step: Sequences) -> int:
    """Compute the last number of `staged` if new tokens begin where in a granule they touch the most granules."""
    return int(np.where(step.counts > 0, (step.counts + GRANULE - 2) // GRANULE + 1, 0).sum())


@lru_cache(maxsize=64)
def most_rows(shape: AttentionShape) -> int:
    """Count the most rows of a block that fit the budget with one kv head; a larger group is cut, too."""
    fitting = SCRATCH_BUDGET // shape.touched_row_bytes // ROW_CAPACITY * ROW_CAPACITY
    return min(max(fitting, ROW_CAPACITY), MAX_ITEM_ROWS)


def _block_rows(shape: AttentionShape, tokens: int, num_cores: int) -> int:
    """Choose the most rows of a block; if a step has many, each core gets several blocks of it."""
    if num_cores == 1:
        return most_rows(shape)
    share = tokens * shape.num_heads // (num_cores * BLOCKS_PER_CORE) // ROW_CAPACITY * ROW_CAPACITY
    return min(max(share, MIN_BLOCK_ROWS), most_rows(shape))


@lru_cache(maxsize=64)
def _head_limits(shape: AttentionShape) -> Int64:
    """Tabulate the most kv heads of an item by the rows of its block: all that fit the budget if few rows, else one."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    fitting = SCRATCH_BUDGET // (np.maximum(rows, 1) * shape.touched_row_bytes)
    return np.where(rows <= STREAM_ROWS, np.clip(fitting, 1, shape.num_kv_heads), 1)


def _item_table(blocks: RowBlocks, items: Items, partial: Bools) -> tuple[Int32, int]:
    """Write AttentionPlan.items, and count their partial rows."""
    table = np.empty((len(items.block), 8), dtype=np.int32)
    table[:, SEQUENCE] = blocks.sequence[items.block]
    table[:, HEAD_BEGIN], table[:, HEAD_END] = items.head_begin, items.head_end
    table[:, ROW_BEGIN], table[:, ROW_END] = blocks.row_begin[items.block], blocks.row_end[items.block]
    table[:, SPAN_BEGIN], table[:, SPAN_END] = items.span_begin, items.span_end
    table[:, PARTIAL] = -1
    if not partial.any():
        return table, 0
    writes = partial[items.block]
    rows = blocks.rows[items.block] * (items.head_end - items.head_begin) * (items.span_end - items.span_begin)
    ends = np.cumsum(rows * writes)
    table[writes, PARTIAL] = (ends - rows)[writes]
    return table, int(ends[-1])


def _key(
    step: Sequences, shape: AttentionShape, blocks: RowBlocks, block_table: Int32, *, split: bool, shared: bool
) -> int:
    memory = "rows" if block_table.shape[1] <= 1 else "paged"
    if step.window is not None and memory == "paged":
        repeats = (block_table[:, 0] == block_table[:, 1]) & (block_table[:, 0] >= 0)
        memory = "ring" if bool(repeats.any()) else memory
    scales = "token" if shape.token_scales else "channel"
    return encode_key(
        phase="decode" if step.is_decode else _of_these(step.counts == 1, "decode", "chunk", "mixed"),
        query=shape.dtype,
        cache=shape.kv_cache_dtype,
        output=shape.dtype,
        scales=scales if shape.kv_cache_dtype == "int8" else "none",
        slices=str(shape.slices),
        template=_of_these(blocks.rows <= STREAM_ROWS, "stream", "blocks", "both"),
        split="spans" if split else "no",
        memory=memory,
        window="none" if step.window is None else "sinks" if step.sinks else "window",
        prefix="shared" if shared else "own",
        level=shape.level,
    )


def _of_these(what: Bools, every: str, none: str, some: str) -> str:
    return every if what.all() else some if what.any() else none


def encode_key(**chosen: str) -> int:
    """Encode these choices as a key, one per field of CHOICES.

    Raises:
        ValueError: a field has no such choice.
    """
    key = 1
    for name, choices in CHOICES.items():
        if chosen[name] not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {chosen[name]!r}")
        key = key * 10 + list(choices).index(chosen[name])
    return key
