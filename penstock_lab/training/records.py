"""JSON answers whose values have to be copied, with many and invented names, fields in any order, and schemas.

tasks.json_answer() draws from short lists, which a model learns by heart instead of learning to copy. A Source draws
either the names and numbers of training, or those that training never sees.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_uppercase

from penstock.weights.hub import MODEL_DIR
from penstock_lab.training import sums, tasks, words
from penstock_lab.training.words import PHRASES

JSON_TYPES = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
INVENTED_SHARE, KNOWN_SHARE = 0.45, 0.15  # shares of names; the remaining ones come from the longer lists
SPELLED_LETTERS = range(3, 12)
PIECED_LETTERS = 16  # at most
ALL_HELD_OUT = frozenset(words.HELDOUT_NAMES + words.HELDOUT_CITIES)
CITY_FORMS = ("{} City", "New {}", "San {}", "Port {}", "{} Bay", "Saint {}")


@cache
def followers() -> dict[str, str]:
    """List the letters that follow each pair of letters in the names and cities of training; "." marks the end."""
    found: dict[str, str] = {}
    for name in words.MORE_NAMES + words.MORE_CITIES + words.GIRLS + words.BOYS + words.CITIES:
        for part in name.lower().split():
            text = f"..{part}."
            for place in range(2, len(text)):
                found[text[place - 2 : place]] = found.get(text[place - 2 : place], "") + text[place]
    return found


def spelled(rng: Random) -> str:
    """Make a word letter by letter, in which letters follow each other as they do in names."""
    while True:
        text = ".."
        while not text.endswith(".", 2):
            text += rng.choice(followers()[text[-2:]])
        if len(text) - 3 in SPELLED_LETTERS:
            return text[2:-1]


@cache
def pieces() -> dict[str, tuple[str, ...]]:
    """Sort the demo model's tokens: beginnings of names, the pieces inside words, and whole words."""
    vocab = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    forms = {
        "first": r"[A-Z][a-z]*",
        "inner": r"[a-z]+",
        "words": r"\u0120([a-z]{3,})",  # U+0120 is a space
        "names": r"\u0120([A-Z][a-z]{2,})",
    }
    return {
        kind: tuple(found[found.lastindex or 0] for token in vocab if (found := re.fullmatch(form, token)))
        for kind, form in forms.items()
    }


def pieced(rng: Random, capital: bool) -> str:
    """Put a word together from tokens, so that every token is copied, also those that names rarely have."""
    found = pieces()
    if rng.random() < 0.25:
        return rng.choice(found["names" if capital else "words"])
    text = rng.choice(rng.choice((ascii_uppercase, found["first"])) if capital else found["inner"])
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        text += rng.choice(found["inner"])
    return text if len(text) <= PIECED_LETTERS else pieced(rng, capital)


@dataclass(frozen=True)
class Source:
    """Draws names, words and pairs of numbers: those of training, or the held-out ones.

    Attributes:
        rng: the random number generator.
        held_out: draw only what training never states.
        spelled_share: the share of names and words for training that spelled() or pieced() makes.
        pieced_share: the share of these that pieced() makes.
    """

    rng: Random
    held_out: bool = False
    spelled_share: float = 0.0
    pieced_share: float = 0.0

    def spells(self) -> bool:
        """Decide whether spelled() makes the next name or word. Draws no random number if spelled_share is 0."""
        return self.spelled_share > 0 and self.rng.random() < self.spelled_share

    def spelled(self, capital: bool) -> str:
        """Make a new word, of letters or of tokens."""
        if self.pieced_share and self.rng.random() < self.pieced_share:
            return pieced(self.rng, capital)
        return spelled(self.rng).capitalize() if capital else spelled(self.rng)

    def invented(self) -> str:
        """Make up a word of two or three syllables, which is probably not a real word."""
        return "".join(self.rng.choices(words.SYLLABLES, k=self.rng.choice((1, 2, 2)))) + self.rng.choice(words.ENDINGS)

    def open_choice(self, known: tuple[str, ...], more: tuple[str, ...], held_out: tuple[str, ...]) -> str:
        """Choose a held-out name, or for training a known, a less common or an invented name."""
        if self.held_out:
            return self.rng.choice(held_out)
        spells = self.spells()
        drawn = self.rng.random()
        if spells or drawn < INVENTED_SHARE:
            name = self.spelled(capital=True) if spells else self.invented().capitalize()
            return name if name not in ALL_HELD_OUT else self.open_choice(known, more, held_out)
        return self.rng.choice(known if drawn < INVENTED_SHARE + KNOWN_SHARE else more)

    def name(self) -> str:
        return self.open_choice(words.GIRLS + words.BOYS, words.MORE_NAMES, words.HELDOUT_NAMES)

    def city(self) -> str:
        city = self.open_choice(words.CITIES, words.MORE_CITIES, words.HELDOUT_CITIES)
        if self.spelled_share and " " not in city and self.rng.random() < 0.1:
            longer = self.rng.choice(CITY_FORMS).format(city)
            return longer if longer not in words.HELDOUT_CITIES else city
        return city

    def word(self, known: tuple[str, ...]) -> str:
        """Choose one of `known`, another common word, or an invented one."""
        if self.spells():
            return self.spelled(capital=False)
        drawn = self.rng.random()
        if drawn < 0.5:
            return self.rng.choice(known)
        return self.rng.choice(words.COMMON) if drawn < 0.8 or self.held_out else self.invented()

    def number(self) -> int:
        """Draw a number of up to three digits, or for training sometimes four."""
        return self.rng.randrange(10 ** self.rng.choice((1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4 if not self.held_out else 3)))

    def allows(self, a: int, b: int) -> bool:
        """Decide whether the sum of a and b may be stated."""
        apart = (a, b) in sums.HELD_OUT or (max(a, b) > sums.LIMIT and (31 * a + 17 * b) % 19 == 0)
        return apart == self.held_out

    def pair(self) -> tuple[int, int]:
        """Draw two numbers whose sum may be stated."""
        while True:
            a, b = self.number(), self.number()
            if self.allows(a, b):
                return a, b


