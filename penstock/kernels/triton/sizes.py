"""What kernels on a GPU take of its memory, counted without torch, Triton or a GPU: the tensors of packed weights, and
the limits of what lies between two kernels. CountingOps stands for TritonOps where a model is only planned. Also, how
rows are grouped by their LoRA adapters."""

import math
from itertools import pairwise

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.ops import PLAIN, Packing
from penstock.kernels.tensors import NAMES, Array, ArrayType, array_type
from penstock.kernels.triton.device import LEAVES

# Tokens of programs. Up to 16, products compute as many rows whatever the step has; above, at most half more than it
# has; and beyond 256, kernels take longer than the Python that launches them.
PROGRAM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GATE_BYTES = 2**26  # of gates and what they multiply, for weights whose kernels cannot gate: some rows at a time
ALIGNED_ROWS = 16  # a multiple of so many begins at an aligned address
SPAN = 512  # positions that attention sums up at a time
STATES_BYTES = 2**27  # of the states of spans that exist at once, at most, unless one pair of items has more
QUAD = 4  # groups whose int4 values share words
ITEM_FIELDS = 4  # of a row of what group_rows returns
MAX_INTEGER_LEAF = 2**16  # elements; a longer sum of products of two bytes may overflow an int32


def shapes(
    shape: tuple[int, ...], packing: Packing, dtype: str, *, bias: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    """List the shapes and types of the tensors of a packed weight. dtype: the name of the model's type.

    Raises:
        NotSupportedError: no kernel multiplies such a weight.
        ValueError: the shape or the leaves are invalid.
    """
    (n, k), scheme = shape, packing.scheme
    leaves, length, _ = leaf_table(k, packing)
    if n < 1 or k < 1 or (packing.gated and n % 2):
        raise ValueError(
            f"a weight of the shape {list(shape)} cannot be packed{' for a gate' if packing.gated else ''}"
        )
    if packing.coding is not None:
        raise NotSupportedError(
            f"quantization: {packing.coding.name} needs the kernels 'cpu' or 'reference'", param="quantization"
        )
    found: dict[str, tuple[tuple[int, ...], str]] = {"values": ((n, k), dtype)}
    if scheme is not None and scheme.slices and length > MAX_INTEGER_LEAF:
        raise NotSupportedError(
            f"quantization: {scheme.name} sums at most {MAX_INTEGER_LEAF} products, and this model has {k}",
            param="quantization",
        )
    if scheme is not None and scheme.group_size is None:
        found |= {"values": ((n, k), "int8"), "scales": ((n,), "float32")}
    elif scheme is not None and scheme.group_size is not None:
        quads = leaves * -(-length // (QUAD * scheme.group_size))
        found["values"] = (n, quads * scheme.group_size), "int16"
        found["scales"] = (QUAD * quads, n), "bfloat16"
    if bias:
        found["bias"] = (n,), "float32"
    return found


def count_bytes(shape: tuple[int, ...], packing: Packing, dtype: str, *, bias: bool) -> int:
    """Count the bytes of a packed weight."""
    found = shapes(shape, packing, dtype, bias=bias).values()
    return sum(math.prod(size) * NAMES[kind].itemsize for size, kind in found)


def leaf_table(k: int, packing: Packing) -> tuple[int, int, tuple[int, ...] | None]:
    """Find the number of leaves, the length of the longest, and where they begin unless all are equally long."""
    ends = packing.leaf_ends or (k,)
    lengths = [end - start for start, end in pairwise((0, *ends))]
    leaves = 1 << (len(ends) - 1).bit_length()
    if leaves > 8 or ends[-1] != k or min(lengths) < 0:
        raise ValueError(f"{k} elements cannot be cut into leaves that end at {list(ends)}")
    if len(set(lengths)) == 1 and leaves == len(ends):
        return leaves, lengths[0], None
    return leaves, max(lengths), (0, *ends, *[k] * (leaves - len(ends)))


def item_rows(tokens: int) -> int:
    """Choose how many rows with the same adapter one program computes, at most, in a step of so many tokens."""
    return 16 if tokens <= PROGRAM_ROWS[-1] else 64


def count_items(tokens: int, slots: int) -> int:
    """Count the items that a step may have: each has item_rows rows but for the last one of each adapter."""
    return min(tokens, -(-tokens // item_rows(tokens)) + slots)


def group_rows(slots: Array) -> Array:
    """Group rows by their slots [M] int32 (-1: none), and cut the groups into items.

    Returns:
        [M, ITEM_FIELDS] int32. The first column lists the rows that have a slot, those with the same one together. The
        others describe item i: its slot, where its rows begin in that list, and their number; 0 beyond the last item.
    """
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    grouped, found = slots[order], np.zeros((len(slots), ITEM_FIELDS), np.int32)
    found[: len(order), 0] = order
    within = np.arange(len(order)) - np.searchsorted(grouped, grouped)  # place in its group
    first = np.flatnonzero(within % item_rows(len(slots)) == 0)
    found[: len(first), 1:] = np.stack([grouped[first], first, np.diff(first, append=len(order))], axis=1)
    return found


class CountingOps:
    """The sizes of TritonOps, and none of its operations. Its tensors have a shape and a type, and no memory."""

    name, device, is_planned, fixed_rows = "triton", "cpu", True, PROGRAM_ROWS[-1]
    experts = None  # layers of experts keep the operation, and nothing calls it
    group_rows = staticmethod(group_rows)

    def __init__(self, dtype: str, leaves: int = LEAVES) -> None:
        self.dtype: ArrayType = NAMES[dtype]
        self.leaves = leaves

    def tensor(self, array: Array) -> Array:
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.broadcast_to(np.zeros((), NAMES[dtype]), shape)

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        return count_bytes(shape, packing, str(array_type(self.dtype)), bias=bias)
