"""Targets for attention: caches of each kind, windows, biases, shared prefixes, plans, and steps that are refused."""

import ctypes

import numpy as np

from penstock.kernels.cpu.calls import fill_step
from penstock.kernels.cpu.library import LEVELS, PenstockAttentionStep
from penstock.kernels.cpu.ops import NativeParams
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, Heads
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT8, INT32, INT64, Array
from tools.fuzz_native.caches import Paged
from tools.fuzz_native.target import OK, OUT_OF_RANGE, TYPES, Fuzz, same_bits

ATTENDED = {FLOAT32: 2e-5, BFLOAT16: 0.03, INT8: 0.03}  # largest error of a result, given the stored values
SPAN = 2048  # tokens; neighbouring sequences share prefixes of whole spans
Sight = tuple[int | None, int, bool]  # window, sink tokens, whether windows are chunks
UNLIMITED: Sight = (None, 0, False)


def attend(fuzz: Fuzz) -> None:
    """Run one step: compare it with float64 over the values in the cache, and each sequence with the sequence alone."""
    prefix = SPAN if fuzz.chance(0.05) else 0
    count = 2 if prefix else fuzz.random.choice((0, 1, 2, 3))
    lengths = [prefix + fuzz.size(1, 129) for _ in range(count)]
    new = [fuzz.random.choice((1, 1, fuzz.random.randint(1, length - prefix))) for length in lengths]
    paged = Paged(fuzz, lengths, prefix)
    # queries, keys, values, queries for sink tokens
    parts = [[paged.random(length, heads) for length in lengths] for heads in _counts(paged.heads)]
    for row in range(1, count if prefix else 0):
        for part in parts[1:3]:
            part[row][:prefix] = part[row - 1][:prefix]
    for row, length in enumerate(lengths):
        cached = length - new[row]
        paged.store(parts[1][row][:cached], parts[2][row][:cached], paged.slots(row, 0, cached))
    params, window = _params(fuzz, paged.heads), fuzz.random.choice((None, None, 1, 17, 100))
    sinks = fuzz.random.choice((0, 4)) if window else 0
    sight = window, sinks, fuzz.chance(0.3)
    alone = fuzz.random.randrange(count) if count else None

    def step(chosen: list[int]) -> Array:
        meta = _metadata(paged, chosen, new, sight)
        given = [[part[row][lengths[row] - new[row] :] for row in chosen] for part in parts]
        return _attend(paged, meta, params, given)

    if alone is not None:
        found = step([alone])
        first = lengths[alone] - new[alone]
        _compare(paged, alone, found, [parts[0][alone][first:], parts[3][alone][first:]], params, sight)
    whole = step(list(range(count)))
    if alone is not None:
        begin = sum(new[:alone])
        same_bits(whole[begin : begin + new[alone]], found)


def _counts(heads: Heads) -> tuple[int, ...]:
    return heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads


def _params(fuzz: Fuzz, heads: Heads) -> AttentionParams:
    slopes, logits = (fuzz.normal(heads.num_heads).values if fuzz.chance(0.2) else None for _ in range(2))
    scale, softcap = heads.head_dim**-0.5, fuzz.random.choice((None, None, 5.0))
    return AttentionParams(scale, softcap, slopes, fuzz.chance(0.5), logits)


def _metadata(paged: Paged, chosen: list[int], new: list[int], sight: Sight) -> AttentionMetadata:
    (window, sinks, chunked), fuzz, lengths = sight, paged.fuzz, [paged.lengths[row] for row in chosen]
    starts = np.cumsum([0, *(new[row] for row in chosen)]).astype(INT32)
    slots = [paged.slots(row, paged.lengths[row] - new[row], paged.lengths[row]) for row in chosen]
    arrays = starts, np.array(lengths, dtype=INT32), paged.table[chosen], np.concatenate([np.empty(0, INT64), *slots])
    guarded = [
        fuzz.array(array.astype(kind)).values for array, kind in zip(arrays, (INT32, INT32, INT32, INT64), strict=True)
    ]
    return AttentionMetadata(*guarded, paged.cache.spec.block_size, window, sinks, chunked=chunked)


def _attend(paged: Paged, meta: AttentionMetadata, params: AttentionParams, given: list[list[Array]]) -> Array:
    """Plan and attend, with or without memory reserved. Return [T, heads, D]."""
    fuzz, heads, tokens = paged.fuzz, paged.heads, len(meta.slot_mapping)
    planned = paged.cache.plan(meta, heads, paged.dtype, LEVELS[fuzz.level], fuzz.threads)
    step, native = fill_step(PenstockAttentionStep(), planned), NativeParams(params, heads.num_heads)
    q, k, v, sink_q = [
        fuzz.array(np.concatenate([np.empty((0, count, heads.head_dim), paged.dtype), *part]))
        for part, count in zip(given, _counts(heads), strict=True)
    ]
    out, lse = fuzz.out((tokens, heads.num_heads, heads.head_dim), paged.dtype), fuzz.out((tokens, heads.num_heads))
    if planned.plan is not None and fuzz.chance(0.5):
        fuzz.call("attention_reserve", planned.plan.workspace_bytes, planned.plan.scratch_bytes)
    fuzz.call(
        "attend", ctypes.addressof(step), paged.cache.address, native.address, q, sink_q, k, v, TYPES[paged.dtype],
        heads.num_heads, out, fuzz.random.choice((lse, None)),
    )  # fmt: skip
    return out.values


