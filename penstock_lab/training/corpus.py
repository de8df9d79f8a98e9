"""The training corpus: an endless, seeded stream of documents, and the held-out text that is kept out of it.

A document is text with the special tokens written out. A plain story is <|bos|>...<|eos|>; a conversation is the result
of chats.render(). Standard library only.

    python -m penstock_lab.training.corpus --seed 0 --documents 5          print some
    python -m penstock_lab.training.corpus --write-heldout heldout.txt     write the held-out text again
"""

import argparse
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import yaml

from penstock_lab.training import HELDOUT_FILE, calls, chats, records, stories, sums, words

HELDOUT_SEED = "penstock held-out"
HELDOUT_BYTES = 36_000
HELDOUT_MIN_CHARS = 120  # a shorter document could occur in training by chance


def plain(make: Callable[[Random], str]) -> Callable[[Random], str]:
    """Wrap a maker of plain text, so that it makes documents."""
    return lambda rng: chats.BOS + make(rng) + chats.EOS


def chat(make: Callable[[Random], list[chats.Turn]]) -> Callable[[Random], str]:
    """Wrap a maker of conversations, so that it makes documents."""
    return lambda rng: chats.render(chats.with_system(rng, make(rng)))


# name -> (weight by number of documents, maker)
Mixture = dict[str, tuple[float, Callable[[Random], str]]]
MIXTURE: Mixture = {
    "plain stories": (18, plain(lambda rng: stories.tell(rng, once=0.7).text)),
    "pages of sums": (6, plain(sums.sheet)),
    "stories on request": (11, chat(chats.requested_story)),
    "stories on request, with questions": (4, chat(lambda rng: chats.requested_story(rng, questions=2))),
    "questions about a given story": (18, chat(chats.read_story)),
    "sums": (20, chat(chats.sum_task)),
    "JSON answers": (20, chat(chats.json_task)),
    "lists": (8, chat(chats.list_task)),
    "small facts": (8, chat(chats.fact_task)),
    "text to repeat": (14, chat(chats.repeat_task)),
    "small talk": (12, chat(chats.smalltalk)),
    "questions that it cannot answer": (4, chat(chats.unknown)),
    "several short exchanges": (9, chat(chats.several)),
}


# the mixture of the second training
SECOND_MIXTURE: Mixture = MIXTURE | {
    "JSON answers with open names and schemas": (70, chat(lambda rng: records.task(records.Source(rng)))),
    "JSON lists to copy": (60, chat(lambda rng: records.array(records.Source(rng)))),
    "conversations with tools": (60, lambda rng: chats.render(calls.conversation(records.Source(rng)))),
}


def spelling(rng: Random) -> records.Source:
    """Make the third training's source. Many names are spelled letter by letter, so that none is learnt by heart."""
    return records.Source(rng, spelled_share=0.5)


# the mixture of the third training: copying of unseen text, reading, and tools under any name
THIRD_MIXTURE: Mixture = MIXTURE | {
    "questions about a given story": (45, chat(chats.read_story)),
    "lists": (14, chat(chats.list_task)),
    "JSON answers with open names and schemas": (110, chat(lambda rng: records.task(spelling(rng)))),
    "JSON lists to copy": (60, chat(lambda rng: records.array(spelling(rng)))),
    "open text to repeat": (40, chat(lambda rng: records.echo(spelling(rng)))),
    "conversations with tools": (
        80, lambda rng: chats.render(calls.conversation(spelling(rng), usual_share=0.5))
    ),
}  # fmt: skip
# the mixture of the fourth training: as the third, but with four times as many stories, also amid a conversation
FOURTH_MIXTURE: Mixture = THIRD_MIXTURE | {
    "plain stories": (60, plain(lambda rng: stories.tell(rng, once=0.7).text)),
    "stories on request": (40, chat(chats.requested_story)),
    "stories on request, with questions": (15, chat(lambda rng: chats.requested_story(rng, questions=2))),
    "conversations with stories": (30, chat(chats.story_talk)),
    "JSON answers with open names and schemas": (120, chat(lambda rng: records.task(spelling(rng)))),
}


