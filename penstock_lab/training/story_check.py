"""Judge stories of the demo model: a story is odd if it holds what no story of the generator holds.

oddities() says what is odd about a story. There are four reasons: the story did not end by itself; it is too short; it
has a word that neither a story of the generator nor the prompt has; or it has three words or marks in a row that never
stand together in a sentence of the generator. Names, colours and other words that may replace each other count as one
word there. How the sentences follow each other is not judged.
"""

import re
from collections.abc import Iterator
from functools import cache
from random import Random

from penstock_lab.training import stories, words

SCENES = 200  # every sentence of the generator is filled in so often: of 1,000 of its stories hardly one is odd then
SHORTEST = 50  # words after the prompt; the generator's stories have more than 70
REASONS = {  # the beginning of each reason -> what it means
    "does not end": "that do not end by themselves",
    "too short": f"of fewer than {SHORTEST} words",
    "word": "with a word that the generator does not have",
    "words": "with three words in a row that the generator does not have",
}
TOKEN = re.compile(r"\w+|[.!?]\"?|[^\w\s]")  # a quote that ends with its sentence is one token with the full stop
END, QUOTE_END = ".", '."'  # every end of a sentence, without and with a closing quote
# lists of words that may replace each other in any sentence
EXCHANGEABLE = (
    words.GIRLS + words.BOYS + words.PET_NAMES, words.COLORS, words.THINGS, words.KINDS, words.HERO_WORDS,
    words.FRIEND_WORDS, words.SMALL_ANIMALS, words.BAD_FEELINGS, words.GOOD_FEELINGS, words.NOISES, words.INSTRUMENTS,
    tuple(name.split()[0] for name, _ in words.ELDERS if name[0].isupper()),
    ("he", "she"), ("He", "She"), ("his", "her"), ("His", "Her"), tuple(food.split()[-1] for food in words.FOODS),
    tuple(noun for *_, noun in words.PLACES),
)  # fmt: skip
Triple = tuple[str, ...]


@cache
def classes() -> dict[str, str]:
    """Map each exchangeable word to the first word of its list; a word of several lists belongs to the first."""
    return {word: members[0] for members in reversed(EXCHANGEABLE) for word in members if " " not in word}


def triples(tokens: list[str]) -> Iterator[tuple[Triple, Triple]]:
    """Yield every three tokens in a row within a sentence, with the mark before it, as classes and as they are."""
    ends = [token[0] in ".!?" for token in tokens]
    kinds = [(QUOTE_END if len(token) > 1 else END) if end else classes().get(token, token)
             for token, end in zip(tokens, ends, strict=True)]  # fmt: skip
    for place in range(len(tokens) - 2):
        if not ends[place + 1]:
            three = slice(place, place + 3)
            yield tuple(kinds[three]), tuple(tokens[three])


@cache
def world() -> tuple[frozenset[str], frozenset[Triple]]:
    """Collect the words and the triples of all sentences of the generator, each in many scenes."""
    rng = Random("story check")
    lines = [line for lines in words.EXTRAS.values() for line in lines]
    lines += [line for plot in stories.plots() for _, variants in plot.beats for line in variants]
    lines += [line for plot in stories.plots() for line in stories.begun_at_once(plot)]
    known: set[str] = set()
    found: set[Triple] = set()
    for _ in range(SCENES):
        scene = stories.people(rng) | stories.props(rng)
        text = f" {END} ".join(stories.sentence_case(line.format_map(scene)) for line in lines)
        tokens = TOKEN.findall(text)
        known.update(tokens)
        found.update(kinds for kinds, _ in triples(tokens))
    found |= {(QUOTE_END, b, c) for a, b, c in found if a == END}  # any sentence may follow one that ends with a quote
    return frozenset(known.union(*EXCHANGEABLE)), frozenset(found)


def oddities(prompt: str, story: str, ended: bool) -> list[str]:
    """Say what is odd about a story: nothing, or all reasons.

    Args:
        prompt: what the user wrote: the story's beginning, or a request for it. Its words are allowed in the story.
        story: what the model wrote, without `prompt`.
        ended: the story ended by itself.
    """
    known, usual = world()
    given = set(TOKEN.findall(prompt))
    tokens = TOKEN.findall(story)
    found = [] if ended else ["does not end"]
    if sum(token[0].isalnum() for token in tokens) < SHORTEST:
        found.append("too short")
    found += [f"word: {token}" for token in tokens if token not in known and token not in given]
    foreign = given - known
    return found + [
        f"words: {' '.join(spelt)}"
        for kinds, spelt in triples([END, *tokens] if prompt.endswith((".", "?", "!")) else tokens)
        if kinds not in usual and foreign.isdisjoint(spelt) and known.issuperset(spelt)
    ]
