"""Work: what attention launches for a step, planned on the host, and brought to the device by one copy.

Rows are grouped into items (attention.py), and an item into spans. Both decide what is computed by one program, and no
bit. Steps that may be recorded have work of a few forms, so that one program serves many steps: their sizes are rounded
up, with items of a sequence that has no tokens.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import AttentionMetadata, CacheSpec, Heads
from penstock.kernels.tensors import as_array
from penstock.kernels.triton.cache import TritonCache
from penstock.kernels.triton.configurations import tile as configuration
from penstock.kernels.triton.sizes import SPAN, STATES_BYTES

FEW = 64  # rows of a kv head, at most, that get a program for each span
COLUMNS = 16  # of the table of a form that steps share, at least
ALIGNED = 16  # words; kernels are compiled for addresses that are multiples of so many bytes
PARTS = "slots", "query_start", "lengths", "table", "few", "many"
Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Items:
    """Items of one number of rows each.

    Attributes:
        items: [N, 2] int32: the sequence, and the item's first row.
        rows: of an item; a power of two.
        spans: how many spans an item sees at most, those of the sinks included.
    """

    items: Tensor
    rows: int
    spans: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What attention launches for a step, in one buffer on the device.

    Attributes:
        query_start, lengths, table, slots: AttentionMetadata's query_start_loc, seq_lens, block_table, slot_mapping.
        few, many: None: no such item.
        memory: [n] int32, in which all of them are.
        form: where they are, and how large.
    """

    query_start: Tensor
    lengths: Tensor
    table: Tensor
    slots: Tensor
    few: Items | None = None
    many: Items | None = None
    memory: Tensor | None = None
    form: "Form | None" = None


