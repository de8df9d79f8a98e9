"""LoRA: what the adapter of each row adds to the result of a product.

Rows with the same adapter are grouped into items (sizes.group_rows) on the host, and brought to the device with each
step. A launch has a program for as many items as the step may have; those that are left have no rows. So a graph
serves every choice of adapters.

`shrink_rows`: a program owns COLUMNS rows of A, of one piece, and the rows of an item, over all of K: x A^T.
`expand_rows`: a program owns COLUMNS outputs of the rows of an item, over all ranks: what is added to the product.

A row's bits depend on its own adapter alone: x A^T is a product as in products.py, and its product with B is one chain
over ascending ranks. Rows without an adapter are in no item, so nothing writes to them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.ops import LoraTable, Packing
from penstock.kernels.triton.configurations import tile
from penstock.kernels.triton.elements import mma
from penstock.kernels.triton.launch import launch
from penstock.kernels.triton.products import outputs
from penstock.kernels.triton.sizes import ITEM_FIELDS, count_items, item_rows, leaf_table

LANES = tl.constexpr(16)  # columns that a table keeps together
FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit
def item_of(items, index, ROWS: tl.constexpr):
    """Read an item: its slot, its number of rows, which of ROWS these are, and where they are in the step."""
    at = items + index.to(tl.int64) * FIELDS
    slot, first, count = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    place = tl.arange(0, ROWS)
    row = tl.load(items + (first + place).to(tl.int64) * FIELDS, mask=place < count, other=0)
    return slot.to(tl.int64), count, place < count, row.to(tl.int64)


@triton.jit
def shrink_rows(
    x, a, ranks, items, starts, hidden, K, length, max_rank,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    slot, count, is_row, row = item_of(items, tl.program_id(1), ROWS)
    tiles = tl.cdiv(max_rank, COLUMNS)
    piece, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    rank = tl.load(ranks + slot)
    if (count > 0) & (first < rank):
        rn, own = first + tl.arange(0, COLUMNS), a + (slot * PIECES + piece) * max_rank * K
        value = outputs(
            x + row * K, is_row, own, None, None, None, is_row, starts, rn, 0, rank, K, length,
            ROWS, COLUMNS, DEPTH, LEAVES, WHOLE, 1, False, "",
        )  # fmt: skip
        to = hidden + (row * PIECES + piece)[None, :] * max_rank + rn[:, None]
        tl.store(to, value, mask=is_row[None, :] & (rn < rank)[:, None])


@triton.jit
def add_products(b, hidden, sums):
    """Add the product of b with float32 values. For bfloat16, these are three parts, which together are exact."""
    if b.dtype == tl.float32:
        sums = mma(b, hidden, sums)
    else:
        for _ in tl.static_range(3):
            part = hidden.to(b.dtype)
            sums = mma(b, part, sums)
            hidden = hidden - part.to(tl.float32)
    return sums


@triton.jit
def expand_rows(
    hidden, b, ranks, scaled, factors, offsets, items, ends, y, N, y_stride, max_rank,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ends: [PIECES + 1] int32, where pieces begin, and where the last one ends."""
    slot, count, is_row, row = item_of(items, tl.program_id(1), ROWS)
    rank, is_scaled = tl.load(ranks + slot), tl.load(scaled + slot) != 0
    if (count > 0) & ((rank > 0) | is_scaled):
        first, depth = tl.program_id(0) * COLUMNS, tl.arange(0, DEPTH)
        rn = first + tl.arange(0, COLUMNS)
        panel = slot * tl.cdiv(N, LANES) + rn // LANES
        own = b + panel * max_rank * LANES + rn % LANES
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for piece in range(PIECES):
            begin, end = tl.load(ends + piece), tl.load(ends + piece + 1)
            if (begin < first + COLUMNS) & (first < end):
                inside = (begin <= rn) & (rn < end)
                sums = tl.zeros([COLUMNS, ROWS], tl.float32)
                for start in range(0, rank, DEPTH):
                    j = start + depth
                    of_b = inside[:, None] & (j < rank)[None, :]
                    of_row = is_row[None, :] & (j < rank)[:, None]
                    values = tl.load(own[:, None] + j[None, :] * LANES, mask=of_b, other=0.0)
                    at = hidden + (row * PIECES + piece)[None, :] * max_rank + j[:, None]
                    sums = add_products(values, tl.load(at, mask=of_row, other=0.0), sums)
                total = tl.where(inside[:, None], sums, total)
        to, is_column = y + row[None, :] * y_stride + rn[:, None], rn < N
        is_output = is_row[None, :] & is_column[:, None]
        value = tl.load(to, mask=is_output, other=0.0)
        if is_scaled:
            factor = tl.load(factors + slot * N + rn, mask=is_column, other=0.0)
            value = value * factor[:, None] + tl.load(offsets + slot * N + rn, mask=is_column, other=0.0)[:, None]
        tl.store(to, value + total, mask=is_output)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a product, with what kernels read of the sizes of its table.

    Attributes:
        leaves, length, starts: as in TritonLinear.
        ends: as in expand_rows.
    """

    table: LoraTable
    leaves: int
    length: int
    starts: torch.Tensor | None
    ends: torch.Tensor

    @classmethod
    def of(cls, table: LoraTable) -> "Adapters":
        def words(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=table.a.device)

        leaves, length, starts = leaf_table(table.a.shape[-1], Packing(table.leaf_ends))
        return cls(table, leaves, length, None if starts is None else words(starts), words((0, *table.piece_ends)))


def shrink(x: torch.Tensor, adapters: Adapters, items: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute x A^T of the rows that have an adapter into out [M, pieces, max_rank] float32."""
    table, (slots, pieces, max_rank, depth) = adapters.table, adapters.table.a.shape
    found = tile("lora_shrink" + _kind_of(x), len(x))
    launch(
        shrink_rows,
        (pieces * triton.cdiv(max_rank, found.columns), count_items(len(x), slots)),
        *(x, table.a, table.ranks, items, adapters.starts, out, depth, adapters.length, max_rank),
        PIECES=pieces,
        ROWS=item_rows(len(x)),
        COLUMNS=found.columns,
        DEPTH=found.depth,
        LEAVES=adapters.leaves,
        WHOLE=adapters.starts is None and adapters.length % found.depth == 0,
        warps=found.warps,
        stages=found.stages,
    )
    return out


def expand(hidden: torch.Tensor, adapters: Adapters, items: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Change y [M, N] float32 in place, as kernels/ops.py says."""
    table, (slots, pieces, max_rank, _) = adapters.table, adapters.table.a.shape
    found, columns = tile("lora_expand" + _kind_of(table.b), len(y)), y.shape[1]
    launch(
        expand_rows,
        (triton.cdiv(columns, found.columns), count_items(len(y), slots)),
        *(hidden, table.b, table.ranks, table.scaled, table.factors, table.offsets, items, adapters.ends, y, columns),
        *(y.stride(0), max_rank),
        PIECES=pieces,
        ROWS=item_rows(len(y)),
        COLUMNS=found.columns,
        DEPTH=found.depth,
        warps=found.warps,
        stages=found.stages,
    )
    return y


def _kind_of(values: torch.Tensor) -> str:
    return " float32" if values.dtype == torch.float32 else ""
