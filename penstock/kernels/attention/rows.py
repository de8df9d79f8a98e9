"""Query rows in blocks, and the tiles that each block sees: the first step of planning.

A row of the packed step is token * group + g. A block holds the rows of one sequence, or those of neighbouring
sequences over a prefix that they share, for all kv heads.

Sequences share a span if their block tables name the same blocks for it and all its positions were computed before the
step: then every new row of these sequences sees the whole span. Prefix caching makes such block tables, for example for
a common system prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.kernels.attention.layout import ROW_CAPACITY, SPAN, SPAN_TILES, TILE
from penstock.kernels.tensors import Bools, Int32, Int64


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

    @classmethod
    def of(
        cls, query_start_loc: Int32, seq_lens: Int32, group: int, sliding_window: int | None, num_sink_tokens: int
    ) -> "Sequences":
        """Read the arrays of AttentionMetadata."""
        starts, lengths = query_start_loc.astype(np.int64), seq_lens.astype(np.int64)
        begins, tokens = starts[:-1], int(starts[-1])
        counts = starts[1:] - begins
        is_decode = tokens == len(counts) and bool((counts == 1).all())
        hides = sliding_window is not None and len(lengths) > 0 and lengths.max() > sliding_window
        window, sinks = (sliding_window, num_sink_tokens) if hides else (None, 0)
        return cls(tokens, begins, counts, lengths - counts, lengths, is_decode, group, window, sinks)


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
    last_token = computed + (end - 1) // step.group
    return _with_tiles(step, sequence, first + begin, first + end, computed + begin // step.group, last_token + 1)


def ragged(counts: Int64) -> tuple[Int64, Int64]:
    """Return, for each of counts.sum() entries, its owner and its index among the owner's entries."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _block_sizes(rows: Int64, block_rows: int) -> Int64:
    """Return the rows of each sequence's blocks: equal multiples of ROW_CAPACITY, or all rows in one block."""
    blocks = -(-rows // block_rows)
    equal = -(-rows // np.maximum(blocks, 1))
    size = -(-equal // ROW_CAPACITY) * ROW_CAPACITY
    return np.where(rows <= block_rows, np.maximum(rows, 1), size)


def _with_tiles(step: Sequences, sequence: Int64, begin: Int64, end: Int64, first: Int64, stop: Int64) -> RowBlocks:
    """Return blocks whose rows are at positions first .. stop - 1."""
    tile_end = -(-stop // TILE)
    if step.window is None:
        return RowBlocks(sequence, begin, end, np.zeros_like(tile_end), tile_end)
    tile_begin = np.maximum(first - (step.window - 1), 0) // TILE
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
        """Whether a block sees only a part of the tiles that its rows see, [U]."""
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
    """Return whether two neighbouring sequences begin with the same block: a cheap test that excludes most steps."""
    if block_table.shape[0] < 2 or block_table.shape[1] == 0:
        return False
    first = block_table[:, 0]
    return bool((first[1:] == first[:-1]).any())


def _shared_spans(step: Sequences, block_table: Int32, block_size: int) -> list[int]:
    """Return the number of whole spans that each sequence shares with the next one, [B - 1]."""
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
