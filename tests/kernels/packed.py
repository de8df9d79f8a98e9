"""Packed weights and native products without the package's own packing: the layout of native/abi.h, in numpy.

So a test of a product does not depend on the code that packs, and a test of the packing has something to compare with.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.kernels.cpu.library import MAX_LEAVES, PenstockWeight, load_library

PANEL, K_UNIT = 32, 64
KINDS = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3, "int4_a16": 4}
TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "clamped_silu": 4, "relu2": 5, "relu": 6, "tanh": 7}


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest even."""
    floats = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    return floats.bfloat16().view(torch.int16).numpy().view(np.uint16)


def rounded(array: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bfloat16, as float32."""
    return (bf16_bits(array).astype(np.uint32) << 16).view(np.float32)


@dataclass
class Packed:
    """A PenstockWeight, and the arrays that it points to."""

    weight: PenstockWeight
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.weight)


def pack(
    values: np.ndarray,
    kind: str,
    *,
    leaf_ends: Sequence[int] = (),
    slices: int = 0,
    group_size: int = 0,
    column_scales: np.ndarray | None = None,
    group_scales: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    gated: bool = False,
) -> Packed:
    """Pack values [n, k]: floats for f32 and bf16, the integers -127..127 for int8 and -8..7 for int4.

    column_scales [n] float32 (int8); group_scales [n, groups] float32 (int4), whose groups are counted through the
    padded leaves: every leaf begins a new group.
    """
    n, k = values.shape
    ends = list(leaf_ends) or [k]
    unit = max(K_UNIT, group_size)
    lengths = np.diff([0, *ends])
    padded = [-(-int(length) // unit) * unit for length in lengths]
    padded_ends = np.cumsum(padded)
    padded_k = int(padded_ends[-1])
    panels = -(-(n // 2) // (PANEL // 2)) if gated else -(-n // PANEL)
    order = column_order(n, panels, gated)
    wide = np.zeros((panels * PANEL, padded_k), dtype=values.dtype)
    for start, end, to in zip([0, *ends[:-1]], ends, padded_ends - padded, strict=True):
        wide[order >= 0, to : to + end - start] = values[order[order >= 0], start:end]
    arrays = {"values": _panel_values(wide, kind, panels, padded_k)}
    if column_scales is not None:
        arrays["column_scales"] = _columns(column_scales, order)
    if group_scales is not None:
        spread = np.zeros((panels * PANEL, group_scales.shape[1]), dtype=np.float32)
        spread[order >= 0] = group_scales[order[order >= 0]]
        arrays["group_scales"] = bf16_bits(spread.reshape(panels, PANEL, -1).transpose(0, 2, 1))
    if bias is not None:
        arrays["bias"] = _columns(bias, order)
    arrays = {name: aligned(np.ascontiguousarray(array)) for name, array in arrays.items()}
    weight = PenstockWeight(
        n=n, k=k, padded_k=padded_k, panels=panels, kind=KINDS[kind], slices=slices, group_size=group_size,
        gated=int(gated), leaves=len(ends),
        leaf_ends=(ctypes.c_int64 * MAX_LEAVES)(*ends),
        padded_leaf_ends=(ctypes.c_int64 * MAX_LEAVES)(*map(int, padded_ends)),
        **{name: array.ctypes.data for name, array in arrays.items()},
    )  # fmt: skip
    return Packed(weight, arrays)


def column_order(n: int, panels: int, gated: bool) -> np.ndarray:
    """Which row of the weight each packed column is, -1 for padding: [panels * 32]."""
    columns = np.arange(panels * PANEL)
    if not gated:
        return np.where(columns < n, columns, -1)
    half, within = n // 2, columns % PANEL
    index = columns // PANEL * (PANEL // 2) + within % (PANEL // 2)
    return np.where(index < half, index + half * (within >= PANEL // 2), -1)


def _columns(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    return np.where(order >= 0, values[np.maximum(order, 0)], 0).astype(np.float32)


def _panel_values(wide: np.ndarray, kind: str, panels: int, padded_k: int) -> np.ndarray:
    """wide [panels * 32, padded_k] -> the layout of its kind."""
    by_panel = wide.reshape(panels, PANEL, padded_k)
    if kind == "f32":
        return by_panel.transpose(0, 2, 1).astype(np.float32)
    if kind == "bf16":
        return bf16_bits(by_panel.reshape(panels, PANEL, -1, 2).transpose(0, 2, 1, 3))
    quads = by_panel.reshape(panels, PANEL, -1, 4).transpose(0, 2, 1, 3).astype(np.int16)
    if kind == "int8":
        return (quads + 128).astype(np.uint8)
    nibbles = (quads + 8).astype(np.uint8)
    return nibbles[:, :, :16] | nibbles[:, :, 16:] << 4


class Native:
    """A context of the native library, for tests. It is freed with this object, or by `close`."""

    def __init__(self, level: int, threads: int = 1) -> None:
        library: Any = load_library()
        assert library is not None
        self.library = library
        self.context = library.penstock_context_new(level, threads)
        assert self.context
        self.close = weakref.finalize(self, library.penstock_context_free, self.context)

    def linear(
        self, packed: Packed, x: torch.Tensor, *, out_dtype: torch.dtype = torch.float32, activation: str | None = None
    ) -> torch.Tensor:
        """x [M, k] -> [M, n] or, gated and with an activation, [M, n / 2]."""
        columns = packed.weight.n // 2 if packed.weight.gated and activation else packed.weight.n
        out = torch.full((len(x), columns), float("nan"), dtype=out_dtype)
        status = self.library.penstock_linear(
            self.context, packed.address, x.data_ptr(), TYPES[x.dtype], len(x), out.data_ptr(), columns,
            TYPES[out_dtype], ACTIVATIONS[activation],
        )  # fmt: skip
        assert status == 0
        return out


def levels() -> list[int]:
    """Every instruction level that this machine has."""
    library = load_library()
    return [] if library is None else list(range(library.penstock_best_level() + 1))
