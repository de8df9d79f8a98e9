"""The paged cache, and attention over it: against the reference, and against itself in other batches and chunks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, KVScales
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.triton.ops import TritonOps
from tests.kernels.triton.compare import DEVICE, bits, close, draw

BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
BLOCK = 128
NAN = float("nan")


def scales(heads: int, head_dim: int) -> KVScales:
    found = [draw(heads, head_dim, seed=seed) for seed in range(4)]
    return KVScales(found[0].abs() / 50 + 0.01, found[1] * 3, found[2].abs() / 50 + 0.01, found[3] * 3)


def cells(cache: Any) -> tuple[Tensor, Tensor]:
    """View keys and values of a cache of Triton's as the reference has them: [blocks, block size, Hkv, D]."""
    values = cache.values.permute(0, 3, 1, 2) if cache.values.dtype == INT8 else cache.values.permute(0, 2, 1, 3)
    return cache.keys.permute(0, 2, 1, 3), values


class Layer:
    """A layer's cache in Triton's and in the reference's form, with sequences of these lengths in shuffled blocks.

    Everything that no sequence has written is NaN, or the scale of a token is.
    """

    def __init__(self, lengths: list[int], heads: Heads, dtype: torch.dtype, kind: torch.dtype, **options: Any) -> None:
        self.heads, self.dtype = heads, dtype
        counts = [-(-length // BLOCK) for length in lengths]
        order = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
        ends = np.cumsum(counts)
        self.tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.tables[row, :count] = torch.tensor(order[end - count : end])
        slices = 0 if kind != INT8 else 3 if dtype == F32 else 2
        spec = CacheSpec(sum(counts), BLOCK, heads.num_kv_heads, heads.head_dim, kind, slices, **options)
        self.ops, self.reference = TritonOps(dtype, DEVICE), ReferenceOps(dtype, DEVICE)
        self.cache: Any = self.ops.new_kv_cache(spec)
        self.oracle: Any = self.reference.new_kv_cache(spec)
        for cache in (self.cache, self.oracle):
            for part in (part for block in range(spec.num_blocks) for part in cache.block(block)):
                part.fill_(NAN if part.is_floating_point() else 99)
        self.rows = [draw(3, n, heads.num_kv_heads, heads.head_dim, dtype=dtype, seed=n) for n in lengths]
        self.queries = [draw(2, n, heads.num_heads, heads.head_dim, dtype=dtype, seed=n + 1) for n in lengths]

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        at = torch.arange(start, stop)
        return self.tables[row].long()[at // BLOCK] * BLOCK + at % BLOCK

    def fill(self, row: int, stop: int) -> None:
        """Write the first positions of a sequence, as the reference stores them."""
        self.reference.store_kv(self.oracle, *self.rows[row][:2, :stop], self.slots(row, 0, stop))
        blocks = self.tables[row][: -(-stop // BLOCK)].long()
        for ours, theirs in zip(cells(self.cache), (self.oracle.keys, self.oracle.values), strict=True):
            ours[blocks] = theirs[blocks]
        if self.cache.token_scales is not None:
            for ours, theirs in zip(
                self.cache.token_scales, (self.oracle.key_scales, self.oracle.value_scales), strict=True
            ):
                ours[blocks] = theirs[blocks].permute(0, 2, 1, 3)

    def step(self, new: dict[int, tuple[int, int]], **meta: Any) -> tuple[AttentionMetadata, tuple[Tensor, ...]]:
        """Let sequences go on from one position to another: metadata, and q [2, T, H, D], k and v."""
        starts = np.concatenate([[0], np.cumsum([stop - start for start, stop in new.values()])])
        step = AttentionMetadata(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([stop for _, stop in new.values()], dtype=torch.int32),
            self.tables[list(new)],
            torch.cat([self.slots(row, *ends) for row, ends in new.items()]),
            BLOCK,
            **{"sliding_window": None, **meta},
        )
        q = torch.cat([self.queries[row][:, start:stop] for row, (start, stop) in new.items()], dim=1)
        k, v = (torch.cat([self.rows[row][i, start:stop] for row, (start, stop) in new.items()]) for i in range(2))
        return step, (q, k, v)


HEADS = Heads(4, 1, 24)
SLOPES, LOGITS = torch.tensor([0.5, 0.25, 0.03, 0.001]), torch.tensor([1.0, -2.0, 4.0, 0.0])
CASES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "float32": (F32, F32, {}, {}),
    "bfloat16": (BF16, BF16, {}, {}),
    "int8": (BF16, INT8, {}, {}),
    "int8, three slices": (F32, INT8, {"sliding_window": 300}, {"softcap": 2.0}),
    "int8, scales by channel": (BF16, INT8, {}, {"sink_logits": LOGITS}),
    "softcap, biases, sinks": (BF16, BF16, {}, {"softcap": 2.0, "alibi_slopes": SLOPES, "sink_logits": LOGITS}),
    "biases first": (BF16, BF16, {"sliding_window": 90}, {"alibi_slopes": SLOPES, "bias_before_scale": True}),
    "chunks": (BF16, BF16, {"sliding_window": 140, "chunked": True}, {}),
    "sink tokens": (BF16, BF16, {"sliding_window": 90, "num_sink_tokens": 5}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    """Guards against a position that is missed, seen too early or twice, a scale or a bias in the wrong place, and
    contents of memory that nobody wrote."""
    dtype, kind, meta, params = CASES[name]
    options = {"scales": scales(1, 24)} if "channel" in name else {}
    layer = Layer([601, 150], HEADS, dtype, kind, **options)
    layer.fill(0, 600)
    layer.fill(1, 132)
    step, (q, k, v) = layer.step({0: (600, 601), 1: (132, 150)}, **meta)
    q = q if meta.get("num_sink_tokens") else q[0]
    rules = AttentionParams(0.3, **params)
    expected_lse, lse = torch.empty(19, 4), torch.empty(19, 4)
    expected = layer.reference.attend(q, k, v, layer.oracle, step, rules, lse=expected_lse)
    planned = layer.ops.plan(step, HEADS, layer.cache)
    found = layer.ops.attend(q, k, v, layer.cache, planned, rules, lse=lse)
    assert planned.work.few is not None, "the first sequence"
    assert planned.work.many is not None, "the second sequence"
    close(found, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(cells(layer.cache), (layer.oracle.keys, layer.oracle.values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum of a row of NaN
@pytest.mark.parametrize(
    ("kind", "meta"), [(BF16, {}), (INT8, {}), (BF16, {"sliding_window": 400, "num_sink_tokens": 130})]
)
def test_bits_do_not_depend_on_chunks_or_neighbours(kind: torch.dtype, meta: dict[str, Any]) -> None:
    """Guards against sums whose order follows the number of rows, and a neighbour that is read."""
    layer = Layer([640, 140], HEADS, BF16, kind)
    layer.fill(0, 622)
    layer.fill(1, 139)
    rules = AttentionParams(0.3)

    def attend(new: dict[int, tuple[int, int]], spoilt: int | None = None) -> Tensor:
        step, (q, k, v) = layer.step(new, **meta)
        if spoilt is not None:
            q[:, spoilt] = NAN
        return bits(layer.ops.attend(q if meta else q[0], k, v, layer.cache, step, rules))

    whole = attend({0: (622, 640)})  # many rows
    assert torch.equal(attend({1: (139, 140), 0: (639, 640)})[1:], whole[17:])  # few
    assert torch.equal(attend({0: (636, 640), 1: (139, 140)}, spoilt=4)[:4], whole[14:])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("start", [136, 120])  # few rows, many
def test_a_value_that_is_not_finite_stays_in_its_rows(start: int) -> None:
    """Guards against zero times NaN, in rows that do not see a token but read its tile."""
    layer = Layer([140], HEADS, BF16, BF16)
    layer.fill(0, start)
    step, (q, k, v) = layer.step({0: (start, 140)})
    clean = layer.ops.attend(q[0], k, v, layer.cache, step, AttentionParams(0.3))
    v[-2, 0, 5] = float("inf")
    found = layer.ops.attend(q[0], k, v, layer.cache, step, AttentionParams(0.3))
    assert torch.equal(bits(found[:-2]), bits(clean[:-2]))
    assert found[-2:].isnan().any(dim=1).all()


ODD = {"plain": 1.0, "huge": 2.0**101, "infinite": float("inf"), "nan": NAN, "tiny": 2.0**-120}


@pytest.mark.parametrize("kind", [F32, INT8, "by channel"])
def test_storing_and_loading(kind: Any) -> None:
    """Guards against a token in another slot, and integers or scales that differ from their specification."""
    heads = Heads(2, 2, 6)
    dtype = INT8 if kind == "by channel" else kind
    layer = Layer([130], heads, F32, dtype, **({"scales": scales(2, 6)} if kind == "by channel" else {}))
    k, v = draw(6, 2, 6), draw(6, 2, 6, seed=1)
    for row, factor in enumerate(ODD.values()):
        k[row, 0, 3] = v[row, 1, 2] = factor
    k[4], v[5] = 2.0**-120, 0.25
    slots = torch.tensor([129, 3, 128, 0, 77, -1])
    before = layer.cache.read_block(int(layer.tables[0, 0]))
    layer.ops.store_kv(layer.cache, k, v, slots)
    layer.reference.store_kv(layer.oracle, k, v, slots)
    keys, values = layer.reference.load_kv(layer.oracle, slots[:5])
    if kind == F32:  # a value that is not finite is stored as a key of NaN
        wrong = ~values.isfinite().all(-1, keepdim=True)
        assert wrong.sum() == 2
        keys, values = keys.masked_fill(wrong, NAN), values.masked_fill(wrong, 0.0)
    for found, expected in zip(layer.ops.load_kv(layer.cache, slots[:5]), (keys, values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    layer.ops.copy_block(layer.cache, 0, 1)
    content = layer.ops.read_block(layer.cache, 1)
    assert content == layer.ops.read_block(layer.cache, 0) != before
    layer.ops.write_block(layer.cache, 1, before)
    assert layer.ops.read_block(layer.cache, 1) == before
    assert len(before) * 2 == layer.cache.num_bytes
    with pytest.raises(ValueError, match="bytes, but"):
        layer.ops.write_block(layer.cache, 1, before[1:])


def test_what_is_refused() -> None:
    """Guards against a cache that the kernels would read wrongly, and a ring, whose tokens they would overwrite."""
    ops = TritonOps(BF16, DEVICE)
    for field, spec in {
        "block_size": CacheSpec(1, 64, 1, 16, BF16),
        "head_dim": CacheSpec(1, 128, 1, 512, BF16),
        "slices": CacheSpec(1, 128, 1, 16, INT8),
        "scales": CacheSpec(1, 128, 1, 16, BF16, scales=scales(1, 16)),
    }.items():
        with pytest.raises(NotSupportedError) as refused:
            ops.new_kv_cache(spec)
        assert refused.value.param == field
    layer = Layer([8], HEADS, BF16, BF16)
    step, _ = layer.step({0: (2, 6)}, sliding_window=4)
    step.slot_mapping[0] = -1
    with pytest.raises(NotSupportedError, match="ring"):
        ops.plan(step, HEADS, layer.cache)
