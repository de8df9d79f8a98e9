"""The word lists of words.txt as tuples."""

import re
from pathlib import Path

Pairs = tuple[tuple[str, str], ...]


def _read() -> dict[str, tuple[str, ...]]:
    """Return all lists of words.txt by name. Lines of one list are joined."""
    text = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
    parts = re.split(r"^\[([\w ]+)\]\n", text, flags=re.M)[1:]
    bodies = (tuple(body.strip().replace("\n", " | ").split(" | ")) for body in parts[1::2])
    return dict(zip(parts[::2], bodies, strict=True))


def _pairs(items: tuple[str, ...]) -> Pairs:
    """Return "a = b" items as pairs."""
    return tuple((left, right) for left, right in (item.split(" = ") for item in items))


def _place(text: str) -> tuple[str, str, str]:
    """Return ("in the park", "to the park", "the park") from the first of them."""
    noun = text.split(" ", 1)[1]
    return text, f"to {noun}", noun


_LISTS = _read()
GIRLS, BOYS, PET_NAMES, KINDS = (_LISTS[name] for name in ("girls", "boys", "pet_names", "kinds"))
HERO_WORDS, FRIEND_WORDS, SMALL_ANIMALS = (_LISTS[name] for name in ("hero_words", "friend_words", "small_animals"))
ELDERS = _pairs(_LISTS["elders"])  # (name, pronoun: he or she)
PLACES = tuple(_place(text) for text in _LISTS["places"])
HOMES, COLORS, THINGS, SPOTS = (_LISTS[name] for name in ("homes", "colors", "things", "spots"))
FOODS, MASS_FOODS, GAMES = (_LISTS[name] for name in ("foods", "mass_foods", "games"))
SKILLS = _pairs(_LISTS["skills"])  # (what, where)
BUILDS, PLANTS, INSTRUMENTS = (_LISTS[name] for name in ("builds", "plants", "instruments"))
BAD_FEELINGS, GOOD_FEELINGS, WHENS = (_LISTS[name] for name in ("bad_feelings", "good_feelings", "whens"))
NUMBER_WORDS, ITEMS, CITIES, JOBS = (_LISTS[name] for name in ("number_words", "items", "cities", "jobs"))
OPPOSITES, SOUNDS, COLOR_FACTS = (_pairs(_LISTS[name]) for name in ("opposites", "sounds", "color_facts"))
COMMON = _LISTS["common"]
CATEGORIES = {name.removeprefix("category "): items for name, items in _LISTS.items() if name.startswith("category ")}
