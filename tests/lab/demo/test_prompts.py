"""The evaluation's prompts and scoring functions, and evaluate() on a fake generator."""

from collections.abc import Sequence

import pytest

from penstock_lab.training import evaluate, sums
from penstock_lab.training.evaluate import Completion, Prompt


def test_there_are_fifty_prompts_and_all_pairs() -> None:
    assert len(evaluate.ENDING_PROMPTS) == 50
    assert len(evaluate.SUM_PROMPTS) == len(sums.ALL_PAIRS) == 441
    assert len({prompt.text for prompt in evaluate.JSON_PROMPTS}) == 30


@pytest.mark.parametrize(("text", "number"), [("3 + 4 = 7.", 7), ("17", 17), ("none", None), ("12 and 5", 5)])
def test_last_number(text: str, number: int | None) -> None:
    assert evaluate.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("1. apple\n2. pear", True),
        ("1. apple\n2. apple", False),
        ("1. apple\n2. hammer", False),
        ("1. apple\n2. pear\n3. plum", False),
        ("apple, pear", False),
        ("", False),
    ],
)
def test_right_list(text: str, good: bool) -> None:
    assert evaluate.right_list(text, "fruits", 2) is good


def test_json_is_right_only_if_it_is_all_there_is() -> None:
    prompt = Prompt("json", "", {"name": "Mia", "age": 7})
    assert evaluate.right(prompt, '{"age": 7, "name": "Mia"}') is True
    assert evaluate.right(prompt, '{"name": "Mia", "age": "7"}') is False
    assert evaluate.right(prompt, 'Here: {"name": "Mia", "age": 7}') is False
    assert evaluate.right(Prompt("json", ""), "{}") is True
    assert evaluate.right(Prompt("story", ""), "anything") is None


def test_share_of_nothing_is_zero() -> None:
    assert evaluate.share([]) == 0.0
    assert evaluate.share([True, False, True, True]) == 0.75


def right_answers(texts: Sequence[str], temperature: float, limit: int) -> list[Completion]:
    """A fake engine that knows every small sum and nothing else."""
    by_text = {prompt.text: str(prompt.expect) for prompt in evaluate.SUM_PROMPTS}
    return [Completion(by_text.get(text, ""), text in by_text) for text in texts]


def test_evaluate_needs_only_a_function() -> None:
    figures = evaluate.evaluate(right_answers)
    assert figures["sums"] == {"all": 1.0, "seen": 1.0, "held_out": 1.0}
    assert figures["json"] == {"prompts": 30, "parse": 0.0, "right": 0.0}
    assert set(figures["held_out"]) > {"one call", "parallel calls", "next call", "answer from the results", "JSON"}
    assert figures["held_out"]["one call"]["greedy"] == 0.0
    greedy = figures["greedy"]
    assert isinstance(greedy, dict)
    assert greedy["prompts"] == 50
    assert greedy["ended"] == 1  # "What is 3 + 9?" is among the fifty
    assert greedy["scores"]["sum"] == {"prompts": 5, "scored": 5, "right": 1}
