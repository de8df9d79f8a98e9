"""The reference attention: who sees whom, what is read and what is stored."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import InvalidRequestError, NotSupportedError
from penstock.kernels.cpu.library import LEVELS
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads, KVScales
from penstock.kernels.reference import ReferenceOps, attention
from tests.kernels.packed import levels

torch.set_num_threads(1)
OPS = ReferenceOps(torch.float32)
NAN = float("nan")


class Sequences:
    """Random keys, values and queries of some sequences, and a cache of shuffled blocks that starts full of NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        window: int | None = None,
        heads: tuple[int, int, int] = (4, 2, 8),
        block_size: int = 4,
        cache_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        params: dict[str, Any] | None = None,
        num_sink_tokens: int = 0,
        slices: int = 0,
        scales: KVScales | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_dim = heads
        self.window, self.block_size, self.num_sink_tokens = window, block_size, num_sink_tokens
        self.params = AttentionParams(**{"scale": head_dim**-0.5} | (params or {}))
        self.q = [torch.randn(n, num_heads, head_dim, generator=generator) for n in lengths]
        self.k = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        self.v = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
        self.done = [0] * len(lengths)
        blocks_each = -(-max(lengths) // block_size)
        ids = list(range(len(lengths) * blocks_each + 2))
        random.Random(seed).shuffle(ids)
        self.tables = torch.tensor(ids[:-2], dtype=torch.int32).view(len(lengths), blocks_each)
        self.cache: Any = OPS.new_kv_cache(
            CacheSpec(len(ids), block_size, num_kv_heads, head_dim, cache_dtype, slices=slices, scales=scales)
        )
        poison(self.cache)
        self.lse = [torch.full(part.shape[:2], NAN) for part in self.q]

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Attend for the next tokens of these sequences in one call -> [n, H, D] for each."""
        rows = list(counts)
        spans = {row: slice(self.done[row], self.done[row] + counts[row]) for row in rows}
        for row in rows:
            self.done[row] += counts[row]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans.values()])
        owner = torch.repeat_interleave(torch.tensor(rows), torch.tensor([counts[row] for row in rows]))
        slots = self.tables[owner, positions // self.block_size].long() * self.block_size + positions % self.block_size
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, *counts.values()]).cumsum(0).int(),
            seq_lens=torch.tensor([self.done[row] for row in rows], dtype=torch.int32),
            block_table=self.tables[rows],
            slot_mapping=slots,
            block_size=self.block_size,
            sliding_window=self.window,
            num_sink_tokens=self.num_sink_tokens,
        )
        q, k, v = (torch.cat([part[row][span] for row, span in spans.items()]) for part in (self.q, self.k, self.v))
        lse = torch.empty(q.shape[:2])
        out = OPS.attend(q, k, v, self.cache, meta, self.params, lse=lse)
        parts = out.view(q.shape).split(list(counts.values()))
        for (row, span), part in zip(spans.items(), lse.split(list(counts.values())), strict=True):
            self.lse[row][span] = part
        return dict(zip(rows, parts, strict=True))

    def expected(self, row: int) -> Tensor:
        """By the formula, in float64, query by query: [n, H, D]."""
        return self.by_formula(row)[0]

    def by_formula(self, row: int) -> tuple[Tensor, Tensor]:
        """Rows [n, H, D] and lse [n, H], from operands as they are given."""
        q, k, v = self.q[row].double(), self.k[row].double(), self.v[row].double()
        group = q.shape[1] // k.shape[1]
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
        for i in range(len(q)):
            first = 0 if self.window is None else max(0, i - self.window + 1)
            seen = torch.tensor([*range(min(first, self.num_sink_tokens)), *range(first, i + 1)])
            for head in range(q.shape[1]):
                s = self.score(k[seen, head // group] @ q[i, head], seen - i, head)
                if self.params.sink_logits is not None:
                    s = torch.cat([s, self.params.sink_logits[head].double()[None]])
                out[i, head] = s.softmax(0)[: len(seen)] @ v[seen, head // group]
                lse[i, head] = s.logsumexp(0)
        return out.float(), lse

    def score(self, s: Tensor, distance: Tensor, head: int) -> Tensor:
        """Dot products with keys at these distances -> scores, in the order that AttentionParams has."""
        how = self.params
        bias = 0.0 if how.alibi_slopes is None else how.alibi_slopes[head].double() * distance
        s = (s + bias) * how.scale if how.bias_before_scale else s * how.scale
        s = s if how.softcap is None else how.softcap * (s / how.softcap).tanh()
        return s if how.bias_before_scale else s + bias


def poison(cache: Any) -> None:
    """NaN in all memory that can hold it: nobody has written there."""
    for part in vars(cache).values():
        if isinstance(part, Tensor):
            part.fill_(NAN if part.is_floating_point() else 77)


def seen_by(window: int | None, chunks: list[int]) -> list[list[int]]:
    """Which positions each query weighs, read off the result: all keys are 0, values are one-hot in the position."""
    total = sum(chunks)
    sequences = Sequences([total], window=window, heads=(1, 1, total))
    sequences.k[0].zero_()
    sequences.v[0] = torch.eye(total)[:, None, :]
    rows = torch.cat([sequences.step({0: count})[0][:, 0] for count in chunks])
    seen = [row.nonzero().flatten().tolist() for row in rows]
    for row, positions in zip(rows, seen, strict=True):
        torch.testing.assert_close(row[positions], torch.full((len(positions),), 1 / len(positions)))
    return seen


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 30)),
    heads=st.sampled_from([(1, 1, 2), (6, 2, 4), (8, 1, 4), (3, 3, 6)]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.covers("M24", "M25")
def test_any_packing_and_any_chunks_give_the_formula(
    lengths: list[int], window: int | None, heads: tuple[int, int, int], seed: int
) -> None:
    """Guards against a wrong mask, a wrong block or a mix-up of sequences. Slots nobody wrote are NaN throughout, so
    reading one would show."""
    sequences = Sequences(lengths, window=window, heads=heads, seed=seed)
    choose = random.Random(seed)
    parts: list[list[Tensor]] = [[] for _ in lengths]
    while any(done < length for done, length in zip(sequences.done, lengths, strict=True)):
        left = {row: length - sequences.done[row] for row, length in enumerate(lengths)}
        counts = {row: choose.choice([1, 1, choose.randint(1, rest)]) for row, rest in left.items() if rest}
        for row, part in sequences.step(counts).items():
            parts[row].append(part)
    for row in range(len(lengths)):
        torch.testing.assert_close(torch.cat(parts[row]), sequences.expected(row), atol=2e-5, rtol=1e-4)


@pytest.mark.covers("M4", "M5")
def test_window_of_three_over_six_tokens() -> None:
    """Guards against a window that is one too wide or too narrow: it includes the token itself."""
    assert seen_by(3, [6]) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


@pytest.mark.covers("M5")
@pytest.mark.parametrize(
    ("window", "first"), [(1, lambda i: i), (6, lambda i: 0), (99, lambda i: 0), (None, lambda i: 0)]
)
def test_edges_of_the_window(window: int | None, first: Any) -> None:
    """Guards against special cases: a window of one token, and windows the sequence never fills."""
    assert seen_by(window, [6]) == [list(range(first(i), i + 1)) for i in range(6)]


@pytest.mark.parametrize("window", [0, -1, -4096])
def test_a_window_of_no_token_is_refused(window: int) -> None:
    """Guards against a window of 0 that one backend reads as none and another as hiding everything."""
    step = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(InvalidRequestError, match=f"sliding_window: {window} is not allowed") as caught:
        AttentionMetadata(step, step[1:], step[None, :1], torch.zeros(1, dtype=torch.int64), 16, window)
    assert caught.value.param == "sliding_window"


@pytest.mark.covers("M12")
def test_chunks_see_what_the_whole_prompt_sees() -> None:
    """Guards against storing before attending: 11 tokens through a window of 4 in chunks of 4, 4 and 3 weigh 4 x 4,
    4 x 8 and 3 x 7 scores, and the first query of a chunk still sees the three tokens before it."""
    whole = [list(range(max(0, i - 3), i + 1)) for i in range(11)]
    assert seen_by(4, [11]) == seen_by(4, [4, 4, 3]) == seen_by(4, [1] * 11) == whole
    for size in range(1, 9):
        assert seen_by(4, [min(size, 11 - start) for start in range(0, 11, size)]) == whole


@pytest.mark.covers("M11")
def test_every_prompt_length_through_every_chunk_size() -> None:
    """Guards against a first, last or exactly full chunk treated differently: lengths 1 to 3W + 1 side by side in
    chunks of 1 to 2W, for W = 4."""
    lengths = list(range(1, 14))
    for size in range(1, 9):
        sequences = Sequences(lengths, window=4)
        parts: list[list[Tensor]] = [[] for _ in lengths]
        while left := {row: n - sequences.done[row] for row, n in enumerate(lengths) if n > sequences.done[row]}:
            for row, part in sequences.step({row: min(size, rest) for row, rest in left.items()}).items():
                parts[row].append(part)
        for row in range(len(lengths)):
            torch.testing.assert_close(torch.cat(parts[row]), sequences.expected(row), atol=2e-5, rtol=1e-4)


def test_long_prompts_are_scored_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slip between two blocks of query rows, with and without a window, also behind a prefix."""
    monkeypatch.setattr(attention, "QUERY_ROWS", 5)
    for window in (None, 7):
        sequences = Sequences([24], window=window)
        out = torch.cat([sequences.step({0: 11})[0], sequences.step({0: 13})[0]])
        torch.testing.assert_close(out, sequences.expected(0), atol=2e-5, rtol=1e-4)


def test_many_decoding_sequences_are_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sequence lost or doubled when the gathered keys would be too many for one group."""
    monkeypatch.setattr(attention, "CACHED_ROWS", 20)
    lengths = [9, 1, 14, 3, 9, 22, 2]
    sequences = Sequences(lengths)
    sequences.step({row: length - 1 for row, length in enumerate(lengths) if length > 1})
    last = sequences.step(dict.fromkeys(range(len(lengths)), 1))
    for row in range(len(lengths)):
        torch.testing.assert_close(last[row][0], sequences.expected(row)[-1], atol=2e-5, rtol=1e-4)


def test_released_blocks_are_never_looked_up() -> None:
    """Guards against reading through a table entry of -1 behind the window; the memory there is NaN."""
    sequences = Sequences([20], window=5)
    sequences.step({0: 19})
    sequences.tables[0, :3] = -1  # positions 0 .. 11; the next query sees 15 .. 19
    sequences.cache.keys[-1], sequences.cache.values[-1] = NAN, NAN
    torch.testing.assert_close(sequences.step({0: 1})[0][0], sequences.expected(0)[-1], atol=2e-5, rtol=1e-4)


def every_operator() -> list[Any]:
    """The reference, and native attention on every level of this machine."""
    return [OPS, *(CpuOps(torch.float32, threads=2, level=LEVELS[level]) for level in levels())]


def decode(
    ops: Any, table: list[list[int]], window: int | None = None, sinks: int = 0, lengths: Any = (41, 9)
) -> Tensor:
    """One new token each for two sequences in a cache of 6 blocks of 16 tokens, the same keys and values every time."""
    generator = torch.Generator().manual_seed(0)
    cache = ops.new_kv_cache(CacheSpec(6, 16, 2, 32, torch.float32))
    ops.store_kv(cache, *torch.randn(2, 96, 2, 32, generator=generator), torch.arange(96))
    q, k, v = (torch.randn(2, heads, 32, generator=generator) for heads in (4, 2, 2))
    starts, lengths = torch.arange(3, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    slots = torch.full((2,), -1)
    meta = AttentionMetadata(starts, lengths, torch.tensor(table, dtype=torch.int32), slots, 16, window, sinks)
    result: Tensor = ops.attend(q, k, v, cache, ops.plan(meta, Heads(4, 2, 32), cache), AttentionParams(0.2))
    return result


@pytest.mark.parametrize("ops", every_operator(), ids=lambda ops: getattr(ops, "level", ops.name))
def test_a_visible_position_without_a_block_is_refused(ops: Any) -> None:
    """Guards against -1 in a block table that is read as the last block of the cache, or as keys of zeros, and against
    a check of blocks that nobody sees: before a window, behind a sequence's end, of the new token itself."""
    whole = [[4, 2, 0], [3, 1, 5]]
    for table, window, sinks, message in (
        ([[-1, 2, 0], [3, 1, 5]], None, 0, "block -1, seen at position 0 of sequence 0"),
        ([[4, -1, 0], [3, 1, 5]], 10, 0, "block -1, seen at position 16 of sequence 0"),  # 31 is visible
        ([[4, -1, 0], [3, 1, 5]], 9, 17, "block -1, seen at position 16 of sequence 0"),
        ([[4, 2, 0], [-2, 1, 5]], None, 0, "block -2, seen at position 0 of sequence 1"),
        ([[4, 6, 0], [3, 1, 5]], None, 0, "block 6, seen at position 16 of sequence 0"),
    ):
        with pytest.raises(ValueError, match=f"{message}, is outside of its table: the cache has blocks 0 to 5"):
            decode(ops, table, window, sinks)
    for table, window, sinks in (
        ([[-1, -1, 0], [3, -1, -1]], 9, 0),
        ([[4, -1, 0], [3, -1, -1]], 9, 16),
        ([[4, 2, 0], [3, -1, 99]], None, 0),
    ):
        assert torch.equal(decode(ops, table, window, sinks), decode(ops, whole, window, sinks))
    assert torch.equal(decode(ops, [[4, 2, -1], [3, 1, 5]], lengths=(33, 9)), decode(ops, whole, lengths=(33, 9)))


def test_tokens_without_a_slot_are_not_stored() -> None:
    """Guards against a negative slot wrapping around to the end of the cache."""
    cache: Any = OPS.new_kv_cache(CacheSpec(2, 4, 1, 2, torch.float32))
    cache.keys.fill_(7.0)
    cache.store(torch.ones(3, 1, 2), torch.ones(3, 1, 2), torch.tensor([-1, 2, -4]))
    assert (cache.keys == 1).sum() == 2
    assert (cache.keys.flatten(0, 1)[2] == 1).all()


def test_new_tokens_are_rounded_like_cached_ones() -> None:
    """Guards against a result that depends on the cut: with a bfloat16 cache, a key read from the step must be the
    key read from the cache. Queries are rounded to the cache's type, too."""
    whole, cut = (Sequences([12], cache_dtype=torch.bfloat16) for _ in range(2))
    rounded = replace_with_rounded(Sequences([12]))
    expected = rounded.expected(0)
    torch.testing.assert_close(whole.step({0: 12})[0], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat([cut.step({0: 5})[0], cut.step({0: 7})[0]]), expected, atol=2e-5, rtol=1e-4)


def replace_with_rounded(sequences: Sequences) -> Sequences:
    sequences.q = [part.bfloat16().float() for part in sequences.q]
    sequences.k = [part.bfloat16().float() for part in sequences.k]
    sequences.v = [part.bfloat16().float() for part in sequences.v]
    return sequences


def test_sequences_without_new_tokens_are_left_out() -> None:
    """Guards against a crash on an empty share of a step."""
    sequences = Sequences([4, 4])
    out = sequences.step({0: 0, 1: 4})
    assert out[0].shape == (0, 4, 8)
    torch.testing.assert_close(out[1], sequences.expected(1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_never_depends_on_what_it_does_not_see(window: int | None, bad: float) -> None:
    """Guards against 0 * NaN: a masked row enters as p = 0 and v = 0. A bad value or key of one token may change the
    rows that see it and no other: not the earlier ones of its chunk, not those it has left the window of, and not
    another sequence. Cached and new tokens alike."""
    for part in ("k", "v"):
        for at in (2, 6):
            sequences = Sequences([9, 7], window=window)
            expected = sequences.expected(0), sequences.expected(1)
            getattr(sequences, part)[0][at] = bad
            first, second = sequences.step({0: 4, 1: 3}), sequences.step({0: 5, 1: 4})
            out = [torch.cat([first[row], second[row]]) for row in (0, 1)]
            blind = [i for i in range(9) if i < at or (window is not None and i >= at + window)]
            torch.testing.assert_close(out[0][blind], expected[0][blind], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(out[1], expected[1], atol=2e-5, rtol=1e-4)
            assert part == "k" or not out[0][at].isfinite().any(), "what is seen must show"


# --- parameters of scores --------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "alibi after scaling": {"alibi_slopes": SLOPES},
    "alibi before scaling": {"alibi_slopes": SLOPES, "bias_before_scale": True},
    "sink logits": {"sink_logits": torch.tensor([0.5, -3.0, 4.0, 0.0])},
    "all": {"softcap": 2.0, "alibi_slopes": SLOPES, "sink_logits": torch.tensor([0.5, -3.0, 4.0, 0.0])},
}


@pytest.mark.covers("A2", "C23")
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (5, 0), (5, 2), (3, 7), (30, 2)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_scores_in_the_order_of_the_contract(name: str, window: int | None, sinks: int) -> None:
    """Guards against a bias on the wrong side of the scaling or of the soft cap, a distance from the chunk instead of
    the query, sinks that are read twice or not at all; lse counts all that the rows count. Prefill, chunks, decode."""
    sequences = Sequences([19, 8], window=window, num_sink_tokens=sinks, params=PARAMETERS[name], seed=3)
    expected = [sequences.by_formula(row) for row in (0, 1)]
    steps = [{0: 7, 1: 5}, {0: 1, 1: 1}, {0: 9}, {0: 1, 1: 2}, {0: 1}]
    parts: list[list[Tensor]] = [[], []]
    for counts in steps:
        for row, part in sequences.step(counts).items():
            parts[row].append(part)
    for row, (rows, lse) in enumerate(expected):
        torch.testing.assert_close(torch.cat(parts[row]), rows, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(sequences.lse[row], lse, atol=2e-5, rtol=1e-4)


def test_a_sink_token_behind_the_window_never_spoils_a_row_that_does_not_see_it() -> None:
    """Guards against 0 * NaN beside sinks: the columns are not a range any more, so the mask alone has to do."""
    sequences = Sequences([16], window=3, num_sink_tokens=2)
    expected = sequences.expected(0)
    sequences.v[0][4] = NAN
    out = torch.cat([sequences.step({0: 6})[0], sequences.step({0: 10})[0]])
    blind = [i for i in range(16) if not 4 <= i < 7]
    torch.testing.assert_close(out[blind], expected[blind], atol=2e-5, rtol=1e-4)
    assert bool(out[4:7].isnan().all())


# --- int8 ------------------------------------------------------------------------------------------------------------


def channel_scales(num_kv_heads: int, head_dim: int) -> KVScales:
    generator = torch.Generator().manual_seed(11)
    scales = [0.04 + 0.01 * torch.rand(num_kv_heads, head_dim, generator=generator) for _ in range(2)]
    offsets = [5 * torch.randn(num_kv_heads, head_dim, generator=generator) for _ in range(2)]
    return KVScales(scales[0], offsets[0], scales[1], offsets[1])


@pytest.mark.covers("A17")
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("slices", "bound"), [(0, 2e-5), (2, 1e-3), (3, 2e-5)])
def test_int8_is_attention_over_what_was_stored(channels: bool, slices: int, bound: float) -> None:
    """Guards against new tokens that are attended to before they are rounded, scales of the wrong token or head, and
    offsets left out. Queries as 2 slices err by 1e-5 of their size, as 3 slices not visibly."""
    scales = channel_scales(2, 8) if channels else None
    sequences = Sequences([21, 6], window=9, cache_dtype=torch.int8, slices=slices, scales=scales)
    plain = Sequences([21, 6], window=9)
    for row in (0, 1):
        plain.k[row], plain.v[row] = sequences.cache.rounded(sequences.k[row], sequences.v[row])
        assert not torch.equal(plain.k[row], sequences.k[row])
        torch.testing.assert_close(plain.k[row], sequences.k[row], atol=0.05, rtol=0)
    out = [torch.cat(parts) for parts in zip(*[sequences.step({0: n, 1: 2}).values() for n in (1, 13, 7)], strict=True)]
    for row in (0, 1):
        torch.testing.assert_close(out[row], plain.expected(row), atol=bound, rtol=0)


@pytest.mark.parametrize("channels", [False, True])
def test_int8_gives_back_what_was_stored(channels: bool) -> None:
    """Guards against store_kv and load_kv that round differently from attend, and slots that are mixed up."""
    cache: Any = OPS.new_kv_cache(CacheSpec(3, 4, 2, 8, torch.int8, scales=channel_scales(2, 8) if channels else None))
    poison(cache)
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    OPS.store_kv(cache, k, v, torch.tensor([7, -1, 0, 11, 3]))
    kept, slots = [0, 2, 3, 4], torch.tensor([7, 0, 11, 3])
    for loaded, stored in zip(OPS.load_kv(cache, slots), cache.rounded(k, v), strict=True):
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, stored[kept])
    assert cache.num_bytes == 3 * 4 * 2 * (2 * 8 + (0 if channels else 16))


def test_caches_that_cannot_be_are_refused_by_name() -> None:
    """Guards against options that are accepted and ignored."""
    for options, param in (
        ({"dtype": torch.float16}, "dtype"),
        ({"dtype": torch.bfloat16, "slices": 2}, "slices"),
        ({"dtype": torch.float32, "scales": channel_scales(2, 8)}, "slices"),
        ({"dtype": torch.int8, "slices": 4}, "slices"),
    ):
        with pytest.raises(NotSupportedError) as caught:
            OPS.new_kv_cache(CacheSpec(1, 4, 2, 8, **options))  # type: ignore[arg-type]
        assert caught.value.param == param
    with pytest.raises(ValueError, match="key_scales"):
        OPS.new_kv_cache(CacheSpec(1, 4, 1, 8, torch.int8, scales=channel_scales(2, 8)))
