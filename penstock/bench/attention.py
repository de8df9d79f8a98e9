"""Attention against the machine's limits and torch's scaled_dot_product_attention: rows of bench.ops.

attend_decode: each sequence has one new token after many cached ones, in blocks in random order. `gb_s` counts the
cached keys and values (with their scales). One long sequence of a single kv head is measured with all threads and with
one. attend_prefill: all tokens of one sequence are new; `gflop_s` counts four operations per pair of tokens that see
each other, query head and element, `gb_s` the keys and values once.

Caches rotate over more memory than a processor's caches hold. torch gets its best layout: keys and values of each
sequence in one piece; grouped for decoding, one copy per query head (made beforehand) for prefill.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.machine import MachineLimits, Turn, rates, ring_length, take_turns
from penstock.kernels.attention.plan import describe_key
from penstock.kernels.cpu.attention import CpuKVCache
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads

DTYPES = ("bf16", "int8")  # of caches
SLICES = {"bf16": 0, "int8": 2}
CACHE_TYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
BLOCK_SIZE = 16
DECODE_SEQS, DECODE_TOKENS = 8, 4096
DECODE_HEADS = (Heads(32, 4, 64), Heads(32, 8, 128), Heads(8, 1, 128))
LONG_TOKENS, LONG_HEADS = 32768, Heads(8, 1, 128)
PREFILL_TOKENS = 4096
PREFILL_HEADS = (Heads(32, 4, 64), Heads(32, 8, 128))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences with `cached` and `new` tokens each; if `single`, measured with one thread as well."""

    op: str
    heads: Heads
    dtype: str
    seqs: int
    cached: int
    new: int
    single: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per sequence, cached or new, by which the case is named."""
        return self.cached or self.new

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands of both sides and their results, roughly."""
        torch_heads = self.heads.num_heads if self.cached == 0 else self.heads.num_kv_heads
        tokens = self.seqs * (self.cached + self.new)
        return 2 * self.heads.head_dim * tokens * (12 * self.heads.num_kv_heads + 4 * torch_heads)

    def measure(self, backends: dict[torch.dtype, CpuOps], limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield one row per number of threads, without the fractions."""
        yield from SequencesUnderTest(self, backends[torch.bfloat16]).measure(limits)


def decode_cases(dtypes: Sequence[str], heads: Sequence[Heads]) -> Iterator[AttentionCase]:
    """Yield the cases in the order of measuring."""
    cache_types = [dtype for dtype in DTYPES if dtype in dtypes]
    for shape in heads or DECODE_HEADS:
        for dtype in cache_types:
            yield AttentionCase("attend_decode", shape, dtype, DECODE_SEQS, DECODE_TOKENS, 1)
    for dtype in cache_types:
        yield AttentionCase("attend_decode", LONG_HEADS, dtype, 1, LONG_TOKENS, 1, single=True)


def prefill_cases(dtypes: Sequence[str], heads: Sequence[Heads]) -> Iterator[AttentionCase]:
    """Yield the cases in the order of measuring."""
    if "bf16" in dtypes:
        for shape in heads or PREFILL_HEADS:
            yield AttentionCase("attend_prefill", shape, "bf16", 1, 0, PREFILL_TOKENS)


class SequencesUnderTest:
    """A case's queries, new keys and values, and a ring of caches with the tokens before them."""

    def __init__(self, case: AttentionCase, ops: CpuOps) -> None:
        self._case, self._ops = case, ops
        heads, lengths = case.heads, (case.seqs, case.cached + case.new)
        generator = torch.Generator().manual_seed(case.tokens + heads.head_dim)

        def random(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator).sub_(0.5).to(torch.bfloat16)

        q = random(case.seqs, case.new, heads.num_heads, heads.head_dim)
        k, v = (random(*lengths, heads.num_kv_heads, heads.head_dim) for _ in range(2))
        self._q, self._k, self._v = (_rows(x) for x in (q, k[:, case.cached :], v[:, case.cached :]))
        self._tables = _block_tables(case)
        self._caches = self._fill_caches(_rows(k[:, : case.cached]), _rows(v[:, : case.cached]))
        self._plain_q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [seqs, heads, tokens, D]
        if case.cached == 0:
            k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1) for x in (k, v))
        self._plain = [(k.clone(), v.clone()) for _ in range(ring_length(2 * k.nbytes))]
        self._out = torch.empty((case.seqs * case.new, heads.num_heads * heads.head_dim), dtype=torch.bfloat16)
        self._params = AttentionParams(scale=heads.head_dim**-0.5)

    def result(self) -> Tensor:
        """Return [tokens, heads * head_dim] of our kernels."""
        self._call(self._ops, self._metadata(self._ops))(0)
        return self._out

    def measure(self, limits: MachineLimits) -> Iterator[dict[str, Any]]:
        """Yield rows of the table, without the fractions."""
        ring, case = len(self._caches), self._case
        ours = {self._ops.threads: self._ops}
        if case.single:
            ours.setdefault(1, CpuOps(torch.bfloat16, threads=1))
        metas = {threads: self._metadata(ops) for threads, ops in ours.items()}

        turns = [Turn(self._call(ops, metas[threads]), ring) for threads, ops in ours.items()]
        turns.append(Turn(self.torch_call(), len(self._plain)))
        *seconds, torch_seconds = take_turns(turns, limits, case.dtype)
        for threads, taken in zip(ours, seconds, strict=True):
            row = self._row(taken, torch_seconds, threads, metas[threads])
            yield {**row, "speedup": seconds[-1] / taken if case.single else None}

    def _call(self, ops: CpuOps, meta: AttentionMetadata) -> Callable[[int], None]:
        def call(index: int) -> None:
            cache = self._caches[index % len(self._caches)]
            ops.attend(self._q, self._k, self._v, cache, meta, self._params, out=self._out)

        return call

    def _row(self, seconds: float, torch_seconds: float, threads: int, meta: AttentionMetadata) -> dict[str, Any]:
        case, heads = self._case, self._case.heads
        pairs = case.seqs * sum(range(case.cached + 1, case.cached + case.new + 1))
        read = self._caches[0].num_bytes * case.tokens / (self._tables.shape[1] * BLOCK_SIZE)
        return {
            "op": case.op,
            "dtype": case.dtype,
            "leaves": 1,
            "m": None,
            "n": None,
            "k": None,
            "heads": heads.num_heads,
            "kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "seqs": case.seqs,
            "tokens": case.tokens,
            "threads": threads,
            "slices": SLICES[case.dtype],
            "key": "" if meta.plan is None else describe_key(meta.plan.key),
            **rates(seconds, read, 4 * pairs * heads.num_heads * heads.head_dim, torch_seconds),
        }

    def _fill_caches(self, k: Tensor, v: Tensor) -> list[CpuKVCache]:
        """Return a ring of equal caches with the keys and values [seqs * cached, kv heads, D]."""
        case, heads = self._case, self._case.heads
        blocks, dtype = self._tables.numel(), CACHE_TYPES[case.dtype]
        spec = CacheSpec(blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype, SLICES[case.dtype])
        first = CpuKVCache(spec)
        positions = torch.arange(case.cached).expand(case.seqs, -1)
        self._ops.store_kv(first, k, v, self._slots(positions))
        caches = [first]
        for _ in range(ring_length(first.num_bytes) - 1):
            caches.append(CpuKVCache(spec))
            caches[-1].memory.copy_(first.memory)
        return caches

    def _slots(self, positions: Tensor) -> Tensor:
        """Return the cache slots [seqs * n] of positions [seqs, n]."""
        blocks = self._tables.long().gather(1, positions // BLOCK_SIZE)
        return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).reshape(-1)

    def _metadata(self, ops: CpuOps) -> AttentionMetadata:
        case = self._case
        starts = torch.arange(case.seqs + 1, dtype=torch.int32) * case.new
        lengths = torch.full((case.seqs,), case.cached + case.new, dtype=torch.int32)
        slots = self._slots(torch.arange(case.cached, case.cached + case.new).expand(case.seqs, -1))
        return ops.plan(
            AttentionMetadata(starts, lengths, self._tables, slots, BLOCK_SIZE, None), case.heads, self._caches[0]
        )

    def torch_call(self) -> Callable[[int], Tensor]:
        """Return torch's call, which returns [seqs, heads, new, head_dim]."""
        prefill = self._case.cached == 0

        def call(index: int) -> Tensor:
            operands = (self._plain_q, *self._plain[index % len(self._plain)])
            return functional.scaled_dot_product_attention(*operands, is_causal=prefill, enable_gqa=not prefill)

        return call


def _rows(x: Tensor) -> Tensor:
    """Return [seqs, n, heads, D] as [seqs * n, heads, D]."""
    return x.flatten(0, 1).contiguous()


def _block_tables(case: AttentionCase) -> Tensor:
    """Return [seqs, blocks] int32: blocks in random order, as in a server's pool after a while."""
    columns = -(-(case.cached + case.new) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(case.seqs)
    return torch.randperm(case.seqs * columns, generator=generator).int().view(case.seqs, columns)
