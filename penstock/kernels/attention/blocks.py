"""Query rows in blocks, and the tiles that each block sees: the first step of planning.

A row of the packed step is token * group + g. A block holds rows of one sequence (or, over a shared prefix, of
neighbouring sequences), for all kv heads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.layout import ROW_CAPACITY, TILE

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Where the sequences of a step stand, in 64 bits.

    Attributes:
        tokens: number of new tokens, T.
        begins: [B] the first new token of each sequence.
        counts: [B] its new tokens.
        computed: [B] its tokens that were cached before the step.
        lengths: [B] its cached plus new tokens.
        is_decode: every sequence has one new token.
        group: query heads per kv head.
        window: tokens that a row sees, itself included; None where the window hides nothing.
        sinks: first tokens that stay visible before the window; 0 without a window.
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
        sequence: whose block table is read.
        row_begin, row_end: rows of the packed step.
        tile_begin, tile_end: tiles that some row sees, sink tokens aside.
        sink_end: end of the tiles, from the first one, that hold sink tokens and precede tile_begin; None: no sinks.
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
        """Tiles that some row sees."""
        tiles = self.tile_end - self.tile_begin
        return tiles if self.sink_end is None else tiles + self.sink_end


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
