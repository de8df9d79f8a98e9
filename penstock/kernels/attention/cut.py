"""Row blocks into items: pieces of heads and spans, as many as let the cores share the load.

A piece costs what reading and multiplying cost, in rows times tiles times heads. Spans are cut before heads: the heads
of a token lie together in memory, and reading them together streams. Rows are never cut here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.blocks import Int64, RowBlocks, ragged
from penstock.kernels.attention.layout import SPAN_TILES
from penstock.kernels.attention.partition import greatest_load, partition

Bools = npt.NDArray[np.bool_]

FEW_ROWS = 16  # so many go through memory with all their heads; more compute longer than they read
READ_ROWS = 16  # reading a tile costs as much as multiplying so many rows with it
PIECES = 8  # a core, at most, where blocks alone do not share the load well
ENOUGH = 4  # items a core that leave something to steal
SMALL_LOAD = 64  # of an item that is not worth cutting: a core carries it out in some microseconds
SLACK = 1 / 16  # of the mean load: how much more a core may have before blocks are cut


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Into how many pieces each block is cut, [U] each. Piece q of h cuts of n heads: q n // h .. (q + 1) n // h - 1.

    A block's pieces are numbered heads first: piece first[u] + q * spans[u] + s.
    """

    spans: Int64
    heads: Int64

    whole: bool = False  # no block is cut at all

    @property
    def counts(self) -> Int64:
        return self.spans * self.heads

    @property
    def first(self) -> Int64:
        counts = self.counts
        return counts.cumsum() - counts


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Pieces of row blocks, [I] each, in the order of the plan.

    Attributes:
        order: the pieces in that order; None: as they are numbered (Pieces).
        block: the row block that each is of.
    """

    order: Int64 | None
    block: Int64
    head_begin: Int64
    head_end: Int64
    span_begin: Int64
    span_end: Int64
    loads: Int64

    @property
    def numbers(self) -> Int64 | None:
        """The item that each piece became."""
        return None if self.order is None else np.argsort(self.order)


def cut(blocks: RowBlocks, kv_heads: int, head_limit: Int64, num_cores: int) -> tuple[Pieces, Items, list[int]]:
    """Items, and where each core begins.

    head_limit: [U] the most heads that an item of each block may have.
    """
    heads = -(-kv_heads // head_limit)
    pieces = Pieces(np.ones_like(heads), heads, whole=not (heads > 1).any())
    items = _items(blocks, kv_heads, pieces)
    starts = _good_starts(items.loads.tolist(), num_cores)
    if starts is not None:
        return pieces, items, starts
    finer = _finer(blocks, kv_heads, pieces, int(items.loads.sum()) // (num_cores * PIECES))
    items = _items(blocks, kv_heads, finer)
    return finer, items, partition(items.loads.tolist(), num_cores)


def _good_starts(loads: list[int], num_cores: int) -> list[int] | None:
    """Where cores begin if that shares the load well and leaves something to steal, or None."""
    total = sum(loads)
    if num_cores == 1 or total <= SMALL_LOAD:
        return partition(loads, num_cores)
    if len(loads) < ENOUGH * num_cores:
        return None
    starts = partition(loads, num_cores)
    return starts if greatest_load(loads, starts) * num_cores <= total * (1 + SLACK) else None


def _finer(blocks: RowBlocks, kv_heads: int, pieces: Pieces, limit: int) -> Pieces:
    """As many more pieces as bring each within the limit: of spans first, then of heads."""
    tiles = blocks.tiles
    wanted = -(-_load(blocks.rows, tiles, kv_heads) // max(limit, SMALL_LOAD))
    whole_spans = (tiles + SPAN_TILES // 2) // SPAN_TILES  # a span of a few tiles is not worth a piece
    spans = np.minimum(np.minimum(wanted, np.maximum(whole_spans, 1)), _end_span(blocks) - _first_span(blocks))
    if blocks.sink_end is not None:
        spans += (spans > 1) & _sinks_apart(blocks)
    return Pieces(spans, np.maximum(pieces.heads, np.minimum(-(-wanted // spans), kv_heads)))


def _load(rows: Int64, tiles: Int64, heads: Int64 | int) -> Int64:
    return (rows + READ_ROWS) * tiles * heads


def _first_span(blocks: RowBlocks) -> Int64:
    """Of those behind the sink tokens."""
    return blocks.tile_begin // SPAN_TILES


def _end_span(blocks: RowBlocks) -> Int64:
    return -(-blocks.tile_end // SPAN_TILES)


def _sink_spans(blocks: RowBlocks) -> Int64 | None:
    return None if blocks.sink_end is None else -(-blocks.sink_end // SPAN_TILES)


def _sinks_apart(blocks: RowBlocks) -> Bools:
    """[U] whether hidden spans lie between the sink tokens and the window."""
    sinks = _sink_spans(blocks)
    return np.zeros(len(blocks.sequence), bool) if sinks is None else (sinks > 0) & (sinks < _first_span(blocks))


def _items(blocks: RowBlocks, kv_heads: int, pieces: Pieces) -> Items:
    if pieces.whole:
        return _whole_blocks(blocks, kv_heads)
    block, index = ragged(pieces.counts)
    order = _order(blocks, kv_heads, pieces, block, index)
    if order is not None:
        block, index = block[order], index[order]
    spans, heads = pieces.spans[block], pieces.heads[block]
    head = index // spans
    head_begin, head_end = head * kv_heads // heads, (head + 1) * kv_heads // heads
    span_begin, span_end = _span_ranges(blocks, block, index - head * spans, spans)
    tiles = _tiles_within(blocks, block, span_begin * SPAN_TILES, span_end * SPAN_TILES)
    loads = _load(blocks.rows[block], tiles, head_end - head_begin)
    return Items(order, block, head_begin, head_end, span_begin, span_end, loads)


def _whole_blocks(blocks: RowBlocks, kv_heads: int) -> Items:
    """An item for each block: most steps of decoding."""
    number = np.arange(len(blocks.sequence))
    span_begin = _first_span(blocks)
    if blocks.sink_end is not None:
        span_begin = np.where(blocks.sink_end > 0, 0, span_begin)
    head_begin, head_end = np.zeros_like(number), np.full_like(number, kv_heads)
    loads = _load(blocks.rows, blocks.tiles, kv_heads)
    return Items(None, number, head_begin, head_end, span_begin, _end_span(blocks), loads)


def _order(blocks: RowBlocks, kv_heads: int, pieces: Pieces, block: Int64, index: Int64) -> Int64 | None:
    """By sequence, then head, then row block, where sequences have several: neighbouring items read the same keys and
    values, which a core's cache then keeps."""
    sequence = blocks.sequence
    if len(sequence) < 2 or not (sequence[1:] <= sequence[:-1]).any():
        return None
    head_begin = index // pieces.spans[block] * kv_heads // pieces.heads[block]
    return np.argsort(sequence[block] * kv_heads + head_begin, kind="stable")


