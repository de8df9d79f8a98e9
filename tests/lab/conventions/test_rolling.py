"""Masks of packed prompts and of rolling caches, as Mistral's inference has them: golden tables, three forms, waste."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.attention import Scoring, attend_part, finish
from penstock_lab.conventions.rolling import (
    RollingBuffer,
    decode_mask,
    first_prefill_mask,
    later_prefill_mask,
    local_mask,
    unrotate,
)
from tests.hf_models import make_mistral
from tests.paged import PagedModel

torch.set_num_threads(1)
HEADS, KV_HEADS, DIM = 4, 2, 8
SCORING = Scoring(scale=DIM**-0.5)
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4}


def drawn(mask: Tensor) -> list[str]:
    """Rows as text: x where a query sees a key."""
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def qkv(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def over_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return finish(attend_part(q[None], k[None], v[None], mask, SCORING))[0][0]


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Everything kept, and a mask: what rolling caches are held against."""
    return over_mask(q, k, v, local_mask(len(q), len(k), window))


# --- golden tables ---------------------------------------------------------------------------------------------------

SIX_BY_SIX = {
    None: ["x.....", "xx....", "xxx...", "xxxx..", "xxxxx.", "xxxxxx"],
    3: ["x.....", "xx....", "xxx...", ".xxx..", "..xxx.", "...xxx"],
    1: ["x.....", ".x....", "..x...", "...x..", "....x.", ".....x"],
}


@pytest.mark.covers("M4", "M5")
@pytest.mark.parametrize("window", SIX_BY_SIX)
def test_six_tokens(window: int | None) -> None:
    """Guards against a window that leaves the token itself out, or counts it beside W others."""
    assert drawn(local_mask(6, 6, window)) == SIX_BY_SIX[window]
    assert drawn(local_mask(6, 6, 6)) == drawn(local_mask(6, 6, 99)) == SIX_BY_SIX[None]


@pytest.mark.covers("M12")
def test_eleven_tokens_in_three_chunks() -> None:
    """Guards against masks as wide as the cache: behind W = 4 cached tokens a chunk of 4 weighs 4 x 8 scores, the last
    one of 3 weighs 3 x 7."""
    assert drawn(first_prefill_mask([4], [0], 4)) == ["x...", "xx..", "xxx.", "xxxx"]
    assert drawn(later_prefill_mask([4], [4], 4)) == [".xxxx...", "..xxxx..", "...xxxx.", "....xxxx"]
    assert drawn(later_prefill_mask([3], [8], 4)) == [".xxxx..", "..xxxx.", "...xxxx"]


@pytest.mark.covers("M23")
def test_three_packed_prompts() -> None:
    """Guards against a token that sees another prompt, and against blocks out of place."""
    assert drawn(first_prefill_mask([3, 4, 5], [0, 0, 0], None)) == [
        "x...........",
        "xx..........",
        "xxx.........",
        "...x........",
        "...xx.......",
        "...xxx......",
        "...xxxx.....",
        ".......x....",
        ".......xx...",
        ".......xxx..",
        ".......xxxx.",
        ".......xxxxx",
    ]


