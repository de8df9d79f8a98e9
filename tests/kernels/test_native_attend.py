"""The driver of native attention: formulas against float64, and bits that depend on a row alone."""

import ctypes
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.attention.items import SPAN, TILE, AttentionShape
from penstock.kernels.attention.plan import AttentionPlan, Planner
from penstock.kernels.cpu.library import MAX_ARGUMENTS, OUT_OF_RANGE, RECORDABLE, PenstockCall

from .attention import DTYPES, Attention, PagedCache, Plan, Rules, Run, Sequences, Shape, Step, oracle
from .packed import TYPES, levels

F32, BF16 = torch.float32, torch.bfloat16
THREADS = 3
Results = dict[int, tuple[Tensor, Tensor]]


@pytest.fixture(params=levels(), scope="module")
def native(request: pytest.FixtureRequest) -> Attention:
    """One context for all tests of a level: what a call leaves behind in its memory must not matter."""
    return Attention(request.param, threads=THREADS)


@pytest.fixture(params=levels(), scope="module")
def alone(request: pytest.FixtureRequest) -> Attention:
    return Attention(request.param)


def same(got: Results, expected: Results) -> bool:
    """Equal bits: also NaN where there should be NaN."""
    return all(
        torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))
        for row in expected
        for a, b in zip(got[row], expected[row], strict=True)
    )


def prefill(native: Attention, sequences: Sequences, rules: Rules) -> Results:
    """Each sequence by itself in one step, by one thread as one item."""
    results = {}
    for row, length in enumerate(sequences.lengths):
        results |= Run(native, sequences, rules).step({row: length})
    return results


def chunks(rng: random.Random, length: int) -> list[int]:
    """A sequence's tokens in steps: anywhere, or one by one at the end."""
    edges = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randint(0, 3)))})
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    tail = rng.choice([0, 0, 3])
    return [*sizes[:-1], sizes[-1] - tail, *[1] * tail] if sizes and sizes[-1] > tail else sizes or [0]


def draw_rules(rng: random.Random, shape: Shape, longest: int) -> Rules:
    generator = torch.Generator().manual_seed(rng.randint(0, 1000))
    some = lambda: torch.rand(shape.num_heads, generator=generator)  # noqa: E731
    window = rng.choice([0, 0, 1, 2, TILE, TILE + 1, longest, rng.randint(1, longest + 1)])
    return Rules(
        scale=shape.head_dim**-0.5,
        window=window,
        kept=rng.choice([0, 1, 4, TILE + 1]) if window else 0,
        sink_queries=rng.random() < 0.5,
        softcap=rng.choice([0.0, 0.0, 3.0]),
        slopes=rng.choice([None, some() * 0.3]),
        bias_before_scale=rng.random() < 0.5,
        sink_logits=rng.choice([None, some() * 4 - 2]),
    )


LENGTHS = [1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 100, 200, SPAN - 1, SPAN, SPAN + 1, SPAN + 70]


