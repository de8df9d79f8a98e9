"""Plans of attention: every row sees each of its tiles once, loads differ least, memory is what was planned."""

import ctypes
import itertools
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention.items import (
    SPAN,
    SPAN_TILES,
    TILE,
    AttentionShape,
    greatest_load,
    partition,
    scratch_bytes,
)
from penstock.kernels.attention.plan import (
    HEAD_BEGIN,
    HEAD_END,
    PARTIAL,
    ROW_BEGIN,
    ROW_END,
    SCRATCH_BUDGET,
    SEQUENCE,
    SPAN_BEGIN,
    SPAN_END,
    AttentionPlan,
    Planner,
)
from penstock.kernels.cpu.library import PenstockAttentionStep, PenstockCache, load_library
from penstock_lab.bench.native import decode_key

SMALL = AttentionShape(4, 2, 16, "float32")
LLAMA = AttentionShape(32, 8, 128, "bfloat16")
ONE_HEAD = AttentionShape(8, 1, 128, "bfloat16")
ITEM_SIGHT = [ROW_BEGIN, ROW_END, SPAN_BEGIN, SPAN_END]


@dataclass
class Step:
    """Sequences by (cached, new) tokens, and how many leading tokens of its blocks each has from the one before it."""

    lengths: list[tuple[int, int]]
    shape: AttentionShape = LLAMA
    block_size: int = 16
    window: int | None = None
    sinks: int = 0
    cores: int = 2
    shared: list[int] = field(default_factory=list)
    chunked: bool = False

    def __post_init__(self) -> None:
        new = [count for _, count in self.lengths]
        self.query_start_loc = np.array([0, *itertools.accumulate(new)], dtype=np.int32)
        self.seq_lens = np.array([cached + count for cached, count in self.lengths], dtype=np.int32)
        columns = -(-int(max(self.seq_lens, default=0)) // self.block_size)
        rows = len(self.lengths)
        self.block_table = np.random.default_rng(0).permutation(rows * columns).astype(np.int32).reshape(rows, columns)
        for row, tokens in enumerate(self.shared, start=1):
            self.block_table[row, : tokens // self.block_size] = self.block_table[row - 1, : tokens // self.block_size]
        for row, length in enumerate(self.seq_lens):
            self.block_table[row, -(-length // self.block_size) :] = -1
        sequences = enumerate(self.lengths)
        self.tokens = [(row, cached + new) for row, (cached, count) in sequences for new in range(count)]
        self._visible: dict[int, set[int]] = {}

    def plan(self) -> AttentionPlan:
        planner = Planner(self.shape, self.block_size, self.window, self.sinks, self.cores, self.chunked)
        return planner.plan(self.query_start_loc, self.seq_lens, self.block_table)

    def visible_tiles(self, position: int) -> set[int]:
        if position not in self._visible:
            low = 0 if self.window is None else max(0, position - self.window + 1)
            low = position // self.window * self.window if self.chunked and self.window else low
            sinks = 0 if self.window is None else min(self.sinks, position + 1)
            self._visible[position] = {*range(low // TILE, position // TILE + 1), *range(-(-sinks // TILE))}
        return self._visible[position]


def item_tiles(item: np.ndarray) -> list[int]:
    return list(range(item[SPAN_BEGIN] * SPAN_TILES, item[SPAN_END] * SPAN_TILES))


def results(step: Step, plan: AttentionPlan) -> dict[tuple[int, int], list[int]]:
    """(kv head, row) -> items that make its result, in the order of folding. Fails where two things deliver a row."""
    found: dict[tuple[int, int], list[int]] = {}

    def deliver(head_begin: int, head_end: int, row_begin: int, row_end: int, items: list[int]) -> None:
        for key in itertools.product(range(head_begin, head_end), range(row_begin, row_end)):
            assert key not in found, f"{key} is delivered twice"
            found[key] = items

    for index, item in enumerate(plan.items):
        if item[PARTIAL] < 0:
            deliver(*item[[HEAD_BEGIN, HEAD_END, ROW_BEGIN, ROW_END]], [index])
    for head_begin, head_end, row_begin, row_end, begin, end in plan.combines:
        references = [int(index) for index in plan.references[begin:end]]
        for index in references:
            item = plan.items[index]
            assert item[PARTIAL] >= 0
            assert item[HEAD_BEGIN] <= head_begin < head_end <= item[HEAD_END]
            assert item[ROW_BEGIN] <= row_begin < row_end <= item[ROW_END]
        deliver(head_begin, head_end, row_begin, row_end, references)
    return found


def check_coverage(step: Step, plan: AttentionPlan) -> None:
    """Each (kv head, row) once, from items that see all its tiles once, ascending, in its own or a shared block."""
    found = results(step, plan)
    rows = int(step.query_start_loc[-1]) * step.shape.group
    assert set(found) == set(itertools.product(range(step.shape.num_kv_heads), range(rows)))
    alike: dict[tuple[int, ...], set[int]] = {}  # tokens by the items that make their rows
    for (_, row), items in found.items():
        alike.setdefault(tuple(items), set()).add(row // step.shape.group)
    for items, tokens in alike.items():
        tiles = [tile for index in items for tile in item_tiles(plan.items[index])]
        assert tiles == sorted(set(tiles)), "spans do not ascend, or one comes twice"
        assert set().union(*(step.visible_tiles(step.tokens[token][1]) for token in tokens)) <= set(tiles)
        for sequence, index in itertools.product({step.tokens[token][0] for token in tokens}, items):
            check_owner(step, sequence, plan.items[index])
    used = set(itertools.chain(*alike))
    assert used == set(range(len(plan.items))), "an item that nobody needs"


def check_owner(step: Step, sequence: int, item: np.ndarray) -> None:
    """An item for a sequence is its own, or is over blocks that are cached and that both have."""
    other = item[SEQUENCE]
    if other != sequence:
        end = item[SPAN_END] * SPAN
        blocks = slice(item[SPAN_BEGIN] * SPAN // step.block_size, -(-end // step.block_size))
        assert end <= min(step.lengths[sequence][0], step.lengths[other][0])
        assert (step.block_table[sequence, blocks] == step.block_table[other, blocks]).all()
        assert (step.block_table[other, blocks] >= 0).all()


def check_items_see(step: Step, plan: AttentionPlan) -> None:
    """No item's spans begin or end where none of its rows sees anything."""
    group = step.shape.group
    for begin, end, span_begin, span_end in set(map(tuple, plan.items[:, ITEM_SIGHT].tolist())):  # of all heads
        tokens = step.tokens[begin // group : (end - 1) // group + 1]
        spans = {tile // SPAN_TILES for tile in set().union(*(step.visible_tiles(at) for _, at in tokens))}
        assert span_begin in spans
        assert span_end - 1 in spans


def check_memory(plan: AttentionPlan) -> None:
    """Partial rows of items fill the whole memory of partial rows and do not overlap."""
    taken = sorted(
        (
            int(item[PARTIAL]),
            int((item[SPAN_END] - item[SPAN_BEGIN]) * (item[HEAD_END] - item[HEAD_BEGIN]))
            * int(item[ROW_END] - item[ROW_BEGIN]),
        )
        for item in plan.items
        if item[PARTIAL] >= 0
    )
    end = 0
    for begin, count in taken:
        assert begin == end
        end += count
    assert end == plan.partial_rows


def check_budget(shape: AttentionShape, plan: AttentionPlan) -> None:
    for item in plan.items:
        rows, heads = item[ROW_END] - item[ROW_BEGIN], item[HEAD_END] - item[HEAD_BEGIN]
        assert rows * heads * shape.touched_row_bytes <= SCRATCH_BUDGET


def check_cores(step: Step, plan: AttentionPlan) -> None:
    assert len(plan.starts) == step.cores + 1
    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(plan.items) == len(plan.loads)
    assert (np.diff(plan.starts) >= 0).all()
    assert (plan.loads > 0).all()


def check(step: Step) -> AttentionPlan:
    plan = step.plan()
    check_coverage(step, plan)
    check_items_see(step, plan)
    check_memory(plan)
    check_budget(step.shape, plan)
    check_cores(step, plan)
    assert plan.positions.tolist() == [position for _, position in step.tokens]
    return plan


LENGTH = st.one_of(
    st.sampled_from([0, 1, TILE - 1, TILE, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN, 5 * SPAN + 7]), st.integers(0, 9000)
)
SHAPES = st.sampled_from(
    [SMALL, LLAMA, ONE_HEAD, AttentionShape(71, 1, 64, "bfloat16"), AttentionShape(16, 16, 256, "int8", 3)]
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    new = st.one_of(st.just(1), st.integers(0, 70))
    lengths = draw(st.lists(st.tuples(LENGTH, new), min_size=0, max_size=6))
    lengths = [(cached, count if cached else max(count, 1)) for cached, count in lengths]
    window = draw(st.one_of(st.none(), st.sampled_from([1, 64, 300, 3000])))
    shared = [draw(st.sampled_from([0, SPAN - 1, SPAN, 2 * SPAN, 3 * SPAN])) for _ in lengths[1:]]
    return Step(
        lengths,
        draw(SHAPES),
        draw(st.sampled_from([16, 48, 512])),
        window,
        draw(st.sampled_from([0, 4, 70, 2100])) if window else 0,
        draw(st.sampled_from([1, 2, 3, 64])),
        shared if draw(st.booleans()) else [],
    )


@pytest.mark.covers("A7", "A20", "A28")
@settings(max_examples=150)
@given(steps())
def test_every_row_sees_each_of_its_tiles_once(step: Step) -> None:
    """Guards against: a tile that is left out or counted twice, a row delivered by nobody or by two, partial results
    over each other, items beyond the budget of a core's cache."""
    check(step)


@pytest.mark.covers("A20")
@pytest.mark.parametrize("group", range(1, 65))
def test_a_great_group_is_cut(group: int) -> None:
    """Guards against: a group that does not fit, and one whose rows are cut unevenly or lost."""
    shape = AttentionShape(2 * group, 2, 256, "float32")
    plan = check(Step([(100, 1), (50, 3)], shape))
    for sequence, total in enumerate((group, 3 * group)):
        own = plan.items[plan.items[:, SEQUENCE] == sequence]
        blocks = sorted(set(zip(own[:, ROW_BEGIN].tolist(), own[:, ROW_END].tolist(), strict=True)))
        # 63 rows fit the budget, and operands come in units of 48: all blocks but the last are full.
        assert [end - begin for begin, end in blocks] == [min(48, total - done) for done in range(0, total, 48)]


PLAIN = {
    "phase": "decode", "query": "bfloat16", "cache": "bfloat16", "output": "bfloat16", "scales": "none", "slices": "0",
    "template": "stream", "split": "no", "memory": "paged", "window": "none", "prefix": "own", "level": "any",
}  # fmt: skip
INT8 = AttentionShape(32, 8, 128, "int8", 2, token_scales=False, dtype="float32", level="avx2")


@pytest.mark.covers("A24")
@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, {}),
        ({"shape": replace(LLAMA, dtype="float32")}, {"query": "float32", "output": "float32"}),
        ({"shape": replace(LLAMA, kv_cache_dtype="float32")}, {"cache": "float32"}),
        (
            {"shape": INT8},
            {
                "query": "float32",
                "output": "float32",
                "cache": "int8",
                "scales": "channel",
                "slices": "2",
                "level": "avx2",
            },
        ),
        (
            {"shape": replace(LLAMA, kv_cache_dtype="int8", slices=3)},
            {"cache": "int8", "scales": "token", "slices": "3"},
        ),
        ({"lengths": [(3, 1)] * 4}, {"memory": "rows"}),
        ({"lengths": [(3, 1)] * 4, "window": 2}, {"memory": "rows", "window": "window"}),
        ({"window": 2 * SPAN}, {"window": "window"}),
        ({"window": 2 * SPAN, "sinks": 4}, {"window": "sinks"}),
        ({"shared": [2 * SPAN] * 3}, {"prefix": "shared", "split": "spans"}),
    ],
    ids=str,
)
def test_a_key_says_what_was_planned(changes: dict[str, Any], differs: dict[str, str]) -> None:
    """Guards against a digit that is another than the plan: results of the cache's type, or one block per sequence that
    is called paged."""
    step = Step(**{"lengths": [(4 * SPAN, 1)] * 4, "cores": 1} | changes)
    assert decode_key(step.plan().key) == PLAIN | differs
    if changes == {"window": 2 * SPAN}:  # a ring is one block, again and again
        step.block_table[:] = step.block_table[:, :1]
        assert decode_key(step.plan().key) == PLAIN | differs | {"memory": "ring"}


@pytest.mark.covers("A9")
@pytest.mark.parametrize(
    ("sequences", "cores", "split"),
    [
        (8, 2, False), (7, 2, True), (32, 2, False), (1, 2, True), (1, 1, False), (8, 64, True),
        (15, 2, True), (17, 2, False), (9, 2, True),  # a core has 1/15, 1/17, 1/9 more than the mean: 1/16 is allowed
    ],
)  # fmt: skip
def test_spans_are_split_where_whole_sequences_leave_cores_idle(sequences: int, cores: int, split: bool) -> None:
    """Guards against: cores that wait for one long sequence, or for as little as the slack allows to none, and partial
    results that nobody needed."""
    plan = check(Step([(4 * SPAN - 1, 1)] * sequences, ONE_HEAD, cores=cores))
    assert (plan.partial_rows > 0) == split
    assert (decode_key(plan.key)["split"] == "spans") == split
    if cores == 2:
        assert greatest_load(plan.loads.tolist(), plan.starts.tolist()) * cores <= 1.07 * plan.loads.sum()


@pytest.mark.covers("A9")
def test_one_long_sequence_among_short_ones_is_split() -> None:
    """Guards against: a rule that counts sequences and heads, and lets one core carry the long one."""
    plan = check(Step([(32767, 1)] + [(200, 1)] * 40, ONE_HEAD, cores=4))
    assert plan.partial_rows == 16 * 8
    assert greatest_load(plan.loads.tolist(), plan.starts.tolist()) <= plan.loads.sum() / 4 + plan.loads.max()


@pytest.mark.covers("A11")
def test_short_sequences_have_fewer_splits() -> None:
    """Guards against: as many splits for every sequence as the longest one has."""
    lengths = [100, SPAN, 2 * SPAN, 8 * SPAN, 16 * SPAN]
    plan = check(Step([(length - 1, 1) for length in lengths], ONE_HEAD, cores=64))
    counts = np.bincount(plan.items[:, SEQUENCE])
    assert counts.tolist() == [1, 1, 2, 8, 16]


@pytest.mark.covers("A8")
@pytest.mark.parametrize(
    ("lengths", "shape", "phase", "template"),
    [
        ([(300, 1)] * 3, LLAMA, "decode", "stream"),
        ([(300, 4)] * 3, LLAMA, "chunk", "stream"),  # 16 rows
        ([(300, 5)] * 3, LLAMA, "chunk", "blocks"),  # 20 rows
        ([(300, 1)] * 3, AttentionShape(71, 1, 64, "bfloat16"), "decode", "blocks"),
        ([(0, 500), (300, 1)], LLAMA, "mixed", "both"),
    ],
)
def test_shape_chooses_the_template(
    lengths: list[tuple[int, int]], shape: AttentionShape, phase: str, template: str
) -> None:
    """Guards against: few rows that read memory head by head, many rows that keep all heads' states at once."""
    plan = check(Step(lengths, shape, cores=1))
    key = decode_key(plan.key)
    assert (key["phase"], key["template"]) == (phase, template)
    for item in plan.items:
        heads, rows = item[HEAD_END] - item[HEAD_BEGIN], item[ROW_END] - item[ROW_BEGIN]
        assert heads == (shape.num_kv_heads if rows <= 16 else 1)


@pytest.mark.covers("A23")
def test_a_shared_prefix_is_read_once() -> None:
    """Guards against: reading a system prompt once for each of its sequences."""
    step = Step([(3 * SPAN + 5 * i, 1) for i in range(8)], LLAMA, shared=[2 * SPAN + 100] * 7)
    plan = check(step)
    shared = plan.items[plan.items[:, SPAN_BEGIN] < 2]
    assert (shared[:, ROW_BEGIN] == 0).all()
    assert (shared[:, ROW_END] == 32).all()
    read = sum((item[SPAN_END] - item[SPAN_BEGIN]) * (item[HEAD_END] - item[HEAD_BEGIN]) for item in shared)
    assert read == 2 * 8  # spans times heads, once
    assert decode_key(plan.key)["prefix"] == "shared"


@pytest.mark.covers("A23")
def test_prefixes_within_prefixes_are_shared() -> None:
    """Guards against: pairs that share more than the whole group, and lose it to the group's common part."""
    step = Step([(5 * SPAN, 1)] * 4, LLAMA, shared=[4 * SPAN, SPAN, 4 * SPAN])
    plan = check(step)
    groups = {tuple(item[[ROW_BEGIN, ROW_END]]) for item in plan.items if item[SPAN_BEGIN] < 4}
    assert groups == {(0, 16), (0, 8), (8, 16)}


@pytest.mark.covers("A23")
@pytest.mark.parametrize(
    "step",
    [
        Step([(SPAN - 1, 1)] * 4, shared=[SPAN] * 3),  # its last position is new
        Step([(3 * SPAN, 1)] * 4, shared=[SPAN - 16] * 3),
        Step([(3 * SPAN, 1)] * 4, shared=[3 * SPAN] * 3, window=1000),
        Step([(3 * SPAN, 512)] * 4, shared=[3 * SPAN] * 3),  # blocks are full without company
    ],
)
def test_nothing_is_shared_where_it_does_not_pay(step: Step) -> None:
    """Guards against: sharing what some row does not see, is not cached yet, or what saves no reading."""
    assert decode_key(check(step).key)["prefix"] == "own"


@pytest.mark.covers("A11")
@pytest.mark.parametrize("cores", [1, 64])
def test_a_window_hides_spans(cores: int) -> None:
    """Guards against: items over spans that nobody sees, with or without first tokens that stay visible."""
    plan = check(Step([(10 * SPAN, 1)], ONE_HEAD, window=SPAN + 1, cores=cores))
    assert plan.items[:, SPAN_BEGIN].min() == 9
    plan = check(Step([(10 * SPAN, 1)], ONE_HEAD, window=2 * SPAN + 1, sinks=4, cores=cores))
    assert plan.items[:, SPAN_BEGIN].min() == 0
    if cores > 1:
        assert plan.partial_rows == 4 * 8  # the first span and the last three


@pytest.mark.covers("A12")
def test_no_contiguous_partition_has_a_smaller_greatest_load() -> None:
    """Guards against: a partition that is merely good. Held against all partitions of small cases."""
    generator = random.Random(0)
    for _ in range(300):
        loads = [generator.choice([0, 1, 2, 7, generator.randrange(1, 100)]) for _ in range(generator.randrange(1, 9))]
        cores = generator.randrange(1, 5)
        starts = partition(loads, cores)
        assert len(starts) == cores + 1
        assert starts == sorted(starts)
        assert (starts[0], starts[-1]) == (0, len(loads))
        cuts = itertools.combinations_with_replacement(range(len(loads) + 1), cores - 1)
        best = min(greatest_load(loads, [0, *cut, len(loads)]) for cut in cuts)
        assert greatest_load(loads, starts) == best


@pytest.mark.covers("A12")
@pytest.mark.parametrize("cores", [2, 64, 200])
def test_many_items_are_shared_to_within_one_item(cores: int) -> None:
    """Guards against: a search that goes astray where nobody can try all partitions."""
    generator = random.Random(cores)
    for count in (1, 63, 64, 1000, 5000):
        loads = [generator.randrange(1, 10**6) for _ in range(count)]
        reached = greatest_load(loads, partition(loads, cores))
        assert reached <= sum(loads) / cores + max(loads)
        assert reached >= max(max(loads), sum(loads) / cores)


def test_equal_items_are_dealt_evenly() -> None:
    """Guards against: the last cores left without work because the first ones may take more."""
    assert partition([5] * 9, 4) == [0, 2, 4, 7, 9] or np.diff(partition([5] * 9, 4)).min() == 2
    assert partition([], 3) == [0, 0, 0, 0]


@pytest.mark.parametrize("cores", [2, 64])
def test_prefill_is_shared_well(cores: int) -> None:
    """Guards against: causal rows, which cost more the later they stand, dealt by their number."""
    plan = check(Step([(0, 4096)], AttentionShape(32, 4, 64, "bfloat16"), cores=cores))
    assert greatest_load(plan.loads.tolist(), plan.starts.tolist()) * cores <= 1.1 * plan.loads.sum()


@pytest.mark.covers("A25")
def test_memory_of_a_step_by_hand() -> None:
    """Guards against: formulas that agree with the native ones and are wrong in both places."""
    plan = Step([(20, 30)], AttentionShape(8, 2, 40, "bfloat16"), cores=1).plan()
    assert plan.staged.tolist() == [0, 3]  # granules 16..31, 32..47, 48..63
    assert plan.workspace_bytes == (3 * 2 + 1) * (16 * 2 * 64 * 2)
    operands = (144 + 48) * 64 * 4  # 120 rows, and rows one by one, with room for float32
    assert plan.scratch_bytes == operands + 128 * ((64 + 2) * 4 + 36 + 4) + 4 * (16 * 2 * 64 * 2)
    assert scratch_bytes(SMALL, *(np.zeros(0, dtype=np.int64),) * 3) == 0


@pytest.mark.covers("A25")
@pytest.mark.skipif(load_library() is None, reason="no native library was built")
@settings(max_examples=150)
@given(steps(), st.sampled_from(["float32", "bfloat16", "int8"]), st.sampled_from([2, 3]), st.booleans())
def test_memory_is_what_the_native_driver_takes(step: Step, dtype: str, slices: int, token_scales: bool) -> None:
    """Guards against: memory that is planned and reserved, and then is not enough."""
    step.shape = replace(step.shape, kv_cache_dtype=dtype, slices=slices if dtype == "int8" else 0)
    step.shape = replace(step.shape, token_scales=token_scales)
    plan = step.plan()
    shape, scales = step.shape, 0 if token_scales or dtype != "int8" else 64
    cache = PenstockCache(
        kind=["float32", "bfloat16", "int8"].index(dtype), slices=shape.slices, block_size=step.block_size,
        kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, padded_dim=shape.padded_dim,
        key_scales=scales, key_offsets=scales, value_scales=scales, value_offsets=scales,
    )  # fmt: skip
    native = PenstockAttentionStep(
        sequences=len(step.lengths), tokens=len(plan.positions), items=len(plan.items), item=plan.items.ctypes.data,
        staged=plan.staged.ctypes.data, partial_rows=plan.partial_rows,
    )  # fmt: skip
    sizes = (ctypes.c_int64 * 2)()
    arguments = (ctypes.addressof(native), ctypes.addressof(cache))
    assert load_library().penstock_attention_bytes(*arguments, ctypes.addressof(sizes)) == 0
    per_sequence = shape.num_kv_heads * shape.granule_bytes  # new tokens may begin anywhere in a granule
    assert sizes[0] <= plan.workspace_bytes <= sizes[0] + len(step.lengths) * per_sequence
    assert plan.scratch_bytes == sizes[1]


@pytest.mark.covers("A28")
def test_planning_needs_no_torch() -> None:
    """Guards against: a simulator or a scheduler that cannot plan because torch is not there."""
    code = "import sys; import penstock.kernels.attention.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_empty_step_has_an_empty_plan() -> None:
    """Guards against: a division by nothing."""
    for step in (Step([]), Step([(5, 0)], cores=3)):
        plan = check(step)
        assert len(plan.items) == len(plan.combines) == plan.partial_rows == 0


def test_planning_has_no_loop_over_items() -> None:
    """Guards against: a loop over items in Python, which would cost more than the attention of a small step."""

    def lines_run(step: Step) -> int:
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            step.plan()
        finally:
            sys.settrace(before)
        return count

    for small, large in ((Step([(1024, 1)] * 8), Step([(16384, 1)] * 8)), (Step([(0, 512)]), Step([(0, 8192)]))):
        assert lines_run(large) < 1.5 * lines_run(small)