@pytest.mark.covers("M22")
def test_waste_of_padding(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a mask that weighs more than it has to: three prompts padded to 5 x 5 against packed ones."""
    lens = [3, 4, 5]
    padded, packed = len(lens) * max(lens) ** 2, int(first_prefill_mask(lens, [0, 0, 0], None).sum())
    print(f"dot products: {padded} padded, {packed} packed, {padded - packed} wasted")
    assert capsys.readouterr().out == "dot products: 75 padded, 31 packed, 44 wasted\n"
    assert packed == 6 + 10 + 15


# --- three forms -----------------------------------------------------------------------------------------------------


def brute(queries: list[tuple[int, int]], keys: list[tuple[int, int]], window: int | None) -> list[list[bool]]:
    """Who sees whom, of (sequence, position) pairs; position -1 is an empty slot."""
    far = 10**6 if window is None else window
    return [[own == other and 0 <= j <= i and i - j < far for other, j in keys] for own, i in queries]


@pytest.mark.covers("M14", "M25")
def test_three_forms_against_the_predicate() -> None:
    """Guards against any wrong entry, for all mixtures of chunk lengths and cached lengths around the window."""
    for window, lens in itertools.product((1, 3, 4), itertools.product((1, 2, 5), repeat=2)):
        queries = [(b, i) for b, n in enumerate(lens) for i in range(n)]
        assert first_prefill_mask(lens, [0, 0], window).tolist() == brute(queries, queries, window)
        for cached in itertools.product((0, 1, 3, 4, 9), repeat=2):
            queries = [(b, old + i) for b, (old, n) in enumerate(zip(cached, lens, strict=True)) for i in range(n)]
            keys = [
                (b, j)
                for b, (old, n) in enumerate(zip(cached, lens, strict=True))
                for j in range(max(0, old - window), old + n)
            ]
            assert later_prefill_mask(lens, cached, window).tolist() == brute(queries, keys, window)
            slots = [(b, position) for b, old in enumerate(cached) for position in slot_positions(old + 1, window)]
            assert decode_mask(cached, window).tolist() == brute(
                [(b, old) for b, old in enumerate(cached)], slots, window
            )


def slot_positions(seq_len: int, window: int) -> list[int]:
    """What each slot of a rolling cache holds, by writing one token after the other."""
    slots = [-1] * window
    for position in range(seq_len):
        slots[position % window] = position
    return slots


@pytest.mark.covers("M14")
def test_forms_without_a_window() -> None:
    """Guards against a window that is needed: Mixtral has none, and then all cached tokens are keys."""
    queries, keys = [(0, 7), (0, 8)], [(0, j) for j in range(9)]
    assert later_prefill_mask([2], [7], None).tolist() == brute(queries, keys, None)


@pytest.mark.covers("M15")
def test_a_first_prefill_begins_at_zero_everywhere() -> None:
    """Guards against a sequence whose cached tokens the first form would silently not show."""
    with pytest.raises(ValueError, match="position 0"):
        first_prefill_mask([3, 2], [0, 4], 4)
    with pytest.raises(ValueError, match="position 0"):
        first_prefill_mask([3, 2], [1, 0], None)


# --- packed prompts --------------------------------------------------------------------------------------------------


def packed_attend(prompts: list[tuple[Tensor, Tensor, Tensor]], window: int | None) -> list[Tensor]:
    """Prompts as one long sequence under a block-diagonal mask -> the rows of each."""
    lens = [len(q) for q, _, _ in prompts]
    q, k, v = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    return list(over_mask(q, k, v, first_prefill_mask(lens, [0] * len(lens), window)).split(lens))


@pytest.mark.covers("M23", "M24")
@pytest.mark.parametrize("window", [None, 1, 2, 4, 99])
def test_packed_prompts_in_any_order(window: int | None) -> None:
    """Guards against an answer that depends on the neighbours: each prompt alone, packed in every order, and by the
    paged operation, which has positions instead of a mask."""
    prompts = [qkv(length, seed=length) for length in (3, 4, 5, 1)]
    alone = [packed_attend([prompt], window)[0] for prompt in prompts]
    for order in itertools.permutations(range(4)):
        for index, rows in zip(order, packed_attend([prompts[i] for i in order], window), strict=True):
            torch.testing.assert_close(rows, alone[index], **CLOSE)
    for index, rows in enumerate(paged_attend(prompts, window)):
        torch.testing.assert_close(rows, alone[index], **CLOSE)


def paged_attend(prompts: list[tuple[Tensor, Tensor, Tensor]], window: int | None) -> list[Tensor]:
    ops, lens = ReferenceOps(torch.float32), [len(q) for q, _, _ in prompts]
    cache = ops.new_kv_cache(CacheSpec(len(lens), 16, KV_HEADS, DIM, torch.float32))
    meta = AttentionMetadata(
        torch.tensor([0, *lens]).cumsum(0).int(),
        torch.tensor(lens, dtype=torch.int32),
        torch.arange(len(lens), dtype=torch.int32)[:, None],
        torch.cat([16 * b + torch.arange(n) for b, n in enumerate(lens)]),
        16,
        window,
    )
    q, k, v = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    return list(ops.attend(q, k, v, cache, meta, AttentionParams(SCORING.scale)).view(q.shape).split(lens))


@pytest.mark.covers("M25", "J22")
def test_different_cached_lengths_in_one_step() -> None:
    """Guards against one length for the whole batch: chunks of 1 to 3 tokens behind caches of 0 to 9, packed under one
    mask, give what each sequence gives alone."""
    window, whole = 4, [qkv(12, seed=seed) for seed in range(4)]
    cached, new = [0, 3, 4, 9], [2, 1, 3, 3]
    parts = [
        (q[old : old + n], k[max(0, old - window) : old + n], v[max(0, old - window) : old + n])
        for (q, k, v), old, n in zip(whole, cached, new, strict=True)
    ]
    q, k, v = (torch.cat(items) for items in zip(*parts, strict=True))
    rows = over_mask(q, k, v, later_prefill_mask(new, cached, window)).split(new)
    for part, (q, k, v), old, n in zip(rows, whole, cached, new, strict=True):
        torch.testing.assert_close(part, windowed(q, k, v, window)[old : old + n], **CLOSE)


@pytest.mark.covers("M26")
def test_logits_of_the_last_token_of_each_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a wrong row picked out of the packed step: logits of the last positions alone are those of all
    positions, gathered, and take 3 rows of memory instead of 12."""
    paged = PagedModel(make_mistral(tmp_path)[1], num_seqs=3)
    hidden: list[Tensor] = []
    compute = paged.model.compute_logits

    def keep(states: Tensor) -> Tensor:
        hidden.append(states.clone())
        return compute(states)

    monkeypatch.setattr(paged.model, "compute_logits", keep)
    every = torch.cat(list(paged.step({0: [5, 6, 7], 1: [8, 9, 10, 11], 2: [3, 4, 5, 6, 7]}).values()))
    last = torch.tensor([3, 4, 5]).cumsum(0) - 1
    with torch.no_grad():
        few = compute(hidden[0][last]).clone()
    torch.testing.assert_close(few.log_softmax(-1), every[last], **CLOSE)
    assert (len(every), len(few)) == (12, 3)


# --- rolling buffers -------------------------------------------------------------------------------------------------


@pytest.mark.covers("M9")
@pytest.mark.parametrize("window", [1, 2, 4])
def test_unrotate_for_every_length(window: int) -> None:
    """Guards against a wrong write pointer: an unfilled buffer, a full one, and one that has turned by any amount."""
    for seq_len in range(3 * window + 1):
        slots = torch.tensor(slot_positions(seq_len, window))
        expected = list(range(max(0, seq_len - window), seq_len))
        assert unrotate(slots, seq_len).tolist() == expected
        buffer = RollingBuffer(window, 1, 1)
        for position in range(seq_len):
            buffer.store(*[torch.full((1, 1, 1), float(position))] * 2)
        assert buffer.positions().tolist() == slots.tolist()
        assert unrotate(buffer.keys, seq_len).flatten().tolist() == expected


@pytest.mark.covers("M9", "M11")
@pytest.mark.parametrize("form", ["prefill", "prefill_in_place"])
def test_rolling_prefill_for_every_prompt_and_chunk(form: str) -> None:
    """Guards against a chunk that overwrites what it still has to see, and shows that nothing has to be rotated:
    prompts of 1 to 3W + 1 tokens, chunks of 1 to 2W, W = 4; slots that were never filled are NaN."""
    window = 4
    for length in range(1, 3 * window + 2):
        q, k, v = qkv(length, seed=length)
        expected = windowed(q, k, v, window)
        for size in range(1, 2 * window + 1):
            buffer = RollingBuffer(window, KV_HEADS, DIM)
            chunks = [slice(start, start + size) for start in range(0, length, size)]
            rows = [getattr(buffer, form)(q[chunk], k[chunk], v[chunk], SCORING) for chunk in chunks]
            torch.testing.assert_close(torch.cat(rows), expected, **CLOSE)


@pytest.mark.covers("M8", "M13")
def test_rolling_decode_over_ten_windows() -> None:
    """Guards against a decode that attends before it stores, and against memory that grows: the first token finds
    itself in the cache, no mask is wider than W, and all is as with everything kept."""
    window, length = 4, 40
    q, k, v = qkv(length)
    buffer = RollingBuffer(window, KV_HEADS, DIM)
    memory, rows = (buffer.keys.data_ptr(), buffer.values.data_ptr()), []
    for i in range(length):
        assert decode_mask([buffer.seq_len], window).shape == (1, window)
        rows.append(buffer.decode(q[i : i + 1], k[i : i + 1], v[i : i + 1], SCORING))
    torch.testing.assert_close(torch.cat(rows), windowed(q, k, v, window), **CLOSE)
    assert (buffer.keys.data_ptr(), buffer.values.data_ptr()) == memory
    assert buffer.keys.shape == (window, KV_HEADS, DIM)


@pytest.mark.covers("M13")
def test_storing_first_costs_a_prefill_its_window() -> None:
    """Guards against the wrong order for chunks: stored first, a chunk of W leaves its first tokens without the past,
    which is why prefill attends before it stores and decode, of one token, may store first."""
    window = 4
    _, k, v = qkv(2 * window)
    buffer = RollingBuffer(window, KV_HEADS, DIM)
    for chunk in (slice(0, window), slice(window, 2 * window)):
        buffer.store(k[chunk], v[chunk])
    slots = buffer.positions()
    seen = [(slots[slots <= at] > at - window).sum().item() for at in range(window, 2 * window)]
    assert seen == [1, 2, 3, 4]


class Ring:
    """A paged cache whose block table repeats one block: the rolling buffer of one sequence."""

    def __init__(self, block_size: int, window: int) -> None:
        self.ops, self.block_size, self.window = ReferenceOps(torch.float32), block_size, window
        self.cache: Any = self.ops.new_kv_cache(CacheSpec(3, block_size, KV_HEADS, DIM, torch.float32))
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        self.seq_len = 0

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(q)
        positions = torch.arange(self.seq_len, self.seq_len + n)
        self.seq_len += n
        slots = self.block_size + positions % self.block_size  # all in block 1
        slots[positions < self.seq_len - self.block_size] = -1  # overwritten within this step
        meta = AttentionMetadata(
            torch.tensor([0, n], dtype=torch.int32),
            torch.tensor([self.seq_len], dtype=torch.int32),
            torch.ones(1, -(-self.seq_len // self.block_size), dtype=torch.int32),
            slots,
            self.block_size,
            self.window,
        )
        return self.ops.attend(q, k, v, self.cache, meta, AttentionParams(SCORING.scale)).view(q.shape)


@pytest.mark.covers("M8", "M12", "J22")
@pytest.mark.parametrize(("block_size", "window"), [(4, 4), (16, 5), (3, 4)])
def test_a_ring_of_one_block(block_size: int, window: int) -> None:
    """Guards against a new token that overwrites a row before it is read, and against rows that wrap around: any
    chunks over ten windows equal everything kept, in one block of memory. The ring needs W - 1 rows, no more."""
    length = 10 * window
    q, k, v = qkv(length, seed=window)
    expected = windowed(q, k, v, window)
    for seed in range(4):
        ring, choose, start = Ring(block_size, window), random.Random(seed), 0
        while start < length:
            chunk = slice(start, min(length, start + choose.choice([1, 1, 2, window, 3 * window])))
            torch.testing.assert_close(ring.step(q[chunk], k[chunk], v[chunk]), expected[chunk], **CLOSE)
            start = chunk.stop
        others = torch.cat([ring.cache.keys[[0, 2]], ring.cache.values[[0, 2]]])
        assert bool(others.isnan().all()), "memory outside of the ring was written"
