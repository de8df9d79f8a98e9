"""Native attention without the package's own plans: paged caches, random plans, and a float64 oracle.

A test makes `Sequences` (queries, keys and values of whole sequences), a `PagedCache` with shuffled blocks that is full
of NaN, and has the sequences go on step by step: `Run.step({row: number of new tokens})`.
"""

import ctypes
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.items import GRANULE, SPAN, cache_token_bytes, padded_head_dim
from penstock.kernels.cpu.library import PenstockAttention, PenstockAttentionStep, PenstockCache

from .packed import TYPES, Native, aligned

KINDS = {"f32": 0, "bf16": 1, "int8": 2}
DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}  # as items.py names them
FINAL = -1  # of an item's `partial`


@dataclass(frozen=True)
class Shape:
    """Of a cache and the queries on it. slices: int8 only."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    kind: str = "f32"
    block_size: int = 16
    slices: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, eq=False)
class Rules:
    """How scores are made and what is seen; kernels/ops.py explains the fields."""

    scale: float = 0.25
    window: int = 0  # 0: none
    kept: int = 0  # num_sink_tokens
    sink_queries: bool = False  # these have queries of their own
    softcap: float = 0.0
    slopes: Tensor | None = None
    bias_before_scale: bool = False
    sink_logits: Tensor | None = None

    def structure(self) -> PenstockAttention:
        slopes, logits = (0 if t is None else t.data_ptr() for t in (self.slopes, self.sink_logits))
        return PenstockAttention(self.scale, self.softcap, slopes, logits, None, int(self.bias_before_scale), 0)


class Sequences:
    """q [n, H, D], k and v [n, Hkv, D] of each sequence, random."""

    def __init__(self, lengths: Sequence[int], shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        parts = [[torch.randn(n, h, shape.head_dim, generator=generator).to(dtype) for n in lengths] for h in heads]
        self.q, self.k, self.v = parts
        self.sink_q = [torch.randn(part.shape, generator=generator).to(dtype) for part in self.q]
        self.lengths, self.shape, self.dtype = list(lengths), shape, dtype


def oracle(sequences: Sequences, rules: Rules, index: int, rows: slice) -> tuple[Tensor, Tensor]:
    """These queries of a sequence in float64, inputs rounded to the cache's type: out [n, H, D], lse [n, H]."""
    rounded = torch.bfloat16 if sequences.shape.kind == "bf16" else sequences.dtype
    q, k, v = (part[index].to(rounded).double() for part in (sequences.q, sequences.k, sequences.v))
    k, v = k[: rows.stop], v[: rows.stop]
    group = sequences.shape.group
    position, key = torch.arange(rows.start, rows.stop)[:, None], torch.arange(rows.stop)[None]
    seen = key <= position
    if rules.window:
        seen &= (key > position - rules.window) | (key < rules.kept)
    s = torch.einsum("qhd,khd->hqk", q[rows], k.repeat_interleave(group, 1))
    if rules.sink_queries:
        sink_q, sinks = sequences.sink_q[index].to(rounded).double(), k[: rules.kept].repeat_interleave(group, 1)
        s[..., : rules.kept] = torch.einsum("qhd,khd->hqk", sink_q[rows], sinks)
    bias = 0 if rules.slopes is None else rules.slopes.double()[:, None, None] * (key - position)
    s = (s + bias) * rules.scale if rules.bias_before_scale else s * rules.scale
    if rules.softcap:
        s = rules.softcap * torch.tanh(s / rules.softcap)
    s = s if rules.bias_before_scale else s + bias
    s = s.masked_fill(~seen, -torch.inf)
    logits = rules.sink_logits
    if logits is not None:
        s = torch.cat([s, logits.double()[:, None, None].expand(-1, s.shape[1], 1)], dim=2)
    lse = torch.logsumexp(s, dim=2)
    p = torch.exp(s - lse[..., None].nan_to_num(neginf=0.0))[..., : rows.stop]
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1)), lse.T


