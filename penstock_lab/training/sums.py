"""Small sums: wordings of a + b (both from 0 to 20) and of a - b, and the pairs that training never sees.

HELD_OUT has its own seed, so every model has the same held-out pairs. A pair is held out in both orders. Subtractions
are not held out, because they never state a held-out sum.
"""

from random import Random

from penstock_lab.training import words

LIMIT = 20
HELD_OUT_COUNT = 23  # of 231 unordered pairs, about a tenth
ALL_PAIRS = tuple((a, b) for a in range(LIMIT + 1) for b in range(LIMIT + 1))
_CHOSEN = Random("held-out sums").sample([(a, b) for a, b in ALL_PAIRS if a <= b], HELD_OUT_COUNT)
HELD_OUT = frozenset(pair for a, b in _CHOSEN for pair in ((a, b), (b, a)))
SEEN_PAIRS = tuple(pair for pair in ALL_PAIRS if pair not in HELD_OUT)


def question(rng: Random) -> tuple[str, str]:
    """Draw one sum as (question, answer). Most are additions, and some are told as a short story."""
    story = rng.random() < 0.15
    if rng.random() < 0.8:
        a, b = rng.choice(SEEN_PAIRS)
        kind, c = "more" if story else "addition", a + b
    else:
        a = rng.randint(0, LIMIT)
        b = rng.randint(0, a)
        kind, c = "less" if story else "subtraction", a - b
    asked, answer = rng.choice(words.PHRASES[kind])
    name, friend = rng.sample(words.GIRLS + words.BOYS, 2)
    slots = {"a": a, "b": b, "c": c, "N": name, "F": friend, "items": rng.choice(words.ITEMS)}
    return asked.format(**slots), answer.format(**slots)


def sheet(rng: Random) -> str:
    """Write a page of sums, one per line, which gives many answers in few tokens."""
    pairs = [rng.choice(SEEN_PAIRS) for _ in range(rng.randint(8, 24))]
    return "\n".join(f"{a} + {b} = {a + b}." for a, b in pairs)
