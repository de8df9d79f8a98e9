"""Prompt lookup, and the choice of how many drafts pay, on a machine whose step times are made up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.config import SpeculativeConfig
from penstock.engine.draft_policy import StepCosts
from penstock.engine.speculation import NgramProposer, Speculation
from penstock.errors import InvalidRequestError
from penstock.interface.step import DraftQuery, SchedulerOutput
from tests.engine.timed import Clock
from tests.fakes_drafts import Oracle
from tests.fakes_engine import expected_outputs, make_engine, request

WINDOW = 8  # of the scripted model: short, so that its tokens are made quickly
pytestmark = pytest.mark.covers("C18")


def look_up(text: list[int], count: int = 5, longest: int = 4, shortest: int = 1) -> list[int]:
    return NgramProposer(longest, shortest).propose([DraftQuery("a", text, count)])[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7, 1, 2]),
        ([5, 1, 2, 9, 4, 2, 8, 1, 2], [9, 4, 2, 8, 1]),  # the longest match, though a shorter one is later
        ([1, 2, 9, 1, 2, 8, 7, 1, 2], [8, 7, 1, 2, 8]),  # of equal ones the latest
        ([3, 3, 3], [3, 3, 3, 3, 3]),  # beyond the end it goes on with itself
        ([1, 2, 3, 4], []),
        ([7], []),
    ],
)
def test_what_followed_before_is_guessed(text: list[int], expected: list[int]) -> None:
    """Guards against a guess from the wrong place, or one token off."""
    assert look_up(text) == expected


def test_shorter_matches_than_asked_for_are_none() -> None:
    """Guards against prompt_lookup_min being ignored."""
    assert look_up([1, 2, 9, 5, 2], shortest=2) == []
    assert look_up([1, 2, 9, 1, 2], shortest=2) == [9, 1, 2, 9, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 6))
def test_lookup_equals_a_search_through_the_text(text: list[int], shortest: int, count: int) -> None:
    """Guards against an index that grows wrongly token by token, against the plainest search there is."""
    proposer = NgramProposer(4, shortest)
    for length in range(1, len(text) + 1):
        part = text[:length]
        (found,) = proposer.propose([DraftQuery("a", part, count)])
        size, place = max(
            ((n, end) for n in range(shortest, 5) for end in range(n, length) if part[end - n : end] == part[-n:]),
            default=(0, 0),
        )
        expected = part[place:] if size else []
        while size and len(expected) < count:
            expected = expected + expected
        assert found == expected[:count]


TICK_S = 0.0002  # that pass whenever the clock is read: thinking takes time too


class Ticking(Clock):
    """A clock of a machine whose Python takes time."""

    ticked = 0.0

    def __call__(self) -> float:
        self.now += TICK_S
        self.ticked += TICK_S
        return self.now


@dataclass
class Machine:
    """Streams on a machine whose step times are known, with drafts whose worth is.

    Attributes:
        cost: mean seconds of a step of so many tokens.
        right: share of right drafts.
        drafting_s: seconds that a round of drafts takes; 0: they are free.
        noise: how much steps vary; now and then one takes ten times as long.
    """

    cost: Callable[[int], float]
    streams: int = 1
    right: float = 0.0
    drafting_s: float = 0.0
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.clock, self.spent, self.number = Ticking(), 0.0, 0
        truth = Oracle(lambda _, ids, count: expected_outputs(ids, count, WINDOW), random=self.random)
        truth.is_free, self._oracle, self._propose = not self.drafting_s, truth, truth.propose
        truth.propose = self._draft  # type: ignore[method-assign]
        drafts = Speculation(truth, 5, clock=self.clock)
        options = {"windows": (WINDOW,), "num_blocks": 200, "max_model_len": 5000, "max_num_seqs": self.streams}
        self.engine = make_engine(speculation=drafts, clock=self.clock, **options)
        self.engine.executor.fail = self._pass  # type: ignore[attr-defined]

    def _draft(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        self._oracle.share = self.right
        seconds = self.drafting_s * max(query.count for query in queries)
        self.clock.now += seconds
        self.spent += seconds
        return self._propose(queries)

    def _pass(self, step: SchedulerOutput) -> set[str]:
        seconds = self.cost(step.num_tokens)
        slow = 10.0 if self.noise and self.random.random() < 0.01 else 1.0
        self.clock.now += seconds * slow * self.random.lognormvariate(0.0, self.noise)
        self.spent += seconds
        return set()

    def run(self, tokens: int) -> float:
        """Let all streams go on until one has so many tokens. Return how many times as many tokens there were in a
        second as without drafts, on average."""
        self.number += 1
        names = [f"{self.number} {index}" for index in range(self.streams)]
        for index, name in enumerate(names):
            self.engine.add_request(request(name, [index, self.number], tokens, ignore_eos=True))
        before, made, is_over = self.spent + self.clock.ticked, 0, False
        while not is_over:
            outputs = self.engine.step()
            made += sum(len(output.new_token_ids) for output in outputs)
            is_over = any(output.finish_reason is not None for output in outputs)
        for name in names:
            self.engine.abort(name)
        return made * self.cost(self.streams) / self.streams / (self.spent + self.clock.ticked - before)


def flat(tokens: int) -> float:
    return 0.1


def by_memory(tokens: int) -> float:
    return 0.1 + 0.005 * tokens


def by_products(tokens: int) -> float:
    return 0.02 + 0.1 * tokens


def by_tiles(tokens: int) -> float:
    return 0.1 * (1 + tokens // 8)


COSTS = [flat, by_memory, by_products, by_tiles]


@settings(max_examples=12, phases=[Phase.generate])
@given(
    st.sampled_from(COSTS), st.sampled_from([1, 6]), st.floats(0, 1), st.sampled_from([0.0, 0.0, 0.002, 0.05]),
    st.sampled_from([0.0, 0.03, 0.1]), st.integers(0, 2**32),
)  # fmt: skip
def test_drafts_never_cost_more_than_three_percent(
    cost: Callable[[int], float], streams: int, right: float, drafting_s: float, noise: float, seed: int
) -> None:
    """Guards, at any share of right drafts, any price of steps and drafts, and any noise, against a loss."""
    machine = Machine(cost, streams, right, drafting_s, noise, Random(seed))
    assert machine.run(250) >= 0.97


def test_a_step_of_drafts_that_takes_many_times_as_long_is_paid_for_slowly() -> None:
    """Guards against trials that go on, for there is a price that no estimate foresees: here the first draft's."""
    machine = Machine(lambda tokens: 0.1 if tokens == 1 else 1.0, right=1.0)
    assert machine.run(1200) >= 0.97