def draw_shape(rng: random.Random, kind: str, longest: int) -> Shape:
    kv_heads = rng.choice([1, 2, 3])
    head_dim = rng.choice([8, 10, 32, 64, 80, 128, 250, 512])
    whole = -(-longest // 16) * 16
    return Shape(kv_heads * rng.choice([1, 2, 3, 7, 8]), kv_heads, head_dim, kind, rng.choice([16, 32, 48, whole]))


def draw_lengths(rng: random.Random) -> list[int]:
    """Of one to four sequences, at most one of them long."""
    short = [rng.choice(LENGTHS[:-4]) for _ in range(rng.randint(0, 3))]
    return [*short, rng.choice(LENGTHS)]


@pytest.mark.covers("A1", "A2", "A4", "A5", "A10", "A11", "A20", "A22", "A29", "F16", "M2", "M3", "M25")
@pytest.mark.parametrize(("kind", "dtype"), [("f32", F32), ("bf16", F32), ("bf16", BF16)])
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_it_is_the_formula(native: Attention, kind: str, dtype: torch.dtype, seed: int) -> None:
    """Guards against anything wrong in masks, biases, folds, granules and slots: all options, against float64."""
    rng = random.Random(seed)
    lengths = draw_lengths(rng)
    shape = draw_shape(rng, kind, max(lengths))
    rules = draw_rules(rng, shape, max(lengths))
    sequences = Sequences(lengths, shape, dtype, seed)
    run = Run(native, sequences, rules, rng=rng)
    for row, length in enumerate(lengths):
        run.put(row, rng.choice([0, length // 2, max(length - 40, 0)]))
    begun = list(run.done)
    left = {row: chunks(rng, n - begun[row]) for row, n in enumerate(lengths)}
    results = run.finish(left)
    for row, (out, lse) in results.items():
        some = slice(max(begun[row], lengths[row] - 160), lengths[row])  # float64 takes its time
        out, lse = out[some.start - begun[row] :], lse[some.start - begun[row] :]
        expected, expected_lse = oracle(sequences, rules, row, some)
        values = 1.0 if not len(expected) else float(sequences.v[row].abs().max())
        tolerance = 2e-6 if kind == "f32" else 2.0**-8  # of the greatest value: p, and out, are rounded once
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance * values)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)


@pytest.mark.covers("A9", "A12", "A13", "A19", "M10", "M11", "M23", "M24", "F16")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_a_row_has_its_bits_however_it_is_computed(native: Attention, kind: str, seed: int) -> None:
    """Guards against arithmetic that follows the plan: the cut of the prompt, items and spans, threads, strips,
    neighbours, cached or new, where blocks lie, how long they are."""
    rng = random.Random(seed)
    lengths = draw_lengths(rng)
    shape = draw_shape(rng, kind, max(lengths))
    rules = draw_rules(rng, shape, max(lengths))
    sequences = Sequences(lengths, shape, F32 if kind == "f32" else BF16, seed)
    expected = prefill(native, sequences, rules)
    for _ in range(2):
        got = Run(native, sequences, rules, rng=rng).finish({row: chunks(rng, n) for row, n in enumerate(lengths)})
        assert same(got, expected)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_one_thread_and_many_agree(alone: Attention, kind: str) -> None:
    """Guards against a thread whose scratch or part of the work is its own."""
    shape = Shape(6, 2, 64, kind)
    sequences, rules = Sequences([70, SPAN + 3, 5, 300], shape, seed=3), Rules()
    expected = prefill(alone, sequences, rules)
    for threads in (2, 5):
        many = Attention(alone.level, threads=threads)
        rng = random.Random(threads)
        run = Run(many, sequences, rules, rng=rng)
        assert same(run.finish({row: chunks(rng, n) for row, n in enumerate(sequences.lengths)}), expected)


def masks(native: Attention, length: int, window: int, steps: list[int], *, ring: bool = False) -> list[list[int]]:
    """Who sees whom: position i's value is the i-th unit vector, and every score is 0."""
    shape = Shape(1, 1, 32, block_size=16)
    sequences = Sequences([length], shape)
    sequences.q[0].zero_()
    sequences.v[0].copy_(torch.eye(length, 32)[:, None])
    run = Run(native, sequences, Rules(window=window), ring=ring)
    out, _ = run.finish({0: steps})[0]
    return (out[:, 0, :length] > 0).int().tolist()


@pytest.mark.covers("M4", "M5", "M12", "M14")
def test_masks_of_the_mistral_slides(native: Attention) -> None:
    """Guards against a window that is one off, and against chunks that lose what they must still see."""
    assert masks(native, 6, 3, [6]) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    assert masks(native, 6, 0, [6]) == torch.ones(6, 6).tril().int().tolist()
    chunked = masks(native, 11, 4, [4, 4, 3])
    assert chunked == torch.ones(11, 11).tril().triu(-3).int().tolist()
    assert chunked[4] == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]  # the second chunk's first row: three cached, one new
    assert chunked[8] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.covers("M8", "M9", "M11", "M12", "F18")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("window", "size"), [(1, 16), (16, 16), (20, 32), (48, 48), (100, 112)])