@dataclass(frozen=True, slots=True)
class PlannedMetadata(AttentionMetadata):
    """Metadata on the device, and what is launched for it."""

    work: Work = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Form:
    """The sizes of the work of a step, each of which decides what is launched, and none of them a bit.

    Attributes:
        columns: of the block table.
        few_rows, many_rows: rows of an item of either kind.
        few, many: how many items there are of either kind.
        spans: as in Items, of items of few rows.
    """

    tokens: int
    sequences: int
    columns: int
    few_rows: int
    many_rows: int
    few: int
    many: int
    spans: int

    def shared(self) -> "Form":
        """Round up to a form that many steps have, with at least one sequence of no tokens for items that have none."""
        few = self.few if self.few == self.tokens else _power_of_two(self.few)
        columns, spans = max(COLUMNS, _power_of_two(self.columns)), _power_of_two(self.spans)
        many = _power_of_two(self.many)
        return replace(self, sequences=self.tokens + 1, columns=columns, few=few, many=many, spans=spans)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """List the shapes of the parts of the buffer, the last of which are items of few and of many rows."""
        own = (2 * self.tokens,), (self.sequences + 1,), (self.sequences,), (self.sequences, self.columns)
        return dict(zip(PARTS, (*own, (self.few, 2), (self.many, 2)), strict=True))

    def views(self, memory: Any) -> dict[str, Any]:
        """View the parts of a buffer, an array or a tensor. The slots are words of 64 bits."""
        found, start = {}, 0
        for name, shape in self.parts().items():
            size = math.prod(shape)
            found[name] = memory[start : start + size].reshape(shape)
            start += -(-size // ALIGNED) * ALIGNED
        return found

    @property
    def size(self) -> int:
        """The words of the buffer."""
        return sum(-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in self.parts().values())

    def work(self, device: torch.device) -> Work:
        """Allocate the buffer."""
        memory = torch.empty(self.size, dtype=torch.int32, device=device)
        view = self.views(memory)
        few = Items(view["few"], self.few_rows, self.spans) if self.few else None
        many = Items(view["many"], self.many_rows) if self.many else None
        places = view["query_start"], view["lengths"], view["table"], view["slots"].view(torch.int64)
        return Work(*places, few, many, memory, self)

    def fill(self, work: Work, meta: AttentionMetadata, few: Pairs, many: Pairs) -> None:
        """Copy a step to the device, all at once, without waiting. few, many: what Items.items holds."""
        memory = work.memory
        assert memory is not None
        # torch keeps this memory until it is copied
        host = torch.empty(self.size, dtype=torch.int32, device="cpu", pin_memory=memory.is_cuda)
        view, table = self.views(host.numpy()), as_array(meta.block_table)
        starts, lengths = as_array(meta.query_start_loc), as_array(meta.seq_lens)
        view["slots"].view(np.int64)[:] = as_array(meta.slot_mapping)
        for name, own, rest in (("query_start", starts, self.tokens), ("lengths", lengths, 0)):
            view[name][: len(own)], view[name][len(own) :] = own, rest
        view["table"][: len(table), : table.shape[1]] = table
        for name, pairs in (("few", few), ("many", many)):
            view[name][: len(pairs)] = np.array(pairs, dtype=np.int32).reshape(-1, 2)
            view[name][len(pairs) :] = self.sequences - 1, 0
        memory.copy_(host, non_blocking=True)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0


def plan(
    meta: AttentionMetadata, heads: Heads, cache: TritonCache, device: torch.device, *, recorded: bool = False
) -> PlannedMetadata:
    """Choose which rows are computed together. It decides no bit.

    recorded: the step may be computed by a program, so its work has a form that many steps share.

    Raises:
        NotSupportedError: the step overwrites tokens that it attends to (a ring).
        ValueError: as in AttentionMetadata.check_blocks.
    """
    meta.check_blocks(len(cache.keys))
    starts, lengths, slots = (as_array(item) for item in (meta.query_start_loc, meta.seq_lens, meta.slot_mapping))
    new, group = np.diff(starts), heads.num_heads // heads.num_kv_heads
    stored = np.concatenate([[0], np.cumsum(slots >= 0)])[starts]
    if np.any((np.diff(stored) < new) & (new > 1)):
        raise NotSupportedError("kernels: 'triton' has no ring of a sliding window; use blocks", param="block_size")
    rows = new * group
    is_few, sizes = rows <= FEW, many_rows(cache)
    few_rows = 16 if rows[is_few].max(initial=0) <= 16 else min(FEW, sizes)
    found: list[Pairs] = []
    for own, size in ((is_few & (rows > 0), few_rows), (~is_few, sizes)):
        pairs = [(row, first) for row in np.flatnonzero(own).tolist() for first in range(0, rows[row], size)]
        pairs.sort(key=lambda pair: new[pair[0]] - lengths[pair[0]] - pair[1] // group)  # the longest begin first
        found.append(pairs)
    few, many = found
    spans = 0
    if few:
        sees = int(lengths[is_few].max())
        spans = -(-sees // SPAN)
        if meta.sliding_window is not None:
            spans = min(spans, (meta.sliding_window + few_rows // group + SPAN - 1) // SPAN + 1)
        spans += -(-min(meta.num_sink_tokens, sees) // SPAN)
    columns = meta.block_table.shape[1]
    form = Form(len(slots), len(lengths), columns, few_rows, sizes, len(few), len(many), spans)
    form = form.shared() if recorded else form
    work = form.work(device)
    form.fill(work, meta, few, many)
    places = work.query_start[: len(starts)], work.lengths[: len(lengths)], work.table[: len(lengths), :columns]
    window = meta.sliding_window, meta.num_sink_tokens
    return PlannedMetadata(*places, work.slots, meta.block_size, *window, chunked=meta.chunked, work=work)


def many_rows(cache: TritonCache) -> int:
    """Return how many rows an item of many rows has."""
    return configuration(f"attend_rows{kind_of(cache)}", cache.spec.head_dim).rows


def kind_of(cache: TritonCache) -> str:
    return {torch.int8: " int8", torch.float32: " float32"}.get(cache.keys.dtype, "")


def states_at_once(spec: CacheSpec, few: Items) -> int:
    """Count the items whose states of spans exist at once: an even number, so that items begin at aligned addresses."""
    own = item_bytes(spec, few.spans, few.rows)
    return max(2, STATES_BYTES // own // 2 * 2)


def item_bytes(spec: CacheSpec, spans: int, rows: int) -> int:
    """Count the bytes of the states of an item of few rows."""
    return 4 * spec.num_kv_heads * spans * rows * (spec.head_dim + 2)
