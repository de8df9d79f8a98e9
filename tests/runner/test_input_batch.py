"""InputBatch against a packing that walks token by token."""

import random
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import EngineError
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.runner.input_batch import InputBatch, PackedStep

MAX_SEQS, MAX_LEN = 5, 100
GROUPS = [CacheGroup((0, 2), None, 64, 16), CacheGroup((1,), 20, 64, 32), CacheGroup((3,), 20, 64, 32, ring=True)]


@dataclass
class Book:
    """One request as the scheduler knows it."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in GROUPS])
    released: list[int] = field(default_factory=lambda: [0 for _ in GROUPS])
    computed: int = 0


class RandomScheduler:
    """Random but legal steps: joins, leaves, chunks, released blocks, preemption and return in one step; and in between
    the rows of the last step, decoding on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.books: dict[str, Book] = {}
        self.count = 0
        self.last: list[str] = []

    def step(self, step_id: int) -> SchedulerOutput:
        names = [name for name in self.last if name in self.books]
        if names and self.rng.random() < 0.8:
            return SchedulerOutput(step_id, [], [self._share(name, is_new=False)[0] for name in names], [])
        forgotten, new_ids = [], []
        for name in list(self.books):
            fate = self.rng.random()
            if fate < 0.1:
                forgotten.append(name)
                del self.books[name]
            elif fate < 0.2:  # preempted, and back at once
                forgotten.append(name)
                new_ids.append(name)
                book = self.books[name]
                self.books[name] = Book(book.tokens, book.num_prompt, book.params)
        while len(self.books) < MAX_SEQS and self.rng.random() < 0.6:
            new_ids.append(self._join())
        names = [name for name in self.books if name in new_ids or self.rng.random() < 0.8]
        self.rng.shuffle(names)
        self.last = names
        new, scheduled = [], []
        for name in names:
            item, request = self._share(name, name in new_ids)
            scheduled.append(item)
            new += [request] if request else []
        return SchedulerOutput(step_id, new, scheduled, forgotten)

    def _join(self) -> str:
        name, self.count = f"r{self.count}", self.count + 1
        num_prompt, num_outputs = self.rng.randint(1, MAX_LEN - 30), self.rng.choice([0, 0, 5])
        tokens = [self.rng.randrange(2**31) for _ in range(num_prompt + num_outputs)]
        logprobs = self.rng.choice([None, 0, 3])
        self.books[name] = Book(tokens, num_prompt, SamplingParams(temperature=0.0, prompt_logprobs=logprobs))
        return name

    def _share(self, name: str, is_new: bool) -> tuple[ScheduledRequest, NewRequest | None]:
        book = self.books[name]
        if is_new and self.rng.random() < 0.3:
            book.computed = self.rng.randrange(len(book.tokens))  # found in the prefix cache
        left = len(book.tokens) - book.computed
        count = self.rng.choice([left, self.rng.randint(1, left)])
        new_block_ids = [self._grow(book, g, book.computed + count) for g in range(len(GROUPS))]
        request = None
        if is_new:
            tables = [list(table) for table in book.tables]
            request = NewRequest(name, list(book.tokens), book.num_prompt, book.params, 0, tables)
            new_block_ids = [[] for _ in GROUPS]
        released = list(book.released)
        done = book.computed + count == len(book.tokens)
        return ScheduledRequest(name, book.computed, count, new_block_ids, released, int(done)), request

    def _grow(self, book: Book, g: int, length: int) -> list[int]:
        size, table = GROUPS[g].block_size, book.tables[g]
        wanted = 1 if GROUPS[g].ring else -(-length // size)
        new_ids = [self.rng.randrange(64) for _ in range(wanted - len(table))]
        table.extend(new_ids)
        if GROUPS[g].ring:
            return new_ids
        if GROUPS[g].sliding_window is not None:
            book.released[g] = max(book.released[g], self.rng.randint(0, book.computed // size))
            table[: book.released[g]] = [-1] * book.released[g]
        return new_ids


def brute_force(books: dict[str, Book], output: SchedulerOutput) -> dict[str, list]:
    """The flat batch, one token at a time."""
    flat: dict[str, list] = {
        key: [] for key in ("ids", "positions", "start", "lens", "slots0", "slots1", "slots2", "sampled", "P")
    }
    flat["start"].append(0)
    for item in output.scheduled:
        book = books[item.request_id]
        for position in range(item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens):
            if book.params.prompt_logprobs is not None and position + 1 < book.num_prompt:
                flat["P"].append((len(flat["ids"]), book.tokens[position + 1]))
            for g, group in enumerate(GROUPS):
                block = book.tables[g][0 if group.ring else position // group.block_size]
                end = item.num_computed_tokens + item.num_new_tokens
                kept = not group.ring or position + group.block_size >= end
                flat[f"slots{g}"].append(block * group.block_size + position % group.block_size if kept else -1)
            flat["ids"].append(book.tokens[position])
            flat["positions"].append(position)
        flat["start"].append(len(flat["ids"]))
        flat["lens"].append(item.num_computed_tokens + item.num_new_tokens)
        flat["sampled"] += [len(flat["ids"]) - 1] if item.num_samples else []
    return flat


def check_packed(packed: PackedStep, books: dict[str, Book], output: SchedulerOutput) -> None:
    flat, count = brute_force(books, output), len(output.scheduled)
    assert packed.input_ids.dtype == packed.positions.dtype == np.int64
    assert packed.layout.query_start_loc.dtype == packed.seq_lens.dtype == np.int32
    assert packed.layout.query_start_loc.shape == (count + 1,)
    for table, slots in zip(packed.block_tables, packed.slot_mappings, strict=True):
        assert (table.dtype, slots.dtype) == (np.int32, np.int64)
        assert (len(table), slots.shape) == (count, packed.input_ids.shape)
    assert packed.input_ids.tolist() == flat["ids"]
    assert packed.positions.tolist() == flat["positions"]
    assert packed.layout.query_start_loc.tolist() == flat["start"]
    assert packed.seq_lens.tolist() == flat["lens"]
    assert packed.logits_indices.tolist() == flat["sampled"] + [index for index, _ in flat["P"]]
    assert [t for piece in packed.prompt_pieces for t in piece.targets.tolist()] == [target for _, target in flat["P"]]
    for g, group in enumerate(GROUPS):
        assert packed.slot_mappings[g].tolist() == flat[f"slots{g}"]
        width = -(-max(flat["lens"]) // group.block_size)
        for item, row in zip(output.scheduled, packed.block_tables[g].tolist(), strict=True):
            table = books[item.request_id].tables[g] * (width if group.ring else 1)
            assert row == (table + [-1] * width)[:width]


def test_decode_steps_of_the_same_rows_are_packed_in_place() -> None:
    """Guards against decode steps that are all packed anew, and against metadata kept where a block begins."""
    batch = InputBatch(GROUPS[:1], MAX_SEQS, MAX_LEN)
    before, kept = (
        run(batch, [NewRequest("a", list(range(40)), 40, SamplingParams(temperature=0.0), 0, [[5, 9, 3]])], decode(39)),
        [],
    )
    for computed in range(40, 52):
        batch.append(before.layout.rows, np.array([computed]), np.zeros(1, dtype=np.int64))
        new_block_ids = [[7]] if computed == 48 else [[]]
        packed = run(batch, [], decode(computed, new_block_ids))
        assert packed.input_ids.tolist() == packed.positions.tolist() == [computed]
        kept.append(packed is before)
        before = packed
    assert kept == [computed != 48 for computed in range(40, 52)]


def test_steps_with_as_many_drafts_are_packed_in_place() -> None:
    """Guards against steps with drafts that are all packed anew, against drafts and lengths of the step before, and
    against metadata kept where a block was added."""
    batch, other = (InputBatch(GROUPS[:1], MAX_SEQS, MAX_LEN) for _ in range(2))
    length, kept, before = 40, [], None
    for step, accepted in enumerate((0, 2, 1, 0, 2, 2)):
        new_block_ids = [[7]] if step == 4 else [[]]
        item = ScheduledRequest("a", length - 1, 3, new_block_ids, [0], 3, [100 + step, 200 + step])
        blocks = [5, 9, 3, 7] if step > 4 else [5, 9, 3]
        first = NewRequest("a", list(range(length)), 40, SamplingParams(temperature=0.0), 0, [blocks])
        packed = run(batch, [first] if step == 0 else [], item)
        other.remove_request("a")
        alone = run(other, [first], item)
        for found, expected in ((packed, alone), (packed.layout, alone.layout)):
            for name in [part.name for part in fields(found) if part.name != "layout"]:
                assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        kept.append(packed is before)
        before = packed
        for _ in range(accepted + 1):
            batch.append(packed.layout.rows, np.array([length]), np.zeros(1, dtype=np.int64))
            length += 1
    assert kept == [False, True, True, True, False, True]


def decode(computed: int, new_block_ids: list[list[int]] | None = None) -> ScheduledRequest:
    return ScheduledRequest("a", computed, 1, new_block_ids or [[]], [0], 1)


@pytest.mark.covers("F4")
@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_packing_equals_brute_force(rng: random.Random) -> None:
    """Guards against stale rows: a table, token or release left over from a request that had the row before, or from
    the step before, whose arrays a decode step takes over."""
    scheduler, batch = RandomScheduler(rng), InputBatch(GROUPS, MAX_SEQS, MAX_LEN)
    for step_id in range(20):
        output = scheduler.step(step_id)
        batch.update(output)
        assert len(batch._row_of) == len(scheduler.books)
        if not output.scheduled:
            continue
        packed = batch.pack(output.scheduled)
        check_packed(packed, scheduler.books, output)
        finish_step(rng, scheduler, batch, packed, output)


def finish_step(
    rng: random.Random, scheduler: RandomScheduler, batch: InputBatch, packed: PackedStep, output: SchedulerOutput
) -> None:
    """Sample a random token for whoever has caught up."""
    for item in output.scheduled:
        scheduler.books[item.request_id].computed += item.num_new_tokens
    rows, tokens = [], []
    for index in packed.layout.sampled.tolist():
        name = output.scheduled[index].request_id
        if len(scheduler.books[name].tokens) == MAX_LEN:
            output.removed_request_ids.append(name)
            batch.remove_request(name)
            del scheduler.books[name]
            continue
        rows.append(int(packed.layout.rows[index]))
        tokens.append(rng.randrange(2**31))
        scheduler.books[name].tokens.append(tokens[-1])
    batch.append(np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64), np.zeros(len(rows), np.int64))


def one(num_tokens: int = 4, name: str = "a", **params: object) -> NewRequest:
    return NewRequest(
        name,
        list(range(1, num_tokens + 1)),
        num_tokens,
        SamplingParams(**{"temperature": 0.0, **params}),
        0,
        [[0], [0], [0]],
    )


def run(batch: InputBatch, new: list[NewRequest], *items: ScheduledRequest) -> PackedStep:
    batch.update(SchedulerOutput(0, new, list(items)))
    return batch.pack(items)


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (ScheduledRequest("b", 0, 4, [[], [], []], [0, 0, 0], 1), "never introduced"),
        (ScheduledRequest("a", 0, 5, [[], [], []], [0, 0, 0], 0), "beyond its last token"),
        (ScheduledRequest("a", 0, 0, [[], [], []], [0, 0, 0], 0), "without tokens"),
        (ScheduledRequest("a", 0, 3, [[], [], []], [0, 0, 0], 1), "has not caught up"),
        (ScheduledRequest("a", 0, 4, [[], [], []], [1, 0, 0], 1), "not allocated"),
        (ScheduledRequest("a", 0, 4, [[1] * 9, [], []], [0, 0, 0], 1), "block table holds"),
        (ScheduledRequest("a", 0, 4, [[], [], [1]], [0, 0, 0], 1), "ring is one block"),
    ],
)
def test_a_step_that_contradicts_the_batch_is_refused(item: ScheduledRequest, error: str) -> None:
    """Guards against a scheduler bug that silently writes to slot -16 or computes tokens that do not exist."""
    batch = InputBatch(GROUPS, MAX_SEQS, MAX_LEN)
    with pytest.raises(EngineError, match=error):
        run(batch, [one()], item)


def test_a_request_twice_in_a_step_is_refused() -> None:
    """Guards against one request computed by two rows of a batch."""
    items = [ScheduledRequest("a", start, 2, [[], [], []], [0, 0, 0], 0) for start in (0, 2)]
    with pytest.raises(EngineError, match="twice"):
        run(InputBatch(GROUPS, MAX_SEQS, MAX_LEN), [one()], *items)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (ScheduledRequest("a", 0, 4, [[], [], []], [0, 0, 0], 2), "after each draft"),
        (ScheduledRequest("a", 0, 5, [[], [], []], [0, 0, 0], 1, [7]), "after each draft"),
        (ScheduledRequest("a", 0, 4, [[], [], []], [0, 0, 0], 2, [7]), "has not caught up"),
        (ScheduledRequest("a", 4, 1, [[], [], []], [0, 0, 0], 2, [7]), "after each draft"),
        (ScheduledRequest("a", 0, 104, [[], [], []], [0, 0, 0], 101, [7] * MAX_LEN), "max_model_len"),
    ],
)  # fmt: skip
def test_drafts_that_contradict_the_step_are_refused(item: ScheduledRequest, message: str) -> None:
    """Guards against a position sampled that has no token before it, and drafts written into the next row."""
    with pytest.raises(EngineError, match=message):
        run(InputBatch(GROUPS, MAX_SEQS, MAX_LEN), [one()], item)