def facts_of(source: Source) -> dict[str, object]:
    """Draw a value for every slot of the sentence templates."""
    rng = source.rng
    known = {**tasks.person(rng), **tasks.item(rng)}
    days = words.CATEGORIES["days of the week"]
    return known | {
        "name": source.name(), "friend": source.name(), "city": source.city(), "goal": source.city(),
        "age": rng.randint(1, 99), "count": rng.randint(1, 99), "price": rng.randint(1, 400),
        "hour": rng.randint(1, 24), "room": rng.randint(1, 500), "degrees": rng.randint(0, 40), "day": rng.choice(days),
        "item": source.word(words.ITEMS), "thing": source.word(words.THINGS),
        "job": source.word(words.JOBS), "animal": source.word(words.CATEGORIES["animals"]),
    }  # fmt: skip


def echo(source: Source) -> list[tuple[str, str]]:
    """Ask to repeat names, words and numbers exactly."""
    makers = (source.name, source.city, source.number, lambda: source.word(words.THINGS))
    text = " ".join(str(source.rng.choice(makers)()) for _ in range(source.rng.randint(1, 12)))
    return [("user", source.rng.choice(PHRASES["repeat_asks"]).format(text)), ("assistant", text)]


def array(source: Source) -> list[tuple[str, str]]:
    """Ask to copy names, words and numbers into a JSON list, which is much copying in few tokens."""
    rng = source.rng
    makers: tuple[Callable[[], object], ...] = (
        source.name, source.city, source.number, lambda: source.word(words.THINGS),
    )  # fmt: skip
    chosen = rng.sample(makers, rng.choice((1, 1, 2, 4)))
    items = [rng.choice(chosen)() for _ in range(rng.randint(1, 10))]
    shown = [str(item) for item in items]
    listed = tasks.joined(shown) if rng.random() < 0.5 else ", ".join(shown)
    return [("user", rng.choice(PHRASES["array_asks"]).format(listed=listed)), ("assistant", json.dumps(items))]


def schema_of(rng: Random, facts: dict[str, object]) -> str:
    """Write a JSON Schema of the facts, with the fields in their order."""
    properties = {
        key: {"type": "array", "items": {"type": "string"}} if isinstance(value, list) else JSON_TYPES[type(value)]
        for key, value in facts.items()
    }
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = list(facts)
    return json.dumps(schema)


def task(source: Source) -> list[tuple[str, str]]:
    """Ask for JSON about a sentence. Fields, a schema or the system message define it."""
    rng = source.rng
    facts = facts_of(source)
    text, names = rng.choice(PHRASES[rng.choice(("person", "item", "record", "record"))])
    stated = names.split()
    keys = [key for key in stated if rng.random() < 0.85] or stated
    if rng.random() < 0.4:
        rng.shuffle(keys)
    text, how = text.format(**facts), rng.random()
    chosen = {key: facts[key] for key in (keys if how < 0.95 else stated)}
    answer = ("assistant", json.dumps(chosen))
    if how < 0.7:
        ask = rng.choice(PHRASES["record_asks"] + PHRASES["json_asks"])
        question = ask.format(keys=tasks.joined(keys) if rng.random() < 0.8 else ", ".join(keys), text=text)
        turns = [("user", question), answer]
        return [("system", rng.choice(PHRASES["json_system"])), *turns] if rng.random() < 0.15 else turns
    if how < 0.9:
        return [("user", rng.choice(PHRASES["schema_asks"]).format(schema=schema_of(rng, chosen), text=text)), answer]
    system = rng.choice(PHRASES["json_system"])
    if how < 0.95:
        system += " Schema: " + schema_of(rng, chosen)
    return [("system", system), ("user", text), answer]
