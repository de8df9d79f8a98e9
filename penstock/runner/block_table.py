"""BlockTable: the block ids of all rows of the InputBatch, for one cache group."""

import numpy as np

from penstock.errors import EngineError
from penstock.interface.step import NO_BLOCK, CacheGroup
from penstock.kernels.tensors import Int32, Int64

NO_SLOT = -1


class BlockTable:
    """Block ids by position // block_size; -1 where no block is allocated.

        row:  [ -1 released (before the window) | block ids | -1 not allocated yet ]
              0                    num_released     num_entries          max_blocks

    A row of a ring repeats its only block id up to max_model_len, so that readers need no special case for rings.

    Attributes:
        group: the cache group that the table addresses.
        version: incremented by every change of a row.
    """

    def __init__(self, group: CacheGroup, max_num_seqs: int, max_model_len: int) -> None:
        max_blocks = -(-max_model_len // group.block_size)
        self.group = group
        self._ids: Int32 = np.full((max_num_seqs, max_blocks), NO_BLOCK, dtype=np.int32)
        self._num_entries = [0] * max_num_seqs
        self._num_released = [0] * max_num_seqs
        self.version = 0

    def append(self, row: int, block_ids: list[int]) -> None:
        """Append block ids to a row.

        Raises:
            EngineError: the row would exceed max_model_len, or a ring would have two blocks.
        """
        if self.group.ring and block_ids:
            if len(block_ids) > 1 or self._num_entries[row]:
                raise EngineError("a ring is one block, and more were given")
            block_ids = block_ids * int(self._ids.shape[1])
        start = self._num_entries[row]
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            raise EngineError(f"a block table holds {self._ids.shape[1]} blocks, and {end} were given")
        self.version += 1
        self._ids[row, start:end] = block_ids
        self._num_entries[row] = end

    def release(self, row: int, num_released: int) -> None:
        """Set the first num_released entries to -1, counted from the start of the row."""
        start = self._num_released[row]
        if num_released > start:
            self.version += 1
            self._ids[row, start:num_released] = NO_BLOCK
            self._num_released[row] = num_released

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.version += 1
        self._ids[row, : self._num_entries[row]] = NO_BLOCK
        self._num_entries[row] = self._num_released[row] = 0

    def slots(self, rows: Int64, positions: Int64, ends: Int64) -> Int64:
        """Return the slots [T] int64 of the tokens at `positions` [T] of `rows` [T].

        In a ring, a token is not stored (NO_SLOT) if a later token of the same step takes its place. ends: [T], the
        length of each token's sequence after the step.

        Raises:
            EngineError: a token has no block.
        """
        block_size = self.group.block_size
        block_ids = self._ids[rows, positions // block_size].astype(np.int64)
        if np.count_nonzero(block_ids < 0):
            raise EngineError("a token was scheduled whose block is not allocated")
        slots = block_ids * block_size + positions % block_size
        return np.where(ends - positions > block_size, NO_SLOT, slots) if self.group.ring else slots

    def begins_block(self, positions: Int64) -> bool:
        """Return whether any of `positions` is the first position of a block."""
        return bool(np.count_nonzero(positions % self.group.block_size) < len(positions))

    def gather(self, rows: Int64, longest: int) -> Int32:
        """Copy `rows` [B], cut to the blocks that `longest` tokens need: [B, max_blocks] int32."""
        return self._ids[rows, : -(-longest // self.group.block_size)]
