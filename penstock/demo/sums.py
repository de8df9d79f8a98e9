"""Small sums: wordings of a + b (both 0 to 20) and of a - b, and which pairs training never sees.

HELD_OUT is fixed by its own seed, not by the corpus seed, so that "held out" means the same pairs for every model.
A pair is held out in both orders. Subtractions are not held out: they never state a held-out sum.
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

# question = answer; the first wording is the one that the evaluation asks
ADDITION = (
    ("What is {a} + {b}?", "{a} + {b} = {c}."),
    ("What is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("How much is {a} + {b}?", "{a} + {b} = {c}."),
    ("{a} + {b} = ?", "{a} + {b} = {c}."),
    ("{a} + {b} =", "{a} + {b} = {c}."),
    ("{a}+{b}", "{a} + {b} = {c}."),
    ("What is {a}+{b}?", "{a} + {b} = {c}."),
    ("Add {a} and {b}.", "The sum of {a} and {b} is {c}."),
    ("What is the sum of {a} and {b}?", "The sum of {a} and {b} is {c}."),
    ("Calculate {a} + {b}.", "{a} + {b} = {c}."),
    ("Can you add {a} and {b}?", "Yes. {a} + {b} = {c}."),
    ("{a} plus {b}?", "{a} plus {b} is {c}."),
)  # fmt: skip
SUBTRACTION = (
    ("What is {a} - {b}?", "{a} - {b} = {c}."),
    ("What is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("{a} - {b} =", "{a} - {b} = {c}."),
    ("Take {b} away from {a}.", "{a} - {b} = {c}."),
    ("How much is {a} - {b}?", "{a} - {b} = {c}."),
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


def pair(rng: Random) -> tuple[int, int]:
    """Two numbers whose sum training may see."""
    return rng.choice(SEEN_PAIRS)


def difference(rng: Random) -> tuple[int, int]:
    """(a, b) with 0 <= b <= a <= 20."""
    a = rng.randint(0, LIMIT)
    return a, rng.randint(0, a)


def fill(template: tuple[str, str], a: int, b: int, c: int, rng: Random) -> tuple[str, str]:
    """A (question, answer) from its template."""
    name, friend = rng.sample(words.GIRLS + words.BOYS, 2)
    slots = {"a": a, "b": b, "c": c, "N": name, "F": friend, "items": rng.choice(words.ITEMS)}
    return template[0].format(**slots), template[1].format(**slots)


def question(rng: Random) -> tuple[str, str]:
    """One sum as (question, answer): mostly additions, sometimes in a little story."""
    story = rng.random() < 0.15
    if rng.random() < 0.8:
        a, b = pair(rng)
        return fill(rng.choice(MORE if story else ADDITION), a, b, a + b, rng)
    a, b = difference(rng)
    return fill(rng.choice(LESS if story else SUBTRACTION), a, b, a - b, rng)


def sheet(rng: Random) -> str:
    """A page of sums, one a line: many answers in few tokens."""
    rows = []
    for _ in range(rng.randint(8, 24)):
        a, b = pair(rng)
        rows.append(f"{a} + {b} = {a + b}.")
    return "\n".join(rows)
