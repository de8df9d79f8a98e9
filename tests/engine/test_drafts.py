"""Prompt lookup, and the choice of how many drafts pay, on numbers made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.draft_policy import DraftPolicy, StepCosts
from penstock.engine.ngram import NgramProposer
from penstock.errors import InvalidRequestError
from penstock.interface.drafts import DraftQuery, SpeculativeConfig

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


class Machine:
    """Steps of a machine whose time is known, with a policy that chooses."""

    def __init__(self, policy: DraftPolicy, requests: int, per_token: float, right: float) -> None:
        self.policy, self.requests, self.per_token, self.right = policy, requests, per_token, right
        self.seconds = self.tokens = self.due = 0.0

    def run(self, steps: int) -> float:
        """Return how much faster than without drafts it is."""
        for _ in range(steps):
            counts = self.policy.choose({str(i): 5 for i in range(self.requests)}, self.requests)
            tokens = self.requests + sum(counts.values())
            accepted = 0
            for name, count in counts.items():
                self.due += self.right * count
                now = min(count, int(self.due))
                self.due -= now
                accepted += now
                self.policy.note_drafts(name, count, now)
            seconds = 1.0 + self.per_token * (tokens - self.requests)
            self.policy.note_step(self.requests, tokens, seconds, accepted, 0.0)
            self.seconds += seconds
            self.tokens += self.requests + accepted
        return self.tokens / self.requests / self.seconds


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_wrong_drafts_cost_little(requests: int, share: float) -> None:
    """Guards against speculation that slows down where nothing is accepted: never by more than 3 %."""
    per_token = share / requests  # 1: a token more costs what each token costs, and a draft saves nothing ever
    assert Machine(DraftPolicy(), requests, per_token, 0.0).run(128) >= 0.97
    assert Machine(DraftPolicy(), requests, per_token, 0.0).run(2000) >= 0.98


def test_a_text_that_turns_is_followed() -> None:
    """Guards against drafts that are never tried again, or go on for long when they are wrong."""
    machine = Machine(DraftPolicy(), 1, 0.05, 0.8)
    assert machine.run(200) > 2.0
    machine.right = machine.seconds = machine.tokens = 0.0
    assert machine.run(200) > 0.96
    machine.right = 0.8
    machine.run(300)
    machine.seconds = machine.tokens = 0.0
    assert machine.run(100) > 2.0


def test_right_drafts_that_cost_too_much_are_left_out() -> None:
    """Guards against a choice by acceptance alone: with many requests the step is busy without drafts."""
    machine = Machine(DraftPolicy(), 32, 1 / 40, 0.6)
    assert machine.run(300) > 0.97
    assert machine.policy.choose({str(i): 5 for i in range(32)}, 32).keys() <= {str(i) for i in range(32)}


def test_costs_between_and_beyond_what_was_measured() -> None:
    """Guards against one slow step that says for ever that more tokens are dear."""
    costs = StepCosts()
    for tokens, seconds in [(1, 9.0), (1, 1.0), (5, 99.0), (5, 50.0), (1, 1.0)]:
        costs.note(tokens, seconds)
    assert costs.estimate(1) == 1.0
    assert costs.estimate(5) == 5.0  # five steps of one token would do as well
    assert 1.0 < costs.estimate(3) <= 3.0
    assert costs.estimate(1) < costs.estimate(2) <= 2.0


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