def test_a_ring_gives_the_bits_of_a_cache_that_keeps_all(native: Attention, kind: str, window: int, size: int) -> None:
    """Guards against a store before the read: prompts far longer than the ring, in chunks longer than the window."""
    rng = random.Random(window)
    lengths = [10 * window + 5, 3 * window, 400]
    ring, rules = Shape(4, 2, 32, kind, size), Rules(window=window)
    sequences = Sequences(lengths, ring, seed=window)
    expected = prefill(native, Sequences(lengths, Shape(4, 2, 32, kind, 16), seed=window), rules)
    for _ in range(3):
        run = Run(native, sequences, rules, ring=True, rng=rng)
        assert same(run.finish({row: chunks(rng, n) for row, n in enumerate(lengths)}), expected)
    run = Run(native, sequences, rules, ring=True)
    assert same(run.finish({row: [7] * (n // 7) + [n % 7] * (n % 7 > 0) for row, n in enumerate(lengths)}), expected)


@pytest.mark.covers("A1", "F4")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("window", "kept"), [(0, 0), (20, 0), (20, 3)])
def test_a_spoilt_token_spoils_only_who_sees_it(native: Attention, kind: str, window: int, kept: int) -> None:
    """Guards against 0 * NaN: keys and values of some tokens are NaN or infinite, in the same tile, chunk or cache."""
    shape, rules = Shape(8, 2, 32, kind), Rules(window=window, kept=kept)
    good, bad = (Sequences([200], shape, seed=1) for _ in range(2))
    for position, value in [(70, torch.nan), (71, torch.inf), (150, -torch.inf)]:
        bad.k[0][position] = torch.nan
        bad.v[0][position] = value
    expected, _ = prefill(native, good, rules)[0]
    query, key = torch.arange(200)[:, None], torch.tensor([70, 71, 150])
    reach = (key <= query) & ((key > query - window) | (window == 0))
    spoilt = reach.any(1)
    for steps in ([200], [60, 5, 30, 105], [69, 1, 1, 1, 128], [149, *[1] * 51]):
        run = Run(native, bad, rules, rng=random.Random(len(steps)))
        out, _ = run.finish({0: steps})[0]
        assert torch.equal(out[~spoilt], expected[~spoilt])
        assert out[spoilt].isnan().all()


@pytest.mark.covers("A3", "A29")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_row_that_sees_nothing_is_zeros(native: Attention, kind: str) -> None:
    """Guards against 0 / 0, and against a sink logit that needs company."""
    shape = Shape(4, 2, 32, kind)
    logits = torch.tensor([0.5, -2.0, -torch.inf, 9.0])
    for sinks in (None, logits):
        rules = Rules(sink_logits=sinks)
        run = Run(native, Sequences([40], shape), rules)
        run.done[0] = 40
        step = run.make_step({0: 40})
        step.arrays["positions"][5:9] = -1
        out, lse = native.attend(step, run.cache, rules, *run.operands({0: 40}))
        assert (out[5:9] == 0).all()
        assert not out[5:9].signbit().any()
        expected = torch.full((4, 4), -torch.inf) if sinks is None else logits.expand(4, 4)
        assert torch.equal(lse[5:9], expected)
        assert out[9:].isfinite().all()
        assert (out[9:] != 0).any()


@pytest.mark.covers("A23")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, SPAN + 30])
def test_rows_of_neighbours_share_the_blocks_of_a_prefix(native: Attention, kind: str, window: int) -> None:
    """Guards against shared items that take another sequence's positions, or sums in another order."""
    shape, rules, tail = Shape(4, 2, 32, kind), Rules(window=window), [40, 7, 100]
    sequences = Sequences([SPAN + n for n in tail], shape, seed=5)
    for part in (sequences.k, sequences.v):
        for copy in part[1:]:
            copy[:SPAN] = part[0][:SPAN]
    counts = {0: 3, 1: 1, 2: 64}
    results = []
    for shared in (False, True):
        run = Run(native, sequences, rules)
        if shared:
            run.table[1:, : SPAN // 16] = run.table[0, : SPAN // 16]
        for row, count in counts.items():
            run.put(row, SPAN + tail[row] - count)
        if not shared:
            results.append(run.step(counts))
            continue
        plan, rows, heads = Plan(), np.cumsum([0, *counts.values()]) * shape.group, (0, 2)
        prefix = plan.add_partial(1, heads, (0, int(rows[-1])), (0, 1))
        for row, part in enumerate(itertools.pairwise(rows.tolist())):
            plan.add_combine(heads, part, [prefix, plan.add_partial(row, heads, part, (1, 2))])
        plan.starts = [0, 1, 3, 4]
        results.append(run.step(counts, plan))
    assert same(results[1], results[0])


@pytest.mark.covers("F15", "A19", "J3")
@pytest.mark.parametrize(("kind", "dtype"), [("f32", F32), ("bf16", F32), ("bf16", BF16)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (80, 48), (256, 32)])
def test_what_is_stored_is_loaded(
    native: Attention, kind: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    """Guards against rows at the wrong place: by themselves and after attention, other slots untouched."""
    shape = Shape(3, 3, head_dim, kind, block_size)
    cache = PagedCache(shape, blocks=5)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(1))
    sequences = Sequences([60], shape, dtype, seed=1)
    k, v = sequences.k[0], sequences.v[0]
    rounded = BF16 if kind == "bf16" else dtype
    some = slots[:60].clone()
    some[3] = -5
    assert native.store(cache, k, v, some) == 0
    kept = torch.arange(60) != 3
    got = native.load(cache, slots[:60])
    for part, true in zip(got, (k, v), strict=True):
        assert torch.equal(part[kept], true.to(rounded).float()[kept])
        assert part[3].isnan().all()
    assert all(part.isnan().all() for part in native.load(cache, slots[60:]))

    run = Run(native, sequences, Rules(), rng=random.Random(0))
    run.finish({0: [5, 1, 40, 14]})
    for part, true in zip(native.load(run.cache, torch.from_numpy(run.slots(0, 0, 60))), (k, v), strict=True):
        assert torch.equal(part, true.to(rounded).float())


@pytest.mark.parametrize("wrong", ["block", "slot", "columns"])
def test_what_is_out_of_range_is_refused_before_anything_is_written(native: Attention, wrong: str) -> None:
    """Guards against reading and writing memory that belongs to somebody else."""
    rules = Rules()
    run = Run(native, Sequences([100], Shape()), rules)
    run.put(0, 90)
    run.done[0] = 100
    step = run.make_step({0: 10})
    if wrong == "block":
        step.arrays["block_table"][0, 2] = 1000
    if wrong == "slot":
        step.arrays["slot_mapping"][9] = 10_000
    if wrong == "columns":
        step.structure.max_blocks = 5
    before = run.cache.memory.copy()
    operands = run.operands({0: 10})
    out, lse = torch.full_like(operands[0], 7.0), torch.full((10, 4), 7.0)
    assert native.attend_status(step, run.cache, rules, *operands, out, lse) == OUT_OF_RANGE
    assert (out == 7).all()
    assert (lse == 7).all()
    assert (run.cache.memory == before).all()
    k = torch.zeros(1, 2, 32)
    assert native.store(run.cache, k, k, torch.tensor([10_000])) == OUT_OF_RANGE
    assert (run.cache.memory == before).all()


def test_blocks_that_were_given_back_are_not_read(native: Attention) -> None:
    """Guards against -1 as a block: behind a window, and in the granule where the new tokens begin."""
    shape, rules = Shape(block_size=16), Rules(window=33)
    sequences = Sequences([300], shape, seed=2)
    expected = prefill(native, sequences, rules)[0][0]
    run = Run(native, sequences, rules)
    for count in [100, 100, 1, 1, 98]:
        run.table[0, : max(run.done[0] - 33 + 1, 0) // 16] = -1
        begin = run.done[0]
        assert torch.equal(run.step({0: count})[0][0], expected[begin : begin + count])


def test_a_step_with_nothing_to_do_does_nothing(native: Attention) -> None:
    """Guards against empty arrays that are read: sequences without new tokens beside others, and nothing at all."""
    rules = Rules()
    sequences = Sequences([100, 20], Shape(), seed=2)
    run = Run(native, sequences, rules)
    run.put(0, 50)
    before = run.cache.memory.copy()
    assert len(run.step({0: 0, 1: 0})[0][0]) == 0
    assert len(native.attend(run.make_step({}), run.cache, rules, *(t[:0] for t in run.operands({0: 1})))[0]) == 0
    assert (run.cache.memory == before).all()
    assert torch.equal(run.step({0: 0, 1: 20})[1][0], prefill(native, sequences, rules)[1][0])


def tiny_run(native: Attention) -> tuple[Run, Step, Rules, list[Tensor], dict[int, int]]:
    """A step of five sequences in many pieces, some of two spans."""
    rules, counts = Rules(), {0: 1, 1: 2, 2: 17, 3: 1, 4: 5}
    sequences = Sequences([40, SPAN + 9, 33, 90, 12], Shape(4, 2, 8), seed=4)
    run = Run(native, sequences, rules, rng=random.Random(11))
    for row, count in counts.items():
        run.put(row, sequences.lengths[row] - count)
        run.done[row] += count
    return run, run.make_step(counts), rules, run.operands(counts), counts


@pytest.mark.covers("A13", "A28")
def test_thousands_of_runs_have_the_same_bits(native: Attention) -> None:
    """Guards against a phase that begins before the one before it is over: a race shows sooner or later."""
    run, step, rules, operands, _ = tiny_run(native)
    assert len(step.arrays["combine"]) > 3
    expected = native.attend(step, run.cache, rules, *operands)
    for _ in range(4_000):  # on each level
        out, lse = native.attend(step, run.cache, rules, *operands)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


MALLOC_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
)  # fmt: skip


class Malloc(ctypes.Structure):
    """What glibc says of its memory: mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLOC_FIELDS)


def planned(shape: Shape, counts: list[int], lengths: list[int], table: np.ndarray, threads: int) -> AttentionPlan:
    """The package's own plan."""
    starts, ends = np.cumsum([0, *counts]).astype(np.int32), np.array(lengths, dtype=np.int32)
    return Planner(attention_shape(shape), shape.block_size, num_cores=threads).plan(starts, ends, table)


def attention_shape(shape: Shape) -> AttentionShape:
    return AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, DTYPES[shape.kind], shape.slices)


def as_plan(plan: AttentionPlan) -> Plan:
    rows = (plan.items, plan.combines, plan.references)
    items, combines, references = (part.tolist() for part in rows)
    return Plan(items, combines, references, plan.partial_rows, plan.starts.tolist())


@pytest.mark.covers("A25", "A28")
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("counts", [[1, 1, 1], [170, 1, 30]])
def test_a_run_takes_the_memory_of_its_plan_and_no_more(kind: str, counts: list[int]) -> None:
    """Guards against a plan that reserves other than what is carved, and against allocation in a step."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library does not tell")
    mallinfo.restype = Malloc
    lengths, shape, rules = [4 * SPAN + 170, 3000, 90], Shape(6, 3, 64, kind, slices=2 * (kind == "int8")), Rules()
    native, fresh = (Attention(levels()[-1], threads=2) for _ in range(2))
    run = Run(native, Sequences(lengths, shape), rules)
    for row, length in enumerate(lengths):
        run.put(row, length - counts[row])
        run.done[row] = length
    plan = planned(shape, counts, lengths, run.table, 2)
    chosen = dict(enumerate(counts))
    step, operands = run.make_step(chosen, as_plan(plan)), run.operands(chosen)
    out, lse = torch.empty_like(operands[0]), torch.empty(sum(counts), 6)
    workspace, scratch = native.bytes(step, run.cache)
    most = workspace + len(counts) * 3 * attention_shape(shape).granule_bytes  # wherever the new tokens begin
    assert workspace <= plan.workspace_bytes <= most
    assert scratch == plan.scratch_bytes

    def grown(native: Attention) -> int:
        before = mallinfo()
        assert native.attend_status(step, run.cache, rules, *operands, out, lse) == 0
        after = mallinfo()
        return int(after.hblkhd + after.uordblks - before.hblkhd - before.uordblks)

    native.reserve(plan.workspace_bytes, plan.scratch_bytes)
    assert grown(native) < 10_000  # what ctypes and Python take
    assert grown(fresh) > workspace + 2 * scratch - 10_000  # growth would be seen


def test_a_program_attends(native: Attention) -> None:
    """Guards against a recorded call that is numbered or cut otherwise than Python thinks."""
    run, step, rules, (q, k, v), _ = tiny_run(native)
    expected, expected_lse = native.attend(step, run.cache, rules, q, k, v)
    out, lse, how = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan), rules.structure()
    structures = (ctypes.addressof(s) for s in (step.structure, run.cache.structure, how))
    words = [*structures, q.data_ptr(), 0, k.data_ptr(), v.data_ptr(), TYPES[q.dtype], q.shape[1], out.data_ptr()]
    call = PenstockCall(RECORDABLE.index("penstock_attend"), (ctypes.c_int64 * MAX_ARGUMENTS)(*words, lse.data_ptr()))
    assert native.library.penstock_replay(native.context, ctypes.addressof(call), 1) == 0
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
