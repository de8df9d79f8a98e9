"""The native sampler: it chooses what the reference chooses, and its bits depend on nothing but the row.

Noise, exponentials and logarithms of the reference come from torch and may differ in their last bits. So an id may
differ where two perturbed values are within NEAR of each other, or where an entry lies within NEAR of the limit of
top_p or min_p; `explained` computes that in float64, and `assert_same_choices` bounds how often it may be needed.
"""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.cpu.library import PenstockSampling, load_library
from penstock.kernels.reference.ops import ReferenceOps
from penstock.kernels.reference.sampling import gumbel_noise
from penstock.kernels.sampling import MASK, NO_TOKEN, SamplingTensors, adjust, high, philox4x32
from tests.kernels.packed import Native, levels

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native library was not built")
NEVER = float("-inf")
NEAR = 1e-5
REFERENCE = ReferenceOps(torch.float32)


def structure(params: SamplingTensors) -> PenstockSampling:
    """The C structure that points into these tensors."""
    fields: dict[str, int] = {}

    def put(name: str, tensor: Tensor | None, count: str = "") -> None:
        if tensor is not None:
            assert tensor.is_contiguous()
            fields[name] = tensor.data_ptr()
            if count:
                fields[count] = len(tensor)

    for name in ("temperature", "top_k", "top_p", "min_p", "noise_key"):
        put(name, getattr(params, name))
    put("masked", params.masked, "num_masked")
    if params.bias is not None:
        put("bias_pairs", params.bias[0], "num_bias")
        put("bias_values", params.bias[1])
    if params.repetition is not None:
        put("repetition", params.repetition[0])
        put("repetition_pairs", params.repetition[1], "num_repetition")
    if params.counts is not None:
        put("frequency", params.counts[0])
        put("presence", params.counts[1])
        put("count_pairs", params.counts[2], "num_counts")
        put("count_values", params.counts[3])
    return PenstockSampling(**fields)


class Sampler(Native):
    """The sampler's functions of one context."""

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        before, ids = logits.clone(), torch.full((len(logits),), -7)
        arguments = structure(params)
        status = self.library.penstock_sample(
            self.context, logits.data_ptr(), *logits.shape, ctypes.addressof(arguments), ids.data_ptr()
        )
        assert status == 0
        assert torch.equal(before.view(torch.int32), logits.view(torch.int32)), "the logits were written"
        return ids

    def log_softmax(self, logits: Tensor) -> Tensor:
        out = torch.full_like(logits, float("nan"))
        assert self.library.penstock_log_softmax(self.context, logits.data_ptr(), *logits.shape, out.data_ptr()) == 0
        return out

    def finite_rows(self, logits: Tensor) -> list[int]:
        out = torch.full((len(logits),), 7, dtype=torch.uint8)
        assert self.library.penstock_finite_rows(self.context, logits.data_ptr(), *logits.shape, out.data_ptr()) == 0
        return out.tolist()


@pytest.fixture(scope="module")
def samplers() -> list[Sampler]:
    """One for each level with one thread, and the highest level with three."""
    return [Sampler(level) for level in levels()] + [Sampler(levels()[-1], 3)]


def tensors(rows: int, **fields: Any) -> SamplingTensors:
    """SamplingTensors with None where nothing is given. A temperature alone also gets keys for its noise."""
    values: dict[str, Any] = dict.fromkeys(SamplingTensors.__dataclass_fields__)
    values |= {"temperature": torch.zeros(rows), "noise_key": noise_keys(rows)} | fields
    return SamplingTensors(**values)


