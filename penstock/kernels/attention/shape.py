"""What attention takes of memory: a shape, an item, a step. native/attention_call.h has the same formulas."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.layout import (
    ELEMENT_BYTES,
    GRANULE,
    ROW_CAPACITY,
    TILE,
    cache_token_bytes,
    padded_head_dim,
)

Int64 = npt.NDArray[np.int64]
_Number = TypeVar("_Number", int, Int64)

ROW_UNIT = 16  # arrays of states have room for a multiple of so many rows
ROW_NOTES = 36  # bytes that are known of each row: positions, limits, where its results go
HEAD_NOTES = 4  # and of each row in each head
MAX_ITEM_ROWS = 192
INTEGER_NOTES = 64  # int8: bytes of a row's scale and sums


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the layers of a cache group have in common.

    Attributes:
        kv_cache_dtype: "float32", "bfloat16" or "int8".
        slices: int8 only: rows that stand for a query row, and for a row of probabilities; else 0.
        token_scales: int8 only: scales belong to tokens, not to channels.
        dtype: of queries and results, "float32" or "bfloat16"; the key says it, nothing depends on it.
        level: instruction level of the backend; likewise.
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
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return padded_head_dim(self.head_dim)

    @property
    def query_row_bytes(self) -> int:
        """Of a row as an operand: its elements, or its slices and what is known of them."""
        if self.kv_cache_dtype == "int8":
            return self.padded_dim * self.slices + INTEGER_NOTES
        return self.padded_dim * ELEMENT_BYTES[self.kv_cache_dtype]

    @property
    def state_row_bytes(self) -> int:
        """Of a row's state: m, l and o."""
        return (self.padded_dim + 2) * 4

    @property
    def touched_row_bytes(self) -> int:
        """What each tile touches of a row of a kv head: operand, states of the span and of the row, notes."""
        return self.query_row_bytes + 2 * self.state_row_bytes + ROW_NOTES + HEAD_NOTES

    @property
    def granule_bytes(self) -> int:
        """Of one kv head."""
        return GRANULE * cache_token_bytes(1, self.head_dim, self.kv_cache_dtype, token_scales=self.token_scales)


def workspace_bytes(shape: AttentionShape, staged_granules: int, partial_rows: int) -> int:
    """What the cores share during a step: new tokens as granules, a granule of zeros, states of partial rows."""
    granules = staged_granules * shape.num_kv_heads + 1
    return granules * shape.granule_bytes + _up(partial_rows, ROW_UNIT) * shape.state_row_bytes


def scratch_bytes(shape: AttentionShape, heads: Int64, rows: Int64, states: Int64) -> int:
    """What a core takes for the greatest of some items, [I] each, with so many states of each row and head: two where
    spans fold into a result, one where a span is all there is, none where partial rows are the states."""
    if len(heads) == 0:
        return 0
    notes, operands, state = _rows_bytes(shape)
    items = notes[rows] + heads * (operands[rows] + states * state[rows])
    one_row = ROW_CAPACITY * shape.query_row_bytes
    return int(items.max()) + one_row + TILE // GRANULE * shape.granule_bytes


@lru_cache(maxsize=64)
def _rows_bytes(shape: AttentionShape) -> tuple[Int64, Int64, Int64]:
    """[rows of an item] bytes of notes; of the operand of a head and its notes; of a state of a head."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    room = _up(rows, ROW_UNIT)
    operands = _up(rows, ROW_CAPACITY) * shape.query_row_bytes + room * HEAD_NOTES
    return room * ROW_NOTES, operands, room * shape.state_row_bytes


def _up(count: _Number, unit: int) -> _Number:
    """The next multiple of the unit."""
    return -(-count // unit) * unit
