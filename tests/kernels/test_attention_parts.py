"""Attention in parts: tiles, spans, the fold, flash decoding, Falcon's two parts. float64 unless said otherwise."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec
from penstock.kernels.reference import ReferenceOps, attention
from penstock.kernels.reference.attention import Part, ReferenceKVCache, Scoring, attend_part, finish, fold
from penstock_lab.conventions.tiled_attention import attend_tiles, combine

torch.set_num_threads(1)
B, N, S, H, HKV, D = 2, 3, 300, 6, 2, 8
SCORING = Scoring(scale=D**-0.5)
NAN, INF = float("nan"), float("inf")
EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-10}  # of float64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(num_keys: int = S, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(B, N, H, D, seed=1, dtype=dtype),
        draw(B, num_keys, HKV, D, seed=2, dtype=dtype),
        draw(B, num_keys, HKV, D, seed=3, dtype=dtype),
    )


def random_mask(*shape: int, share: float = 0.6, seed: int = 5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def by_formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(D)) v, one row and head at a time over exactly the keys it sees; zeros where none."""
    out = torch.zeros_like(q)
    shown = torch.ones(B, H, N, k.shape[1], dtype=torch.bool) if visible is None else visible
    shown = shown.expand(B, H, N, k.shape[1])
    for b, i, h in torch.cartesian_prod(torch.arange(B), torch.arange(N), torch.arange(H)).tolist():
        seen = shown[b, h, i]
        keys, values = k[b, seen, h // (H // HKV)], v[b, seen, h // (H // HKV)]
        if len(keys):
            out[b, i, h] = (keys @ q[b, i, h] * SCORING.scale).softmax(0) @ values
    return out


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch does, but with truth values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            self.counts[func.name().split("::")[1].split(".")[0].rstrip("_")] += 1
        return result


def same(part: Part, other: Part) -> bool:
    return all(torch.equal(getattr(part, name), getattr(other, name)) for name in ("greatest", "total", "mixed"))


# --- tiles and spans -------------------------------------------------------------------------------------------------


@pytest.mark.covers("A5")
@pytest.mark.parametrize(("tile", "span_tiles"), [(1, 1), (7, 3), (16, 32), (64, 2), (64, 32), (299, 1), (1000, 1)])
def test_any_tiles_are_one_tile(tile: int, span_tiles: int) -> None:
    """Guards against a refresh that forgets to rescale what came before: exp[i] = e^(max[i-1] - max[i])."""
    q, k, v = qkv()
    k[:, ::50] *= 4  # the maximum goes up again and again
    visible = random_mask(B, 1, N, S)
    whole = finish(attend_part(q, k, v, visible, SCORING))
    tiled = finish(attend_tiles(q, k, v, visible, SCORING, tile=tile, span_tiles=span_tiles))
    for a, b in zip(tiled, whole, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    torch.testing.assert_close(whole[0], by_formula(q, k, v, visible), **EXACT)


@pytest.mark.covers("A5")
def test_float32_tiles_stay_within_a_bound() -> None:
    """Guards against an order of sums that loses more than one tile does: thousands of tokens, against float64."""
    q, k, v = qkv(5000, torch.float32)
    exact = finish(attend_part(q.double(), k.double(), v.double(), None, SCORING))[0]
    errors = [
        (finish(attend_tiles(q, k, v, None, SCORING, tile=tile))[0].double() - exact).abs().max().item()
        for tile in (64, 5000)
    ]
    assert max(errors) < 1e-6
    assert errors[0] < 4 * errors[1] + 1e-8


@pytest.mark.covers("A5")
def test_fixed_tiles_do_not_see_the_batch() -> None:
    """Guards against sums that end elsewhere when a longer neighbour comes: a row with padding up to the longest of
    its batch, whatever is there, has the bits it has alone. (With one tile it may not.)"""
    lengths, longest = [1, 63, 64, 65, 130, 700], 700
    q = draw(len(lengths), 1, H, D, seed=1, dtype=torch.float32)
    k, v = (draw(len(lengths), longest, HKV, D, seed=seed, dtype=torch.float32) for seed in (2, 3))
    visible = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]
    # The batch is a loop: whether torch gives a row of a product the same bits in a larger one is torch's affair.
    for row, length in enumerate(lengths):
        mine, whole = slice(row, row + 1), -(-length // 64) * 64
        padded_k, padded_v = (x[mine].masked_fill(~visible[mine, 0, 0, :, None, None], 1e30) for x in (k, v))
        together = attend_tiles(q[mine], padded_k, padded_v, visible[mine], SCORING)
        alone_k, alone_v = (torch.cat([x[mine, :length], x.new_zeros(1, whole - length, HKV, D)], 1) for x in (k, v))
        shown = (torch.arange(whole) < length)[None, None, None]
        assert same(together, attend_tiles(q[mine], alone_k, alone_v, shown, SCORING))


@pytest.mark.covers("A6")
@pytest.mark.parametrize("tile", [300, 64, 10])
def test_one_division(tile: int) -> None:
    """Guards against a state that is normed after every tile."""
    q, k, v = qkv()
    with Operations() as watched:
        out, _ = finish(attend_tiles(q, k, v, None, SCORING, tile=tile))
    divisions = {name: count for name, count in watched.counts.items() if "div" in name or "softmax" in name}
    assert divisions == {"div": 1}
    torch.testing.assert_close(out, by_formula(q, k, v), **EXACT)


@pytest.mark.covers("F17")
@pytest.mark.parametrize("tile", [300, 64, 7])
def test_two_loops_are_the_online_softmax(tile: int) -> None:
    """Guards against statistics that miss a tile. Every tile has its two products, and no o is rescaled: there is one
    multiplication a tile, that by the scale."""
    q, k, v = qkv()
    visible = random_mask(B, H, N, S)
    visible[0, :, 0] = False
    with Operations() as watched:
        two = finish(attend_tiles(q, k, v, visible, SCORING, tile=tile, loops=2))
    one = finish(attend_tiles(q, k, v, visible, SCORING, tile=tile))
    for a, b in zip(two, one, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    num_tiles = -(-S // tile)
    assert watched.counts["bmm"] == 2 * num_tiles
    assert watched.counts["mul"] == num_tiles
    with Operations() as watched:
        attend_tiles(q, k, v, visible, SCORING, tile=tile)
    assert watched.counts["bmm"] == 2 * num_tiles
    assert watched.counts["mul"] > 4 * num_tiles  # what the two loops save


# --- the fold --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A5", "A6")
def test_fold_in_any_grouping() -> None:
    """Guards against a fold that only works from left to right, or only for one maximum."""
    q, k, v = qkv()
    parts = [
        attend_part(q, k[:, keys], v[:, keys], None, SCORING) for keys in (slice(0, 9), slice(9, 10), slice(10, S))
    ]
    left, right = fold(fold(parts[0], parts[1]), parts[2]), fold(parts[2], fold(parts[1], parts[0]))
    expected = by_formula(q, k, v)
    for part in (left, right):
        torch.testing.assert_close(finish(part)[0], expected, **EXACT)


def test_nothing_is_the_identity() -> None:
    """Guards against e^(-inf + inf): a part that sees nothing leaves a state as it is, bit for bit, also the state
    that has seen nothing itself."""
    q, k, v = qkv()
    part, nothing = attend_part(q, k, v, None, SCORING), Part.nothing(q)
    hidden = attend_part(q, k.fill_(NAN), v.fill_(NAN), torch.zeros(1, 1, 1, S, dtype=torch.bool), SCORING)
    assert same(hidden, nothing)
    part.mixed[..., 0] = -0.0  # which an addition of 0 would turn
    assert same(fold(part, hidden), part)
    assert bool(fold(part, hidden).mixed[..., 0].signbit().all())
    assert same(fold(nothing, hidden), nothing)
    for a, b in zip(finish(fold(nothing, part)), finish(part), strict=True):
        assert torch.equal(a, b)


@pytest.mark.covers("A3")
def test_a_row_that_sees_nothing_is_zeros() -> None:
    """Guards against 0 / 0, in one part and in tiles; its lse is -inf. Sink logits alone still bring no value."""
    q, k, v = qkv()
    visible = random_mask(B, H, N, S)
    visible[1, 2, 0] = False
    for part in (attend_part(q, k, v, visible, SCORING), attend_tiles(q, k, v, visible, SCORING)):
        out, lse = finish(part)
        assert bool((out[1, 0, 2] == 0).all())
        assert lse[1, 0, 2] == -INF
        assert bool(lse.isnan().sum() == 0)
        assert int(lse.isinf().sum()) == 1
        torch.testing.assert_close(out, by_formula(q, k, v, visible), **EXACT)
        sunk, sunk_lse = finish(part, torch.full((H,), 0.25))
        assert bool((sunk[1, 0, 2] == 0).all())
        assert sunk_lse[1, 0, 2] == 0.25


def test_sink_logits_are_one_more_key_without_value() -> None:
    """Guards against a sink that is left out of the maximum (overflow) or of the sum."""
    q, k, v = qkv()
    for size in (0.5, 900.0, -900.0):
        sinks = size + draw(H, seed=8)
        s = (q.transpose(1, 2) @ k.repeat_interleave(H // HKV, 2).permute(0, 2, 3, 1)) * SCORING.scale
        s = torch.cat([s, sinks[None, :, None, None].expand(B, H, N, 1)], dim=-1)
        out, lse = finish(attend_part(q, k, v, None, SCORING), sinks)
        weights = s.softmax(-1)[..., :-1].transpose(1, 2)  # [B, N, H, S]
        expected = torch.einsum("bnhs,bshd->bnhd", weights, v.repeat_interleave(H // HKV, 2))
        torch.testing.assert_close(out, expected, **EXACT)
        torch.testing.assert_close(lse, s.logsumexp(-1).transpose(1, 2), **EXACT)


# --- flash decoding --------------------------------------------------------------------------------------------------


def splits(bounds: list[int], q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Finished splits between bounds -> outs [K, B, N, H, D], lses [K, B, N, H]."""
    done = [
        finish(attend_part(q, k[:, low:high], v[:, low:high], visible[..., low:high], SCORING))
        for low, high in itertools.pairwise(bounds)
    ]
    return torch.stack([out for out, _ in done]), torch.stack([lse for _, lse in done])


@pytest.mark.covers("A10")
@pytest.mark.parametrize("bounds", [[0, S], [0, 100, 200, S], [0, 0, 7, 7, 7, S, S], [0, 1, 2, 3, S - 1, S]])
def test_splits_combine_to_the_whole(bounds: list[int]) -> None:
    """Guards against splits that are averaged, and against those of no length or of nothing visible (lse = -inf). A
    row that sees nothing anywhere stays zeros."""
    q, k, v = qkv()
    visible = random_mask(B, 1, N, S, share=0.02)
    visible[0, :, 1] = False
    out, lse = combine(*splits(bounds, q, k, v, visible))
    whole, whole_lse = finish(attend_part(q, k, v, visible, SCORING))
    torch.testing.assert_close(out, whole, **EXACT)
    torch.testing.assert_close(lse, whole_lse, **EXACT)
    assert bool((out[0, 1] == 0).all() and (lse[0, 1] == -INF).all())


@pytest.mark.covers("A10")
def test_the_greatest_lse_is_subtracted() -> None:
    """Guards against e^lse as the operator's document writes it: scores of a thousand overflow even float64."""
    q, k, v = qkv()
    q = q * 1000
    visible = torch.ones(1, 1, 1, S, dtype=torch.bool)
    outs, lses = splits([0, 80, 200, S], q, k, v, visible)
    assert bool(torch.exp(lses).isinf().any())
    out, lse = combine(outs, lses)
    whole, whole_lse = finish(attend_part(q, k, v, None, SCORING))
    torch.testing.assert_close(out, whole, **EXACT)
    torch.testing.assert_close(lse, whole_lse, **EXACT)


# --- Falcon's two parts ----------------------------------------------------------------------------------------------


@pytest.mark.covers("F14")
def test_dense_masks() -> None:
    """Guards against a mask that is shared by rows, by the heads of a group, or shifted by a slot: dense ones for each
    row, head and slot, and all that broadcast to them. Hidden memory is NaN or infinite."""
    q, k, v = qkv()
    for shape in ((B, H, N, S), (B, 1, N, S), (1, H, 1, S), (1, 1, N, S), (B, H, N, 1)):
        visible = random_mask(*shape, share=0.5)
        expected = by_formula(q, k, v, visible)
        torch.testing.assert_close(finish(attend_part(q, k, v, visible, SCORING))[0], expected, **EXACT)
        torch.testing.assert_close(finish(attend_tiles(q, k, v, visible, SCORING))[0], expected, **EXACT)
    visible = random_mask(B, H, N, S)
    visible[0, :, :, 17] = visible[1, 3:, :, 4] = visible[1, :, 2, 9] = False
    expected = by_formula(q, k, v, visible)
    k[0, 17], v[0, 17], k[1, 4, 1], v[1, 4, 1] = NAN, INF, NAN, NAN  # heads 3 .. 5 read kv head 1
    torch.testing.assert_close(finish(attend_part(q, k, v, visible, SCORING))[0], expected, **EXACT)
    v[1, 9] = NAN  # hidden from row 2 only
    out = finish(attend_part(q, k, v, visible, SCORING))[0]
    torch.testing.assert_close(out[1, 2], expected[1, 2], **EXACT)
    seen = visible[1, :, 0, 9]
    assert bool(out[1, 0, seen].isnan().all())
    torch.testing.assert_close(out[1, 0, ~seen], expected[1, 0, ~seen], **EXACT)


@pytest.mark.covers("F15")
def test_a_store_is_index_copy() -> None:
    """Guards against a store that touches other slots: each row's new token goes to its own slot, and all other slots
    keep their bits."""
    rows, slots = 32, 64
    cache, new = draw(rows, slots, D, dtype=torch.bfloat16), draw(rows, 1, D, seed=4, dtype=torch.bfloat16)
    chosen = torch.randint(0, slots, (rows,), generator=torch.Generator().manual_seed(6))
    expected = cache.clone()
    for row, slot in enumerate(chosen.tolist()):
        expected[row].index_copy_(0, torch.tensor([slot]), new[row])
    store = ReferenceKVCache(CacheSpec(rows, slots, 1, D, torch.bfloat16), torch.device("cpu"))
    store.store(cache.reshape(-1, 1, D), cache.reshape(-1, 1, D), torch.arange(rows * slots))
    store.store(new, -new, torch.arange(rows) * slots + chosen)
    assert torch.equal(store.keys[:, :, 0].view(torch.int16), expected.view(torch.int16))
    untouched = torch.ones(rows, slots, dtype=torch.bool).scatter_(1, chosen[:, None], False)
    assert torch.equal(store.values[:, :, 0][untouched], cache[untouched])
    assert torch.equal(store.values[:, :, 0][~untouched], -new[:, 0])


@pytest.mark.covers("F16")
@pytest.mark.parametrize("cached", [0, 1, 5, 64])
def test_cached_and_new_tokens_are_two_parts(cached: int) -> None:
    """Guards against a softmax that is normed for each part: keys [cache, new], masks [mask, None], merged by their
    statistics, against the concatenation. With nothing cached the first part is hidden altogether."""
    slots = 64
    q, k, v = qkv(slots + 1)
    q = q[:, :1]
    mask = (torch.arange(slots) < cached).view(1, 1, 1, slots)
    k[:, cached:slots], v[:, cached:slots] = NAN, NAN
    old, new = (attend_part(q, k[:, keys], v[:, keys], shown, SCORING) for keys, shown in
                ((slice(0, slots), mask), (slice(slots, None), None)))  # fmt: skip
    together = torch.cat([torch.arange(cached), torch.tensor([slots])])
    whole = finish(attend_part(q, k[:, together], v[:, together], None, SCORING))
    for a, b in zip(finish(fold(old, new)), whole, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    if cached == 0:
        assert same(fold(Part.nothing(q), old), Part.nothing(q))


class LateCache(ReferenceKVCache):
    """Stores when it is told to."""

    later: list[Callable[[], None]]

    def store(self, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
        store = super().store
        self.later.append(lambda: store(k_new, v_new, slots))


def one_step(cache: ReferenceKVCache, start: int, count: int) -> Tensor:
    ops, (q, k, v) = ReferenceOps(torch.float64), (x[0] for x in (draw(1, 40, H, D), *qkv(40)[1:]))
    meta = AttentionMetadata(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([start + count], dtype=torch.int32),
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        torch.tensor([[2, 0, 1][p // 16] * 16 + p % 16 for p in range(start, start + count)]),
        16,
        None,
    )
    new = slice(start, start + count)
    return ops.attend(q[new], k[new], v[new], cache, meta, AttentionParams(SCORING.scale))


@pytest.mark.covers("F18")
@pytest.mark.parametrize("how", ["later", "thread"])
def test_nothing_waits_for_the_store(how: str) -> None:
    """Guards against attention that reads new tokens from the cache: the write may come after it, or go on in another
    thread, and the step has the same bits; the next step finds the tokens."""
    plain = ReferenceKVCache(CacheSpec(3, 16, HKV, D, torch.float64), torch.device("cpu"))
    late = LateCache(CacheSpec(3, 16, HKV, D, torch.float64), torch.device("cpu"))
    late.later = []
    late.keys.fill_(NAN)
    late.values.fill_(NAN)
    for start, count in ((0, 20), (20, 1), (21, 17)):
        assert torch.equal(one_step(late, start, count), one_step(plain, start, count))
        (write,) = late.later
        late.later.clear()
        if how == "thread":
            worker = threading.Thread(target=write)
            worker.start()
            worker.join()
        else:
            write()


# --- the paged operation is made of parts ----------------------------------------------------------------------------


def test_float64_throughout() -> None:
    """Guards against an oracle that is float32 inside: queries and cache in float64 give float64."""
    cache = ReferenceKVCache(CacheSpec(3, 16, HKV, D, torch.float64), torch.device("cpu"))
    out = one_step(cache, 0, 20)
    assert out.dtype == torch.float64
    q, (k, v) = draw(1, 40, H, D)[:, :20], (x[:1, :20] for x in qkv(40)[1:])
    rows = torch.arange(20)
    part = attend_tiles(q, k, v, (rows <= rows[:, None])[None, None], SCORING)
    torch.testing.assert_close(out, finish(part)[0].view(20, -1), **EXACT)
    assert attention.QUERY_ROWS > 20
