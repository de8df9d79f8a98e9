"""Forks that share blocks, and beam searches in everybody's batch, on the scripted executor.

What a search finds alone comes from `expected_search`, a plain loop over the same log-probabilities, without an engine,
blocks or steps. That the search itself chooses as Transformers does is test_beam_search.py's.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.request import Request
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.step import NO_BLOCK, CacheGroup
from tests.fakes_engine import (
    VOCAB,
    ScriptedExecutor,
    expected_outputs,
    expected_search,
    make_engine,
    request,
    run,
    token_ids,
)

ENDS = (3, 11)  # of the 40 tokens that beams go on with
pytestmark = pytest.mark.covers("C6", "C17")


def search(request_id: str, prompt: list[int], max_tokens: int = 8, n: int = 3, **options: Any) -> EngineRequest:
    return request(request_id, prompt, max_tokens, n=n, use_beam_search=True, **options)


def check_found(engine: Engine, source: EngineRequest, outputs: list[EngineOutput], window: int | None = None) -> None:
    """The only output of a search is what a plain loop finds."""
    (output,) = outputs
    ends = tuple(engine.eos_token_ids)
    assert output.hypotheses == expected_search(source.prompt_token_ids, source.params, ends, window)
    assert output.error is None
    assert output.finish_reason is output.hypotheses[0].finish_reason


def copies_of(engine: Engine) -> int:
    assert isinstance(engine.executor, ScriptedExecutor)
    return sum(len(step.block_copies) for step in engine.executor.steps)


# --- blocks -----------------------------------------------------------------------------------------------------------

GROUPS = [CacheGroup((0,), None, 7, 16), CacheGroup((1,), 20, 7, 16), CacheGroup((2,), 20, 5, 32, ring=True)]


@dataclass
class Held:
    """A request with what it has written."""

    request: Request
    written: list[int] = field(default_factory=list)


class Blocks(RuleBasedStateMachine):
    """Requests come, grow, fork and go, over a memory in which every slot holds the number that was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(GROUPS, enable_prefix_caching=False)
        self.memory = [[-1] * (group.num_blocks * group.block_size) for group in GROUPS]
        self.held: list[Held] = []
        self.counter = 0

    def new(self, num_tokens: int) -> Request:
        self.counter += 1
        return Request(request(f"r{self.counter}", [1] * num_tokens, 1000), self.counter, 10_000)

    @rule(num_tokens=st.integers(1, 40))
    def come(self, num_tokens: int) -> None:
        held = Held(self.new(num_tokens))
        prefix = self.manager.get_computed_blocks(held.request)
        if self.manager.admit(held.request, prefix, num_tokens) is not None:
            self.held.append(held)
            self.write(held, num_tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        held.request.token_ids.append(1)
        if self.manager.allocate_slots(held.request, 1):
            self.write(held, 1)
        else:
            held.request.token_ids.pop()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        parent = data.draw(st.sampled_from(self.held))
        for _ in range(count):
            child = Held(self.new(1), list(parent.written))
            child.request.token_ids = list(parent.request.token_ids)
            self.manager.fork(parent.request, child.request)
            self.held.append(child)
        self.held.remove(parent)
        self.manager.free(parent.request)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.manager.free(held.request)

    def write(self, held: Held, count: int) -> None:
        """A step of one request: copies first, then every new position gets a number of its own."""
        for copy in self.manager.pop_copies():
            size, slots = GROUPS[copy.group].block_size, self.memory[copy.group]
            slots[copy.target * size : (copy.target + 1) * size] = slots[copy.source * size : (copy.source + 1) * size]
        for _ in range(count):
            self.counter += 1
            held.written.append(self.counter)
        start = held.request.num_computed_tokens
        for index in range(len(GROUPS)):
            for position in range(start, start + count):
                self.memory[index][self.slot(held, index, position)] = held.written[position]
        held.request.num_computed_tokens += count
        self.manager.pop_updates(held.request)

    def slot(self, held: Held, index: int, position: int) -> int:
        group, table = GROUPS[index], self.manager.tables(held.request)[index]
        block_id = table[0] if group.ring else table[position // group.block_size]
        assert block_id != NO_BLOCK
        return block_id * group.block_size + position % group.block_size

    @invariant()
    def everybody_reads_what_it_wrote(self) -> None:
        """No two requests share memory that one of them has written since they parted, and no block is lost."""
        self.manager.check_integrity()
        for held in self.held:
            num = held.request.num_computed_tokens
            for index, group in enumerate(GROUPS):
                first = 0 if group.sliding_window is None else max(0, num - group.sliding_window + 1)
                found = [self.memory[index][self.slot(held, index, position)] for position in range(first, num)]
                assert found == held.written[first:num]

    def teardown(self) -> None:
        for held in self.held:
            self.manager.free(held.request)
        self.manager.check_integrity()
        assert self.manager.num_free == self.manager.num_blocks


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=20, stateful_step_count=25)


def test_only_the_last_block_is_copied_and_only_if_it_is_shared() -> None:
    """Guards against beams that copy their whole context in every step."""
    engine = make_engine(max_num_seqs=4)
    engine.add_request(search("a", list(range(1, 41)), max_tokens=6, n=4, ignore_eos=True))
    engine.step()
    engine.step()
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)
    assert [(copy.group, copy.source) for copy in executor.steps[1].block_copies] == [(0, 2)] * 3  # the fourth has it
    tables = [new.block_tables[0] for new in executor.steps[1].new_requests]
    assert len({table[2] for table in tables}) == 4
    assert {tuple(table[:2]) for table in tables} == {(0, 1)}
    run(engine)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_no_copy_at_the_end_of_a_block() -> None:
    """Guards against a copy of a full block, which nobody writes any more."""
    engine = make_engine(max_num_seqs=4)
    engine.add_request(search("a", list(range(1, 33)), max_tokens=2, n=4, ignore_eos=True))
    run(engine)
    assert copies_of(engine) == 0


