"""The generator: deterministic, held-out text and held-out sums stay out of training, every answer stands in its
story."""

import json
import re
from itertools import islice
from random import Random

import pytest

from penstock_lab.training import chats, corpus, stories, sums, tasks

SAMPLE = list(islice(corpus.training_documents(0), 3000))
FIFTH_SAMPLE = list(islice(corpus.training_documents(0, corpus.FIFTH_MIXTURE), 1000))


def test_equal_seeds_give_equal_documents() -> None:
    assert SAMPLE[:300] == list(islice(corpus.training_documents(0), 300))
    assert SAMPLE[:300] != list(islice(corpus.training_documents(1), 300))


def test_shipped_heldout_text_is_what_the_generator_makes() -> None:
    assert corpus.read_heldout() == list(corpus.heldout_documents())


def test_heldout_documents_are_never_training_documents() -> None:
    held_out = set(corpus.read_heldout())
    assert len(held_out) > 30
    assert held_out.isdisjoint(SAMPLE)


def test_a_held_out_document_in_the_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = corpus.heldout_documents()[0]
    monkeypatch.setattr(corpus, "stream", lambda seed, mixture: iter(["<|bos|>a<|eos|>", held_out, "<|bos|>b<|eos|>"]))
    assert list(corpus.training_documents(0)) == ["<|bos|>a<|eos|>", "<|bos|>b<|eos|>"]


def test_held_out_sums_are_never_stated() -> None:
    stated = {(int(a), int(b)) for text in SAMPLE for a, b in re.findall(r"(?<!\d)(\d+) ?\+ ?(\d+)", text)}
    stated |= {(int(a), int(b)) for text in SAMPLE for a, b in re.findall(r"(\d+) (?:plus|and) (\d+)", text)}
    assert len(stated) > 300
    assert stated.isdisjoint(sums.HELD_OUT)


def test_sums_are_right() -> None:
    found = [tuple(map(int, row)) for text in SAMPLE for row in re.findall(r"(\d+) \+ (\d+) = (\d+)", text)]
    assert found
    assert all(a + b == c for a, b, c in found)


def test_every_document_ends_properly_and_fills_every_slot() -> None:
    for text in SAMPLE + FIFTH_SAMPLE:
        assert text.startswith(chats.BOS)
        assert text.endswith((chats.EOS, chats.END))
        body = re.sub(r'\{".*\}', "", text)
        assert "{" not in body
        assert "}" not in body


def test_json_answers_parse_and_hold_what_the_question_says() -> None:
    rng = Random(3)
    for _ in range(300):
        question, answer = tasks.json_answer(rng)
        facts = json.loads(answer)
        assert facts
        assert all(
            str(value) in question
            for value in facts.values()
            if isinstance(value, str | int) and not isinstance(value, bool)
        )


@pytest.mark.parametrize("plot", stories.plots(), ids=lambda plot: plot.topics[0])
def test_every_plot_fills_its_slots(plot: stories.Plot) -> None:
    rng = Random(5)
    scene = stories.people(rng) | stories.props(rng)
    for _, lines in plot.beats:
        assert len(lines) == 3
        for line in lines:
            line.format_map(scene)
    for deed in plot.deeds:
        deed.format_map(scene)
    assert plot.questions
    assert len(plot.deeds) >= 3


def test_names_that_answer_stand_in_the_story() -> None:
    """Guards against questions that rest on a line that may be left out."""
    rng = Random(7)
    for _ in range(500):
        story = stories.tell(rng, fullness=0.0)
        for _, answer in story.questions:
            names = re.findall(r"(?<!^)\b[A-Z]\w+", answer)
            assert all(name in story.text for name in names), (answer, story.text)


def test_story_lengths_vary() -> None:
    rng = Random(1)
    lengths = [len(stories.tell(rng).text.split()) for _ in range(300)]
    assert min(lengths) < 75
    assert max(lengths) > 130


def test_the_evaluations_requests_are_drawn_again() -> None:
    """Guards against figures of odd stories that measure memory, however the request is written."""
    requests = ["Story, please!", "tell me a bedtime story about a hedgehog", "Tell me a story about a hedgehog."]
    documents = [chats.render([("user", "Hi"), ("assistant", "Hello!"), ("user", request)]) for request in requests]
    assert corpus.unlike_evaluation(lambda rng: documents.pop(0))(Random(0)) == chats.render(
        [("user", "Hi"), ("assistant", "Hello!"), ("user", "Tell me a story about a hedgehog.")]
    )
    asked = {corpus.plain_words(text) for text in re.findall(r"<\|user\|>(.*?)<\|end\|>", "".join(FIFTH_SAMPLE))}
    assert len(asked) > 500
    assert len(corpus.kept_requests()) == 7
    assert asked.isdisjoint(corpus.kept_requests())


def test_a_requested_story_is_about_the_hero_asked_for() -> None:
    rng = Random(2)
    requests = [chats.asked_story(rng) for _ in range(400)]
    heroes = [(found[1], story) for (_, request), (_, story) in requests
              if (found := re.search(r"\b(?:named|called) (\w+)", request))]  # fmt: skip
    assert len(heroes) > 20
    assert all(name.lower() in story.lower() for name, story in heroes)
    assert len({request for (_, request), _ in requests}) > 350


def test_a_story_may_begin_in_the_midst() -> None:
    rng = Random(2)
    begun = [stories.tell(rng, other=1.0) for _ in range(300)]
    assert sum(story.text.startswith(("One ", "On a ", "Early ", "After ")) for story in begun) > 50
    assert all(story.kind in story.text[:250] and story.hero in story.text[:250] for story in begun)
