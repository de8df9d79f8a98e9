"""Plans of attention: which items of work a step has, and where each core begins. Made before the step, without torch.

An item is some query rows of some kv heads over some spans of one sequence's cache. The arithmetic of a row is fixed by
tiles and spans at absolute positions (layout.py), so a plan decides only which core computes what: another number of
cores gives another plan and the same bits.

As in Huawei's IncreFlashAttention operator, work is split by sequence and head first, and by spans where that leaves
cores idle (its flash decoding; its rule is B * N2 < 0.4 * cores, ours compares the loads of items, because one long
sequence among many short ones idles cores just as well). Contiguous ranges of items then keep the greatest load of a
core as small as possible. A core works through its range and steals from others.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock.kernels.attention.blocks import Int32, Int64, RowBlocks, Sequences, row_blocks
from penstock.kernels.attention.items import FEW_ROWS, Bools, Items, combines, cut
from penstock.kernels.attention.key import encode_key
from penstock.kernels.attention.layout import (
    GRANULE,
    MAX_ITEM_ROWS,
    ROW_CAPACITY,
    TILE,
    AttentionShape,
    scratch_bytes,
    workspace_bytes,
)
from penstock.kernels.attention.sharing import look_alike, share_prefixes

# Columns of AttentionPlan.items and .combines; native/abi.h has the same.
SEQUENCE, HEAD_BEGIN, HEAD_END, ROW_BEGIN, ROW_END, SPAN_BEGIN, SPAN_END, PARTIAL = range(8)

SCRATCH_BUDGET = 192 * 2**10  # bytes of an item's rows that stay in a core's own cache from tile to tile
MIN_BLOCK_ROWS = 96  # where rows are cut only to share the load; shorter blocks read more than they multiply
BLOCKS_PER_CORE = 8

NO_PARTIAL = np.zeros(0, dtype=np.bool_)
NO_COMBINES, NO_REFERENCES = np.empty((0, 6), dtype=np.int32), np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step for the layers of one cache group.

    A row of the packed step is token * group + g: query head (kv head) * group + g of that token. An item's rows may
    belong to several neighbouring sequences that share the blocks of its spans (a shared prefix): then every position
    of those spans is cached for all of them.

    Attributes:
        items: [I, 8] int32: sequence whose block table is read; kv heads begin, end; rows begin, end; spans begin, end;
            the first partial row that the item writes, or -1 where its results are final. Of a partial item, row r of
            head h and span s is partial row
            partial + ((s - span begin) * heads + h - head begin) * rows + r - row begin.
        starts: [cores + 1] int64: the first item of each core, then the number of items.
        combines: [C, 6] int32: kv heads begin, end; rows begin, end; references begin, end.
        references: [R] int32: the items that a combine folds, spans ascending; each covers its heads and rows.
        positions: [T] int32: each token's position.
        staged: [B+1] int32: running sum over the sequences of their granules of new tokens (per kv head), from the
            granule of the first new token to that of the last one.
        loads: [I] int64: the cost of each item, in rows times tiles times heads and what reading adds.
        partial_rows: of all items together.
        workspace_bytes: shared by the cores while the step runs; the reference needs none.
        scratch_bytes: of each core.
        key: names the plan (key.py).
        shape: the layers for which it was made.
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
    """Plans the steps of one cache group; arguments as those of plan_attention.

    A decode step mostly sees the same tiles as the step before. Then only positions are new, and the last plan is used
    again.
    """

    shape: AttentionShape
    block_size: int
    sliding_window: int | None
    num_sink_tokens: int
    num_cores: int
    _seen: tuple[int, bytes] | None = None  # what the last plan depends on
    _last: AttentionPlan | None = None

    def plan(self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32) -> AttentionPlan:
        """Return the plan that plan_attention makes of this step."""
        seen = self._dependencies(query_start_loc, seq_lens, block_table)
        if self._last is not None and seen is not None and seen == self._seen:
            return replace(self._last, positions=seq_lens - 1)
        self._seen = seen
        self._last = plan_attention(
            query_start_loc,
            seq_lens,
            block_table,
            self.shape,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            num_sink_tokens=self.num_sink_tokens,
            num_cores=self.num_cores,
        )
        return self._last

    def _dependencies(self, query_start_loc: Int32, seq_lens: Int32, block_table: Int32) -> tuple[int, bytes] | None:
        """Return all that the plan of a decode step depends on; None for other steps, and if a prefix may be shared."""
        num_seqs = len(seq_lens)
        if query_start_loc[-1] != num_seqs or not np.array_equal(query_start_loc, np.arange(num_seqs + 1)):
            return None
        if num_seqs == 0 or look_alike(block_table):
            return None
        tiles = ((seq_lens - 1) // TILE).tobytes()
        if self.sliding_window is not None:
            hidden = seq_lens - self.sliding_window
            tiles += (hidden // TILE).tobytes() + (hidden > 0).tobytes()
        return min(block_table.shape[1], 2), tiles


def plan_attention(
    query_start_loc: Int32,
    seq_lens: Int32,
    block_table: Int32,
    shape: AttentionShape,
    *,
    block_size: int,
    sliding_window: int | None = None,
    num_sink_tokens: int = 0,
    num_cores: int = 1,
) -> AttentionPlan:
    """Plan a step; arguments as in kernels.metadata.AttentionMetadata, on the host."""
    step = Sequences.of(query_start_loc, seq_lens, shape.group, sliding_window, num_sink_tokens)
    own = row_blocks(step, _block_rows(shape, step.tokens, num_cores))
    shared = share_prefixes(step, own, block_table, block_size, most_rows(shape))
    blocks, chains = (own, None) if shared is None else (shared.blocks, shared.chains)
    pieces, items, starts = cut(blocks, shape.num_kv_heads, _head_limits(shape)[blocks.rows], num_cores)

    partial = NO_PARTIAL
    combined, references = NO_COMBINES, NO_REFERENCES
    if shared is not None or not pieces.whole:
        partial = pieces.spans > 1 if shared is None else (pieces.spans > 1) | shared.is_partial
        targets = np.flatnonzero(partial[: len(own.sequence)])
        combined, references = combines(blocks, targets, chains, pieces, items, shape.num_kv_heads)
    table, partial_rows = _item_table(blocks, items, partial)
    staged = _staged(step)
    return AttentionPlan(
        items=table,
        starts=np.array(starts, dtype=np.int64),
        combines=combined,
        references=references,
        positions=_positions(step),
        staged=staged,
        loads=items.loads,
        partial_rows=partial_rows,
        workspace_bytes=workspace_bytes(shape, int(staged[-1]), partial_rows),
        scratch_bytes=_scratch_bytes(shape, blocks, items, partial),
        key=_key(step, shape, blocks, block_table, split=partial_rows > 0, shared=shared is not None),
        shape=shape,
    )


def _positions(step: Sequences) -> Int32:
    """[T] the position of each new token."""
    if step.is_decode:
        return step.computed.astype(np.int32)
    return (np.repeat(step.computed - step.begins, step.counts) + np.arange(step.tokens)).astype(np.int32)


def _staged(step: Sequences) -> Int32:
    """[B + 1] running sum of the granules of new tokens."""
    staged = np.arange(len(step.counts) + 1, dtype=np.int32)
    if not step.is_decode:
        granules = -(-step.lengths // GRANULE) - step.computed // GRANULE
        np.cumsum(np.where(step.counts > 0, granules, 0), out=staged[1:])
    return staged


@lru_cache(maxsize=64)
def most_rows(shape: AttentionShape) -> int:
    """Return the rows of a block that fit the budget with one kv head; larger groups are cut as well."""
    fitting = SCRATCH_BUDGET // shape.touched_row_bytes // ROW_CAPACITY * ROW_CAPACITY
    return min(max(fitting, ROW_CAPACITY), MAX_ITEM_ROWS)


def _block_rows(shape: AttentionShape, tokens: int, num_cores: int) -> int:
    """Return the most rows of a block: of many rows, as many as leave each core some blocks."""
    if num_cores == 1:
        return most_rows(shape)
    share = tokens * shape.num_heads // (num_cores * BLOCKS_PER_CORE) // ROW_CAPACITY * ROW_CAPACITY
    return min(max(share, MIN_BLOCK_ROWS), most_rows(shape))


@lru_cache(maxsize=64)
def _head_limits(shape: AttentionShape) -> Int64:
    """By the rows of a block: the most kv heads of an item. Few rows take all that fit the budget, more rows one."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    fitting = SCRATCH_BUDGET // (np.maximum(rows, 1) * shape.touched_row_bytes)
    return np.where(rows <= FEW_ROWS, np.clip(fitting, 1, shape.num_kv_heads), 1)


