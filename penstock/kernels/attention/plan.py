"""Plans of attention: which pieces of work a step has, and who begins where. Made before a step runs, without torch.

A piece (item) is some query rows of some kv heads over some spans of one sequence's cache. The arithmetic of a row is
fixed by tiles and spans at absolute positions (layout.py), so a plan decides only who computes what: a different
number of cores gives another plan and the same bits.

Planned as Huawei's IncreFlashAttention operator does it: first by sequence and head, spans as well where that leaves
cores idle (its flash decoding; its rule is B * N2 < 0.4 * cores, ours looks at the load of each item, because one long
sequence among many short ones idles cores just as well), then contiguous ranges of items so that the greatest load of
a core is least. A core drains its range and steals from others.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.blocks import RowBlocks, Steps, row_blocks
from penstock.kernels.attention.combine import combines
from penstock.kernels.attention.cut import FEW_ROWS, Items, cut
from penstock.kernels.attention.key import TilingKey
from penstock.kernels.attention.layout import GRANULE, ROW_CAPACITY
from penstock.kernels.attention.shape import MAX_ITEM_ROWS, scratch_bytes, workspace_bytes
from penstock.kernels.attention.shape import AttentionShape as AttentionShape
from penstock.kernels.attention.sharing import share_prefixes

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Columns of AttentionPlan.items and .combines; native/abi.h has the same.
SEQUENCE, HEAD_BEGIN, HEAD_END, ROW_BEGIN, ROW_END, SPAN_BEGIN, SPAN_END, PARTIAL = range(8)

SCRATCH_BUDGET = 192 * 2**10  # bytes of an item's rows that stay in a core's own cache from tile to tile
MIN_BLOCK_ROWS = 96  # where rows are cut only to share the load; shorter blocks read more than they multiply
BLOCKS_A_CORE = 8

NO_PARTIAL = np.zeros(0, dtype=np.bool_)
NO_COMBINES, NO_REFERENCES = np.empty((0, 6), dtype=np.int32), np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step for the layers of one cache group.

    A row of the packed step is token * group + g: query head (kv head) * group + g of that token. An item's rows may
    belong to several neighbouring sequences, where those share the blocks of its spans (a shared prefix): then every
    position of those spans is cached for all of them.

    Attributes:
        items: [I, 8] int32: sequence whose block table is read; kv heads begin, end; rows begin, end; spans begin, end;
            the first partial row that the item writes, or -1 where its results are final. Of a partial item, row r of
            head h and span s is partial row
            partial + ((s - span begin) * heads + h - head begin) * rows + r - row begin.
        starts: [cores + 1] int64: the first item of each core, then the number of items.
        combines: [C, 6] int32: kv heads begin, end; rows begin, end; references begin, end.
        references: [R] int32: the items that a combine folds, spans ascending; each covers its heads and rows.
        positions: [T] int32: each token's position.
        staged: [B+1] int32: granules (of each kv head) of new tokens, a running sum over the sequences: those from
            that of the first new token to that of the last one.
        loads: [I] int64: what each item costs, in rows times tiles times heads and what reading adds.
        partial_rows: of all items together.
        workspace_bytes: that the cores share while the step runs; the reference needs none.
        scratch_bytes: of each core.
        key: names the plan (key.py).
        shape: for which it was made.
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
    """The plan of a step; arguments as in kernels.ops.AttentionMetadata, on the host."""
    step = _steps(query_start_loc, seq_lens, shape.group, sliding_window, num_sink_tokens)
    own = row_blocks(step, _block_rows(shape, step.tokens, num_cores))
    shared = share_prefixes(step, own, block_table, block_size, most_rows(shape))
    blocks, chains = (own, None) if shared is None else (shared.blocks, shared.chains)
    pieces, items, starts = cut(blocks, shape.num_kv_heads, _head_limits(shape)[blocks.rows], num_cores)

    partial = NO_PARTIAL
    combined, references = NO_COMBINES, NO_REFERENCES
    if shared is not None or not pieces.whole:
        partial = pieces.spans > 1 if shared is None else (pieces.spans > 1) | shared.is_partial
        targets = np.flatnonzero(partial[: len(own.sequence)])
        combined, references = combines(blocks, targets, chains, pieces, items.numbers, shape.num_kv_heads)
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
        key=_key(step, shape, blocks, _memory(step, block_table), partial_rows > 0, shared is not None),
        shape=shape,
    )


def _steps(query_start_loc: Int32, seq_lens: Int32, group: int, window: int | None, sinks: int) -> Steps:
    starts, lengths = query_start_loc.astype(np.int64), seq_lens.astype(np.int64)
    begins, tokens = starts[:-1], int(starts[-1])
    counts = starts[1:] - begins
    each_one = tokens == len(counts) and bool((counts == 1).all())
    if window is not None and (len(lengths) == 0 or lengths.max() <= window):
        window = None  # it hides nothing yet
    return Steps(
        tokens, begins, counts, lengths - counts, lengths, each_one, group, window, 0 if window is None else sinks
    )


def _positions(step: Steps) -> Int32:
    """[T] of each new token."""
    if step.each_one:
        return step.computed.astype(np.int32)
    return (np.repeat(step.computed - step.begins, step.counts) + np.arange(step.tokens)).astype(np.int32)


def _staged(step: Steps) -> Int32:
    """[B + 1] granules of new tokens, summed."""
    staged = np.arange(len(step.counts) + 1, dtype=np.int32)
    if not step.each_one:
        granules = -(-step.lengths // GRANULE) - step.computed // GRANULE
        np.cumsum(np.where(step.counts > 0, granules, 0), out=staged[1:])
    return staged


@lru_cache(maxsize=64)
def most_rows(shape: AttentionShape) -> int:
    """Rows of a block that fit the budget with one kv head: so a great group is cut as well."""
    fitting = SCRATCH_BUDGET // shape.touched_row_bytes // ROW_CAPACITY * ROW_CAPACITY
    return min(max(fitting, ROW_CAPACITY), MAX_ITEM_ROWS)


def _block_rows(shape: AttentionShape, tokens: int, num_cores: int) -> int:
    """The most rows of a block: of many rows, as many as leave each core some blocks."""
    if num_cores == 1:
        return most_rows(shape)
    share = tokens * shape.num_heads // (num_cores * BLOCKS_A_CORE) // ROW_CAPACITY * ROW_CAPACITY
    return min(max(share, MIN_BLOCK_ROWS), most_rows(shape))


@lru_cache(maxsize=64)
def _head_limits(shape: AttentionShape) -> Int64:
    """[rows of a block] the most kv heads of an item: few rows take all that fit the budget, more rows one."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    fitting = SCRATCH_BUDGET // (np.maximum(rows, 1) * shape.touched_row_bytes)
    return np.where(rows <= FEW_ROWS, np.clip(fitting, 1, shape.num_kv_heads), 1)