# --- searches ---------------------------------------------------------------------------------------------------------


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, Any], list[EngineRequest], int]:
    """An engine's options, requests of which some search, and a seed for what befalls them."""
    windows = draw(st.sampled_from([(None,), (None, 20), (20,)]))
    rows = draw(st.booleans())
    options = {
        "windows": windows,
        "num_blocks": draw(st.sampled_from([8, 12, 64])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([8, 16, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "user_rows": rows,
        "max_model_len": 80,
        "eos_token_ids": ENDS,
    }
    requests = []
    for index in range(draw(st.integers(1, 4))):
        prompt = [(7 * index + i) % VOCAB for i in range(draw(st.integers(1, 40)))]
        max_tokens, flow = draw(st.integers(1, 12)), draw(st.sampled_from(["", "one", "two"]))
        fields: dict[str, Any] = {"flow": flow, "logprobs": draw(st.sampled_from([None, 2]))}
        if draw(st.integers(0, 3)):
            fields |= {"n": draw(st.integers(1, 5)), "use_beam_search": True, "ignore_eos": draw(st.booleans())}
            fields["length_penalty"] = draw(st.sampled_from([0.0, 1.0, 2.0, -1.0]))
            fields["early_stopping"] = draw(st.sampled_from([False, True, "never"]))
        requests.append(request(str(index), prompt, max_tokens, **fields))
    return options, requests, draw(st.integers(0, 2**32))


@given(crowds())
@settings(max_examples=40)
def test_a_search_in_a_crowd_finds_what_it_finds_alone(crowd: tuple[dict[str, Any], list[EngineRequest], int]) -> None:
    """Guards against searches that wait for each other for ever, lose blocks, read each other's, or depend on rows,
    chunks, cached prefixes, preemptions and failed steps."""
    options, requests, seed = crowd
    random, engine = Random(seed), make_engine(**options)
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)

    def fail(step: Any) -> set[str]:
        if not engine.scheduler.is_trying and random.random() < 0.03:
            raise RuntimeError("scripted")
        return set()

    executor.fail = fail
    for source in requests:
        engine.add_request(source)
    found: dict[str, list[EngineOutput]] = {source.request_id: [] for source in requests}
    for _ in range(5000):
        if not engine.has_work:
            break
        for output in engine.step():
            found[output.request_id].append(output)
        engine.check_integrity()
        if engine.scheduler.running and random.random() < 0.1:
            engine.scheduler.preempt(random.choice(engine.scheduler.running))
    assert not engine.has_work, "it has not come to an end"
    window = min((item for item in options["windows"] if item is not None), default=None)
    for source in requests:
        if source.params.use_beam_search:
            check_found(engine, source, found[source.request_id], window)
        else:
            wanted = expected_outputs(source.prompt_token_ids, source.params.max_tokens or 0, window)
            stop = next((i + 1 for i, token in enumerate(wanted) if token in ENDS), len(wanted))
            assert token_ids(found[source.request_id]) == wanted[:stop]
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_two_searches_that_fill_the_rows_do_not_wait_for_each_other() -> None:
    """Guards against the deadlock in which each search has half of the rows, and waits for the other half."""
    engine = make_engine(max_num_seqs=4)
    sources = [search(name, [index, 2, 3], n=4, flow=name) for index, name in enumerate(("a", "b"))]
    for source in sources:
        engine.add_request(source)
    found = run(engine, max_steps=300)
    for source in sources:
        check_found(engine, source, found[source.request_id])


def test_an_aborted_search_leaves_nothing() -> None:
    """Guards against beams that go on when nobody waits for them, and an id that stays in use."""
    engine = make_engine(max_num_seqs=4)
    engine.add_request(search("a", [1, 2, 3], n=4, ignore_eos=True))
    engine.step()
    engine.step()
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request(search("a", [1, 2, 3]))
    assert engine.abort("a")
    assert not engine.has_work
    engine.check_integrity()
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
    assert not engine.abort("a")
    engine.add_request(search("a", [1, 2, 3]))
    run(engine)


@pytest.mark.parametrize("how", ["its own error", "a broken result"])
def test_a_beam_that_fails_ends_its_search_alone(how: str) -> None:
    """Guards against a search that goes on without a beam, or takes others with it."""
    engine = make_engine(max_num_seqs=8)
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)
    if how == "its own error":
        executor.fail = lambda step: {item.request_id for item in step.scheduled if item.request_id == "a beam 3"}
    else:
        collect = executor.collect

        def broken(handle: Any) -> Any:
            output = collect(handle)
            if "a beam 3" in output.results:
                output.results["a beam 3"].logprobs[0].token_ids.append(-1)  # more ids than numbers
            return output

        executor.collect = broken  # type: ignore[method-assign]
    sources = [search("a", [1, 2, 3]), search("b", [4, 5, 6])]
    for source in sources:
        engine.add_request(source)
    found = run(engine)
    (output,) = found["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error
    assert output.hypotheses is None
    check_found(engine, sources[1], found["b"])
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


@pytest.mark.parametrize(
    ("options", "message"), [({"output_token_ids": [5]}, "cannot be resumed"), ({"n": 20}, "more than the 10 tokens")]
)
def test_what_an_engine_cannot_search(options: dict[str, Any], message: str) -> None:
    """Guards against a search that is resumed without its beams, or cannot fill them."""
    engine = make_engine()
    engine.vocab_size = 10
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request(search("a", [1, 2, 3], **options))
    assert not engine.has_work