def _item_table(blocks: RowBlocks, items: Items, partial: Bools) -> tuple[Int32, int]:
    """Return AttentionPlan.items and their number of partial rows."""
    table = np.empty((len(items.block), 8), dtype=np.int32)
    table[:, SEQUENCE] = blocks.sequence[items.block]
    table[:, HEAD_BEGIN], table[:, HEAD_END] = items.head_begin, items.head_end
    table[:, ROW_BEGIN], table[:, ROW_END] = blocks.row_begin[items.block], blocks.row_end[items.block]
    table[:, SPAN_BEGIN], table[:, SPAN_END] = items.span_begin, items.span_end
    table[:, PARTIAL] = -1
    if partial is NO_PARTIAL:
        return table, 0
    writes = partial[items.block]
    rows = blocks.rows[items.block] * (items.head_end - items.head_begin) * (items.span_end - items.span_begin)
    ends = np.cumsum(rows * writes)
    table[writes, PARTIAL] = (ends - rows)[writes]
    return table, int(ends[-1]) if len(ends) else 0


def _scratch_bytes(shape: AttentionShape, blocks: RowBlocks, items: Items, partial: Bools) -> int:
    states = 1 + (items.span_end - items.span_begin > 1)
    if partial is not NO_PARTIAL:
        states[partial[items.block]] = 0
    return scratch_bytes(shape, items.head_end - items.head_begin, blocks.rows[items.block], states)


def _key(
    step: Sequences, shape: AttentionShape, blocks: RowBlocks, block_table: Int32, *, split: bool, shared: bool
) -> int:
    phase = "decode" if step.is_decode else _of_these(step.counts == 1, "decode", "chunk", "mixed")
    template = _of_these(blocks.rows <= FEW_ROWS, "stream", "blocks", "both")
    window = "none" if step.window is None else "sinks" if step.sinks else "window"
    memory = "rows" if block_table.shape[1] <= 1 else "paged"
    if step.window is not None and memory == "paged":
        repeats = (block_table[:, 0] == block_table[:, 1]) & (block_table[:, 0] >= 0)
        memory = "ring" if bool(repeats.any()) else memory
    return encode_key(shape, phase, template, memory, window, split=split, shared=shared)


def _of_these(what: Bools, every: str, none: str, some: str) -> str:
    return every if what.all() else some if what.any() else none
