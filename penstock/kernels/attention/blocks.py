"""Query rows in blocks, and the tiles that each block sees: what planning begins with.

A row of the packed step is token * group + g. A block holds rows of one sequence (or, over a shared prefix, of
neighbouring sequences), for all kv heads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.layout import ROW_CAPACITY, TILE

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Where the sequences of a step stand, with everything in 64 bits.

    Attributes:
        tokens: new ones, T.
        begins: [B] the first new token of each sequence.
        counts: [B] its new tokens.
        computed: [B] its tokens that were cached before the step.
        lengths: [B] its cached plus new tokens.
        each_one: every sequence has one new token.
        group: query heads of a kv head.
        window: tokens that a row sees, itself included; None where no row misses anything.
        sinks: first tokens that stay visible behind the window; 0 without one.
    """

    tokens: int
    begins: Int64
    counts: Int64
    computed: Int64
    lengths: Int64
    each_one: bool
    group: int
    window: int | None
    sinks: int


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """Blocks of rows, [U] each.

    Attributes:
        sequence: whose block table is read.
        row_begin, row_end: rows of the packed step.
        tile_begin, tile_end: tiles that some row sees, sink tokens aside.
        sink_end: tiles from the first one that hold sink tokens and come before tile_begin; None: there are none.
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


def row_blocks(step: Steps, block_rows: int) -> RowBlocks:
    """The rows of all sequences in blocks of at most block_rows, each with the tiles that its rows see."""
    first = step.begins * step.group
    if step.each_one and step.group <= block_rows:
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
    """For each of counts.sum() entries: whose it is, and the how manieth it is there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _block_sizes(rows: Int64, block_rows: int) -> Int64:
    """Rows of each sequence's blocks: equal multiples of ROW_CAPACITY, or all rows in one."""
    blocks = -(-rows // block_rows)
    equal = -(-rows // np.maximum(blocks, 1))
    size = -(-equal // ROW_CAPACITY) * ROW_CAPACITY
    return np.where(rows <= block_rows, np.maximum(rows, 1), size)


def _with_tiles(step: Steps, sequence: Int64, begin: Int64, end: Int64, first: Int64, stop: Int64) -> RowBlocks:
    """first .. stop - 1: the positions of the block's rows."""
    tile_end = -(-stop // TILE)
    if step.window is None:
        return RowBlocks(sequence, begin, end, np.zeros_like(tile_end), tile_end)
    tile_begin = np.maximum(first - (step.window - 1), 0) // TILE
    if step.sinks == 0:
        return RowBlocks(sequence, begin, end, tile_begin, tile_end)
    return RowBlocks(sequence, begin, end, tile_begin, tile_end, np.minimum(-(-step.sinks // TILE), tile_begin))