def noise_keys(rows: int, seed: int = 0) -> Tensor:
    """Seeds, choices and positions with bits in all their upper halves."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows, 1), generator=generator)
    rest = torch.randint(0, 2**17, (rows, 2), generator=generator)
    return torch.cat([seeds, rest], dim=1)


def every_id(logits: Tensor, params: SamplingTensors, samplers: list[Sampler]) -> Tensor:
    """What all samplers choose, which must be the same."""
    first, *others = [sampler.sample(logits, params) for sampler in samplers]
    for other in others:
        assert torch.equal(first, other), "levels or thread counts differ"
    return first


def explained(logits: Tensor, params: SamplingTensors, row: int, chosen: int) -> bool:
    """Whether this id is the reference's but for a near tie, by float64."""
    x = adjust(logits.clone(), params)[row] / params.temperature[row]
    p = x.double().softmax(-1)
    doubtful = torch.zeros(len(x), dtype=torch.bool)  # may be dropped or stay
    stays = x > NEVER
    if params.min_p is not None:
        limit = params.min_p[row].double() * p.max()
        doubtful |= (p / limit - 1).abs() < NEAR
        stays &= (p >= limit) | doubtful
    order = x.sort(descending=True, stable=True).indices
    if params.top_k is not None:
        left = order[stays[order]]
        stays[left[int(params.top_k[row]) :]] = False
    if params.top_p is not None and params.top_p[row] < 1:
        left = order[stays[order]]
        share = p[left] / p[left].sum()
        before = share.cumsum(-1) - share
        doubtful[left] |= (before - params.top_p[row].double()).abs() < NEAR
        stays[left] &= (before < params.top_p[row].double()) | doubtful[left]
        stays[left[0]] = True
    assert params.noise_key is not None
    noisy = x.double() + gumbel_noise(params.noise_key[[row]], len(x))[0].double()
    sure = noisy[stays & ~doubtful].max() if (stays & ~doubtful).any() else -torch.inf
    return bool(stays[chosen]) and bool(noisy[chosen] >= sure - NEAR)


def assert_same_choices(logits: Tensor, params: SamplingTensors, samplers: list[Sampler]) -> int:
    """Every row is the reference's; returns how many needed an explanation."""
    ids, expected = every_id(logits, params, samplers), REFERENCE.choose(logits, params)[0]
    rows = (ids != expected).nonzero().flatten().tolist()
    for row in rows:
        assert params.temperature[row] > 0, f"greedy row {row}: {ids[row]} and not {expected[row]}"
        assert explained(logits, params, row, int(ids[row])), f"row {row}: {ids[row]} and not {expected[row]}"
    return len(rows)


