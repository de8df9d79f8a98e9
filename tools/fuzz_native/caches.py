"""Targets for the attention cache: storing and reading keys and values."""

import numpy as np

from penstock.kernels.cpu.library import PenstockCache
from penstock.kernels.cpu.ops import CpuKVCache
from penstock.kernels.metadata import CacheSpec, Heads, KVScales
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT8, INT32, INT64, Array, ArrayType
from tools.fuzz_native.target import OK, OUT_OF_RANGE, TYPES, Fuzz

STORED = {FLOAT32: 0.0, BFLOAT16: 2**-8, INT8: 2**-6}  # error of a stored value, relative to its head's largest value


class Paged:
    """An unwritten cache in guarded memory (every float is NaN), and sequences with random blocks.

    Leading blocks of a sequence may be those of the previous one.
    """

    def __init__(self, fuzz: Fuzz, lengths: list[int], shared: int = 0) -> None:
        self.fuzz, self.lengths, choice = fuzz, lengths, fuzz.random.choice
        kv_heads, self.dtype = choice((1, 2)), fuzz.dtype()
        self.heads = Heads(kv_heads * choice((1, 3, 8)), kv_heads, choice((2, 8, 30, 32, 34, 64, 130)))
        kind, block_size = choice((FLOAT32, BFLOAT16, INT8)), choice((16, 48))
        columns = [-(-length // block_size) for length in lengths]
        same = shared // block_size
        blocks = fuzz.numbers.permutation(sum(columns) + 1).astype(INT32)
        self.table = np.full((len(lengths), max([1, *columns])), -1, dtype=INT32)
        for row, count in enumerate(columns):
            self.table[row, :count] = blocks[sum(columns[:row]) :][:count]
            if row and same:
                self.table[row, :same] = self.table[row - 1, :same]
        scales = _channel_scales(fuzz, kv_heads, self.heads.head_dim) if kind is INT8 and fuzz.chance(0.4) else None
        slices = choice((2, 3)) if kind is INT8 else 0
        spec = CacheSpec(len(blocks), block_size, kv_heads, self.heads.head_dim, kind, slices, scales)
        self.cache = CpuKVCache(spec)
        memory = fuzz.array(np.full(self.cache.num_bytes, 0xFF, dtype=np.uint8))
        PenstockCache.from_address(self.cache.address).memory = memory.address

    @property
    def kind(self) -> ArrayType:
        kind: ArrayType = self.cache.spec.dtype
        return kind

    def slots(self, row: int, start: int, end: int) -> Array:
        at, size = np.arange(start, end), self.cache.spec.block_size
        found: Array = self.table[row].astype(INT64)[at // size] * size + at % size
        return found

    def random(self, tokens: int, heads: int) -> Array:
        return self.fuzz.normal(tokens, heads, self.heads.head_dim, dtype=self.dtype).values

    def store(self, k: Array, v: Array, slots: Array, expected: int = OK) -> None:
        given = self.fuzz.array(k), self.fuzz.array(v), TYPES[self.dtype], self.fuzz.array(slots)
        self.fuzz.call("cache_store", self.cache.address, *given, len(slots), expected=expected)

    def load(self, slots: Array, expected: int = OK) -> tuple[Array, Array]:
        shape = len(slots), self.heads.num_kv_heads, self.heads.head_dim
        k, v = self.fuzz.out(shape), self.fuzz.out(shape)
        self.fuzz.call("cache_load", self.cache.address, self.fuzz.array(slots), len(slots), k, v, expected=expected)
        return k.values, v.values


def _channel_scales(fuzz: Fuzz, kv_heads: int, head_dim: int) -> KVScales:
    shape = kv_heads, head_dim
    scales = (fuzz.numbers.uniform(0.03, 0.04, shape).astype(FLOAT32) for _ in range(2))
    offsets = (fuzz.numbers.uniform(-3, 3, shape).astype(FLOAT32) for _ in range(2))
    return KVScales(next(scales), next(offsets), next(scales), next(offsets))


def cache_store(fuzz: Fuzz) -> None:
    """Store some tokens of a sequence, skip others, and read all back. Slots beyond the cache must be refused."""
    length = fuzz.size(1, 129)
    paged = Paged(fuzz, [length])
    k, v = (paged.random(length, paged.heads.num_kv_heads) for _ in range(2))
    slots, end = paged.slots(0, 0, length), paged.cache.spec.num_blocks * paged.cache.spec.block_size
    stored = fuzz.numbers.random(length) < 0.7
    given = np.where(stored, slots, fuzz.random.choice((-1, -(2**63))))
    if fuzz.chance(0.2):
        given[fuzz.random.randrange(length)] = fuzz.random.choice((end, 2**62))
        paged.store(k, v, given, OUT_OF_RANGE)
        return
    paged.store(k, v, given)
    for found, right in zip(paged.load(slots[stored]), (k[stored], v[stored]), strict=True):
        right = right.astype(np.float64)
        largest = np.abs(right).max(axis=2, keepdims=True, initial=0) + (1 if paged.cache.spec.scales else 0)
        wrong = np.abs(found - right) > STORED[paged.kind] * largest
        if paged.cache.spec.scales is not None:  # values outside a channel's range are clipped
            wrong &= np.abs(right) < 3
        assert not wrong.any(), f"cache_load: {found[wrong][:3]} where {right[wrong][:3]} was stored"


def cache_load(fuzz: Fuzz) -> None:
    """Read no slots, and read slots that are negative or too large, which must be refused."""
    paged = Paged(fuzz, [33])
    end = paged.cache.spec.num_blocks * paged.cache.spec.block_size
    slots = paged.slots(0, 0, 33)[: fuzz.size(0, 33)]
    if not len(slots):
        paged.load(slots)
        return
    slots[fuzz.random.randrange(len(slots))] = fuzz.random.choice((-1, -(2**63), end, 2**62))
    paged.load(slots, OUT_OF_RANGE)


TARGETS = {"cache_store": cache_store, "cache_load": cache_load}
