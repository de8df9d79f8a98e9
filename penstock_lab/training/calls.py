"""Conversations with the tools add(a, b) and weather(city), called singly, together, one after another, or not at all.

A turn holds tools, calls and results as the chat template writes them: JSON between the tags of chats.TOOL_TOKENS.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from penstock_lab.training import chats, tasks, words
from penstock_lab.training.chats import Turn
from penstock_lab.training.records import Source
from penstock_lab.training.words import PHRASES

Call = tuple[str, dict[str, object]]
MAX_CHARACTERS = 2100  # characters of a conversation, which are fewer than 1,024 tokens


@dataclass(frozen=True)
class Tool:
    """A tool with the name and the argument names that it has in one conversation."""

    name: str
    arguments: tuple[str, ...]
    spec: dict[str, object]

    def call(self, *values: object) -> Call:
        return self.name, dict(zip(self.arguments, values, strict=True))


@dataclass(frozen=True)
class Weather:
    """The weather of a city, as a tool reports it."""

    city: str
    degrees: int
    sky: str

    @property
    def said(self) -> str:
        return f"{self.degrees} degrees, {self.sky}"


def tools_text(specs: Sequence[object]) -> str:
    """Write the tools as the system turn lists them."""
    return "<tools>\n" + "".join(json.dumps(spec, ensure_ascii=False) + "\n" for spec in specs) + "</tools>"


def calls_turn(*calls: Call) -> Turn:
    written = (f'{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}' for name, given in calls)
    return "assistant", "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def results_turn(*results: str) -> Turn:
    """Write the results in the order of the calls."""
    return "user", "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def shuffled(rng: Random, content: dict[str, object], share: float = 0.3) -> dict[str, object]:
    """Reorder the fields sometimes, because clients write them in any order."""
    names = list(content)
    if rng.random() < share:
        rng.shuffle(names)
    return {name: content[name] for name in names}


def tool(rng: Random, kind: str, usual: bool) -> Tool:
    """Draw a tool with one of its descriptions, under its usual name or, unless `usual`, under any of its names."""
    form = PHRASES["tools"][kind]
    name: str = form["names"][0] if usual else rng.choice(form["names"])
    arguments: list[str] = form["arguments"][0] if usual else rng.choice(form["arguments"])
    kind_of = rng.choice(form["type"])
    about = rng.random() < 0.3
    properties = {
        argument: shuffled(rng, {"type": kind_of} | ({"description": text} if about else {}))
        for argument, text in zip(arguments, form["argument_about"], strict=True)
    }
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = arguments
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function: dict[str, object] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(form["about"])
    function["parameters"] = shuffled(rng, parameters)
    if rng.random() < 0.1:
        function["strict"] = True
    return Tool(
        name, tuple(arguments), shuffled(rng, {"type": "function", "function": shuffled(rng, function, 0.15)}, 0.1)
    )


@dataclass(frozen=True)
class Scene:
    """The source that one conversation draws from, and its two tools."""

    source: Source
    add: Tool
    weather: Tool

    @property
    def rng(self) -> Random:
        return self.source.rng

    def total(self, a: int, b: int) -> str:
        """Answer as the tool for sums does: a number, or JSON that contains it."""
        c = a + b
        forms = (str(c), str(c), str(c), {"sum": c}, {"result": c}, {"result": c}, {"a": a, "b": b, "sum": c})
        form = self.rng.choice(forms)
        return form if isinstance(form, str) else json.dumps(form)

    def weather_of(self, city: str) -> Weather:
        return Weather(city, self.rng.randint(0, 38) if self.rng.random() < 0.9 else -self.rng.randint(1, 20),
                       self.rng.choice(words.SKIES))  # fmt: skip

    def report(self, found: Weather) -> str:
        """Answer as the weather tool does, mostly in JSON."""
        rng = self.rng
        if rng.random() < 0.15:
            said = f"{found.sky}, {found.degrees} degrees"
            return rng.choice((found.said, said, f"{found.city}: {said}", f"{found.city}: {found.said}"))
        if rng.random() < 0.5:
            return json.dumps({"city": found.city, "temperature": found.degrees, "sky": found.sky})
        degrees = rng.choice(("temperature", "temp", "degrees", "temperature_c"))
        sky = rng.choice(("sky", "condition", "conditions", "weather", "description"))
        fields: dict[str, object] = {degrees: found.degrees, sky: found.sky}
        if rng.random() < 0.6:
            fields = {rng.choice(("city", "location")): found.city} | fields
        return json.dumps(shuffled(rng, fields, 0.5))

    def added(self, a: int, b: int) -> list[Turn]:
        """Call the tool that adds two numbers, and answer with its result."""
        return [calls_turn(self.add.call(a, b)), results_turn(self.total(a, b))]

    def looked_up(self, *found: Weather) -> list[Turn]:
        """Ask for the weather with all calls in one turn; the results follow in another."""
        return [calls_turn(*(self.weather.call(one.city) for one in found)), results_turn(*map(self.report, found))]

    def allows(self, a: int, b: int) -> bool:
        return a >= 0 and self.source.allows(a, b)


def sum_exchange(scene: Scene) -> list[Turn]:
    """Ask for the sum of two numbers, sometimes told as a short story."""
    a, b = scene.source.pair()
    asked, answer = scene.rng.choice(PHRASES["more" if scene.rng.random() < 0.15 else "addition"])
    name, friend = scene.source.name(), scene.source.name()
    slots = {"a": a, "b": b, "c": a + b, "N": name, "F": friend, "items": scene.rng.choice(words.ITEMS)}
    return [("user", asked.format(**slots)), *scene.added(a, b), ("assistant", answer.format(**slots))]


def answer_of(found: Weather) -> str:
    sentence: str = PHRASES["weather_answer"].format(city=found.city, w=found.said)
    return sentence


def weather_exchange(scene: Scene) -> list[Turn]:
    found = scene.weather_of(scene.source.city())
    asked = scene.rng.choice(PHRASES["weather_asks"]).format(city=found.city)
    return [("user", asked), *scene.looked_up(found), ("assistant", answer_of(found))]


def both_exchange(scene: Scene) -> list[Turn]:
    """Ask for a sum and the weather: two calls in one turn, in the order of the question."""
    forms, (a, b), found = PHRASES["both_asks"], scene.source.pair(), scene.weather_of(scene.source.city())
    parts = [
        (scene.rng.choice(forms["sum"]).format(a=a, b=b), scene.add.call(a, b), scene.total(a, b),
         forms["sum_answer"].format(a=a, b=b, c=a + b)),
        (scene.rng.choice(forms["weather"]).format(city=found.city), scene.weather.call(found.city),
         scene.report(found), answer_of(found)),
    ]  # fmt: skip
    scene.rng.shuffle(parts)
    clauses, made, results, answers = zip(*parts, strict=True)
    asked = scene.rng.choice(forms["joints"]).format(*clauses)
    question = ("user", asked[0].upper() + asked[1:])
    return [question, calls_turn(*made), results_turn(*results), ("assistant", " ".join(answers))]


def cities_exchange(scene: Scene) -> list[Turn]:
    """Ask for the weather of two or three cities, with one call for each in one turn."""
    cities = {scene.source.city(): None for _ in range(scene.rng.choice((2, 2, 3)))}
    found = [scene.weather_of(city) for city in cities]
    asked = scene.rng.choice(PHRASES["cities_asks"]).format(cities=tasks.joined(list(cities)))
    return [("user", asked), *scene.looked_up(*found), ("assistant", " ".join(map(answer_of, found)))]


def row_exchange(scene: Scene) -> list[Turn]:
    """Add three or more numbers, one call after another."""
    rng, (a, b) = scene.rng, scene.source.pair()
    row, total = [a, b], a + b
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        c = scene.source.number()
        while not scene.allows(total, c):
            c = scene.source.number()
        row, total = [*row, c], total + c
    form = "chain_asks" if len(row) == 3 and rng.random() < 0.5 else "row_asks"
    asked, answer = rng.choice(PHRASES[form])
    said = tasks.joined([str(number) for number in row])
    slots = {"a": row[0], "b": row[1], "c": row[2], "r": row[0] + row[1], "s": total, "row": said}
    steps, so_far = [], row[0]
    for number in row[1:]:
        steps += scene.added(so_far, number)
        so_far += number
    return [("user", asked.format(**slots)), *steps, ("assistant", answer.format(**slots))]


def degrees_exchange(scene: Scene) -> list[Turn]:
    """Ask for the weather first, and then for a sum with the degrees found."""
    rng, two = scene.rng, scene.rng.random() < 0.5
    while True:
        found, other = (scene.weather_of(scene.source.city()) for _ in range(2))
        number = other.degrees if two else scene.source.number()
        if found.city != other.city and number >= 0 and scene.allows(found.degrees, number):
            break
    asked, answer = rng.choice(PHRASES["two_degrees_asks" if two else "degrees_asks"])
    slots = {"city": found.city, "other": other.city, "n": number, "t": found.degrees, "u": number}
    slots["s"] = found.degrees + number
    looked_up = scene.looked_up(found, other) if two else scene.looked_up(found)
    added = scene.added(found.degrees, number)
    return [("user", asked.format(**slots)), *looked_up, *added, ("assistant", answer.format(**slots))]


def direct_exchange(scene: Scene) -> list[Turn]:
    """Ask for what needs no tool."""
    rng = scene.rng
    makers: Sequence[Callable[[Random], list[Turn]]] = (
        chats.smalltalk, chats.smalltalk, chats.unknown, chats.list_task, chats.fact_task, chats.repeat_task,
        chats.json_task, chats.requested_story, chats.requested_story,
    )  # fmt: skip
    return [turn for turn in rng.choice(makers)(rng) if turn[0] != "system"]


# exchange -> (weight, tools that it needs)
EXCHANGES: dict[Callable[[Scene], list[Turn]], tuple[float, frozenset[str]]] = {
    sum_exchange: (6, frozenset({"add"})),
    weather_exchange: (6, frozenset({"weather"})),
    both_exchange: (6, frozenset({"add", "weather"})),
    cities_exchange: (3, frozenset({"weather"})),
    row_exchange: (6, frozenset({"add"})),
    degrees_exchange: (3, frozenset({"add", "weather"})),
    direct_exchange: (7, frozenset()),
}


def opened(scene: Scene, given: frozenset[str]) -> list[Turn]:
    """Write the system turn with the tools given, in any order, sometimes after a message that changes nothing."""
    specs = [tool.spec for kind, tool in (("add", scene.add), ("weather", scene.weather)) if kind in given]
    scene.rng.shuffle(specs)
    said = scene.rng.choice(PHRASES["system"]) + "\n\n" if scene.rng.random() < 0.35 else ""
    return [("system", said + tools_text(specs))]


def scene_for(source: Source, usual: bool) -> Scene:
    return Scene(source, tool(source.rng, "add", usual), tool(source.rng, "weather", usual))


def conversation(source: Source, usual_share: float = 0.9) -> list[Turn]:
    """Draw a conversation with tools, of at most ten exchanges, that fits the context."""
    rng = source.rng
    scene = scene_for(source, rng.random() < usual_share)
    given = frozenset(rng.choice((["add", "weather"],) * 8 + (["add"], ["weather"])))
    fitting = {make: weight for make, (weight, needs) in EXCHANGES.items() if needs <= given}
    turns = opened(scene, given)
    for _ in range(rng.choice((1, 1, 2, 3, 3, 5, 10))):
        more = rng.choices(list(fitting), list(fitting.values()))[0](scene)
        if sum(len(text) for _, text in [*turns, *more]) > MAX_CHARACTERS:
            break
        turns += more
    return turns
