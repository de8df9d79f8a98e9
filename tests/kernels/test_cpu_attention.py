"""Attention through CpuOps, on every level: what a caller may rely on and what is refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import library
from penstock.kernels.cpu.ops import REMEMBERED_PARAMS, REMEMBERED_STEPS, CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.reference import ReferenceOps
from tests.kernels.packed import levels
from tests.paged import spoil

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
HEADS = Heads(4, 2, 32)
PARAMS = AttentionParams(HEADS.head_dim**-0.5)


@pytest.fixture(params=range(len(levels())), ids=lambda level: library.LEVELS[level])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(torch.bfloat16, threads=2, level=library.LEVELS[request.param])


def whole_prompt(length: int, **changes: object) -> AttentionMetadata:
    """One sequence, all of it new, in blocks of 16 in order."""
    blocks = -(-length // 16)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(length),
        block_size=16,
        sliding_window=None,
    )
    return replace(meta, **changes)


def operands(length: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((length, 4, 32), (length, 2, 32), (length, 2, 32))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * size).bfloat16(), (k * size).bfloat16(), v.bfloat16()


def new_cache(ops: CpuOps, length: int, dtype: torch.dtype = torch.bfloat16) -> object:
    cache = ops.new_kv_cache(CacheSpec(-(-length // 16), 16, 2, 32, dtype, slices=2 * (dtype == torch.int8)))
    spoil(cache)
    return cache


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_great_scores(ops: CpuOps, size: float, dtype: torch.dtype) -> None:
    """Guards against an exponent whose rounding grows with the score: rows of zeros, or NaN, without any error."""
    length = 130
    q, k, v = operands(length, size)
    lse = torch.empty(length, 4)
    found = ops.attend(q, k, v, new_cache(ops, length, dtype), whole_prompt(length), PARAMS, lse=lse)
    oracle = ReferenceOps(torch.float64)
    cache = oracle.new_kv_cache(CacheSpec(9, 16, 2, 32, torch.float64))
    exact = torch.empty(length, 4)
    doubles = (part.double() for part in (q, k, v))
    expected = oracle.attend(*doubles, cache, whole_prompt(length), PARAMS, lse=exact)
    assert lse.isfinite().all()
    torch.testing.assert_close(lse.double(), exact.double(), rtol=1e-6, atol=1e-4)
    # Two scores that are nearly equal at this size share the weight in whatever way rounding leaves.
    near = 1e-6 * size * size > 1e-2
    rows = ((found.double() - expected).abs().amax(dim=-1) < 0.05).double().mean()
    assert rows > (0.95 if near else 0.999)


def test_metadata_that_contradicts_itself_is_refused(ops: CpuOps) -> None:
    """Guards against memory that is read, or written, because one array says more tokens than another."""
    q, k, v = operands(2)
    cache = new_cache(ops, 2000)
    for changes in (
        {"query_start_loc": torch.tensor([0, 1000], dtype=torch.int32), "seq_lens": torch.tensor([1000]).int()},
        {"query_start_loc": torch.tensor([1, 2], dtype=torch.int32)},
        {"seq_lens": torch.tensor([1], dtype=torch.int32)},
        {"block_table": torch.full((1, 1), 500, dtype=torch.int32), "seq_lens": torch.tensor([9]).int()},
        {"slot_mapping": torch.tensor([0, 10**6])},
    ):
        with pytest.raises(ValueError, match="outside of its table"):
            ops.attend(q, k, v, cache, whole_prompt(2, **changes), PARAMS)


def test_a_plan_for_something_else_is_refused(ops: CpuOps) -> None:
    """Guards against a plan whose rows, heads or threads are not those of the call."""
    q, k, v = operands(20)
    cache = new_cache(ops, 20)
    other = CpuOps(torch.bfloat16, threads=3, level=ops.level)
    int8 = new_cache(ops, 20, torch.int8)
    for meta in (
        other.plan(whole_prompt(20), HEADS, cache),
        ops.plan(whole_prompt(20), Heads(8, 2, 32), cache),
        ops.plan(whole_prompt(20), HEADS, int8),
    ):
        with pytest.raises(ValueError, match="plan: made for"):
            ops.attend(q, k, v, cache, meta, PARAMS)
    with pytest.raises(ValueError, match="20 tokens, but"):
        ops.attend(q, k, v, cache, whole_prompt(19), PARAMS)


def test_parameters_are_checked_for_each_number_of_heads(ops: CpuOps) -> None:
    """Guards against slopes of four heads that a later call reads for eight."""
    params = AttentionParams(1.0, alibi_slopes=torch.ones(4))
    q, k, v = operands(3)
    cache = new_cache(ops, 3)
    ops.attend(q, k, v, cache, whole_prompt(3), params)
    with pytest.raises(ValueError, match="alibi_slopes"):
        ops.attend(q.repeat(1, 2, 1), k, v, cache, whole_prompt(3), params)


def test_what_is_remembered_is_bounded(ops: CpuOps) -> None:
    """Guards against a caller that makes parameters or metadata anew each time, and memory that grows with it."""
    q, k, v = operands(3)
    cache = new_cache(ops, 3)
    for number in range(REMEMBERED_PARAMS + 20):
        ops.attend(q, k, v, cache, whole_prompt(3), AttentionParams(1.0 + number))
    assert len(ops._params) <= REMEMBERED_PARAMS
    assert len(ops._steps) <= REMEMBERED_STEPS


@pytest.mark.parametrize("chunk", [7, 64, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_chunks(ops: CpuOps, chunk: int, dtype: torch.dtype) -> None:
    """Guards against a row that sees a token of the chunk before, or misses the first of its own, at any tile, and
    against bits that depend on how a prompt is cut."""
    length = 300
    q, k, v = operands(length)
    whole = whole_prompt(length, sliding_window=chunk, chunked=True)
    found = ops.attend(q, k, v, new_cache(ops, length, dtype), whole, PARAMS).clone()
    reference = ReferenceOps(torch.float32)
    cache = reference.new_kv_cache(CacheSpec(19, 16, 2, 32, torch.float32))
    expected = reference.attend(q.float(), k.float(), v.float(), cache, whole, PARAMS)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    for start in range(0, length, chunk):  # a chunk alone, as if nothing came before it
        part = slice(start, min(start + chunk, length))
        alone = whole_prompt(part.stop - part.start)
        cache = reference.new_kv_cache(CacheSpec(19, 16, 2, 32, torch.float32))
        own = reference.attend(q[part].float(), k[part].float(), v[part].float(), cache, alone, PARAMS)
        torch.testing.assert_close(expected[part], own)

    pieces, cache = [0, 1, 50, 99, 100, 101, 228, length], new_cache(ops, length, dtype)
    for start, stop in itertools.pairwise(pieces):
        meta = replace(
            whole,
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            block_table=torch.where(torch.arange(19) * 16 + 15 < start // chunk * chunk, -1, torch.arange(19)).int()[
                None
            ],
            slot_mapping=torch.arange(start, stop),
        )
        part = ops.attend(q[start:stop], k[start:stop], v[start:stop], cache, meta, PARAMS)
        assert torch.equal(part, found[start:stop])


@pytest.mark.parametrize("window", [None, 1, 70, 2049])
def test_biases_of_distances(window: int | None) -> None:
    """Guards against a distance counted from the key, one beyond the last bias, another head's biases, a position taken
    for another in a later block of rows, and a window that does not end on both sides, in the native kernels of every
    level and in the specification."""
    length, reach = 2100, 40
    q, k, v = operands(length)
    bias = torch.randn(q.shape[1], 2 * reach + 1, generator=torch.Generator().manual_seed(3))
    params = replace(PARAMS, distance_bias=bias)
    at = torch.arange(length)
    distance = at - at[:, None]
    mask = bias.double()[:, distance.clamp(-reach, reach) + reach]
    mask = mask if window is None else mask.masked_fill(distance.abs() >= window, -torch.inf)
    heads = [part.double().transpose(0, 1) for part in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(*heads, attn_mask=mask, enable_gqa=True, scale=PARAMS.scale).transpose(0, 1).flatten(1)
    whole = whole_prompt(length, bidirectional=True, sliding_window=window)
    reference = ReferenceOps(torch.float32)
    cache = reference.new_kv_cache(CacheSpec(132, 16, 2, 32, torch.float32))
    found = reference.attend(q.float(), k.float(), v.float(), cache, whole, params)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)
    for level in levels():
        ops = CpuOps(torch.float32, threads=2, level=library.LEVELS[level])
        cache = ops.new_kv_cache(CacheSpec(132, 16, 2, 32, torch.float32))
        found = ops.attend(q.float(), k.float(), v.float(), cache, whole, params)
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)


def test_both_directions() -> None:
    """Guards against a row that sees only what comes before it, in the native kernels or in the specification; against
    one in the first span that misses the second; and against bits that another sequence of the step changes."""
    ops, length, short = CpuOps(torch.bfloat16, threads=2), 2100, 5
    q, k, v = operands(length)
    whole = whole_prompt(length, bidirectional=True)
    found = ops.attend(q, k, v, new_cache(ops, length), whole, PARAMS).clone()
    heads = [part.double().transpose(0, 1) for part in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.double(), exact, atol=0.01, rtol=0.02)
    reference = ReferenceOps(torch.float32)
    cache = reference.new_kv_cache(CacheSpec(132, 16, 2, 32, torch.float32))
    expected = reference.attend(q.float(), k.float(), v.float(), cache, whole, PARAMS)
    torch.testing.assert_close(expected.double(), exact, atol=1e-5, rtol=0)

    both = replace(
        whole,
        query_start_loc=torch.tensor([0, short, short + length], dtype=torch.int32),
        seq_lens=torch.tensor([short, length], dtype=torch.int32),
        block_table=torch.stack([torch.full((132,), 132), torch.arange(132)]).int(),
        slot_mapping=torch.cat([132 * 16 + torch.arange(short), torch.arange(length)]),
    )
    beside = (torch.cat([part[:short], part]) for part in (q, k, v))
    crowd = ops.attend(*beside, new_cache(ops, 133 * 16), both, PARAMS)
    assert torch.equal(crowd[short:], found)