def piecing(rng: Random) -> records.Source:
    """Make the fifth training's source: most new names and words consist of any of the tokenizer's tokens."""
    return records.Source(rng, spelled_share=0.7, pieced_share=0.75)


@cache
def kept_requests() -> frozenset[str]:
    """List the evaluation's requests for stories in lower case, without those that are a wording of training."""
    fixed = yaml.safe_load(words.read_text("prompts.yaml"))["questions"]["story"]
    return frozenset(plain_words(text) for text, *_ in fixed if text not in words.PHRASES["story_asks"])


def plain_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def unlike_evaluation(make: Callable[[Random], str]) -> Callable[[Random], str]:
    """Draw again while a document asks for a story as the evaluation does."""

    def made(rng: Random) -> str:
        while True:
            document = make(rng)
            if kept_requests().isdisjoint(map(plain_words, re.findall(r"<\|user\|>(.*?)<\|end\|>", document, re.S))):
                return document

    return made


# the mixture of the fifth training: requests for stories in many ways, more beginnings, and copying of all tokens
FIFTH_MIXTURE: Mixture = {
    name: (weight, unlike_evaluation(make))
    for name, (weight, make) in (FOURTH_MIXTURE | {
        "plain stories": (50, plain(lambda rng: stories.tell(rng, once=0.7, other=0.5).text)),
        "stories on request": (25, chat(chats.requested_story)),
        "stories on request in other words": (70, chat(chats.asked_story)),
        "conversations with stories": (15, chat(chats.story_talk)),
        "conversations with stories on request in other words": (
            25, chat(lambda rng: chats.story_talk(rng, chats.asked_story))
        ),
        "JSON answers with open names and schemas": (150, chat(lambda rng: records.task(piecing(rng)))),
        "JSON lists to copy": (110, chat(lambda rng: records.array(piecing(rng)))),
        "open text to repeat": (40, chat(lambda rng: records.echo(piecing(rng)))),
        "conversations with tools": (
            110, lambda rng: chats.render(calls.conversation(piecing(rng), usual_share=0.6))
        ),
    }).items()
}  # fmt: skip
# of the successive trainings
MIXTURES = (MIXTURE, SECOND_MIXTURE, THIRD_MIXTURE, FOURTH_MIXTURE, FIFTH_MIXTURE)


def stream(seed: str, mixture: Mixture = MIXTURE) -> Iterator[str]:
    """Yield documents of all kinds without end; equal seeds give equal streams."""
    rng = Random(seed)
    weights, makers = zip(*mixture.values(), strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)


@cache
def heldout_documents() -> tuple[str, ...]:
    """Generate the held-out documents anew; the shipped file holds the same documents."""
    chosen: list[str] = []
    for document in stream(HELDOUT_SEED):
        if len(document) >= HELDOUT_MIN_CHARS:
            chosen.append(document)
        if sum(len(one.encode()) + 1 for one in chosen) >= HELDOUT_BYTES:
            return tuple(chosen)
    raise AssertionError("the stream is endless")


def training_documents(seed: int, mixture: Mixture = MIXTURE) -> Iterator[str]:
    """Yield the training documents, without the held-out ones."""
    kept_out = frozenset(heldout_documents())
    return (document for document in stream(f"training {seed}", mixture) if document not in kept_out)


def read_heldout(path: Path = HELDOUT_FILE) -> list[str]:
    """Split the shipped file into its documents; each begins with <|bos|>."""
    parts = path.read_text(encoding="utf-8").removesuffix("\n").split("\n" + chats.BOS)
    return [parts[0], *(chats.BOS + part for part in parts[1:])]


def main() -> None:
    """Print documents, or write the held-out file."""
    parser = argparse.ArgumentParser(description="The demo model's corpus.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--write-heldout", type=Path)
    args = parser.parse_args()
    if args.write_heldout:
        args.write_heldout.write_text("\n".join(heldout_documents()) + "\n", encoding="utf-8")
    else:
        print("\n---\n".join(islice(training_documents(args.seed), args.documents)))


if __name__ == "__main__":
    main()
