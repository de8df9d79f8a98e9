"""Tests of what counts as odd: hardly any story of the generator, and what a reader stumbles over."""

from random import Random

import pytest

from penstock_lab.training import stories, story_check
from penstock_lab.training.evaluate import Completion, is_story, is_sum


@pytest.fixture(scope="module")
def story() -> str:
    return stories.tell(Random("a story"), fullness=1.0).text


def test_hardly_a_story_of_the_generator_is_odd() -> None:
    """Guards against a check that finds fault with what the model was taught."""
    rng = Random("fresh")
    told = [stories.tell(rng, other=other).text for other in (0.0, 0.5) for _ in range(250)]
    odd = [found for text in told if (found := story_check.oddities("", text, ended=True))]
    assert len(odd) <= 5, odd


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("Once upon a time a cheerful boy named ne lived far away in the mountains.", "word: ne"),
        ("Then Mia called add and weather.", "word: add"),
        ("Mia felt upset and felt upset and began to cry.", "words: upset and felt"),
        ("Now the that was not alone any more.", "words: Now the that"),
        ("Mia took the red to the lake.", "words: the red to"),
    ],
)
def test_what_a_reader_stumbles_over_is_odd(story: str, sentence: str, reason: str) -> None:
    """Guards against a check that lets an unknown word, a tool's name or a glued sentence pass."""
    assert story_check.oddities("", story, ended=True) == []
    assert reason in story_check.oddities("", f"{story} {sentence}", ended=True)


def test_a_story_that_stops_early_or_goes_on_is_odd(story: str) -> None:
    beginning = story[: story.index(".", 60) + 1]
    assert "too short" in story_check.oddities("", beginning, ended=True)
    assert story_check.oddities("", story, ended=False) == ["does not end"]


def test_words_of_the_prompt_are_allowed(story: str) -> None:
    """Guards against a story that is called odd for the hero that was asked for."""
    told = f"{story} Then there was a walrus who lived on a sunny farm."
    assert "word: walrus" in story_check.oddities("Tell me a story.", told, ended=True)
    assert story_check.oddities("Tell me a story about a walrus.", told, ended=True) == []


def test_stories_and_sums_are_told_apart(story: str) -> None:
    """Guards against a measure of conversations that takes one kind of answer for the other."""
    assert is_story(Completion(story, True))
    assert not is_story(Completion(story, False))
    assert not is_story(Completion(f"{story} 3 + 4 = 7.", True))
    assert is_sum(Completion("3 plus 4 is 7.", True))
    assert not is_sum(Completion(story, True))