def pairs(generator: torch.Generator, rows: int, vocab: int, per_row: int) -> Tensor:
    """Distinct pairs (row, id) in no order, [P, 2]."""
    flat = torch.randperm(rows * vocab, generator=generator)[: rows * per_row]
    return torch.stack([flat // vocab, flat % vocab], dim=1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, SamplingTensors]:
    """Logits, often with many ties, and every parameter on or off."""
    rows, vocab = draw(st.integers(1, 9)), draw(st.one_of(st.integers(5, 150), st.integers(150, 3000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 4.0]))
    if draw(st.booleans()):
        logits = (logits * 4).round() / 4  # ties, and -0
    if draw(st.booleans()):
        logits[torch.rand(rows, vocab, generator=generator) < 0.3] = NEVER
        logits[:, vocab // 2] = 0.5

    def some(low: float, high: float, off: float) -> Tensor | None:
        values = torch.rand(rows, generator=generator) * (high - low) + low
        values[torch.rand(rows, generator=generator) < 0.2] = off
        return values if draw(st.booleans()) else None

    top_k = some(1, draw(st.sampled_from([4, 60, vocab + 3])), vocab)
    fields: dict[str, Any] = {
        "temperature": some(0.3, 2.5, 0.0),
        "top_k": None if top_k is None else top_k.long(),
        "top_p": some(0.01, 1.0, 1.0),
        "min_p": some(0.0, 0.6, 0.0),
        "noise_key": noise_keys(rows, draw(st.integers(0, 2**32))),
    }
    if fields["temperature"] is None:
        fields["temperature"] = torch.ones(rows)
    if draw(st.booleans()):
        fields["masked"] = pairs(generator, rows, vocab, min(vocab // 2, 40))
        biased = pairs(generator, rows, vocab, 3)
        fields["bias"] = (biased, torch.randn(len(biased), generator=generator) * 5)
    if draw(st.booleans()):
        fields["repetition"] = (torch.rand(rows, generator=generator) + 0.7, pairs(generator, rows, vocab, vocab // 3))
        counted = pairs(generator, rows, vocab, vocab // 4)
        times = torch.randint(1, 5, (len(counted),), generator=generator).float()
        fields["counts"] = (*torch.randn(2, rows, generator=generator), counted, times)
    return logits, tensors(rows, **fields)


def test_chooses_what_the_reference_chooses(samplers: list[Sampler]) -> None:
    """Guards against any step that is missing, out of order or cuts one entry too many. Of the rows that are drawn, at
    most one in a thousand may need the near tie that `explained` proves."""
    rows = excused = 0

    @settings(max_examples=250)
    @given(case=cases())
    def check(case: tuple[Tensor, SamplingTensors]) -> None:
        nonlocal rows, excused
        rows += len(case[0])
        excused += assert_same_choices(*case, samplers)

    check()
    assert excused <= rows / 1000, f"{excused} of {rows} rows"


def shapes_of_a_row(vocab: int) -> dict[str, Tensor]:
    """Rows that are hard for a search by blocks, buckets or thresholds."""
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(vocab, generator=generator)
    peaked = normal.clone()
    peaked[vocab - 3] = 60.0
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    two = torch.where(torch.arange(vocab) % 7 == 3, 1.0, 0.0)
    wide = normal * 10 ** (torch.rand(vocab, generator=generator) * 60 - 30)
    lonely = torch.full((vocab,), NEVER)
    lonely[[vocab // 3, vocab - 1]] = torch.tensor([2.0, 2.0])
    return {
        "normal": normal * 3, "flat": normal * 1e-3, "equal": torch.full((vocab,), -3.25), "peaked": peaked,
        "ascending": normal.sort()[0], "descending": normal.sort(descending=True)[0], "zeros": zeros, "two values": two,
        "wide": wide.clamp(-30, 30), "lonely": lonely, "tiny": normal * 1e-40,
    }  # fmt: skip


@pytest.mark.parametrize("vocab", [5, 17, 1023, 1024, 4099, 33000])
def test_cuts_of_hard_rows(vocab: int, samplers: list[Sampler]) -> None:
    """Guards against a search that misses an entry behind its threshold, loses the order of ties, or stops at the end
    of a block: each row with every cut, over several draws; top_k 1, top_k of V and more, tiny and huge top_p. No share
    is one that a number of equal entries meets exactly."""
    shapes = list(shapes_of_a_row(vocab).values())
    cuts = [
        (1, 1.0, 0.0), (2, 1.0, 0.0), (50, 1.0, 0.0), (vocab // 2, 1.0, 0.0), (vocab, 1.0, 0.0), (vocab + 9, 0.53, 0.0),
        (vocab, 1e-6, 0.0), (vocab, 0.31, 0.0), (vocab, 0.89, 0.0), (vocab, 0.9999, 0.0), (vocab, 1.0, 0.5),
        (vocab, 1.0, 0.99), (vocab, 0.71, 0.05), (40, 0.81, 0.0), (vocab // 3 + 1, 0.53, 0.01),
    ]  # fmt: skip
    logits = torch.stack(shapes).repeat_interleave(len(cuts), dim=0)
    columns = [torch.tensor(column) for column in zip(*cuts * len(shapes), strict=True)]
    excused = 0
    for seed in range(4 if vocab < 10000 else 1):
        params = tensors(
            len(logits), temperature=torch.ones(len(logits)), noise_key=noise_keys(len(logits), seed),
            top_k=columns[0].clamp(min=1), top_p=columns[1].float(), min_p=columns[2].float(),
        )  # fmt: skip
        excused += assert_same_choices(logits, params, samplers[-2:])
    assert excused <= 1


def test_a_share_that_is_met_exactly(samplers: list[Sampler]) -> None:
    """Guards against one entry too many where the sum before it equals top_p, and ties lost at min_p 1. Of eight equal
    entries the first n remain at top_p n / 8, which float32 adds without rounding."""
    count = 400
    logits = torch.full((count, 40), NEVER)
    logits[:, 3:35:4] = 1.5
    kept = torch.arange(count) % 8 + 1
    fields = {"temperature": torch.full((count,), 0.5), "noise_key": noise_keys(count)}
    for top_k in (None, torch.full((count,), 39)):
        params = tensors(count, top_p=kept / 8, top_k=top_k, **fields)
        ids = every_id(logits, params, samplers)
        assert (ids < 3 + 4 * kept).all()
        assert torch.equal(ids, REFERENCE.choose(logits, params)[0])
    logits[:, 1] = 1.4
    ids = every_id(logits, tensors(count, min_p=torch.ones(count), **fields), samplers)
    assert sorted(set(ids.tolist())) == list(range(3, 35, 4))


def test_a_share_far_below_the_most_likely(samplers: list[Sampler]) -> None:
    """Guards against a search that stops where it expects the share: one entry has half of the probability, the others
    lie more than e^10 below it, and the cut lies among them."""
    count, vocab = 40, 33000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)).repeat(count, 1) * 0.1
    logits[:, vocab // 2] = 10.7
    params = tensors(count, temperature=torch.ones(count), top_p=torch.full((count,), 0.7))
    assert assert_same_choices(logits, params, samplers[-1:]) == 0


@pytest.mark.parametrize("vocab", [32000, 152064])
def test_large_vocabularies(vocab: int, samplers: list[Sampler]) -> None:
    """Guards against what only a real vocabulary shows: counters beyond 16 bits, and a top_p of most of it."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    params = tensors(
        5, temperature=torch.tensor([0.0, 1.0, 0.9, 0.5, 1.0]), top_k=torch.tensor([vocab] * 3 + [50, 30000]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 0.6]),
    )  # fmt: skip
    assert assert_same_choices(logits, params, samplers[-1:]) == 0


def test_the_greater_word_wins(samplers: list[Sampler]) -> None:
    """Guards against a wrong Philox constant, swapped seed words, or words that serve the wrong entries: of two equal
    logits the one with the greater random word is chosen, for every entry against another one. No logarithms."""
    vocab = 203
    first = torch.arange(vocab)
    second = (first * 7 + 3) % vocab
    logits = torch.full((vocab, vocab), NEVER)
    logits[first, first] = logits[first, second] = 1.0
    for seed in range(10):
        keys = noise_keys(vocab, seed)
        counter = (keys[:, 1:2] & MASK, keys[:, 2:3] & MASK, torch.arange(51)[None, :], torch.zeros(1, 51).long())
        words = torch.stack(philox4x32(counter, (keys[:, :1] & MASK, high(keys[:, :1]))), dim=-1).flatten(1) >> 9
        expected = torch.where(words[first, first] > words[first, second], first, second)
        clear = words[first, first] != words[first, second]
        ids = every_id(logits, tensors(vocab, temperature=torch.ones(vocab), noise_key=keys), samplers)
        assert torch.equal(ids[clear], expected[clear])


def test_a_row_depends_on_itself_only(samplers: list[Sampler]) -> None:
    """Guards against scratch memory that one row leaves to the next, and parameters of the wrong row: every row alone
    gives the id and the log-probabilities that it has in a batch of unlike rows, at each level and thread count."""
    generator = torch.Generator().manual_seed(4)
    rows, vocab = 12, 1931
    logits = torch.randn(rows, vocab, generator=generator) * 3
    masked = pairs(generator, rows, vocab, 900)
    keys = noise_keys(rows)
    temperature, top_k = torch.tensor([0.0, 1.0, 0.7] * 4), torch.tensor([vocab, 3, 200, vocab] * 3)
    top_p = torch.tensor([1.0, 0.9] * 6)
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "noise_key": keys}
    ids = every_id(logits, tensors(rows, masked=masked, **fields), samplers)
    logprobs = samplers[0].log_softmax(logits)
    for sampler in samplers:
        assert torch.equal(sampler.log_softmax(logits), logprobs)
        for row in range(rows):
            own = masked[masked[:, 0] == row] * torch.tensor([0, 1])
            alone = tensors(1, masked=own, **{name: values[row : row + 1] for name, values in fields.items()})
            assert sampler.sample(logits[row : row + 1], alone)[0] == ids[row]
            assert torch.equal(sampler.log_softmax(logits[row : row + 1])[0], logprobs[row])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_to_choose(temperature: float, samplers: list[Sampler]) -> None:
    """Guards against an id for a row that is masked or -inf throughout, and against NO_TOKEN for its neighbours."""
    vocab = 21
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(8))
    logits[3] = NEVER
    logits[2, :20] = NEVER
    masked = torch.tensor([[1, token] for token in range(vocab)])
    fields = {"temperature": torch.full((4,), temperature), "top_p": torch.full((4,), 0.5)}
    params = tensors(4, masked=masked, bias=(torch.tensor([[1, 4]]), torch.tensor([50.0])), **fields)
    ids = every_id(logits, params, samplers)
    assert ids.tolist() == [REFERENCE.choose(logits, params)[0][0].item(), NO_TOKEN, 20, NO_TOKEN]


def test_greedy_takes_the_lowest_of_equals(samplers: list[Sampler]) -> None:
    """Guards against the highest id of a tie, or that of a lane or block that was looked at first, and -0 below 0."""
    vocab = 5003
    generator = torch.Generator().manual_seed(2)
    logits = torch.zeros(40, vocab) - torch.rand(40, vocab, generator=generator)
    tied = torch.randint(0, vocab, (40, 5), generator=generator)
    logits.scatter_(1, tied, torch.tensor([[0.0, -0.0, 0.0, -0.0, 0.0]]).expand(40, -1))
    assert torch.equal(every_id(logits, tensors(40, noise_key=None), samplers), tied.amin(dim=1))


def test_a_temperature_without_noise_is_greedy(samplers: list[Sampler]) -> None:
    """Guards against a null pointer that is read."""
    logits = torch.randn(2, 90, generator=torch.Generator().manual_seed(2))
    params = tensors(2, temperature=torch.ones(2), noise_key=None)
    assert torch.equal(every_id(logits, params, samplers), logits.argmax(-1))


@pytest.mark.parametrize("field", ["none", "top_k", "top_p", "min_p"])
def test_draws_follow_the_distribution(field: str, samplers: list[Sampler]) -> None:
    """Guards against noise that is skipped for an entry that could have won: 20,000 seeds against the exact
    probabilities by chi-square. The noise is counter-based, so the statistic is a constant and cannot flake."""
    count, vocab = 20_000, 70
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, vocab, generator=generator)
    p = logits.double().softmax(-1)[0]
    order = p.sort(descending=True).indices
    if field == "top_k":
        p[order[12:]] = 0
    elif field == "top_p":
        p[order[(p[order].cumsum(0) - p[order]) >= 0.8]] = 0
    elif field == "min_p":
        p[p < 0.2 * p.max()] = 0
    cuts = {"top_k": torch.full((count,), 12), "top_p": torch.full((count,), 0.8), "min_p": torch.full((count,), 0.2)}
    keys = torch.stack([torch.arange(count) * 7919, torch.zeros(count).long(), torch.full((count,), 3)], dim=1)
    params = tensors(
        count, temperature=torch.ones(count), noise_key=keys, **{k: v for k, v in cuts.items() if k == field}
    )
    seen = torch.bincount(samplers[-2].sample(logits.repeat(count, 1), params), minlength=vocab)
    assert seen[p == 0].sum() == 0, "an entry that was cut off"
    expected = (p / p.sum() * count)[p > 0]
    statistic = ((seen[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 0.001


@pytest.mark.parametrize("vocab", [1, 3, 7, 16, 129, 1000, 32000, 151_939])
def test_log_softmax_is_near_float64(vocab: int, samplers: list[Sampler]) -> None:
    """Guards against an inexact exponential or sum, and an end that is left out. Bound: 1e-6 for the logarithm of the
    sum, and one rounding of each difference."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator) * torch.tensor([[0.0], [1.0], [5.0], [30.0], [1.0]])
    logits[4] += 1000
    logits[1, vocab // 2 + 1 :: 3] = NEVER
    exact = logits.double().log_softmax(-1)
    got = samplers[0].log_softmax(logits)
    for sampler in samplers[1:]:
        assert torch.equal(sampler.log_softmax(logits), got), "levels or thread counts differ"
    gone = logits == NEVER
    assert (got[gone] == NEVER).all()
    assert ((got - exact).abs()[~gone] <= 1e-6 + 2.0**-23 * exact.abs()[~gone]).all()


def test_log_softmax_sums_in_eight_leaves(samplers: list[Sampler]) -> None:
    """Guards against another cut of the vocabulary or order of its sums: leaves that change places within the tree
    leave every bit as it is, so ranks that have neighbouring leaves find the tree's inner sums. Elsewhere they do not,
    which shows that the sums are near enough to be told apart: they lie between 1 and 2, one entry has most of it."""
    rows, length = 30, 777
    leaves = torch.randn(rows, 8, length, generator=torch.Generator().manual_seed(1)) - 9.0
    leaves[:, 3, 100] = 0.0

    def sums(order: list[int]) -> Tensor:
        return samplers[0].log_softmax(leaves[:, order].reshape(rows, -1).contiguous()).amax(-1)

    expected = sums([0, 1, 2, 3, 4, 5, 6, 7])
    for order in ([1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3]):
        assert torch.equal(sums(order), expected)
    assert not torch.equal(sums([0, 2, 1, 3, 4, 5, 6, 7]), expected)


def test_finite_rows(samplers: list[Sampler]) -> None:
    """Guards against a NaN or an infinity that is overlooked in any lane or tail, and rows without anything."""
    for vocab in (1, 15, 16, 37):
        bad = [torch.zeros(vocab) for _ in range(2 * vocab)]
        for at in range(vocab):
            bad[at][at], bad[vocab + at][at] = float("nan"), float("inf")
        good = torch.full((vocab, vocab), NEVER)
        good.fill_diagonal_(-1e30)
        logits = torch.stack([*bad, torch.full((vocab,), NEVER), *good])
        expected = [0] * (2 * vocab + 1) + [1] * vocab
        for sampler in samplers:
            assert sampler.finite_rows(logits) == expected


def test_rows_that_are_not_finite_do_no_harm(samplers: list[Sampler]) -> None:
    """Guards against an index out of range where a caller did not ask finite_rows first."""
    vocab = 300
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    logits[0], logits[1, ::2], logits[2, 5], logits[3] = float("nan"), float("nan"), float("inf"), 3e38
    fields = {"top_k": torch.full((6,), 20), "top_p": torch.full((6,), 0.5)}
    for temperature in (0.0, 0.1, 1.0):
        for cuts in ({}, {"top_k": fields["top_k"]}, {"top_p": fields["top_p"]}, fields):
            ids = samplers[-2].sample(logits, tensors(6, temperature=torch.full((6,), temperature), **cuts))
            assert ((ids >= NO_TOKEN) & (ids < vocab)).all()
            assert np.all(ids[4:].numpy() >= 0)
