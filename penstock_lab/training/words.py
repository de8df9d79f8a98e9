"""The word lists of words.txt as tuples, the sentences of extras.txt and the templates of phrases.yaml."""

import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent


def read_text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def read_lists(name: str) -> dict[str, tuple[str, ...]]:
    """Read the lists in a file, by name. Items are separated by " | " or by line ends."""
    parts = re.split(r"^\[([\w ]+)\]\n", read_text(name), flags=re.M)[1:]
    bodies = (tuple(body.strip().replace("\n", " | ").split(" | ")) for body in parts[1::2])
    return dict(zip(parts[::2], bodies, strict=True))


def _pairs(name: str) -> tuple[tuple[str, str], ...]:
    """Split the "a = b" items of a list."""
    return tuple((left, right) for left, right in (item.split(" = ") for item in _LISTS[name]))


PHRASES: dict[str, Any] = yaml.safe_load(read_text("phrases.yaml"))
EXTRAS, _LISTS = read_lists("extras.txt"), read_lists("words.txt")
GIRLS, BOYS, PET_NAMES, KINDS = (_LISTS[name] for name in ("girls", "boys", "pet_names", "kinds"))
HERO_WORDS, FRIEND_WORDS, SMALL_ANIMALS = (_LISTS[name] for name in ("hero_words", "friend_words", "small_animals"))
ELDERS = _pairs("elders")  # (name, pronoun: he or she)
PLACES = tuple((text, f"to {noun}", noun) for text in _LISTS["places"] for noun in [text.split(" ", 1)[1]])
HOMES, COLORS, THINGS, SPOTS = (_LISTS[name] for name in ("homes", "colors", "things", "spots"))
SHELTERS, GUIDES, NOISES = (_LISTS[name] for name in ("shelters", "guides", "noises"))
FOODS, MASS_FOODS, GAMES = (_LISTS[name] for name in ("foods", "mass_foods", "games"))
SKILLS = _pairs("skills")  # (what, where)
BUILDS, PLANTS, INSTRUMENTS = (_LISTS[name] for name in ("builds", "plants", "instruments"))
BAD_FEELINGS, GOOD_FEELINGS, WHENS = (_LISTS[name] for name in ("bad_feelings", "good_feelings", "whens"))
NUMBER_WORDS, ITEMS, CITIES, JOBS = (_LISTS[name] for name in ("number_words", "items", "cities", "jobs"))
FACT_PAIRS = {name: _pairs(name) for name in PHRASES["facts"]}
COMMON, SKIES, SYLLABLES, ENDINGS = (_LISTS[name] for name in ("common", "skies", "syllables", "endings"))
MORE_NAMES, HELDOUT_NAMES = _LISTS["more_names"], _LISTS["heldout_names"]
MORE_CITIES, HELDOUT_CITIES = _LISTS["more_cities"], _LISTS["heldout_cities"]
CATEGORIES = {name.removeprefix("category "): items for name, items in _LISTS.items() if name.startswith("category ")}
