"""Stories: a scene (who, where, what) is drawn, a plot is chosen, and its lines are filled in.

A Story is a text and questions that the text answers. chats.py makes conversations of it.
"""

import re
from dataclasses import dataclass
from functools import cache
from random import Random

from penstock_lab.training import words

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
MORAL_SHARE, PARAGRAPH_SHARE = 0.25, 0.2


@dataclass(frozen=True)
class Plot:
    """Topics and deeds of the hero to ask for, lines as (optional, alternatives), and questions with answers."""

    topics: tuple[str, ...]
    deeds: tuple[str, ...]
    beats: tuple[tuple[bool, tuple[str, ...]], ...]
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Story:
    """A finished story, what it may be requested by (hero, kind, topics, deeds), and (question, answer) pairs."""

    text: str
    hero: str
    kind: str
    topics: tuple[str, ...]
    deeds: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


def read_plot(block: str) -> Plot:
    """Parse the plot in one paragraph of plots.txt."""
    topics: tuple[str, ...] = ()
    deeds: tuple[str, ...] = ()
    beats, questions = [], []
    for line in block.splitlines():
        if line.startswith("plot: "):
            topics = tuple(line.removeprefix("plot: ").split(", "))
        elif line.startswith("who: "):
            deeds = tuple(line.removeprefix("who: ").split(" | "))
        elif line.startswith("Q: "):
            question, answer = line.removeprefix("Q: ").split(" = ")
            questions.append((question, answer))
        else:
            beats.append((line.startswith("? "), tuple(line.removeprefix("? ").split(" | "))))
    return Plot(topics, deeds, tuple(beats), tuple(questions))


@cache
def plots() -> tuple[Plot, ...]:
    """Read all plots of plots.txt, in file order."""
    blocks = words.read_text("plots.txt").strip().split("\n\n")
    return tuple(read_plot(block) for block in blocks if block.startswith("plot: "))


def article(noun: str) -> str:
    """Put a or an before `noun`."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence_case(text: str) -> str:
    """Capitalise the first letter, and the letter after each full stop; leave text after a closing quote unchanged."""
    return re.sub(r"(?<=[.] )[a-zé]", lambda m: m.group().upper(), capital(text))


def character(rng: Random, child_share: float) -> tuple[str, str, str]:
    """Draw (name, kind, pronoun family)."""
    if rng.random() < child_share:
        girl = rng.random() < 0.5
        return rng.choice(words.GIRLS if girl else words.BOYS), "girl" if girl else "boy", "she" if girl else "he"
    return rng.choice(words.PET_NAMES), rng.choice(words.KINDS), rng.choice(("he", "she"))


def people(rng: Random) -> dict[str, str]:
    """Fill the slots of the hero (N, he, ...), the friend (F, fhe, ...) and the elder (E, ehe, ...)."""
    name, kind, family = character(rng, 0.5)
    friend, fkind, ffamily = character(rng, 0.4)
    while friend == name:
        friend, fkind, ffamily = character(rng, 0.4)
    elder, efamily = rng.choice(words.ELDERS)
    he, him, his, himself = PRONOUNS[family]
    fhe, fhim, fhis, _ = PRONOUNS[ffamily]
    return {
        "N": name, "kind": kind, "a_hero": article(f"{rng.choice(words.HERO_WORDS)} {kind}"),
        "he": he, "him": him, "his": his, "himself": himself, "He": capital(he), "His": capital(his),
        "F": friend, "fkind": fkind, "a_friend": article(f"{rng.choice(words.FRIEND_WORDS)} {fkind}"),
        "fhe": fhe, "fhim": fhim, "fhis": fhis,
        "E": elder, "Ecap": capital(elder), "ehe": PRONOUNS[efamily][0], "ehis": PRONOUNS[efamily][2],
    }  # fmt: skip


def props(rng: Random) -> dict[str, str]:
    """Fill the slots of places, things, food, weather and feelings."""
    in_place, to_place, place = rng.choice(words.PLACES)
    color, color2 = rng.sample(words.COLORS, 2)
    food, food2 = rng.sample(words.FOODS, 2)
    thing, small, shelter = rng.choice(words.THINGS), rng.choice(words.SMALL_ANIMALS), rng.choice(words.SHELTERS)
    skill, skill_place = rng.choice(words.SKILLS)
    plant = rng.choice(words.PLANTS)
    game, game2 = rng.sample(words.GAMES, 2)
    sound = rng.choice(words.NOISES)
    return {
        "in_place": in_place, "to_place": to_place, "place": place, "home": rng.choice(words.HOMES),
        "thing": thing, "color": color, "a_color2": article(color2), "cthing": f"{color} {thing}",
        "a_cthing": article(f"{color} {thing}"), "a_cthingcap": capital(article(f"{color} {thing}")),
        "food": food, "a_food": f"some {food}" if food.endswith(words.MASS_FOODS) else article(food),
        "food2": food2, "game": game, "game2": game2,
        "small": small, "a_small": article(small), "a_smallcap": capital(article(small)),
        "shelter": shelter, "a_shelter": article(shelter), "spot": rng.choice(words.SPOTS),
        "guide": rng.choice(words.GUIDES), "build": rng.choice(words.BUILDS), "plant": plant,
        "a_plantcap": capital(article(plant)), "instrument": rng.choice(words.INSTRUMENTS),
        "skill": skill, "skill_place": skill_place, "sound": sound, "sound_low": sound.lower(),
        "bad": rng.choice(words.BAD_FEELINGS), "good": rng.choice(words.GOOD_FEELINGS),
        "when": rng.choice(words.WHENS), "when2": rng.choice(("one day", "one morning", "that day", "one afternoon")),
    }  # fmt: skip


def begun_at_once(plot: Plot) -> tuple[str, ...]:
    """Write the plot's first lines so that they also introduce the hero, as far as they name the hero."""
    return tuple(line.replace("{N}", "{a_hero} named {N}", 1) for line in plot.beats[0][1] if "{N}" in line)


