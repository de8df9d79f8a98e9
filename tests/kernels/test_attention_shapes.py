"""Native attention for the head sizes and groups that families of models have, planned as a step plans it, against the
reference: sizes that fill no vector, no pair of vectors and no tile of AMX, and Falcon-7B's 71 heads on one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.plan import ROW_BEGIN, ROW_END
from penstock.kernels.cpu import library
from penstock.kernels.cpu.ops import CpuKVCache, CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, KVCache
from penstock.kernels.ops import Ops
from penstock.kernels.reference import ReferenceOps
from tests.kernels.packed import levels
from tests.paged import spoil

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
HEAD_DIMS = [20, 24, 40, 64, 72, 80, 96, 112, 256, 512]
HEADS = [(2, 2), (6, 2), (16, 2), (16, 1), (71, 1)]  # groups of 1, 3, 8, 16 and 71
CACHES = {"float32": (F32, F32, 0), "bfloat16": (BF16, BF16, 0), "int8-x2": (BF16, INT8, 2), "int8-x3": (F32, INT8, 3)}
BLOCK, BLOCKS = 16, 12
LENGTHS = (67, 9)  # after a first step; then each goes on by as many tokens as NEXT says
NEXT = (1, 3)


def variants(num_heads: int, head_dim: int) -> list[AttentionParams]:
    """How scores are made: plain, capped, and with the biases of Falcon and of BLOOM."""
    slopes = 0.5 ** torch.linspace(0.5, 8.0, num_heads)
    plain = AttentionParams(head_dim**-0.5)
    return [
        plain,
        replace(plain, softcap=2.0),
        replace(plain, alibi_slopes=slopes),
        replace(plain, alibi_slopes=slopes, bias_before_scale=True, softcap=3.0),
    ]


def metadata(lengths: tuple[int, ...], counts: tuple[int, ...], window: int | None) -> AttentionMetadata:
    """Two sequences whose blocks alternate in memory."""
    tables = torch.arange(BLOCKS, dtype=torch.int32).view(-1, 2).T.contiguous()
    positions = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    slots = [table[at // BLOCK].long() * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    return AttentionMetadata(starts, torch.tensor(lengths, dtype=torch.int32), tables, torch.cat(slots), BLOCK, window)


def new_cache(ops: Ops, heads: tuple[int, int], head_dim: int, name: str) -> KVCache:
    _, kind, slices = CACHES[name]
    cache = ops.new_kv_cache(CacheSpec(BLOCKS, BLOCK, heads[1], head_dim, kind, slices=slices))
    if isinstance(cache, CpuKVCache):
        spoil(cache)
    return cache


def operands(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, count, head_dim, generator=generator).to(dtype) for count in (*heads, heads[1])]


def two_steps(
    ops: Ops, heads: tuple[int, int], head_dim: int, name: str, params: AttentionParams, window: int | None
) -> list[Tensor]:
    """A prompt of each sequence, then some more tokens: results and logarithms of sums of both steps."""
    results, cache, dtype = [], new_cache(ops, heads, head_dim, name), CACHES[name][0]
    later = tuple(length + count for length, count in zip(LENGTHS, NEXT, strict=True))
    for seed, (lengths, counts) in enumerate(((LENGTHS, LENGTHS), (later, NEXT))):
        q, k, v = operands(sum(counts), heads, head_dim, dtype, seed)
        lse = torch.full((sum(counts), heads[0]), torch.nan)
        results += [ops.attend(q, k, v, cache, metadata(lengths, counts, window), params, lse=lse), lse]
    return results


@pytest.mark.covers("F20", "A4")
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_is_the_reference(name: str, head_dim: int) -> None:
    """Guards against elements behind the end of a head, rows behind the end of a group, slopes of another head, and a
    bias on the wrong side of the scale; on every level."""
    dtype = CACHES[name][0]
    reference = ReferenceOps(dtype)
    every_level = [CpuOps(dtype, threads=2, level=library.LEVELS[level]) for level in levels()]
    for number, heads in enumerate(HEADS):
        if number == (head_dim // 4 + len(name)) % len(HEADS) or number == head_dim // 4 % len(HEADS):
            continue  # two of five: each group has every cache and nearly every size
        params = variants(heads[0], head_dim)[(number + head_dim // 4) % 4]
        window = (None, 20)[number % 2]
        expected = two_steps(reference, heads, head_dim, name, params, window)
        for ops in every_level:
            for found, other in zip(two_steps(ops, heads, head_dim, name, params, window), expected, strict=True):
                # Both round the same operands, so logarithms agree; results in bfloat16 are rounded on their own.
                tolerance = 2.0**-6 if found.dtype == BF16 else 2e-5
                torch.testing.assert_close(found, other, rtol=0, atol=tolerance)


@pytest.mark.covers("A20")
def test_every_group_up_to_64() -> None:
    """Guards against a last piece of a group that is smaller than the others: head dim 256 in float32 leaves room for
    48 rows, so groups beyond are cut; one token and three, beside the reference."""
    reference = ReferenceOps(F32)
    every_level = [CpuOps(F32, threads=2, level=library.LEVELS[level]) for level in {levels()[0], levels()[-1]}]
    pieces = set()
    for group in (*range(1, 18, 3), 31, 32, 33, 47, 48, *range(49, 65)):
        heads, params = (group, 1), AttentionParams(1 / 16)
        expected = two_steps(reference, heads, 256, "float32", params, None)
        for ops in every_level:
            for found, other in zip(two_steps(ops, heads, 256, "float32", params, None), expected, strict=True):
                torch.testing.assert_close(found, other, rtol=0, atol=2e-5)
        cache = new_cache(every_level[0], heads, 256, "float32")
        later = tuple(length + count for length, count in zip(LENGTHS, NEXT, strict=True))
        plan = every_level[0].plan(metadata(later, NEXT, None), Heads(group, 1, 256), cache).plan
        assert plan is not None
        rows = plan.items[:, ROW_END] - plan.items[:, ROW_BEGIN]
        pieces |= {(group, int(count)) for count in rows if group > 48}
    assert pieces >= {(group, group - 48) for group in range(49, 65)} | {(group, 48) for group in range(49, 65)}


@pytest.mark.parametrize("name", CACHES)
def test_a_token_by_itself_has_the_bits_of_a_prompt(name: str) -> None:
    """Guards against a group that is cut at 16, 32 or 48 rows in another way when there are more of them."""
    heads, head_dim, length = (71, 1), 64, 40
    params = variants(*heads[:1], head_dim)[3]
    dtype = CACHES[name][0]
    q, k, v = operands(2 * length, heads, head_dim, dtype, 0)
    for level in levels():
        ops = CpuOps(dtype, threads=2, level=library.LEVELS[level])
        whole = ops.attend(
            q, k, v, new_cache(ops, heads, head_dim, name), metadata((length, length), (length, length), None), params
        ).view(2, length, -1)
        cache = new_cache(ops, heads, head_dim, name)
        q2, k2, v2 = (x.view(2, length, -1, head_dim) for x in (q, k, v))
        for first, last in ((0, 35), (35, 36), (36, 40)):
            part = [x[:, first:last].flatten(0, 1).contiguous() for x in (q2, k2, v2)]
            meta = metadata((last, last), (last - first, last - first), None)
            found = ops.attend(*part, cache, meta, params).view(2, last - first, -1)
            assert torch.equal(found, whole[:, first:last])
