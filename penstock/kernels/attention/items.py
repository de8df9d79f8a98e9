"""The work of a step's attention: sizes, query rows in blocks, the tiles that each block sees, and items for cores.

A tile is 64 positions that begin at a multiple of 64; a span is 32 tiles. Both are constants of the numerics version
and alone decide the order of sums, whatever the block size and the load. A row of the packed step is token * group + g.
A block holds the rows of one sequence, or those of neighbouring sequences over a prefix that they share, for all kv
heads. Items are row blocks, cut by heads and spans so that the cores share the load; each core gets a contiguous range
of items, chosen so that the greatest load of a core is as small as possible. Without torch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np

from penstock.kernels.tensors import Bools, Int32, Int64

_Number = TypeVar("_Number", int, Int64)
_Positions = TypeVar("_Positions")

TILE = 64  # L: positions jL .. (j+1)L-1 make a tile
SPAN_TILES = 32  # C: tiles folded in ascending order before spans are folded
SPAN = TILE * SPAN_TILES
GRANULE = 16  # positions that are contiguous in memory; a block is a multiple of it
DIM_UNIT = 32  # the native kernels pad a head's elements to a multiple of this
MAX_HEAD_DIM = 512  # the native kernels' limit
ROW_CAPACITY = 48  # the native kernels' operands have room for a multiple of this many rows
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # by kv_cache_dtype
TOKEN_SCALE_BYTES = 16  # int8: scale and offset of key and value of one head of a token, float32

ROW_UNIT = 16  # arrays of states have room for a multiple of this many rows
ROW_METADATA_BYTES = 36  # per row: positions, limits, where its results go
HEAD_METADATA_BYTES = 4  # per row and head
MAX_ITEM_ROWS = 192
INT8_METADATA_BYTES = 64  # int8: a row's scale and sums


def first_seen(position: _Positions, window: int, *, chunked: bool) -> _Positions:
    """Find the first position that a token at `position` sees, besides sink tokens. The position is an integer or an
    array, and the result below 0 where a window begins before the text.

    chunked: windows are chunks into which the text is cut, and the token sees its own chunk only.
    """
    at: Any = position
    return cast(_Positions, at - at % window if chunked else at - (window - 1))


def padded_head_dim(head_dim: int) -> int:
    return _round_up(head_dim, DIM_UNIT)


def cache_token_bytes(
    num_kv_heads: int, head_dim: int, kv_cache_dtype: str, *, padded: bool = True, token_scales: bool = True
) -> int:
    """Count the bytes of one token's keys and values in one layer.

    padded: heads are padded, as the native cache stores them; the reference stores head_dim elements.
    token_scales: int8 scales are per token, not per channel.
    """
    elements = padded_head_dim(head_dim) if padded else head_dim
    scales = TOKEN_SCALE_BYTES if kv_cache_dtype == "int8" and token_scales else 0
    return num_kv_heads * (2 * elements * ELEMENT_BYTES[kv_cache_dtype] + scales)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and types that the layers of a cache group share.

    Attributes:
        kv_cache_dtype: "float32", "bfloat16" or "int8".
        slices: int8 only: the number of int8 rows that represent a query row, or a row of probabilities; else 0.
        token_scales: int8 only: scales are per token, not per channel.
        dtype: type of queries and results, "float32" or "bfloat16"; used in the key only.
        level: instruction level of the backend; used in the key only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_cache_dtype: str
    slices: int = 0
    token_scales: bool = True
    dtype: str = "bfloat16"
    level: str = "any"

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return padded_head_dim(self.head_dim)

    @property
    def query_row_bytes(self) -> int:
        """Bytes of a query row as an operand: its elements, or its slices and their notes."""
        if self.kv_cache_dtype == "int8":
            return self.padded_dim * self.slices + INT8_METADATA_BYTES
        return self.padded_dim * ELEMENT_BYTES[self.kv_cache_dtype]

    @property
    def query_row_room(self) -> int:
        """The bytes of a query row on the instruction level that needs most: some levels widen bfloat16 to float32, and
        slices to int16."""
        if self.kv_cache_dtype == "int8":
            return 2 * self.padded_dim * self.slices + INT8_METADATA_BYTES
        return self.padded_dim * ELEMENT_BYTES["float32"]

    @property
    def state_row_bytes(self) -> int:
        """Bytes of a row's state: m, l and o."""
        return (self.padded_dim + 2) * 4

    @property
    def touched_row_bytes(self) -> int:
        """Bytes of a row of one kv head that every tile touches: its operand, the states of span and row, its notes."""
        return self.query_row_bytes + 2 * self.state_row_bytes + ROW_METADATA_BYTES + HEAD_METADATA_BYTES

    @property
    def granule_bytes(self) -> int:
        """Bytes of a granule of one kv head."""
        return GRANULE * cache_token_bytes(1, self.head_dim, self.kv_cache_dtype, token_scales=self.token_scales)