def _item_table(blocks: RowBlocks, items: Items, partial: Bools) -> tuple[Int32, int]:
    """AttentionPlan.items, and how many partial rows they have."""
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


def _key(step: Steps, shape: AttentionShape, blocks: RowBlocks, memory: str, split: bool, shared: bool) -> int:
    few = blocks.rows <= FEW_ROWS
    phase = "decode" if step.each_one else _of_these(step.counts == 1, "decode", "chunk", "mixed")
    template = _of_these(few, "stream", "blocks", "both")
    window = "none" if step.window is None else "sinks" if step.sinks else "window"
    return _encoded(shape, phase, template, memory, window, split, shared)


@lru_cache(maxsize=256)
def _encoded(
    shape: AttentionShape, phase: str, template: str, memory: str, window: str, split: bool, shared: bool
) -> int:
    integers = shape.kv_cache_dtype == "int8"
    return TilingKey(
        phase=phase,
        query=shape.dtype,
        cache=shape.kv_cache_dtype,
        output=shape.dtype,
        scales=("token" if shape.token_scales else "channel") if integers else "none",
        slices=str(shape.slices),
        template=template,
        split="spans" if split else "no",
        memory=memory,
        window=window,
        prefix="shared" if shared else "own",
        level=shape.level,
    ).encode()


def _of_these(what: Bools, every: str, none: str, some: str) -> str:
    return every if what.all() else some if what.any() else none


def _memory(step: Steps, block_table: Int32) -> str:
    """How the block table is used."""
    if block_table.shape[1] <= 1:
        return "rows"
    if step.window is not None and bool(((block_table[:, 0] == block_table[:, 1]) & (block_table[:, 0] >= 0)).any()):
        return "ring"
    return "paged"
