"""LoRA adapters in a model: the slots that hold them, and what they add to a product.

An adapter changes the weight W [N, K] of a product to W + B A, with A [r, K] and B [N, r] of a small rank r, and to
diag(g) (W + B A) if it is a DoRA adapter. Nothing of W is changed, so every row of a step may have an adapter of its
own: the product is computed for all rows, then each row's adapter is added. A row without one keeps its bits.

A product that computes several products of the checkpoint at once (q, k and v) has an A for each of its pieces.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from penstock.kernels.ops import AdaptingOps, LoraTable, Ops
from penstock.kernels.tensors import FLOAT32, INT32, Array, Slot, Tensor, array_type, rounded
from penstock.spec.param_table import Parameter

NO_ADAPTER = -1  # in place of a slot
MAX_PIECES = 4  # of a product
PADDING_ROWS = 256  # that a class of Transformers may add to those of a step
LANES = 16  # columns that a table keeps together (LoraTable)
IN_A_LAYER, EXPERT = re.compile(r"\.\d+\."), re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """What an adapter changes in one product. With the columns of piece p, y = factors * y + offsets + (x a[p]^T) b^T.

    Attributes:
        a: [pieces, r, K] float32.
        b: [N, r] float32, with the scale of the adapter.
        factors, offsets: [N] float32 each, of DoRA and of biases; None: 1 and 0.
    """

    a: Array
    b: Array
    factors: Array | None = None
    offsets: Array | None = None


Adapter = Mapping[str, AdapterPart]  # by the name of the parameter


def adapter_size(adapter: Adapter) -> int:
    """Count the bytes of an adapter's values."""
    arrays = [(part.a, part.b, part.factors, part.offsets) for part in adapter.values()]
    return sum(item.nbytes for four in arrays for item in four if item is not None)


def is_adaptable(parameter: Parameter) -> bool:
    """Tell whether an adapter may change a parameter: the weight of a product inside a layer, but not of an expert."""
    is_product = len(parameter.shape) == 2 and parameter.quant is True and parameter.name.endswith(".weight")
    return is_product and IN_A_LAYER.search(parameter.name) is not None and not EXPERT.search(parameter.name)


def piece_ends(parameter: Parameter) -> tuple[int, ...]:
    """Find where the rows of each product of a checkpoint end that a parameter joins."""
    joined = [layout.pieces for layout in parameter.layouts if 1 < len(layout.sources) <= MAX_PIECES]
    return tuple(itertools.accumulate(joined[0])) if joined else parameter.shape[:1]


class LoraSlots:
    """The slots of a model, and which of them each row of a step uses.

    Attributes:
        count, max_rank: how many slots there are, and the largest rank of an adapter.
        rows: [tokens, ...] int32, the slot of each row, as the backend groups them. Recorded programs read it at its
            address.
        are_used: whether a row of the step has an adapter.
    """

    def __init__(self, ops: Ops, count: int, max_rank: int, max_tokens: int) -> None:
        self.count, self.max_rank = count, max_rank
        rows = max(max_tokens, ops.fixed_rows) + PADDING_ROWS
        self.rows = ops.tensor(cast(AdaptingOps, ops).group_rows(np.full(rows, NO_ADAPTER, INT32)))
        self.are_used, self._ops = False, ops
        self._views: dict[int, Tensor] = {}

    def choose(self, slots: Array) -> None:
        """Set the slots of a step's rows."""
        self.are_used = bool((slots >= 0).any())
        self.first(len(slots))[:] = self._ops.tensor(cast(AdaptingOps, self._ops).group_rows(slots))

    def first(self, count: int) -> Tensor:
        """View the slots of the first rows. `choose` cuts the view, because a pass that is recorded may not."""
        if count not in self._views:
            self._views[count] = self.rows[:count]
        return self._views[count]


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapters of one product on this device.

    Attributes:
        piece_ends: where the columns of each piece end.
        leaf_ends: as in Packing; those of this device.
        hidden: a buffer [M, pieces, max_rank] float32 for x A^T.
        sums: a buffer [M, N] float32 for the product before its activation; None for a product without one.
        cut: takes a rank's own part of an adapter; None: this device has the whole product.
    """

    slots: LoraSlots
    piece_ends: tuple[int, ...]
    leaf_ends: tuple[int, ...]
    hidden: Slot
    sums: Slot | None = None
    cut: Callable[[AdapterPart], AdapterPart] | None = None


@dataclass(slots=True)
class LoraLinear:
    """The adapters of one product."""

    ops: Ops
    spec: LoraSpec
    shape: tuple[int, ...]
    _table: LoraTable = field(init=False)

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        slots, (n, k), pieces = self.spec.slots, self.shape, len(self.spec.piece_ends)
        element = array_type(self.ops.dtype).itemsize
        columns = -(-n // LANES) * LANES
        return slots.count * (slots.max_rank * (pieces * k + columns) * element + 2 * n * FLOAT32.itemsize)

    def allocate(self) -> None:
        """Allocate the slots, all empty."""
        slots, (n, k), dtype = self.spec.slots, self.shape, str(array_type(self.ops.dtype))
        self._table = LoraTable(
            self.ops.empty((slots.count, len(self.spec.piece_ends), slots.max_rank, k), dtype),
            self.ops.empty((slots.count, -(-n // LANES), slots.max_rank, LANES), dtype),
            self.ops.empty((slots.count, n), "float32"),
            self.ops.empty((slots.count, n), "float32"),
            self.ops.tensor(np.zeros(slots.count, INT32)),
            self.ops.tensor(np.zeros(slots.count, INT32)),
            self.spec.piece_ends,
            self.spec.leaf_ends or (k,),
        )

    def load(self, slot: int, part: AdapterPart | None) -> None:
        """Put a part of an adapter into a slot; None: the adapter does not change this product."""
        table = self._table
        table.ranks[slot] = table.scaled[slot] = 0
        if part is None:
            return
        part = part if self.spec.cut is None else self.spec.cut(part)
        rank = part.b.shape[1]
        table.a[slot, :, :rank] = self._stored(part.a)
        panels = np.pad(part.b, ((0, -len(part.b) % LANES), (0, 0))).reshape(-1, LANES, rank)
        table.b[slot, :, :rank] = self._stored(panels.transpose(0, 2, 1))
        table.ranks[slot] = rank
        if part.factors is not None or part.offsets is not None:
            n = self.shape[0]
            table.factors[slot] = self.ops.tensor(np.ones(n, FLOAT32) if part.factors is None else part.factors)
            table.offsets[slot] = self.ops.tensor(np.zeros(n, FLOAT32) if part.offsets is None else part.offsets)
            table.scaled[slot] = 1

    def _stored(self, values: Array) -> Tensor:
        return self.ops.tensor(rounded(np.ascontiguousarray(values), self.ops.dtype))

    def shrink(self, x: Tensor) -> Tensor:
        """Compute x A^T, [M, pieces, max_rank] float32."""
        rows = x.shape[0]
        slots, out = self.spec.slots.first(rows), self.spec.hidden(rows)
        return cast(AdaptingOps, self.ops).lora_shrink(x, self._table, slots, out=out)

    def expand(self, hidden: Tensor, y: Tensor) -> Tensor:
        """Change the result y [M, N] float32 of the product in place, and return it."""
        return cast(AdaptingOps, self.ops).lora_expand(hidden, self._table, self.spec.slots.first(y.shape[0]), y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Change the result y of the product of x, as `expand` does."""
        return self.expand(self.shrink(x), y)
