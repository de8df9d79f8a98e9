"""Measure the speed of attention on this machine, for a prompt and for streams, with each type of cache. No torch."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.config import KV_CACHE_SLICES
from penstock.kernels.cpu.ops import CpuKVCache, CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT8

BLOCK_SIZE = 16
PROMPT_LEN, PROMPT_HEADS = 2048, Heads(8, 2, 64)  # a quarter of a layer's heads: the same speed, measured in less time
STREAMS, CONTEXT, STREAM_HEADS = 8, 1024, Heads(32, 8, 64)
CACHE_TYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}


def attention_cases(wide: CpuOps, narrow: CpuOps) -> dict[str, Callable[[], float]]:
    """Return the cases `TYPE attend prompt` and `TYPE attend streams` for each TYPE of cache.

    A case returns operations per second, counted as in planner/costs.py.
    wide, narrow: backends that compute in float32 and in bfloat16.
    """
    cases: dict[str, Callable[[], float]] = {}
    for kind, dtype in CACHE_TYPES.items():
        ops = wide if kind == "float32" else narrow
        slices = KV_CACHE_SLICES[str(ops.element)] if kind == "int8" else 0
        for name, heads, lengths in (
            ("prompt", PROMPT_HEADS, (1, 0, PROMPT_LEN)),
            ("streams", STREAM_HEADS, (STREAMS, CONTEXT - 1, 1)),
        ):
            sequences, cached, new = lengths
            spec = CacheSpec(sequences * (-(-(cached + new) // BLOCK_SIZE)), BLOCK_SIZE, heads.num_kv_heads,
                             heads.head_dim, dtype, slices)  # fmt: skip
            attend = _attention(ops, heads, CpuKVCache(spec), sequences, cached, new)
            pairs = sequences * (new * cached + new * (new + 1) / 2)
            operations = 4 * pairs * heads.num_heads * heads.head_dim * max(1, slices)
            cases[f"{kind} attend {name}"] = partial(_rate, attend, operations)
    return cases


def _attention(
    ops: CpuOps, heads: Heads, cache: CpuKVCache, sequences: int, cached: int, new: int
) -> Callable[[], Any]:
    """Return a call in which each sequence attends with `new` tokens after `cached` ones, in equally many blocks."""
    columns = cache.spec.num_blocks // sequences
    cache.memory[...] = 0
    table = np.arange(sequences * columns, dtype=np.int32).reshape(sequences, columns)
    positions = np.arange(cached, cached + new)
    slots = (table[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
    starts = np.arange(sequences + 1, dtype=np.int32) * new
    lengths = np.full(sequences, cached + new, dtype=np.int32)
    planned = ops.plan(AttentionMetadata(starts, lengths, table, slots, BLOCK_SIZE, None), heads, cache)
    generator = np.random.default_rng(0)
    q, k, v = (
        (generator.random((sequences * new, count, heads.head_dim), dtype=np.float32) - 0.5).astype(ops.element)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    out = np.empty((sequences * new, heads.num_heads * heads.head_dim), ops.element)
    params = AttentionParams(scale=heads.head_dim**-0.5)
    return lambda: ops.attend(q, k, v, cache, planned, params, out=out)


def _rate(attend: Callable[[], Any], operations: float) -> float:
    started = time.perf_counter()
    attend()
    return operations / (time.perf_counter() - started)
