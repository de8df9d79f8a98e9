"""Small sums: wordings of a + b (both 0 to 20) and of a - b, and the pairs that training never sees.

HELD_OUT has its own seed, so every model has the same held-out pairs. A pair is held out in both orders. Subtractions
are not held out: they never state a held-out sum.
"""

from random import Random

from penstock.demo import words

LIMIT = 20
HELD_OUT_COUNT = 23  # of 231 unordered pairs, about a tenth


def _held_out() -> frozenset[tuple[int, int]]:
    pairs = [(a, b) for a in range(LIMIT + 1) for b in range(a, LIMIT + 1)]
    chosen = Random("held-out sums").sample(pairs, HELD_OUT_COUNT)
    return frozenset(chosen) | frozenset((b, a) for a, b in chosen)


HELD_OUT = _held_out()
ALL_PAIRS = tuple((a, b) for a in range(LIMIT + 1) for b in range(LIMIT + 1))
SEEN_PAIRS = tuple(pair for pair in ALL_PAIRS if pair not in HELD_OUT)

# (question, answer); the first wording is the one that the evaluation asks
PLUS, MINUS = "{a} + {b} = {c}.", "{a} - {b} = {c}."
ADDITION = (
    ("What is {a} + {b}?", PLUS), ("What is {a} plus {b}?", "{a} plus {b} is {c}."), ("How much is {a} + {b}?", PLUS),
    ("{a} + {b} = ?", PLUS), ("{a} + {b} =", PLUS), ("{a}+{b}", PLUS), ("What is {a}+{b}?", PLUS),
    ("Add {a} and {b}.", "The sum of {a} and {b} is {c}."),
    ("What is the sum of {a} and {b}?", "The sum of {a} and {b} is {c}."), ("Calculate {a} + {b}.", PLUS),
    ("Can you add {a} and {b}?", "Yes. {a} + {b} = {c}."), ("{a} plus {b}?", "{a} plus {b} is {c}."),
)  # fmt: skip
SUBTRACTION = (
    ("What is {a} - {b}?", MINUS), ("What is {a} minus {b}?", "{a} minus {b} is {c}."), ("{a} - {b} =", MINUS),
    ("Take {b} away from {a}.", MINUS), ("How much is {a} - {b}?", MINUS),
)  # fmt: skip
MORE = (
    ("{N} has {a} {items} and gets {b} more. How many {items} does {N} have now?", "{a} + {b} = {c}. {N} has {c}."),
    ("{N} has {a} {items}. {F} gives {N} {b} more. How many is that?", "{a} + {b} = {c}. {N} has {c} {items}."),
    ("There are {a} {items} in a bag and {b} {items} in a box. How many are there?", "{a} + {b} = {c}. There are {c}."),
    ("{N} finds {a} {items} and {F} finds {b}. How many do they have together?", "{a} + {b} = {c}. They have {c}."),
)  # fmt: skip
LESS = (
    ("{N} has {a} {items} and gives {b} away. How many are left?", "{a} - {b} = {c}. {N} has {c} {items} left."),
    ("There were {a} {items} in a box. {N} took {b}. How many are left?", "{a} - {b} = {c}. There are {c} left."),
)  # fmt: skip


def fill(template: tuple[str, str], a: int, b: int, c: int, rng: Random) -> tuple[str, str]:
    """Return (question, answer) from its template."""
    name, friend = rng.sample(words.GIRLS + words.BOYS, 2)
    slots = {"a": a, "b": b, "c": c, "N": name, "F": friend, "items": rng.choice(words.ITEMS)}
    return template[0].format(**slots), template[1].format(**slots)


def question(rng: Random) -> tuple[str, str]:
    """Return one sum as (question, answer): mostly additions, sometimes in a little story."""
    story = rng.random() < 0.15
    if rng.random() < 0.8:
        a, b = rng.choice(SEEN_PAIRS)
        return fill(rng.choice(MORE if story else ADDITION), a, b, a + b, rng)
    a = rng.randint(0, LIMIT)
    b = rng.randint(0, a)
    return fill(rng.choice(LESS if story else SUBTRACTION), a, b, a - b, rng)


def sheet(rng: Random) -> str:
    """Return a page of sums, one per line: many answers in few tokens."""
    pairs = [rng.choice(SEEN_PAIRS) for _ in range(rng.randint(8, 24))]
    return "\n".join(f"{a} + {b} = {a + b}." for a, b in pairs)