def tell(rng: Random, fullness: float | None = None, once: float = 0.6, other: float = 0.0) -> Story:
    """Tell a story.

    Args:
        rng: the random number generator.
        fullness: the chance of each extra sentence. None draws it.
        once: the chance of "Once upon a time".
        other: the chance of one of the rarer beginnings, such as a first line of the plot that introduces the hero.
    """
    full = rng.choice((0.0, 0.3, 0.6, 1.0)) if fullness is None else fullness
    scene = people(rng) | props(rng)
    plot = rng.choice(plots())
    pool = words.EXTRAS
    lines = [rng.choice(pool["opening_once" if rng.random() < once else "opening"])]
    lines += [rng.choice(pool[name]) for name in ("about", "weather") if rng.random() < full]
    end_chances = {"closing": full, "moral": MORAL_SHARE * full}
    ends = [rng.choice(pool[name]) for name, chance in end_chances.items() if rng.random() < chance]
    middle = [rng.choice(variants) for optional, variants in plot.beats if not optional or rng.random() < full]
    if other and rng.random() < other:
        first = begun_at_once(plot)
        if first and rng.random() < 0.5:
            lines, middle[0] = [], rng.choice(first)
        else:
            lines[0] = rng.choice(pool["opening_other"])
    parts = [sentence_case(line.format_map(scene)) for line in lines + middle + ends]
    questions = (("Who is the story about?", "The story is about {a_hero} named {N}."), *plot.questions)
    filled = tuple((q.format_map(scene), a.format_map(scene)) for q, a in questions)
    topics = tuple(topic.format_map(scene) for topic in plot.topics)
    deeds = tuple(deed.format_map(scene) for deed in plot.deeds)
    text = " ".join(parts)
    if rng.random() < PARAGRAPH_SHARE and len(parts) >= 6:  # two paragraphs
        cut = rng.randrange(3, len(parts) - 2)
        text = " ".join(parts[:cut]) + "\n\n" + " ".join(parts[cut:])
    return Story(text, scene["N"], scene["kind"], topics, deeds, filled)
