"""Guarded memory, and Fuzz: random operands for one context, and the checks that targets share."""

import ctypes
import mmap
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.kernels.cpu.library import ABI
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT64, Array, ArrayType

SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129, 1000)
EXTREME = (np.nan, np.inf, -np.inf, 3e38, 1e-40, -0.0)
BEFORE = 0xA5  # bytes of the page before an operand
PROT_NONE = 0
TYPES = {FLOAT32: ABI.constants["TYPE_F32"], BFLOAT16: ABI.constants["TYPE_BF16"]}
PRECISION = {FLOAT32: 1e-4, BFLOAT16: 2**-7}  # relative error of a result that is summed in float32 and rounded once
OK, OUT_OF_RANGE = ABI.constants["STATUS_OK"], ABI.constants["STATUS_OUT_OF_RANGE"]
libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory of `count` bytes that ends at a page without access; ctypes passes its address.

    Attributes:
        values: the memory as an array.
    """

    def __init__(self, count: int, dtype: ArrayType = FLOAT32, shape: tuple[int, ...] | None = None) -> None:
        self._room = -(-max(count, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._room + mmap.PAGESIZE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = self._room - count
        self._map[: self._start] = bytes([BEFORE]) * self._start
        if libc.mprotect(ctypes.c_void_p(self._base + self._room), mmap.PAGESIZE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = self._as_parameter_ = self._base + self._start
        number = count // dtype.itemsize
        self.values = np.frombuffer(self._map, dtype, number, self._start).reshape(
            (number,) if shape is None else shape
        )

    def check(self, name: str) -> None:
        """Raise AssertionError if a byte before the operand was written."""
        if self._map[: self._start] != bytes([BEFORE]) * self._start:
            raise AssertionError(f"{name}: wrote before an operand")


class Fuzz:
    """Random operands for one context. A target is a function that takes a Fuzz and calls one entry point.

    Attributes:
        context: a context at the instruction level, with `threads` threads.
        random, numbers: the sources of all random choices.
    """

    def __init__(self, library: ctypes.CDLL, level: int, seed: int, threads: int = 2) -> None:
        self.library, self.level, self.seed, self.threads = library, level, seed, threads
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.context = library.penstock_context_new(level, threads)
        self._kept: list[Guarded] = []

    def close(self) -> None:
        self.library.penstock_context_free(self.context)

    def call(self, name: str, *args: Any, expected: int = OK) -> None:
        """Call an entry point, and check its status and the memory before the operands.

        Raises:
            AssertionError: the status is not the expected one, or memory before an operand was written.
        """
        status = getattr(self.library, f"penstock_{name}")(self.context, *args)
        for operand in self._kept:
            operand.check(name)
        if status != expected:
            raise AssertionError(f"{name}: status {status} where {expected} is right")

    def forget(self) -> None:
        """Free the operands of a finished target."""
        self._kept.clear()

    # --- operands

    def size(self, low: int = 0, high: int = 1000) -> int:
        return self.random.choice([size for size in SIZES if low <= size <= high])

    def rows(self) -> int:
        return self.random.choice((0, 1, 2, 3, 5))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def dtype(self) -> ArrayType:
        return self.random.choice((FLOAT32, BFLOAT16))

    def array(self, values: Array) -> Guarded:
        """Return guarded memory with these values."""
        guarded = self.out(values.shape, values.dtype)
        guarded.values[...] = values
        return guarded

    def out(self, shape: tuple[int, ...], dtype: ArrayType = FLOAT32) -> Guarded:
        """Return guarded memory of zeros."""
        self._kept.append(Guarded(int(np.prod(shape)) * dtype.itemsize, dtype, shape))
        return self._kept[-1]

    def normal(self, *shape: int, dtype: ArrayType = FLOAT32) -> Guarded:
        return self.array(self.numbers.standard_normal(shape).astype(np.float32).astype(dtype))

    def floats(self, *shape: int, dtype: ArrayType = FLOAT32) -> Guarded:
        """Return normally distributed numbers; with probability 0.3 one of them is extreme."""
        guarded = self.normal(*shape, dtype=dtype)
        if guarded.values.size and self.chance(0.3):
            guarded.values.reshape(-1)[self.random.randrange(guarded.values.size)] = self.random.choice(EXTREME)
        return guarded

    def ids(self, *shape: int, limit: int) -> tuple[Guarded, int]:
        """Return int64 ids, and the expected status of a call with them: sometimes an id is out of range."""
        guarded, expected = self.array(self.numbers.integers(0, limit, shape, dtype=INT64)), OK
        if guarded.values.size and self.chance(0.2):
            at, expected = self.random.randrange(guarded.values.size), OUT_OF_RANGE
            guarded.values.reshape(-1)[at] = self.random.choice((-1, limit, 2**62, -(2**63)))
        return guarded, expected

    # --- checks

    def close_to(self, found: Array, expected: Array, tolerance: float | Array = 1e-4) -> None:
        """Compare results with numpy's, where those are finite and not near the largest float32.

        Raises:
            AssertionError: they differ by more than the tolerance, which is absolute below 1 and relative above.
        """
        with np.errstate(all="ignore"):
            certain = np.abs(expected) < 1e30
            wrong = np.abs(found.astype(np.float64) - expected) > tolerance * np.maximum(np.abs(expected), 1)
            wrong |= ~np.isfinite(found.astype(np.float64))
        if (wrong & certain).any():
            at = np.argwhere(wrong & certain)[0]
            raise AssertionError(f"{found[tuple(at)]} at {at.tolist()} where {expected[tuple(at)]} is right")

    def same_alone(self, compute: Callable[[Array], Array], rows: int) -> Array:
        """Return compute(all rows), after comparing the bits of one row with those of the row computed alone.

        Raises:
            AssertionError: a bit differs.
        """
        whole = compute(np.arange(rows)).copy()
        if rows:
            row = self.random.randrange(rows)
            same_bits(compute(np.array([row]))[0], whole[row])
        return whole


def same_bits(one: Array, other: Array) -> None:
    """Raise AssertionError unless all bits are the same. All NaNs count as equal."""
    if not np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True):
        raise AssertionError(f"the bits of a row depend on what was computed with it: {one}, {other}")
