"""Sizes in attention: tiles and spans, the bytes of a cached token, and the memory of an item and of a step. No torch.

A tile is 64 positions that begin at a multiple of 64; a span is 32 tiles. Both are constants of the numerics version
and alone decide the order of sums, whatever the block size and the load. native/attention/call.h has the same formulas.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from penstock.kernels.tensors import Int64

_Number = TypeVar("_Number", int, Int64)

TILE = 64  # L: positions jL .. (j+1)L-1 make a tile
SPAN_TILES = 32  # C: tiles folded in ascending order before spans are folded
SPAN = TILE * SPAN_TILES
GRANULE = 16  # positions that are contiguous in memory; a block is a multiple of it
DIM_UNIT = 32  # the native kernels pad a head's elements to a multiple of this
MAX_HEAD_DIM = 256  # the native kernels' limit
ROW_CAPACITY = 48  # the native kernels' operands have room for a multiple of this many rows
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # by kv_cache_dtype
TOKEN_SCALE_BYTES = 16  # int8: scale and offset of key and value of one head of a token, float32

ROW_UNIT = 16  # arrays of states have room for a multiple of this many rows
ROW_METADATA_BYTES = 36  # per row: positions, limits, where its results go
HEAD_METADATA_BYTES = 4  # per row and head
MAX_ITEM_ROWS = 192
INT8_METADATA_BYTES = 64  # int8: a row's scale and sums


def padded_head_dim(head_dim: int) -> int:
    """Return the number of elements that the native cache stores for a head."""
    return _round_up(head_dim, DIM_UNIT)


def cache_token_bytes(
    num_kv_heads: int, head_dim: int, kv_cache_dtype: str, *, padded: bool = True, token_scales: bool = True
) -> int:
    """Return the bytes of one token's keys and values in one layer.

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
    """Return the bytes that cores share in a step: new tokens as granules, a granule of zeros, partial rows' states."""
    granules = staged_granules * shape.num_kv_heads + 1
    return granules * shape.granule_bytes + _round_up(partial_rows, ROW_UNIT) * shape.state_row_bytes


def scratch_bytes(shape: AttentionShape, heads: Int64, rows: Int64, states: Int64) -> int:
    """Return the bytes that a core needs for the largest of some items, given the heads, rows and states of each, [I].

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
    """Return, by an item's number of rows, the bytes of its metadata, of a head's operand, and of its state."""
    rows = np.arange(MAX_ITEM_ROWS + 1)
    room = _round_up(rows, ROW_UNIT)
    operands = _round_up(rows, ROW_CAPACITY) * shape.query_row_room + room * HEAD_METADATA_BYTES
    return room * ROW_METADATA_BYTES, operands, room * shape.state_row_bytes


def _round_up(count: _Number, unit: int) -> _Number:
    """Round up to a multiple of the unit."""
    return -(-count // unit) * unit