def workspace_bytes(shape: AttentionShape, staged_granules: int, partial_rows: int) -> int:
    """Count the bytes that cores share in a step: new tokens as granules, a granule of zeros, partial rows' states."""
    granules = staged_granules * shape.num_kv_heads + 1
    return granules * shape.granule_bytes + _round_up(partial_rows, ROW_UNIT) * shape.state_row_bytes


def scratch_bytes(shape: AttentionShape, heads: Int64, rows: Int64, states: Int64) -> int:
    """Count the bytes that a core needs for the largest of some items, given the heads, rows and states of each, [I].

    states: per row and head: two if spans fold into a result, one for a single span, none if partial rows are the
        states.
    """
    if len(heads) == 0:
        return 0
    metadata, operands, state = _rows_bytes(shape)
    items = metadata[rows] + heads * (operands[rows] + states * state[rows])
    one_row = ROW_CAPACITY * shape.query_row_room
    return int(items.max()) + one_row + TILE // GRANULE * shape.granule_bytes


@lru_cache(maxsize=64)
def _rows_bytes(shape: AttentionShape) -> tuple[Int64, Int64, Int64]:
    """Tabulate, by an item's number of rows, the bytes of its metadata, of a head's operand, and of its state."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    room = _round_up(rows, ROW_UNIT)
    operands = _round_up(rows, ROW_CAPACITY) * shape.query_row_room + room * HEAD_METADATA_BYTES
    return room * ROW_METADATA_BYTES, operands, room * shape.state_row_bytes


def _round_up(count: _Number, unit: int) -> _Number:
    """Round up to a multiple of the unit."""
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The lengths and positions of the sequences of a step, as int64.

    Attributes:
        tokens: number of new tokens, T.
        begins: [B] the first new token of each sequence.
        counts: [B] the number of its new tokens.
        computed: [B] the number of its tokens that were cached before the step.
        lengths: [B] the number of its cached plus new tokens.
        is_decode: whether every sequence has exactly one new token.
        group: query heads per kv head.
        window: number of tokens that a row sees, itself included; None where the window hides nothing.
        sinks: number of first tokens that stay visible before the window; 0 without a window.
        chunked: as in first_seen.
        bidirectional: a row also sees what is after it, within the window.
    """

    tokens: int
    begins: Int64
    counts: Int64
    computed: Int64
    lengths: Int64
    is_decode: bool
    group: int
    window: int | None
    sinks: int
    chunked: bool
    bidirectional: bool = False

    @classmethod
    def of(
        cls,
        query_start_loc: Int32,
        seq_lens: Int32,
        group: int,
        sliding_window: int | None,
        num_sink_tokens: int,
        *,
        chunked: bool,
        bidirectional: bool = False,
    ) -> "Sequences":
        """Read the arrays of AttentionMetadata."""
        starts, lengths = query_start_loc.astype(np.int64), seq_lens.astype(np.int64)
        begins, tokens = starts[:-1], int(starts[-1])
        counts = starts[1:] - begins
        is_decode = tokens == len(counts) and bool((counts == 1).all())
        hides = sliding_window is not None and len(lengths) > 0 and lengths.max() > sliding_window
        window, sinks = (sliding_window, num_sink_tokens) if hides else (None, 0)
        limits = window, sinks, chunked, bidirectional
        return cls(tokens, begins, counts, lengths - counts, lengths, is_decode, group, *limits)


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """Blocks of rows, [U] each.

    Attributes:
        sequence: the sequence whose block table is read.
        row_begin, row_end: rows of the packed step.
        tile_begin, tile_end: tiles that some row sees, not counting sink tokens.
        sink_end: tiles 0 .. sink_end - 1 hold sink tokens and precede tile_begin; None: no sinks.
    """

    sequence: Int64
    row_begin: Int64
    row_end: Int64
    tile_begin: Int64
    tile_end: Int64
    sink_end: Int64 | None = None

    @property
    def rows(self) -> Int64:
        return self.row_end - self.row_begin

    @property
    def tiles(self) -> Int64:
        """The number of tiles that some row sees."""
        tiles = self.tile_end - self.tile_begin
        return tiles if self.sink_end is None else tiles + self.sink_end

    @property
    def first_span(self) -> Int64:
        """The first span after the sink tokens."""
        return self.tile_begin // SPAN_TILES

    @property
    def end_span(self) -> Int64:
        return -(-self.tile_end // SPAN_TILES)


def row_blocks(step: Sequences, block_rows: int) -> RowBlocks:
    """Cut the rows of all sequences into blocks of at most block_rows, each with the tiles that its rows see."""
    first = step.begins * step.group
    if step.is_decode and step.group <= block_rows:
        return _with_tiles(step, np.arange(step.tokens), first, first + step.group, step.computed, step.lengths)
    rows = step.counts * step.group
    size = _block_sizes(rows, block_rows)
    sequence, index = ragged(-(-rows // size))
    begin = index * size[sequence]
    end = np.minimum(begin + size[sequence], rows[sequence])
    first, computed = first[sequence], step.computed[sequence]
    stop = computed + (end - 1) // step.group + 1
    if step.bidirectional:
        length = step.lengths[sequence]
        stop = length if step.window is None else np.minimum(stop + step.window - 1, length)
    return _with_tiles(step, sequence, first + begin, first + end, computed + begin // step.group, stop)


def ragged(counts: Int64) -> tuple[Int64, Int64]:
    """Compute, for each of counts.sum() entries, its owner and its index among the owner's entries."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _block_sizes(rows: Int64, block_rows: int) -> Int64:
    """Divide each sequence's rows into blocks: equal multiples of ROW_CAPACITY, or all rows in one block."""
    blocks = -(-rows // block_rows)
    equal = -(-rows // np.maximum(blocks, 1))
    size = -(-equal // ROW_CAPACITY) * ROW_CAPACITY
    return np.where(rows <= block_rows, np.maximum(rows, 1), size)


def _with_tiles(step: Sequences, sequence: Int64, begin: Int64, end: Int64, first: Int64, stop: Int64) -> RowBlocks:
    """Make blocks of rows from position `first` on, which see positions up to stop - 1."""
    tile_end = -(-stop // TILE)
    if step.window is None:
        return RowBlocks(sequence, begin, end, np.zeros_like(tile_end), tile_end)
    tile_begin = np.maximum(first_seen(first, step.window, chunked=step.chunked), 0) // TILE
    sink_end = np.minimum(-(-step.sinks // TILE), tile_begin) if step.sinks else None
    return RowBlocks(sequence, begin, end, tile_begin, tile_end, sink_end)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Row blocks of the step, followed by blocks that join several of them over shared spans.

    Attributes:
        blocks: the first len(chains) of them belong to one sequence each, and see the tiles after the shared spans.
        chains: for each of those, the blocks that together see all its tiles, spans ascending, the block itself last.
    """

    blocks: RowBlocks
    chains: list[list[int]]

    @property
    def is_partial(self) -> Bools:
        """Tell whether a block sees only a part of the tiles that its rows see, [U]."""
        own = [len(chain) > 1 for chain in self.chains]
        return np.array(own + [True] * (len(self.blocks.sequence) - len(own)))


def share_prefixes(
    step: Sequences, own: RowBlocks, block_table: Int32, block_size: int, block_rows: int
) -> SharedPrefixes | None:
    """Join rows of several sequences, at most block_rows, over the spans they share; None if no spans are shared."""
    if step.window is not None or not look_alike(block_table):
        return None
    depths = _shared_spans(step, block_table, block_size)
    chains: list[list[int]] = [[] for _ in own.sequence]
    seen = [0] * len(chains)  # by block: how many of its first spans shared blocks see
    shared: list[tuple[int, ...]] = []  # columns of RowBlocks
    for begin, end, span_begin, span_end in _runs(depths, 0, len(depths), 0) if any(depths) else ():
        first, high = np.searchsorted(own.sequence, (begin, end)).tolist()
        while first < high:
            last, limit = first, own.row_begin[first] + block_rows
            while last < high and own.row_end[last] <= limit and seen[last] == span_begin:
                last += 1
            if last - first > 1:  # a single block would save no reads
                for block in range(first, last):
                    chains[block].append(len(chains) + len(shared))
                    seen[block] = span_end
                rows = own.sequence[first], own.row_begin[first], own.row_end[last - 1]
                shared.append((*rows, span_begin * SPAN_TILES, span_end * SPAN_TILES))
            first = max(last, first + 1)
    if not shared:
        return None
    tile_begin = np.array(seen, dtype=np.int64) * SPAN_TILES
    columns = own.sequence, own.row_begin, own.row_end, tile_begin, own.tile_end
    joined = [np.concatenate(pair) for pair in zip(columns, np.array(shared, dtype=np.int64).T, strict=True)]
    return SharedPrefixes(RowBlocks(*joined), [[*chain, block] for block, chain in enumerate(chains)])


def look_alike(block_table: Int32) -> bool:
    """Tell whether two neighbouring sequences begin with the same block: a cheap test that excludes most steps."""
    if block_table.shape[0] < 2 or block_table.shape[1] == 0:
        return False
    first = block_table[:, 0]
    return bool((first[1:] == first[:-1]).any())


def _shared_spans(step: Sequences, block_table: Int32, block_size: int) -> list[int]:
    """Count the whole spans that each sequence shares with the next one, [B - 1]."""
    above, below = block_table[:-1], block_table[1:]
    differs = (above != below) | (above < 0)
    blocks = np.where(differs.any(axis=1), differs.argmax(axis=1), differs.shape[1])
    computed = np.where(step.counts > 0, step.computed, 0)
    spans = np.minimum(np.minimum(computed[1:], computed[:-1]), blocks * block_size) // SPAN
    return [int(count) for count in spans]


def _runs(depths: list[int], begin: int, end: int, base: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the spans from `base` on that some of the sequences begin .. end share.

    Each is (first sequence, last sequence + 1, first span, last span + 1). Outer runs of sequences come before the runs
    within them, so the spans of a sequence ascend.
    """
    if begin == end:
        return
    least = min(depths[begin:end])
    if least > base:
        yield begin, end + 1, base, least
    start = begin
    for index in range(begin, end + 1):
        if index == end or depths[index] == least:
            yield from _runs(depths, start, index, least)
            start = index + 1


# Up to this many rows, an item takes its heads together; with more, computing takes longer than reading.
STREAM_ROWS = 16
READ_ROWS = 16  # reading a tile costs as much as multiplying this many rows with it
PIECES_PER_CORE = 8  # at most, if blocks alone do not share the load well
ITEMS_PER_CORE = 4  # enough to leave something to steal
SMALL_LOAD = 64  # the load of an item that is not worth cutting: a core takes some microseconds for it
SLACK = 1 / 16  # share of the mean load by which a core may exceed it before blocks are cut


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The numbers of pieces into which each block's spans and heads are cut, [U] each.

    When n heads are cut into h pieces, piece q has the heads q n // h .. (q + 1) n // h - 1. Piece q of the heads and s
    of the spans of block u has the number first[u] + q * spans[u] + s.

    Attributes:
        whole: no block is cut.
    """

    spans: Int64
    heads: Int64
    whole: bool = False

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
        order: the number of each item's piece (Pieces); None: item i is piece i.
        block: the row block of each item.
    """

    order: Int64 | None
    block: Int64
    head_begin: Int64
    head_end: Int64
    span_begin: Int64
    span_end: Int64
    loads: Int64


def cut(blocks: RowBlocks, kv_heads: int, head_limit: Int64, num_cores: int) -> tuple[Pieces, Items, list[int]]:
    """Cut blocks into items, and return where each core begins.

    head_limit: [U] the most heads that an item of each block may have.
    """
    heads = -(-kv_heads // head_limit)
    pieces = Pieces(np.ones_like(heads), heads, whole=not (heads > 1).any())
    items = _items(blocks, kv_heads, pieces)
    starts = _good_starts(items.loads.tolist(), num_cores)
    if starts is not None:
        return pieces, items, starts
    finer = _finer(blocks, kv_heads, pieces, int(items.loads.sum()) // (num_cores * PIECES_PER_CORE))
    items = _items(blocks, kv_heads, finer)
    return finer, items, partition(items.loads.tolist(), num_cores)


def combines(
    blocks: RowBlocks, targets: Int64, chains: list[list[int]] | None, pieces: Pieces, items: Items, kv_heads: int
) -> tuple[Int32, Int32]:
    """Make AttentionPlan.combines and .references: one combine per target and kv head.

    targets: [N] blocks whose results are combined.
    chains: for each block of the step, the blocks that see its tiles, spans ascending; None: each sees its own.
    """
    if len(targets) == 0:
        return np.empty((0, 6), dtype=np.int32), np.empty(0, dtype=np.int32)
    target, head = ragged(np.full_like(targets, kv_heads))  # of each combine
    if chains is None:
        link, linked_head, link_ends = targets[target], head, None
    else:
        links = [np.array(chains[block], dtype=np.int64) for block in targets]
        link_counts = np.array([len(chain) for chain in links], dtype=np.int64)
        combine, index = ragged(link_counts[target])
        link = np.concatenate(links)[(link_counts.cumsum() - link_counts)[target[combine]] + index]
        linked_head, link_ends = head[combine], link_counts[target].cumsum()
    # When n heads are cut into h pieces, head i is in the piece with the greatest q for which q n < (i + 1) h.
    piece = ((linked_head + 1) * pieces.heads[link] - 1) // kv_heads
    counts = pieces.spans[link]
    of_link, span_piece = ragged(counts)
    references = (pieces.first[link] + piece * counts)[of_link] + span_piece
    if items.order is not None:
        references = np.argsort(items.order)[references]

    table = np.empty((len(head), 6), dtype=np.int32)
    table[:, 0], table[:, 1] = head, head + 1
    block = targets[target]
    table[:, 2], table[:, 3] = blocks.row_begin[block], blocks.row_end[block]
    ends = counts.cumsum()
    table[:, 5] = ends if link_ends is None else ends[link_ends - 1]
    table[0, 4] = 0
    table[1:, 4] = table[:-1, 5]
    return table, references.astype(np.int32)


def _good_starts(loads: list[int], num_cores: int) -> list[int] | None:
    """Find where cores begin if these items share the load well and leave something to steal; None if they do not."""
    total = sum(loads)
    if num_cores == 1 or total <= SMALL_LOAD:
        return partition(loads, num_cores)
    if len(loads) < ITEMS_PER_CORE * num_cores:
        return None
    starts = partition(loads, num_cores)
    return starts if greatest_load(loads, starts) * num_cores <= total * (1 + SLACK) else None


def _finer(blocks: RowBlocks, kv_heads: int, pieces: Pieces, limit: int) -> Pieces:
    """Cut until each piece is within the limit: spans first, then heads."""
    tiles = blocks.tiles
    wanted = -(-_load(blocks.rows, tiles, kv_heads) // max(limit, SMALL_LOAD))
    whole_spans = (tiles + SPAN_TILES // 2) // SPAN_TILES  # a span of a few tiles is not worth a piece
    spans = np.minimum(np.minimum(wanted, np.maximum(whole_spans, 1)), blocks.end_span - blocks.first_span)
    if blocks.sink_end is not None:
        spans += (spans > 1) & _sinks_apart(blocks)
    return Pieces(spans, np.maximum(pieces.heads, np.minimum(-(-wanted // spans), kv_heads)))


def _load(rows: Int64, tiles: Int64, heads: Int64 | int) -> Int64:
    return (rows + READ_ROWS) * tiles * heads


def _sink_spans(blocks: RowBlocks) -> Int64 | None:
    return None if blocks.sink_end is None else -(-blocks.sink_end // SPAN_TILES)


def _sinks_apart(blocks: RowBlocks) -> Bools:
    """Tell whether hidden spans separate the sink tokens from the window, [U] bool."""
    sinks = _sink_spans(blocks)
    return np.zeros(len(blocks.sequence), bool) if sinks is None else (sinks > 0) & (sinks < blocks.first_span)


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
    """Make one item per block, as most steps of decoding do."""
    number = np.arange(len(blocks.sequence))
    span_begin = blocks.first_span
    if blocks.sink_end is not None:
        span_begin = np.where(blocks.sink_end > 0, 0, span_begin)
    head_begin, head_end = np.zeros_like(number), np.full_like(number, kv_heads)
    loads = _load(blocks.rows, blocks.tiles, kv_heads)
    return Items(None, number, head_begin, head_end, span_begin, blocks.end_span, loads)


def _order(blocks: RowBlocks, kv_heads: int, pieces: Pieces, block: Int64, index: Int64) -> Int64 | None:
    """Order pieces by sequence, head and row block if a sequence has several blocks. Neighbouring items then read the
    same keys and values, which stay in a core's cache."""
    sequence = blocks.sequence
    if len(sequence) < 2 or not (sequence[1:] <= sequence[:-1]).any():
        return None
    head_begin = index // pieces.spans[block] * kv_heads // pieces.heads[block]
    return np.argsort(sequence[block] * kv_heads + head_begin, kind="stable")


def _span_ranges(blocks: RowBlocks, block: Int64, index: Int64, pieces: Int64) -> tuple[Int64, Int64]:
    """Compute the first span, and the span past the last one, of piece `index` of `pieces`."""
    first, end = blocks.first_span[block], blocks.end_span[block]
    sinks = _sink_spans(blocks)
    if sinks is None:
        return _part(first, end, index, pieces)
    sinks = sinks[block]
    alone = _sinks_apart(blocks)[block] & (pieces > 1)  # sinks get their own piece, so no piece has hidden spans
    first = np.where((sinks > 0) & ~alone, 0, first)
    apart = alone.astype(np.int64)
    begin, stop = _part(first, end, index - apart, np.maximum(pieces - apart, 1))
    of_sinks = alone & (index == 0)
    begin[of_sinks] = 0
    stop[of_sinks] = sinks[of_sinks]
    return begin, stop


def _part(begin: Int64, end: Int64, index: Int64, parts: Int64) -> tuple[Int64, Int64]:
    """Cut part `index` of `parts` even parts out of a range."""
    count: Int64 = end - begin
    return begin + index * count // parts, begin + (index + 1) * count // parts


def _tiles_within(blocks: RowBlocks, block: Int64, begin: Int64, end: Int64) -> Int64:
    """Count the tiles begin .. end - 1 that some row sees."""
    first, stop = blocks.tile_begin[block], blocks.tile_end[block]
    tiles: Int64 = np.maximum(np.minimum(end, stop) - np.maximum(begin, first), 0)
    if blocks.sink_end is None:
        return tiles
    sinks: Int64 = np.maximum(np.minimum(end, blocks.sink_end[block]) - begin, 0)
    return tiles + sinks


def partition(loads: Sequence[int], num_cores: int) -> list[int]:
    """Find the first item of each core, then the number of items. loads: each item's load, not negative.

    No other contiguous ranges have a smaller greatest load. Among equally good ranges, these end as near to equal
    shares as the greatest load allows.
    """
    if num_cores == 1 or not loads:
        return [0] * num_cores + [len(loads)]
    sums = list(accumulate(loads, initial=0))
    limit = _least_limit(sums, max(loads), num_cores)
    return _even_ranges(sums, limit, num_cores)


def greatest_load(loads: Sequence[int], starts: Sequence[int]) -> int:
    sums = list(accumulate(loads, initial=0))
    return max(sums[end] - sums[begin] for begin, end in pairwise(starts))


def _least_limit(sums: list[int], largest: int, num_cores: int) -> int:
    """Find the smallest limit that every core can keep, by bisection over loads that occur."""
    low = max(largest, -(-sums[-1] // num_cores))  # no partition is better
    reached, missed = _fill(sums, low, num_cores)
    if missed is None:
        return reached
    low, high = missed, low + largest  # filling core by core wastes less than one item per core
    while low < high:
        reached, missed = _fill(sums, (low + high) // 2, num_cores)
        if missed is None:
            high = reached
        else:
            low = missed
    return low


def _fill(sums: list[int], limit: int, num_cores: int) -> tuple[int, int | None]:
    """Give each core as much as the limit allows. Return the greatest load of a core and, if items are left over, the
    smallest limit that would give some core more."""
    count = len(sums) - 1
    begin, reached, missed = 0, 0, sums[-1]
    for _ in range(num_cores):
        base = sums[begin]
        end = bisect_right(sums, base + limit, begin) - 1
        reached = max(reached, sums[end] - base)
        if end == count:
            return reached, None
        missed = min(missed, sums[end + 1] - base)
        begin = end
    return reached, missed


def _even_ranges(sums: list[int], limit: int, num_cores: int) -> list[int]:
    """Choose ranges within the limit whose ends are near to equal shares."""
    earliest = [len(sums) - 1]  # from the end: where each core begins if the cores after it take all they can
    for _ in range(num_cores):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - limit, 0, earliest[-1] + 1))
    earliest.reverse()
    starts = [0]
    for core in range(1, num_cores):
        share = sums[-1] * core / num_cores
        nearest = bisect_left(sums, share)
        if nearest > 0 and share - sums[nearest - 1] <= sums[nearest] - share:
            nearest -= 1
        latest = bisect_right(sums, sums[starts[-1]] + limit) - 1
        starts.append(min(max(nearest, earliest[core], starts[-1]), latest))
    return [*starts, len(sums) - 1]
