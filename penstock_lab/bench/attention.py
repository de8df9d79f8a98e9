"""Compare attention with the machine's limits and with torch's scaled_dot_product_attention, as rows of bench.ops.

attend_decode: each sequence has one new token after many cached tokens, which lie in blocks in random order. `gb_s`
counts the cached keys and values (with their scales). The long sequence with a single kv head is measured with all
threads and with one. attend_prefill: all tokens of one sequence are new; `gflop_s` counts four operations per pair of
tokens that see each other, per query head and element; `gb_s` counts the keys and values once.

torch gets its best layout: the keys and values of each sequence in one piece. For decoding they are grouped; for
prefill each query head has its own copy, which is made beforehand.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.config import TRITON
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, KVCache
from penstock.kernels.ops import Ops
from penstock.kernels.triton.device import TILE
from penstock_lab.bench.machine import MachineLimits, ring_length, time_in_rounds
from penstock_lab.bench.native import describe_key
from penstock_lab.bench.products import uniform
from penstock_lab.bench.samples import Work

DTYPES = ("bf16", "int8")  # of caches
SLICES = {"bf16": 0, "int8": 2}
CACHE_TYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
BLOCK_SIZES = {"cpu": 16, TRITON: TILE}
DECODE_SEQS, DECODE_TOKENS = 8, 4096
DECODE_HEADS = (Heads(32, 4, 64), Heads(32, 8, 128), Heads(8, 1, 128))
LONG_TOKENS, LONG_HEADS = 32768, Heads(8, 1, 128)
PREFILL_TOKENS = 4096
PREFILL_HEADS = DECODE_HEADS[:2]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences with `cached` and `new` tokens each. If `single`, the case is measured with one thread as well."""

    op: str
    heads: Heads
    dtype: str
    seqs: int
    cached: int
    new: int
    single: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per sequence, cached or new, that name the case."""
        return self.cached or self.new

    @property
    def operand_bytes(self) -> int:
        """Approximate bytes of the operands and results of both sides."""
        torch_heads = self.heads.num_heads if self.cached == 0 else self.heads.num_kv_heads
        tokens = self.seqs * (self.cached + self.new)
        return 2 * self.heads.head_dim * tokens * (12 * self.heads.num_kv_heads + 4 * torch_heads)

    def measure(self, backends: dict[torch.dtype, Any], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield one row per number of threads."""
        backend = backends[torch.bfloat16]
        sequences, heads = SequencesUnderTest(self, backend), self.heads
        on_cpu = isinstance(backend, CpuOps)
        ours = {backend.threads if on_cpu else 1: backend}
        if self.single and on_cpu:
            ours.setdefault(1, CpuOps(torch.bfloat16, threads=1))
        calls, keys = zip(*map(sequences.call, ours.values()), strict=True)
        timed = [limits.timed(call, sequences.caches) for call in calls]
        timed.append(limits.timed(sequences.torch_call, sequences.plain))
        pairs = self.seqs * sum(range(self.cached + 1, self.cached + self.new + 1))
        operations = 4 * pairs * heads.num_heads * heads.head_dim
        passes = max(1, SLICES[self.dtype])
        work = Work(round(sequences.read_bytes), Counter({self.dtype: operations * passes}))
        results = time_in_rounds(timed, work, limits)
        case = {"op": self.op, "dtype": self.dtype, "leaves": 1, "m": None, "n": None, "k": None}
        shape = {"heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        for threads, key, measured in zip(ours, keys, results, strict=True):
            yield {
                **case,
                **shape,
                "seqs": self.seqs,
                "tokens": self.tokens,
                "threads": threads,
                "slices": SLICES[self.dtype],
                "key": key,
                **measured.figures(sequences.read_bytes, operations, limits),
                "speedup": results[-1].seconds / measured.seconds if self.single else None,
            }


def decode_cases(dtypes: Sequence[str], heads: Sequence[Heads]) -> Iterator[AttentionCase]:
    cache_types = [dtype for dtype in DTYPES if dtype in dtypes]
    for shape in heads or DECODE_HEADS:
        for dtype in cache_types:
            yield AttentionCase("attend_decode", shape, dtype, DECODE_SEQS, DECODE_TOKENS, 1)
    for dtype in cache_types:
        yield AttentionCase("attend_decode", LONG_HEADS, dtype, 1, LONG_TOKENS, 1, single=True)


def prefill_cases(dtypes: Sequence[str], heads: Sequence[Heads]) -> Iterator[AttentionCase]:
    if "bf16" in dtypes:
        for shape in heads or PREFILL_HEADS:
            yield AttentionCase("attend_prefill", shape, "bf16", 1, 0, PREFILL_TOKENS)


class SequencesUnderTest:
    """The queries, new keys and new values of a case, and a ring of caches that hold the tokens before them.

    Attributes:
        caches: ring of equal caches for the kernels.
        plain: ring of equal (keys, values) for torch, each [seqs, heads, tokens, head_dim].
        read_bytes: bytes that the case's tokens take in a cache.
    """

    def __init__(self, case: AttentionCase, ops: Ops) -> None:
        self._case, heads, lengths = case, case.heads, (case.seqs, case.cached + case.new)
        self._block_size = BLOCK_SIZES[ops.name]
        generator = torch.Generator().manual_seed(case.tokens + heads.head_dim)
        q = uniform((case.seqs, case.new, heads.num_heads, heads.head_dim), torch.bfloat16, generator).to(ops.device)
        kv_shape = (*lengths, heads.num_kv_heads, heads.head_dim)
        k, v = (uniform(kv_shape, torch.bfloat16, generator).to(ops.device) for _ in range(2))
        self._q, self._k, self._v = (_rows(x) for x in (q, k[:, case.cached :], v[:, case.cached :]))
        self._tables = _block_tables(case, self._block_size)
        self.caches = self._fill_caches(ops, _rows(k[:, : case.cached]), _rows(v[:, : case.cached]))
        self.read_bytes = self.caches[0].num_bytes * case.tokens / (self._tables.shape[1] * self._block_size)
        self._plain_q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        if case.cached == 0:
            k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1) for x in (k, v))
        self.plain = [(k.clone(), v.clone()) for _ in range(ring_length(2 * k.nbytes))]
        self._out: Tensor = ops.empty((case.seqs * case.new, heads.num_heads * heads.head_dim), "bfloat16")
        self._params = AttentionParams(scale=heads.head_dim**-0.5)

    def call(self, ops: Ops) -> tuple[Callable[[KVCache], Tensor], str]:
        """Plan a backend's call, from a cache to [tokens, heads * head_dim], and describe the plan."""
        case = self._case
        starts = torch.arange(case.seqs + 1, dtype=torch.int32) * case.new
        lengths = torch.full((case.seqs,), case.cached + case.new, dtype=torch.int32)
        slots = self._slots(case.cached, case.cached + case.new)
        metadata = AttentionMetadata(starts, lengths, self._tables, slots, self._block_size, None)
        planned = ops.plan(metadata, case.heads, self.caches[0])

        def attend(cache: KVCache) -> Tensor:
            ops.attend(self._q, self._k, self._v, cache, planned, self._params, out=self._out)
            return self._out

        return attend, "" if planned.plan is None else describe_key(planned.plan.key)

    def torch_call(self, keys_and_values: tuple[Tensor, Tensor]) -> Tensor:
        """Attend with torch: [seqs, heads, new, head_dim]."""
        prefill = self._case.cached == 0
        operands = (self._plain_q, *keys_and_values)
        return functional.scaled_dot_product_attention(*operands, is_causal=prefill, enable_gqa=not prefill)

    def _fill_caches(self, ops: Ops, k: Tensor, v: Tensor) -> list[KVCache]:
        """Make a ring of equal caches that hold the keys and values [seqs * cached, kv heads, D]."""
        case, heads = self._case, self._case.heads
        blocks, dtype = self._tables.numel(), CACHE_TYPES[case.dtype]
        spec = CacheSpec(blocks, self._block_size, heads.num_kv_heads, heads.head_dim, dtype, SLICES[case.dtype])
        first = ops.new_kv_cache(spec)
        caches, slots = [first] * ring_length(first.num_bytes), self._slots(0, case.cached).to(ops.device)
        for index in range(len(caches)):
            caches[index] = ops.new_kv_cache(spec) if index else first
            ops.store_kv(caches[index], k, v, slots)
        return caches

    def _slots(self, start: int, end: int) -> Tensor:
        """List the cache slots [seqs * (end - start)] of these positions of every sequence."""
        positions = torch.arange(start, end)
        size = self._block_size
        return (self._tables.long()[:, positions // size] * size + positions % size).flatten()


def _rows(x: Tensor) -> Tensor:
    """Flatten [seqs, n, heads, D] to [seqs * n, heads, D]."""
    return x.flatten(0, 1).contiguous()


def _block_tables(case: AttentionCase, block_size: int) -> Tensor:
    """Deal out [seqs, blocks] int32: blocks in random order, as in the block pool of a busy server."""
    columns = -(-(case.cached + case.new) // block_size)
    generator = torch.Generator().manual_seed(case.seqs)
    return torch.randperm(case.seqs * columns, generator=generator).int().view(case.seqs, columns)
