"""Short tasks with one right answer format: lists, JSON answers and small facts, as pairs of (question, answer).

The pairs contain no chat markup. JSON is written by json.dumps with its defaults.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from penstock_lab.training import words
from penstock_lab.training.words import PHRASES

Pair = tuple[str, str]


def listing(rng: Random) -> Pair:
    """Ask for a list of two to five things of one kind."""
    what = rng.choice(tuple(words.CATEGORIES))
    count = rng.randint(2, min(5, len(words.CATEGORIES[what])))
    shown = str(count) if rng.random() < 0.4 else words.NUMBER_WORDS[count]
    chosen = rng.sample(words.CATEGORIES[what], count)
    ask = rng.choice(PHRASES["list_asks"]).format(n=shown, what=what)
    return ask, "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))


def joined(parts: Sequence[str]) -> str:
    """Join the parts as "a", "a and b" or "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def person(rng: Random) -> dict[str, object]:
    """Draw facts about a person, for the templates named "person"."""
    name, age, city = rng.choice(words.GIRLS + words.BOYS), rng.randint(2, 90), rng.choice(words.CITIES)
    job, color, animal = rng.choice(words.JOBS), rng.choice(words.COLORS), rng.choice(words.CATEGORIES["animals"])
    has_dog = rng.random() < 0.5
    return {
        "name": name, "age": age, "city": city, "job": job, "color": color, "animal": animal, "has_dog": has_dog,
        "a_or_no": "a" if has_dog else "no",
    }  # fmt: skip


def item(rng: Random) -> dict[str, object]:
    """Draw facts about a thing, for the templates named "item"."""
    name, (in_place, _, place) = rng.choice(words.PET_NAMES), rng.choice(words.PLACES)
    thing, color, kind = rng.choice(words.THINGS), rng.choice(words.COLORS), rng.choice(words.KINDS)
    count, items, price = rng.randint(1, 50), rng.choice(words.ITEMS), rng.randint(1, 60)
    fruits = [fruit + "s" for fruit in rng.sample(words.CATEGORIES["fruits"], rng.randint(2, 3))]
    return {
        "name": name, "in_place": in_place, "place": place, "thing": thing, "color": color, "kind": kind,
        "count": count, "age": count, "item": items, "price": price, "fruits": fruits, "listed": joined(fruits),
    }  # fmt: skip


def json_answer(rng: Random) -> Pair:
    """Ask for JSON about a sentence, sometimes about only some of its facts."""
    kind, draw = ("person", person) if rng.random() < 0.6 else ("item", item)
    facts = draw(rng)
    text, names = rng.choice(PHRASES[kind])
    stated = names.split()
    keys = [key for key in stated if rng.random() < 0.85] or stated
    ask = rng.choice(PHRASES["json_asks"]).format(keys=joined(keys), text=text.format(**facts))
    return ask, json.dumps({key: facts[key] for key in keys})


def repeat(rng: Random) -> Pair:
    """Ask to repeat words exactly, which teaches copying."""
    pools = (words.COMMON, words.COMMON, words.GIRLS + words.BOYS, words.PET_NAMES, words.THINGS)
    text = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 14)))
    return rng.choice(PHRASES["repeat_asks"]).format(text), text


def pair_fact(name: str, rng: Random) -> Pair:
    """Ask about a pair from a word list (opposites, animal sounds, colours)."""
    a, b = rng.choice(words.FACT_PAIRS[name])
    form = PHRASES["facts"][name]
    return rng.choice(form["asks"]).format(a=a), form["answer"].format(a=a, A=a[0].upper() + a[1:], b=b)


def counting(rng: Random) -> Pair:
    """Ask to count up or down through a short range."""
    first, length = rng.randint(0, 12), rng.randint(3, 9)
    numbers = list(range(first, first + length))
    ask = rng.choice(("Count from {} to {}.", "Can you count from {} to {}?"))
    if rng.random() < 0.3:
        numbers.reverse()
    return ask.format(numbers[0], numbers[-1]), ", ".join(map(str, numbers))


def bigger(rng: Random) -> Pair:
    """Ask which of two numbers is bigger."""
    a, b = rng.sample(range(41), 2)
    ask = rng.choice(("Which is bigger, {} or {}?", "What is more, {} or {}?"))
    return ask.format(a, b), f"{max(a, b)} is bigger than {min(a, b)}."


def neighbour(rng: Random) -> Pair:
    """Ask for the day or month before or after another."""
    names = words.CATEGORIES[rng.choice(("days of the week", "months"))]
    here, step = rng.randrange(len(names)), rng.choice((1, -1))
    side, other = ("after" if step == 1 else "before"), names[(here + step) % len(names)]
    unit = "day" if len(names) == 7 else "month"
    return f"Which {unit} comes {side} {names[here]}?", f"{other} comes {side} {names[here]}."


FACTS: tuple[Callable[[Random], Pair], ...] = (
    *(partial(pair_fact, name) for name in words.FACT_PAIRS),
    counting,
    bigger,
    neighbour,
)