def _span_ranges(blocks: RowBlocks, block: Int64, index: Int64, pieces: Int64) -> tuple[Int64, Int64]:
    """Spans of piece `index` of so many."""
    first, end = _first_span(blocks)[block], _end_span(blocks)[block]
    sinks = _sink_spans(blocks)
    if sinks is None:
        return _part(first, end, index, pieces)
    sinks = sinks[block]
    alone = _sinks_apart(blocks)[block] & (pieces > 1)  # a piece of their own, so that hidden spans are in none
    first = np.where((sinks > 0) & ~alone, 0, first)
    apart = alone.astype(np.int64)
    begin, stop = _part(first, end, index - apart, np.maximum(pieces - apart, 1))
    of_sinks = alone & (index == 0)
    begin[of_sinks] = 0
    stop[of_sinks] = sinks[of_sinks]
    return begin, stop


def _part(begin: Int64, end: Int64, index: Int64, pieces: Int64) -> tuple[Int64, Int64]:
    """One of so many even parts of a range."""
    count: Int64 = end - begin
    return begin + index * count // pieces, begin + (index + 1) * count // pieces


def _tiles_within(blocks: RowBlocks, block: Int64, begin: Int64, end: Int64) -> Int64:
    """Tiles begin .. end - 1 that some row sees."""
    first, stop = blocks.tile_begin[block], blocks.tile_end[block]
    tiles: Int64 = np.maximum(np.minimum(end, stop) - np.maximum(begin, first), 0)
    if blocks.sink_end is None:
        return tiles
    sinks: Int64 = np.maximum(np.minimum(end, blocks.sink_end[block]) - begin, 0)
    return tiles + sinks