def _compare(paged: Paged, row: int, found: Array, queries: list[Array], params: AttentionParams, sight: Sight) -> None:
    """Compare the results of one sequence with float64 over the present contents of its cache."""
    q, sink_q = (part.astype(np.float64) for part in queries)
    (window, sinks, chunked), length, heads = sight, paged.lengths[row], paged.heads
    k, v = (np.repeat(part.astype(np.float64), heads.num_heads // heads.num_kv_heads, axis=1)
            for part in paged.load(paged.slots(row, 0, length)))  # fmt: skip
    query, key = np.arange(length - len(q), length)[:, None], np.arange(length)
    seen = key <= query
    if window is not None:
        first = query // window * window if chunked else query - window + 1
        seen &= (key >= first) | (key < sinks)
    s = np.einsum("qhd,khd->hqk", q, k)
    s[..., :sinks] = np.einsum("qhd,khd->hqk", sink_q, k[:sinks])
    bias = 0.0 if params.alibi_slopes is None else params.alibi_slopes[:, None, None].astype(np.float64) * (key - query)
    s = (s + bias) * params.scale if params.bias_before_scale else s * params.scale
    s = s if params.softcap is None else params.softcap * np.tanh(s / params.softcap)
    s = np.where(seen, s if params.bias_before_scale else s + bias, -np.inf)
    logits = np.full(heads.num_heads, -np.inf) if params.sink_logits is None else params.sink_logits.astype(np.float64)
    top = np.maximum(s.max(axis=2), logits[:, None])
    p = np.exp(s - top[..., None])
    p /= p.sum(axis=2, keepdims=True) + np.exp(logits[:, None] - top)[..., None]
    tolerance = max(ATTENDED[paged.kind], ATTENDED[paged.dtype])
    size = max(1.0, float(np.abs(v).max(initial=0)))
    paged.fuzz.close_to(found / size, np.einsum("hqk,khd->qhd", p, v) / size, tolerance)


def attend_refuses(fuzz: Fuzz) -> None:
    """Check that a slot, block or length out of range is refused before anything is written."""
    paged = Paged(fuzz, [40, 20])
    meta = _metadata(paged, [0, 1], [1, 1], UNLIMITED)
    planned = paged.cache.plan(meta, paged.heads, paged.dtype, LEVELS[fuzz.level], fuzz.threads)
    end = paged.cache.spec.num_blocks
    damage = fuzz.random.choice(("slot", "block", "lengths", "starts"))
    if damage == "slot":
        meta.slot_mapping[1] = end * paged.cache.spec.block_size
    if damage == "block":
        meta.block_table[0, 0] = fuzz.random.choice((end, 2**31 - 1))
    if damage == "lengths":
        meta.seq_lens[0] = fuzz.random.choice((0, 2**31 - 1))
    if damage == "starts":
        meta.query_start_loc[1] = fuzz.random.choice((-1, 3))
    step, native = (
        fill_step(PenstockAttentionStep(), planned),
        NativeParams(AttentionParams(1.0), paged.heads.num_heads),
    )
    heads = paged.heads.num_heads, paged.heads.num_kv_heads, paged.heads.num_kv_heads
    q, *kv = [fuzz.array(paged.random(2, count)) for count in heads]
    out = fuzz.out((2, heads[0], paged.heads.head_dim))
    fuzz.call(
        "attend", ctypes.addressof(step), paged.cache.address, native.address, q, None, *kv, TYPES[paged.dtype],
        heads[0], out, None, expected=OUT_OF_RANGE,
    )  # fmt: skip
    same_bits(out.values, np.zeros_like(out.values))


def attention_bytes(fuzz: Fuzz) -> None:
    """Check that the library and the planner agree on the memory of a step, and that it can be reserved."""
    paged = Paged(fuzz, [fuzz.size(1) for _ in range(fuzz.rows())])
    meta = _metadata(paged, list(range(len(paged.lengths))), [1] * len(paged.lengths), UNLIMITED)
    planned = paged.cache.plan(meta, paged.heads, paged.dtype, LEVELS[fuzz.level], fuzz.threads)
    step, found = fill_step(PenstockAttentionStep(), planned), fuzz.out((2,), INT64)
    assert fuzz.library.penstock_attention_bytes(ctypes.addressof(step), paged.cache.address, found) == OK
    plan = planned.plan
    assert plan is not None
    assert found.values.tolist() == [plan.workspace_bytes, plan.scratch_bytes], f"attention_bytes: {found.values}"
    fuzz.call("attention_reserve", *found.values.tolist())


def attend_or_refuse(fuzz: Fuzz) -> None:
    (attend_refuses if fuzz.chance(0.2) else attend)(fuzz)


TARGETS = {
    "attend": attend_or_refuse, "attention_reserve": attention_bytes, "attention_bytes": attention_bytes,
}  # fmt: skip