class PagedCache:
    """A cache of one layer in which nobody has written: every byte is 0xFF, so every float is NaN."""

    def __init__(self, shape: Shape, blocks: int, channel_scales: Sequence[Tensor] | None = None) -> None:
        token = cache_token_bytes(
            shape.num_kv_heads, shape.head_dim, DTYPES[shape.kind], token_scales=channel_scales is None
        )
        self.memory = aligned(np.full(blocks * shape.block_size * token, 0xFF, dtype=np.uint8))
        padded = padded_head_dim(shape.head_dim)
        self.shape = shape
        self.scales = []
        for scales in channel_scales or ():  # [Hkv, D]
            wide = np.ones((shape.num_kv_heads, padded), dtype=np.float32)
            wide[:, : shape.head_dim] = scales.numpy()
            self.scales.append(aligned(wide))
        self.structure = PenstockCache(
            self.memory.ctypes.data, blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, padded,
            KINDS[shape.kind], shape.slices, *([s.ctypes.data for s in self.scales] or [0] * 4),
        )  # fmt: skip


@dataclass
class Plan:
    """Items and combines as rows of numbers (native/abi.h); starts [threads + 1]."""

    items: list[tuple[int, ...]] = field(default_factory=list)
    combines: list[tuple[int, ...]] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    partial_rows: int = 0
    starts: list[int] = field(default_factory=list)

    def add(self, sequence: int, heads: tuple[int, int], rows: tuple[int, int], spans: tuple[int, int]) -> None:
        """A final item."""
        self.items.append((sequence, *heads, *rows, *spans, FINAL))

    def add_partial(self, sequence: int, heads: tuple[int, int], rows: tuple[int, int], spans: tuple[int, int]) -> int:
        self.items.append((sequence, *heads, *rows, *spans, self.partial_rows))
        self.partial_rows += (spans[1] - spans[0]) * (heads[1] - heads[0]) * (rows[1] - rows[0])
        return len(self.items) - 1

    def add_combine(self, heads: tuple[int, int], rows: tuple[int, int], items: Sequence[int]) -> None:
        begin = len(self.references)
        self.references += items
        self.combines.append((*heads, *rows, begin, len(self.references)))


def cut(rng: random.Random, begin: int, end: int, pieces: int) -> list[tuple[int, int]]:
    """begin .. end in up to so many random pieces."""
    inner = sorted(rng.sample(range(begin + 1, end), min(rng.randint(0, pieces - 1), end - begin - 1)))
    edges = [begin, *inner, end]
    return list(itertools.pairwise(edges))


