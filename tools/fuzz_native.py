"""Call the entry points of the native library with random shapes, each operand against a page that may not be touched.

    python tools/fuzz_native.py [CALLS]          CALLS per entry point; 300 if absent

Sizes are at edges: 0, 1, odd, one more or less than a vector. An operand ends where its page ends, so a read or write
beyond it ends the process; bytes before it are compared afterwards. `make sanitize` runs it under the sanitizers.
Products, experts, attention, caches and sampling need packed weights, plans and parameters: the tests of tests/kernels
make these, and run under the sanitizers too.
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.library import LEVELS, load_library

SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129, 1000)
BEFORE = 0xA5  # bytes of the page before an operand
PROT_NONE = 0
F32, BF16 = ABI.constants["TYPE_F32"], ABI.constants["TYPE_BF16"]
ITEM_BYTES = {F32: 4, BF16: 2}
libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory of `count` bytes that ends at a page without access."""

    def __init__(self, count: int, content: bytes | None = None) -> None:
        self._room = -(-max(count, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._room + mmap.PAGESIZE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = self._room - count
        self._map[: self._start] = bytes([BEFORE]) * self._start
        if content is not None:
            self._map[self._start : self._room] = content
        if libc.mprotect(ctypes.c_void_p(self._base + self._room), mmap.PAGESIZE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = self._base + self._start

    def check(self, name: str) -> None:
        """Raise AssertionError if a byte before the operand was written."""
        if self._map[: self._start] != bytes([BEFORE]) * self._start:
            raise AssertionError(f"{name}: wrote before an operand")


class Fuzz:
    """Random operands for one context; each method calls one entry point."""

    def __init__(self, library: ctypes.CDLL, level: int, seed: int) -> None:
        self.library = library
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.context = library.penstock_context_new(level, 2)
        self.kept: list[Guarded] = []

    def call(self, name: str, *args: Any) -> None:
        getattr(self.library, f"penstock_{name}")(self.context, *args)
        for operand in self.kept:
            operand.check(name)
        self.kept.clear()

    def size(self, low: int = 0) -> int:
        return self.random.choice([size for size in SIZES if size >= low])

    def rows(self) -> int:
        return self.random.choice((0, 1, 2, 3, 5))

    def floats(self, count: int) -> int:
        """Return the address of `count` float32 numbers, a few of them extreme."""
        values = self.numbers.standard_normal(count).astype(np.float32)
        if count and self.random.random() < 0.3:
            values[self.random.randrange(count)] = self.random.choice((np.nan, np.inf, -np.inf, 3e38, 1e-40, -0.0))
        return self._keep(4 * count, values.tobytes())

    def ids(self, count: int, limit: int) -> int:
        """Return the address of `count` int64 ids, now and then one out of range."""
        values = self.numbers.integers(0, limit, count)
        if count and self.random.random() < 0.2:
            values[self.random.randrange(count)] = self.random.choice((-1, limit, 2**62, -(2**63)))
        return self._keep(8 * count, values.astype(np.int64).tobytes())

    def out(self, count: int, item_bytes: int = 4) -> int:
        return self._keep(count * item_bytes, None)

    def _keep(self, num_bytes: int, content: bytes | None) -> int:
        self.kept.append(Guarded(num_bytes, content))
        return self.kept[-1].address

    # --- the entry points

    def rms_norm(self) -> None:
        rows, n, kind = self.rows(), self.size(1), self.random.choice((F32, BF16))
        out = self.out(rows * n, ITEM_BYTES[kind])
        self.call("rms_norm", self.floats(rows * n), self.floats(n), 1e-5, rows, n, out, kind)

    def add_rms_norm(self) -> None:
        rows, n, kind = self.rows(), self.size(1), self.random.choice((F32, BF16))
        x, h, out = self.floats(rows * n), self.floats(rows * n), self.out(rows * n, ITEM_BYTES[kind])
        self.call("add_rms_norm", x, h, self.floats(n), 1e-5, rows, n, out, kind)

    def layer_norm(self) -> None:
        rows, n, kind = self.rows(), self.size(1), self.random.choice((F32, BF16))
        bias = self.random.choice((None, self.floats(n)))
        out = self.out(rows * n, ITEM_BYTES[kind])
        self.call("layer_norm", self.floats(rows * n), self.floats(n), bias, 1e-5, rows, n, out, kind)

    def add_layer_norm(self) -> None:
        rows, n, kind = self.rows(), self.size(1), self.random.choice((F32, BF16))
        x, h, out = self.floats(rows * n), self.floats(rows * n), self.out(rows * n, ITEM_BYTES[kind])
        self.call("add_layer_norm", x, h, self.floats(n), None, 1e-5, rows, n, out, kind)

    def add(self) -> None:
        count = self.size() * self.rows()
        self.call("add", self.floats(count), self.floats(count), count)

    def round(self) -> None:
        count, kind = self.size() * self.rows(), self.random.choice((F32, BF16))
        self.call("round", self.floats(count), count, self.out(count, ITEM_BYTES[kind]), kind)

    def softcap(self) -> None:
        count = self.size() * self.rows()
        self.call("softcap", self.floats(count), 30.0, count)

    def embedding(self) -> None:
        rows, n, table_rows = self.rows(), self.size(1), self.size(1)
        ids, table = self.ids(rows, table_rows), self.floats(table_rows * n)
        self.call("embedding", ids, table, F32, table_rows, rows, n, 2.0, self.out(rows * n))

    def rotary_qkv(self) -> None:
        rows, kv_heads, head_dim = self.rows(), self.random.choice((1, 2)), 2 * self.random.randint(1, 40)
        heads, kind = kv_heads * self.random.choice((1, 3)), self.random.choice((F32, BF16))
        positions, rotary = self.size(1), 2 * self.random.randint(1, head_dim // 2)
        q_norm, k_norm = self.random.choice(((0, 0), (head_dim, head_dim), (heads * head_dim, kv_heads * head_dim)))
        outs = [self.out(rows * count * head_dim, ITEM_BYTES[kind]) for count in (heads, kv_heads, kv_heads)]
        self.call(
            "rotary_qkv", self.floats(rows * (heads + 2 * kv_heads) * head_dim), self.ids(rows, positions),
            self.floats(positions * rotary), positions, rotary, rows, heads, kv_heads, head_dim,
            self.floats(q_norm) if q_norm else None, q_norm, self.floats(k_norm) if k_norm else None, k_norm,
            1e-6, *outs, kind,
        )  # fmt: skip

    def route(self) -> None:
        rows, experts = self.rows(), self.random.choice((1, 2, 3, 8, 60, 64))
        top_k = self.random.randint(1, min(experts, 8))
        out_ids, out_weights = self.out(rows * top_k, 8), self.out(rows * top_k)
        self.call("route", self.floats(rows * experts), rows, experts, top_k, 1, out_ids, out_weights)

    def log_softmax(self) -> None:
        rows, vocab = self.rows(), self.size(1)
        self.call("log_softmax", self.floats(rows * vocab), rows, vocab, self.out(rows * vocab))

    def finite_rows(self) -> None:
        rows, vocab = self.rows(), self.size(1)
        self.call("finite_rows", self.floats(rows * vocab), rows, vocab, self.out(rows, 1))


ENTRY_POINTS: tuple[Callable[[Fuzz], None], ...] = (
    Fuzz.rms_norm, Fuzz.add_rms_norm, Fuzz.layer_norm, Fuzz.add_layer_norm, Fuzz.add, Fuzz.round, Fuzz.softcap,
    Fuzz.embedding, Fuzz.rotary_qkv, Fuzz.route, Fuzz.log_softmax, Fuzz.finite_rows,
)  # fmt: skip


def main(calls: int) -> None:
    """Call each entry point so often at each level of this machine."""
    library = load_library()
    if library is None:
        raise SystemExit("there is no native library")
    for level in range(library.penstock_best_level() + 1):
        fuzz = Fuzz(library, level, seed=level)
        for entry_point in ENTRY_POINTS:
            for _ in range(calls):
                entry_point(fuzz)
        library.penstock_context_free(fuzz.context)
        print(f"{LEVELS[level]}: {len(ENTRY_POINTS)} entry points, {calls} calls each", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