def test_new_requests_that_do_not_fit_are_refused() -> None:
    """Guards against two requests in one row, and against a cryptic numpy error for a long one."""
    item = ScheduledRequest("a", 0, 4, [[], [], []], [0, 0, 0], 1)
    batch = InputBatch(GROUPS, 1, MAX_LEN)
    run(batch, [one()], item)
    with pytest.raises(EngineError, match="introduced twice"):
        batch.add_request(one())
    with pytest.raises(EngineError, match="max_num_seqs = 1"):
        batch.add_request(one(name="b"))
    batch.remove_request("a")
    with pytest.raises(EngineError, match="max_model_len = 100"):
        batch.add_request(one(MAX_LEN + 1))
    with pytest.raises(EngineError, match="seed"):
        batch.add_request(one(temperature=1.0))


def test_a_request_stops_at_max_model_len() -> None:
    """Guards against a token written into the next request's row."""
    batch = InputBatch(GROUPS, 2, 16)
    batch.add_request(one(16))
    with pytest.raises(EngineError, match="max_model_len = 16"):
        batch.append(np.array([batch.row("a")]), np.array([7]), np.array([0]))


def test_forgetting_a_stranger_is_harmless() -> None:
    """Guards against a failed first step that makes every later step fail: its request was never learnt."""
    batch = InputBatch(GROUPS, MAX_SEQS, MAX_LEN)
    batch.update(SchedulerOutput(0, [], [], ["nobody"]))
    assert len(batch._row_of) == 0


@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63, 2**64 - 1])
def test_seed_bits_survive(seed: int) -> None:
    """Guards against seeds above 2**63 - 1 that overflow: the 64 bits are kept as two's complement."""
    batch = InputBatch(GROUPS, MAX_SEQS, MAX_LEN)
    batch.add_request(one(temperature=1.0, seed=seed))
    assert int(batch.sampling.noise_key[batch.row("a"), 0]) % 2**64 == seed % 2**64
