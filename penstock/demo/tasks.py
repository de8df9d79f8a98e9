"""Short tasks with one right form: lists, JSON answers, and small facts. Each function gives (question, answer).

Knows nothing of chat markup. json_answer() is the only place that decides how our JSON looks (json.dumps with its
defaults).
"""

import json
from collections.abc import Callable, Sequence
from random import Random

from penstock.demo import words

Pair = tuple[str, str]

LIST_ASKS = (
    "Name {n} {what}.", "List {n} {what}.", "Tell me {n} {what}.", "Give me {n} {what}.", "Can you name {n} {what}?",
    "Write a list of {n} {what}.", "I need {n} {what}.", "Which {n} {what} do you know?", "Please name {n} {what}.",
)  # fmt: skip
JSON_ASKS = (
    "Give the answer as JSON with {keys}: {text}", "Answer as JSON with {keys}: {text}",
    "{text} Give this as JSON with {keys}.",
    "Write JSON with {keys}: {text}", "Turn this into JSON with {keys}: {text}",
    "Return a JSON object with {keys}: {text}",
    "{text} Answer in JSON with the keys {keys}.", "JSON with {keys}, please: {text}",
)  # fmt: skip


def listing(rng: Random) -> Pair:
    """A list of two to five things of one kind."""
    what = rng.choice(tuple(words.CATEGORIES))
    count = rng.randint(2, min(5, len(words.CATEGORIES[what])))
    shown = str(count) if rng.random() < 0.4 else words.NUMBER_WORDS[count]
    chosen = rng.sample(words.CATEGORIES[what], count)
    return rng.choice(LIST_ASKS).format(n=shown, what=what), "\n".join(
        f"{i}. {item}" for i, item in enumerate(chosen, 1)
    )


def joined(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def person(rng: Random) -> tuple[str, dict[str, object]]:
    """A sentence about a person, with its facts."""
    name, age, city = rng.choice(words.GIRLS + words.BOYS), rng.randint(2, 90), rng.choice(words.CITIES)
    job, color, animal = rng.choice(words.JOBS), rng.choice(words.COLORS), rng.choice(words.CATEGORIES["animals"])
    has_dog = rng.random() < 0.5
    forms: tuple[tuple[str, dict[str, object]], ...] = (
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"My name is {name} and I am {age}.", {"name": name, "age": age}),
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name}, aged {age}, comes from {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} is a {job} in {city}.", {"name": name, "job": job, "city": city}),
        (f"{name} is {age} and works as a {job}.", {"name": name, "age": age, "job": job}),
        (f"{name} likes {color} and has a {animal}.", {"name": name, "color": color, "animal": animal}),
        (
            f"{name} is {age} and {'has a' if has_dog else 'has no'} dog.",
            {"name": name, "age": age, "has_dog": has_dog},
        ),
    )
    return rng.choice(forms)


def item(rng: Random) -> tuple[str, dict[str, object]]:
    """A sentence about things, with its facts."""
    name, place = rng.choice(words.PET_NAMES), rng.choice(words.PLACES)
    thing, color, kind = rng.choice(words.THINGS), rng.choice(words.COLORS), rng.choice(words.KINDS)
    count, items, price = rng.randint(1, 50), rng.choice(words.ITEMS), rng.randint(1, 60)
    fruits = rng.sample(words.CATEGORIES["fruits"], rng.randint(2, 3))
    forms: tuple[tuple[str, dict[str, object]], ...] = (
        (f"There are {count} {items} in the box.", {"item": items, "count": count}),
        (f"We bought {count} {items} for {price} coins.", {"item": items, "count": count, "price": price}),
        (f"The {thing} is {color} and costs {price} coins.", {"thing": thing, "color": color, "price": price}),
        (f"The {thing} is {color}.", {"thing": thing, "color": color}),
        (f"{name} is a {kind} who lives {place[0]}.", {"name": name, "kind": kind, "place": place[2]}),
        (f"A {kind} named {name} is {count} years old.", {"name": name, "kind": kind, "age": count}),
        (
            f"In the basket there are {joined([fruit + 's' for fruit in fruits])}.",
            {"fruits": [fruit + "s" for fruit in fruits]},
        ),
    )
    return rng.choice(forms)


def json_answer(rng: Random) -> Pair:
    """A request for JSON over a sentence; sometimes only some of its facts are asked for."""
    text, facts = (person if rng.random() < 0.6 else item)(rng)
    keys = [key for key in facts if rng.random() < 0.85] or list(facts)
    return rng.choice(JSON_ASKS).format(keys=joined(keys), text=text), json.dumps({key: facts[key] for key in keys})


def repeat(rng: Random) -> Pair:
    """Words to be said again exactly: it teaches copying."""
    pools = (words.COMMON, words.COMMON, words.GIRLS + words.BOYS, words.PET_NAMES, words.THINGS)
    text = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 14)))
    return rng.choice(("Repeat: {}", "Say this again: {}", "Repeat after me: {}", "Say {}", "Write: {}")).format(
        text
    ), text


def opposite(rng: Random) -> Pair:
    """Opposites of adjectives."""
    one, other = rng.choice(words.OPPOSITES)
    ask = rng.choice(("What is the opposite of {}?", "Give me the opposite of {}.", "Opposite of {}?"))
    return ask.format(one), f"The opposite of {one} is {other}."


def sound(rng: Random) -> Pair:
    """What an animal says."""
    animal, noise = rng.choice(words.SOUNDS)
    return rng.choice(("What does a {} say?", "Which sound does a {} make?")).format(
        animal
    ), f"A {animal} says {noise}."


def color(rng: Random) -> Pair:
    """The colour of a thing."""
    thing, shade = rng.choice(words.COLOR_FACTS)
    ask = rng.choice(("What colour is {}?", "What color is {}?", "Which colour does {} have?")).format(thing)
    return ask, f"{thing[0].upper()}{thing[1:]} is {shade}."


def counting(rng: Random) -> Pair:
    """Counting up or down in a short range."""
    first, length = rng.randint(0, 12), rng.randint(3, 9)
    numbers = list(range(first, first + length))
    ask = rng.choice(("Count from {} to {}.", "Can you count from {} to {}?"))
    if rng.random() < 0.3:
        numbers.reverse()
    return ask.format(numbers[0], numbers[-1]), ", ".join(map(str, numbers))


def bigger(rng: Random) -> Pair:
    """The bigger of two numbers."""
    a, b = rng.sample(range(41), 2)
    ask = rng.choice(("Which is bigger, {} or {}?", "What is more, {} or {}?")).format(a, b)
    return ask, f"{max(a, b)} is bigger than {min(a, b)}."


def neighbour(rng: Random) -> Pair:
    """The day or month before or after."""
    names = words.CATEGORIES[rng.choice(("days of the week", "months"))]
    here, step = rng.randrange(len(names)), rng.choice((1, -1))
    side, other = ("after" if step == 1 else "before"), names[(here + step) % len(names)]
    unit = "day" if len(names) == 7 else "month"
    return f"Which {unit} comes {side} {names[here]}?", f"{other} comes {side} {names[here]}."


FACTS: tuple[Callable[[Random], Pair], ...] = (opposite, sound, color, counting, bigger, neighbour)


def fact(rng: Random) -> Pair:
    """One small fact."""
    return rng.choice(FACTS)(rng)
