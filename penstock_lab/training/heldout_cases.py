"""Held-out cases of tool calls and JSON answers, with names, cities and pairs of numbers that training never states.

A case is a conversation up to a turn of the assistant, with that turn, word for word, as the right answer. The calls
before it in the conversation are correct, so every turn is judged alone.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random

from penstock_lab.training import calls, chats, records
from penstock_lab.training.calls import Scene
from penstock_lab.training.chats import Turn
from penstock_lab.training.records import Source

Case = tuple[str, str, str]  # kind, prompt with special tokens, right answer
Generate = Callable[[Sequence[str], float], Sequence[str]]  # (prompts, temperature) -> answers
SAMPLED = 0.8
CONVERSATIONS = 25  # number of conversations per kind of exchange
JSON_CASES = 100
EXCHANGES = tuple(exchange for exchange in calls.EXCHANGES if exchange is not calls.direct_exchange)


def kind_of(text: str, first: bool) -> str:
    made = text.count("<tool_call>")
    if not made:
        return "answer from the results"
    return "parallel calls" if made > 1 else "one call" if first else "next call"


def cases_of(turns: list[Turn]) -> Iterator[Case]:
    """Yield a case for each turn of the assistant."""
    places = [place for place, (role, _) in enumerate(turns) if role == "assistant"]
    for place in places:
        text = turns[place][1]
        yield kind_of(text, place == places[0]), chats.render_prompt(turns[:place]), text


def conversation(exchange: Callable[[Scene], list[Turn]], seed: str, usual: bool = True) -> list[Turn]:
    """Draw one held-out exchange in which both tools are given."""
    scene = calls.scene_for(Source(Random(seed), held_out=True), usual)
    return calls.opened(scene, frozenset({"add", "weather"})) + exchange(scene)


@cache
def tool_cases() -> tuple[Case, ...]:
    """Make the cases of tool calls, and those in which the tool to be called has another name."""
    found: list[Case] = []
    for exchange in EXCHANGES:
        for number in range(CONVERSATIONS):
            found += cases_of(conversation(exchange, f"{exchange.__name__} {number}"))
    for exchange in (calls.sum_exchange, calls.weather_exchange):
        for number in range(CONVERSATIONS):
            turns = conversation(exchange, f"renamed {exchange.__name__} {number}", usual=False)
            _, prompt, call = next(cases_of(turns))
            found.append(("one call of a renamed tool", prompt, call))
    return tuple(found)


@cache
def direct_prompts() -> tuple[str, ...]:
    """Make prompts that give tools but need no tool call."""
    turns = [conversation(calls.direct_exchange, f"direct {number}") for number in range(2 * CONVERSATIONS)]
    return tuple(chats.render_prompt(talk[:2]) for talk in turns)


@cache
def json_cases() -> tuple[Case, ...]:
    """Make requests for JSON about people and cities that training never names."""
    talks = (records.task(Source(Random(f"held-out JSON {number}"), held_out=True)) for number in range(JSON_CASES))
    return tuple(("JSON", chats.render_prompt(turns[:-1]), turns[-1][1]) for turns in talks)


def schema_of(expected: str) -> dict[str, object]:
    """Write the JSON Schema that a user would send with a request: the fields of the right answer and their types."""
    fields: dict[str, object] = json.loads(expected)
    properties = {
        name: {"type": "array", "items": {"type": "string"}}
        if isinstance(value, list)
        else records.JSON_TYPES[type(value)]
        for name, value in fields.items()
    }
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def right(kind: str, expected: str, text: str) -> bool:
    """Judge an answer: JSON must have the same values, everything else must match word for word."""
    if kind == "JSON":
        try:
            return bool(json.loads(text) == json.loads(expected))
        except ValueError:
            return False
    return text == expected


def verdicts(answer: Generate, temperature: float) -> dict[str, list[bool]]:
    """Judge the answers: for each kind, whether each of its cases was answered correctly."""
    cases = tool_cases() + json_cases()
    found: dict[str, list[bool]] = {}
    for (kind, _, expected), text in zip(cases, answer([prompt for _, prompt, _ in cases], temperature), strict=True):
        found.setdefault(kind, []).append(right(kind, expected, text))
    found["no call where none is needed"] = [
        "<tool_call>" not in text for text in answer(direct_prompts(), temperature)
    ]
    return found


def measure(answer: Generate) -> dict[str, dict[str, float]]:
    """Count, for each kind, its cases, and compute the shares of right answers, greedy and sampled."""
    greedy, sampled = (verdicts(answer, temperature) for temperature in (0.0, SAMPLED))
    return {
        kind: {"cases": len(hits), "greedy": sum(hits) / len(hits), "sampled": sum(sampled[kind]) / len(hits)}
        for kind, hits in greedy.items()
    }
