"""How fast attention goes on this machine: of a prompt, and of streams over a cache of each type. No torch."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.config import KV_CACHE_SLICES
from penstock.kernels.cpu.attention import CpuKVCache
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT8

HEADS = Heads(32, 8, 64)
BLOCK_SIZE = 16
PROMPT_LEN = 1024
STREAMS, CONTEXT = 8, 1024
CACHE_TYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}


def attention_cases(wide: CpuOps, narrow: CpuOps) -> dict[str, Callable[[], float]]:
    """Return what measures operations per second: `TYPE attend prompt`, and `TYPE attend streams`, of a cache of TYPE.

    Operations count as planner/costs.py counts them. wide, narrow: backends that compute in float32 and in bfloat16.
    """
    cases: dict[str, Callable[[], float]] = {}
    for kind, dtype in CACHE_TYPES.items():
        ops = wide if kind == "float32" else narrow
        slices = KV_CACHE_SLICES[str(ops.element)] if kind == "int8" else 0
        for name, sequences, cached, new in (("prompt", 1, 0, PROMPT_LEN), ("streams", STREAMS, CONTEXT - 1, 1)):
            attend = _attention(ops, dtype, slices, sequences, cached, new)
            pairs = sequences * (new * cached + new * (new + 1) / 2)
            operations = 4 * pairs * HEADS.num_heads * HEADS.head_dim * max(1, slices)
            cases[f"{kind} attend {name}"] = partial(_rate, attend, operations)
    return cases


def _attention(ops: CpuOps, dtype: Any, slices: int, sequences: int, cached: int, new: int) -> Callable[[], Any]:
    """Return attention of `new` tokens of each sequence, which has `cached` ones in a cache of its own."""
    columns = -(-(cached + new) // BLOCK_SIZE)
    cache = CpuKVCache(CacheSpec(sequences * columns, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim, dtype, slices))
    cache.memory[...] = 0
    table = np.arange(sequences * columns, dtype=np.int32).reshape(sequences, columns)
    positions = np.arange(cached, cached + new)
    slots = (table[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
    starts = np.arange(sequences + 1, dtype=np.int32) * new
    lengths = np.full(sequences, cached + new, dtype=np.int32)
    planned = ops.plan(AttentionMetadata(starts, lengths, table, slots, BLOCK_SIZE, None), HEADS, cache)
    generator = np.random.default_rng(0)
    q, k, v = (
        (generator.random((sequences * new, heads, HEADS.head_dim), dtype=np.float32) - 0.5).astype(ops.element)
        for heads in (HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads)
    )
    out = np.empty((sequences * new, HEADS.num_heads * HEADS.head_dim), ops.element)
    params = AttentionParams(scale=HEADS.head_dim**-0.5)
    return lambda: ops.attend(q, k, v, cache, planned, params, out=out)


def _rate(attend: Callable[[], Any], operations: float) -> float:
    started = time.perf_counter()
    attend()
    return operations / (time.perf_counter() - started)