def make_plan(
    starts: Sequence[int], lengths: Sequence[int], shape: Shape, threads: int, rng: random.Random | None = None
) -> Plan:
    """One item a sequence; with a random generator, items and combines cut anywhere, in any order, at any thread.

    starts: query_start_loc; lengths: cached and new tokens.
    """
    plan = Plan()
    for sequence, length in enumerate(lengths):
        rows = starts[sequence] * shape.group, starts[sequence + 1] * shape.group
        if rows[0] == rows[1]:
            continue
        spans, heads = -(-length // SPAN), (0, shape.num_kv_heads)
        if rng is None:
            plan.add(sequence, heads, rows, (0, spans))
            continue
        for piece in cut(rng, *rows, 4):
            for part in cut(rng, *heads, 3):
                add_pieces(plan, rng, sequence, part, piece, spans)
    count = len(plan.items)
    plan.starts = [count * t // threads for t in range(threads + 1)]
    if rng is not None:
        plan.starts = [0, *sorted(rng.randint(0, count) for _ in range(threads - 1)), count]
    return plan


def add_pieces(
    plan: Plan, rng: random.Random, sequence: int, heads: tuple[int, int], rows: tuple[int, int], spans: int
) -> None:
    """These rows and heads: final at once, or in pieces that are combined."""
    if rng.random() < 0.5:
        plan.add(sequence, heads, rows, (0, spans))
        return
    items = [plan.add_partial(sequence, heads, rows, part) for part in cut(rng, 0, spans, 3)]
    for combined in cut(rng, *rows, 2):
        for head in cut(rng, *heads, 2):
            plan.add_combine(head, combined, items)


class Step:
    """A PenstockAttentionStep and the arrays that it points to."""

    def __init__(
        self,
        counts: Sequence[int],
        lengths: Sequence[int],
        table: np.ndarray,
        slots: np.ndarray,
        shape: Shape,
        rules: Rules,
        plan: Plan,
    ) -> None:
        starts = np.cumsum([0, *counts])
        staged = [
            0 if n == 0 else (length - 1) // GRANULE - (length - n) // GRANULE + 1
            for n, length in zip(counts, lengths, strict=True)
        ]
        positions = [np.arange(length - n, length) for n, length in zip(counts, lengths, strict=True)]
        self.arrays = {
            "query_start_loc": starts.astype(np.int32),
            "seq_lens": np.array(lengths, dtype=np.int32),
            "block_table": np.ascontiguousarray(table, dtype=np.int32),
            "slot_mapping": np.array(slots, dtype=np.int64),
            "positions": np.concatenate([*positions, [0]]).astype(np.int32),
            "item": np.array(plan.items, dtype=np.int32).reshape(-1, 8),
            "item_starts": np.array(plan.starts, dtype=np.int64),
            "combine": np.array(plan.combines, dtype=np.int32).reshape(-1, 6),
            "references": np.array(plan.references, dtype=np.int32),
            "staged": np.cumsum([0, *staged]).astype(np.int32),
        }
        self.tokens = int(starts[-1])
        self.structure = PenstockAttentionStep(
            sequences=len(counts), tokens=self.tokens, max_blocks=table.shape[1], sliding_window=rules.window,
            num_sink_tokens=rules.kept, items=len(plan.items), combines=len(plan.combines),
            partial_rows=plan.partial_rows, **{name: a.ctypes.data for name, a in self.arrays.items()},
        )  # fmt: skip


class Attention(Native):
    """The attention functions of the native library on tensors."""

    def __init__(self, level: int, threads: int = 1) -> None:
        super().__init__(level, threads)
        self.level, self.threads = level, threads

    def attend(
        self, step: Step, cache: PagedCache, rules: Rules, q: Tensor, k: Tensor, v: Tensor, sink_q: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q and sink_q [T, H, D], k, v [T, Hkv, D] -> out [T, H, D], lse [T, H]."""
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        status = self.attend_status(step, cache, rules, q, k, v, out, lse, sink_q)
        assert status == 0
        return out, lse

    def attend_status(
        self, step: Step, cache: PagedCache, rules: Rules, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        sink_q: Tensor | None = None,
    ) -> int:  # fmt: skip
        assert all(t.is_contiguous() for t in (q, k, v))
        how = rules.structure()
        return self.library.penstock_attend(
            self.context, *(ctypes.addressof(s) for s in (step.structure, cache.structure, how)), q.data_ptr(),
            None if sink_q is None else sink_q.data_ptr(), k.data_ptr(), v.data_ptr(), TYPES[q.dtype], q.shape[1],
            out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip

    def store(self, cache: PagedCache, k: Tensor, v: Tensor, slots: Tensor) -> int:
        return self.library.penstock_cache_store(
            self.context, ctypes.addressof(cache.structure), k.data_ptr(), v.data_ptr(), TYPES[k.dtype],
            slots.data_ptr(), len(slots),
        )  # fmt: skip

    def load(self, cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [tokens, Hkv, D] float32."""
        k, v = (torch.full((len(slots), cache.shape.num_kv_heads, cache.shape.head_dim), torch.nan) for _ in range(2))
        status = self.library.penstock_cache_load(
            self.context, ctypes.addressof(cache.structure), slots.data_ptr(), len(slots), k.data_ptr(), v.data_ptr()
        )
        assert status == 0
        return k, v

    def reserve(self, workspace: int, scratch: int) -> None:
        assert self.library.penstock_attention_reserve(self.context, workspace, scratch) == 0

    def bytes(self, step: Step, cache: PagedCache) -> tuple[int, int]:
        """Workspace and scratch that the step takes."""
        sizes = (ctypes.c_int64 * 2)()
        self.library.penstock_attention_bytes(
            *(ctypes.addressof(s) for s in (step.structure, cache.structure)), ctypes.addressof(sizes)
        )
        return sizes[0], sizes[1]


class Run:
    """Sequences that go on in a cache, step by step.

    ring: each sequence has one block, which its table repeats.
    rng: makes plans that are cut anywhere, and shuffles the blocks.
    """

    def __init__(
        self,
        native: Attention,
        sequences: Sequences,
        rules: Rules,
        *,
        ring: bool = False,
        rng: random.Random | None = None,
        channel_scales: Sequence[Tensor] | None = None,
    ) -> None:
        self.native, self.sequences, self.rules, self.rng = native, sequences, rules, rng
        self.shape, self.ring = sequences.shape, ring
        columns = max(-(-max(sequences.lengths) // self.shape.block_size), 1)
        ids = list(range(len(sequences.lengths) * (1 if ring else columns) + 2))
        if rng is not None:
            rng.shuffle(ids)
        ids = ids[:-2]
        table = np.array(ids, dtype=np.int32).reshape(len(sequences.lengths), -1)
        self.table = np.repeat(table, columns, axis=1) if ring else table
        self.cache = PagedCache(self.shape, len(ids) + 2, channel_scales)
        self.done = [0] * len(sequences.lengths)

    def slots(self, row: int, begin: int, end: int) -> np.ndarray:
        """Of these positions; -1 where a later one of them takes the place."""
        positions = np.arange(begin, end)
        size = self.shape.block_size
        slots = self.table[row, positions // size].astype(np.int64) * size + positions % size
        return np.where(positions < end - size, -1, slots) if self.ring else slots

    def put(self, row: int, count: int) -> None:
        """The next tokens are stored in the cache, without attention."""
        begin, end = self.done[row], self.done[row] + count
        slots = torch.from_numpy(self.slots(row, begin, end))
        k, v = (part[row][begin:end].contiguous() for part in (self.sequences.k, self.sequences.v))
        assert self.native.store(self.cache, k, v, slots) == 0
        self.done[row] = end

    def make_step(self, counts: Mapping[int, int], plan: Plan | None = None) -> Step:
        """So many next tokens of these sequences; `done` counts them already."""
        rows = list(counts)
        lengths = [self.done[row] for row in rows]
        starts = np.cumsum([0, *counts.values()])
        plan = plan or make_plan(starts.tolist(), lengths, self.shape, self.native.threads, self.rng)
        none = np.empty(0, dtype=np.int64)
        slots = np.concatenate([none, *(self.slots(r, self.done[r] - counts[r], self.done[r]) for r in rows)])
        return Step(list(counts.values()), lengths, self.table[rows], slots, self.shape, self.rules, plan)

    def operands(self, counts: Mapping[int, int]) -> list[Tensor]:
        """q, k, v of the tokens that were counted last, and their queries for sinks."""
        s = self.sequences
        return [
            torch.cat([part[row][self.done[row] - n : self.done[row]] for row, n in counts.items()]).contiguous()
            for part in (s.q, s.k, s.v, *([s.sink_q] if self.rules.sink_queries else []))
        ]

    def step(self, counts: Mapping[int, int], plan: Plan | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """The next tokens of these sequences attend in one call -> of each row: out [n, H, D], lse [n, H]."""
        for row, count in counts.items():
            self.done[row] += count
        step = self.make_step(counts, plan)
        out, lse = self.native.attend(step, self.cache, self.rules, *self.operands(counts))
        sizes = list(counts.values())
        return dict(zip(counts, zip(out.split(sizes), lse.split(sizes), strict=True), strict=True))

    def finish(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Steps of these sizes for each sequence, side by side as long as they last -> all results of each."""
        results: dict[int, list[Any]] = {row: [] for row in chunks}
        for turn in range(max(map(len, chunks.values()))):
            counts = {row: sizes[turn] for row, sizes in chunks.items() if turn < len(sizes)}
            for row, result in self.step(counts).items():
                results[row].append(result)
        return {
            row: (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))
            for row, parts in results.items()
        }