def test_drafts_that_are_never_right_are_not_even_tried() -> None:
    """Guards against a trial to learn what can be seen without one: that a guess was wrong."""
    machine = Machine(by_memory)
    machine.run(100)
    assert machine.engine.stats().num_draft_tokens_total == 0


@pytest.mark.parametrize(("drafting_s", "gain"), [(0.0, 2.0), (0.005, 1.7)])
def test_a_text_that_turns_is_followed(drafting_s: float, gain: float) -> None:
    """Guards against drafts that are never tried again, or go on for long when they are wrong."""
    machine = Machine(by_memory, right=0.8, drafting_s=drafting_s)
    machine.run(200)
    assert machine.run(200) > gain
    machine.right = 0.0
    assert machine.run(200) > 0.96
    machine.right = 0.8
    machine.run(400)
    assert machine.run(200) > gain


def test_a_machine_that_turns_is_followed() -> None:
    """Guards against what was measured in a bad hour and counts for ever."""
    machine = Machine(by_products, right=0.9)
    machine.run(300)
    machine.cost = by_memory
    machine.run(600)
    assert machine.run(200) > 1.5


def test_a_batch_gains_too() -> None:
    """Guards against a choice that gives each stream a draft or none: where tokens are cheap, all have several."""
    machine = Machine(lambda tokens: 0.1 + 0.002 * tokens, 8, right=0.8)
    machine.run(200)
    assert machine.run(100) > 1.8


def test_costs_between_and_beyond_what_was_measured() -> None:
    """Guards against one slow step that says for ever that more tokens are dear."""
    costs = StepCosts()
    for tokens, seconds in [(1, 9.0), (1, 1.0), (5, 99.0), (5, 50.0), (1, 1.0)]:
        costs.note(tokens, seconds)
    assert costs.estimate(1) == 1.0
    assert costs.estimate(5) == 5.0  # five steps of one token would do as well
    assert 1.0 < costs.estimate(3) <= 3.0
    assert costs.estimate(1) < costs.estimate(2) <= 2.0
    assert costs.note(1, 7.0) == 1.5
    assert costs.estimate(1) == 1.0
    costs.note(1, 7.0)  # no exception any more
    assert 1.0 < costs.estimate(1) < 1.2


@pytest.mark.parametrize(
    ("given_config", "message"),
    [
        ({}, "method"),
        ({"method": "eagle"}, "method"),
        ({"method": "ngram", "model": "demo-draft"}, "ngram has no model"),
        ({"method": "draft_model"}, "model"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "unknown key"),
        ("ngram", "an object"),
    ],
)
def test_wrong_speculative_configs_are_refused(given_config: object, message: str) -> None:
    """Guards against an option that is accepted and ignored."""
    with pytest.raises(InvalidRequestError, match=message) as raised:
        SpeculativeConfig.of(given_config)
    assert "speculative_config" in str(raised.value)


def test_defaults_and_lengths() -> None:
    """Guards against a lookup of no length, and a model without a method that is refused."""
    found = SpeculativeConfig.of({"method": "ngram", "prompt_lookup_min": 6})
    assert (found.prompt_lookup_max, found.prompt_lookup_min, found.num_speculative_tokens) == (6, 6, 5)
    assert SpeculativeConfig.of({"model": "demo-draft"}).method == "draft_model"
