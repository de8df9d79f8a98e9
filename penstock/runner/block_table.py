"""BlockTable: the block ids of every row for one cache group, as one array.

It follows what the scheduler says (append, release) and never decides about a block. It does not know how a block is
laid out: it hands out slots, block id * block_size + offset, and copies of its rows.
"""

import numpy as np
import numpy.typing as npt

from penstock.errors import EngineError
from penstock.interface.step import CacheGroup

NO_BLOCK = -1
NO_SLOT = -1


class BlockTable:
    """Block ids by position // block_size, -1 where nothing is allocated.

        row:  [ -1 released (behind the window) | block ids | -1 not allocated yet ]
              0                    num_released     num_entries          max_blocks

    A row of a ring repeats its one block id as far as max_model_len reaches, so that whoever reads the table needs to
    know nothing of rings.

    Attributes:
        group: the cache group that the table addresses.
    """

    def __init__(self, group: CacheGroup, max_num_seqs: int, max_model_len: int) -> None:
        max_blocks = -(-max_model_len // group.block_size)
        self.group = group
        self._ids: npt.NDArray[np.int32] = np.full((max_num_seqs, max_blocks), NO_BLOCK, dtype=np.int32)
        self._num_entries = [0] * max_num_seqs
        self._num_released = [0] * max_num_seqs

    def append(self, row: int, block_ids: list[int]) -> None:
        """Add entries at the end of a row.

        Raises:
            EngineError: the row would be longer than max_model_len needs, or a ring would have two blocks.
        """
        if self.group.ring and block_ids:
            block_ids = self._all_around(row, block_ids)
        start = self._num_entries[row]
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            raise EngineError(f"a block table holds {self._ids.shape[1]} blocks, and {end} were given")
        self._ids[row, start:end] = block_ids
        self._num_entries[row] = end

    def _all_around(self, row: int, block_ids: list[int]) -> list[int]:
        """What a ring's row holds from end to end."""
        if len(block_ids) > 1 or self._num_entries[row]:
            raise EngineError("a ring is one block, and more were given")
        return block_ids * int(self._ids.shape[1])

    def release(self, row: int, num_released: int) -> None:
        """Make the first num_released entries -1. The number counts from the start of the row, not since last time."""
        start = self._num_released[row]
        if num_released > start:
            self._ids[row, start:num_released] = NO_BLOCK
            self._num_released[row] = num_released

    def clear(self, row: int) -> None:
        """Empty a row."""
        self._ids[row, : self._num_entries[row]] = NO_BLOCK
        self._num_entries[row] = self._num_released[row] = 0

    def slots(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where the tokens at `positions` [T] of `rows` [T] are stored: [T] int64. In a ring a token is not stored
        (NO_SLOT) whose row a later one of the same step takes; `ends` [T] says where its sequence ends in this step.

        Raises:
            EngineError: a token has no block.
        """
        block_size = self.group.block_size
        block_ids = self._ids[rows, positions // block_size].astype(np.int64)
        if block_ids.size and block_ids.min() < 0:
            raise EngineError("a token was scheduled whose block is not allocated")
        slots = block_ids * block_size + positions % block_size
        return np.where(ends - positions > block_size, NO_SLOT, slots) if self.group.ring else slots

    def gather(self, rows: npt.NDArray[np.int64], longest: int) -> npt.NDArray[np.int32]:
        """A copy of `rows` [B], cut to the blocks that `longest` tokens need: [B, max_blocks] int32."""
        return self._ids[rows, : -(-longest // self.group.block_size)]
