"""The fixed prompts of the evaluation, and the functions that score answers. Standard library only.

A Prompt is text with its special tokens written out, to be encoded with add_special_tokens=False. Stories and questions
are written by hand, where possible with names and details that the generator never makes; sums use a wording of
training.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.demo import chats, sums, words


@dataclass(frozen=True)
class Prompt:
    """Text for the model; `expect` is the right answer, if any: a word, a number, a list's kind and length, or JSON."""

    kind: str
    text: str
    expect: object = None


@dataclass(frozen=True)
class Completion:
    """The generated text without its end token, and whether it ended by itself."""

    text: str
    ended: bool


def plain(text: str) -> Prompt:
    """Return a plain text to continue."""
    return Prompt("story", chats.BOS + text)


def user(kind: str, question: str, expect: object = None, system: str | None = None) -> Prompt:
    """Return one question in a conversation."""
    turns = [("system", system)] if system else []
    return Prompt(kind, chats.render_prompt([*turns, ("user", question)]), expect)


KITE = (
    "Once upon a time there was a sleepy girl named Ella. Ella had a silver lantern and took it everywhere. "
    "One rainy morning she carried the lantern to the lake. But when she wanted to go home, the lantern was "
    "gone. Ella felt upset and began to cry. Then a gentle goat called Maple came along. At last Maple found "
    "the lantern behind the well. Ella laughed and felt proud."
)
MOUSE = (
    "There was a wise mouse named Button. Button wanted to learn to swim. He tried it in the lake. But it was "
    "much harder than he had thought. Button was sad and did not want to try again. A tall penguin named Olive "
    'had seen it. "I will help you," said Olive. Day after day Button practised with Olive. At last Button '
    "could swim. Button was proud."
)
OPENINGS = (
    "Once upon a time", "Once upon a time there was a sleepy giraffe named Clara.",
    "Once upon a time, in a house made of glass,", "There once was", "One day a girl named Ruby",
    "Long ago, on a little island,", "The old owl", "Once upon a time, two friends",
    "This is the story of a brave snail", "In a land far away there lived a robot named Otto. One day",
)  # fmt: skip
REQUESTS = (
    "Tell me a story.", "Tell me a story about a bear who is afraid of the dark.",
    "Write a story about a lost umbrella.", "Can you tell me a story about a dragon named Nora?",
    "I want a story about two friends and a boat.", "story please", "Tell me a bedtime story about a hedgehog.",
    "Make up a story about the moon.",
)  # fmt: skip
TALK = [("user", "Hi"), ("assistant", "Hello! What shall we do?"), ("user", "What is 2 + 2?")]
ENDING_PROMPTS: tuple[Prompt, ...] = (
    *(plain(text) for text in OPENINGS),
    *(user("story", text) for text in REQUESTS),
    user("question", f"{KITE}\n\nWhere was the lantern?", "behind the well"),
    user("question", f"{KITE}\n\nWhat colour was the lantern?", "silver"),
    user("question", f"{KITE}\n\nWho found the lantern?", "Maple"),
    user("question", f"Read this story: {KITE}\n\nHow did Ella feel at the end?", "proud"),
    user("question", f"{MOUSE}\n\nWhat did Button want to learn?", "swim"),
    user("question", f"{MOUSE}\n\nWho helped Button?", "Olive"),
    user("question", f"Read this story: {MOUSE}\n\nWho is the story about?", "Button"),
    user("question", f"Here is a story.\n\n{MOUSE}\n\nQuestion: How did Button feel at the end?", "proud"),
    user("sum", "What is 3 + 9?", 12),
    user("sum", "17+2", 19),
    user("sum", "How much is 15 plus 14?", 29),
    user("sum", "Ella has 6 shells and gets 7 more. How many shells does Ella have now?", 13),
    user("sum", "What is 18 minus 5?", 13),
    user("list", "Name three fruits.", ("fruits", 3)),
    user("list", "List four animals, please.", ("animals", 4)),
    user("list", "Can you tell me 5 colours?", ("colours", 5)),
    user("list", "Give me two days of the week", ("days of the week", 2)),
    user("list", "name 3 tools", ("tools", 3)),
    user("json", "Give the answer as JSON with name and age: Mia is 7 years old.", {"name": "Mia", "age": 7}),
    user("json", "Answer as JSON with name and job: Tess is a sailor in Vienna.", {"name": "Tess", "job": "sailor"}),
    user("json", "Turn this into JSON with thing and color: The violin is red.", {"thing": "violin", "color": "red"}),
    user("json", "There are 12 keys in the box. Give this as JSON with item and count.", {"item": "keys", "count": 12}),
    user("json", "Olga, aged 41, comes from Rome.\nname, age and city", None, system="You answer only with JSON."),
    user("chat", "Hi"),
    user("chat", "Hello, who are you?"),
    user("chat", "what can you do"),
    user("chat", "How are you this morning?"),
    user("chat", "Thank you so much!"),
    user("chat", "What is the capital of Norway?"),
    user("chat", "What is the opposite of hot?", "cold"),
    user("chat", "What does a cow say?", "moo"),
    Prompt("chat", chats.render_prompt(TALK), 4),
)  # fmt: skip
SUM_PROMPTS: tuple[Prompt, ...] = tuple(user("sum", f"What is {a} + {b}?", a + b) for a, b in sums.ALL_PAIRS)

AGES = (
    ("Agnes", 31), ("Boris", 8), ("Chloe", 64), ("Dora", 5), ("Edgar", 77), ("Fiona", 12), ("Gustav", 40),
    ("Helga", 29), ("Tom", 9), ("Lily", 3), ("Zoé", 18), ("Oscar", 55),
)  # fmt: skip
HOMES = (
    ("Nora", 21, "Athens"), ("Hugo", 6, "Lima"), ("Ivy", 83, "Prague"), ("Boris", 34, "Geneva"), ("Sam", 10, "Oslo"),
)  # fmt: skip
PRICES = (
    ("kite", "grey", 15), ("ring", "purple", 60), ("sofa", "blue", 44), ("hat", "silver", 2), ("piano", "black", 59),
)  # fmt: skip
COUNTS = (("nuts", 4), ("stamps", 38), ("candles", 17), ("shells", 50), ("eggs", 1))
DOGS = (("Mia", True, 9, "a"), ("Udo", False, 50, "no"), ("Vera", False, 27, "no"))
JSON_FORMS: tuple[tuple[str, str, tuple[tuple[object, ...], ...]], ...] = (  # question, keys, rows of values
    ("Give the answer as JSON with name and age: {} is {} years old.", "name age", AGES),
    ("{} is {} years old and lives in {}. Answer in JSON with the keys name, age and city.", "name age city", HOMES),
    ("Turn this into JSON with thing, color and price: The {} is {} and costs {} coins.", "thing color price", PRICES),
    ("Write JSON with item and count: There are {1} {0} in the box.", "item count", COUNTS),
    ("Return a JSON object with name and has_dog: {0} is {2} and has {3} dog.", "name has_dog", DOGS),
)  # fmt: skip
JSON_PROMPTS: tuple[Prompt, ...] = tuple(
    user("json", question.format(*values), dict(zip(keys.split(), values, strict=False)))
    for question, keys, rows in JSON_FORMS
    for values in rows
)


def last_number(text: str) -> int | None:
    """Return the last whole number in a text."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def parsed_json(text: str) -> object:
    """Return the JSON value that the whole text is, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def list_items(text: str) -> list[str]:
    """Return the items of a numbered list."""
    return [line.split(". ", 1)[1].strip() for line in text.strip().splitlines() if re.match(r"\d+\. \S", line)]


def right_list(text: str, expect: tuple[str, int]) -> bool:
    """Return whether the text lists as many different items of the kind as were asked for."""
    items, (kind, count) = list_items(text), expect
    return len(items) == len(set(items)) == count and set(items) <= set(words.CATEGORIES[kind])


def right(prompt: Prompt, text: str) -> bool | None:
    """Return whether an answer is right; None if the prompt has no right answer."""
    expect = prompt.expect
    if expect is None:
        return parsed_json(text) is not None if prompt.kind == "json" else None
    if prompt.kind == "list" and isinstance(expect, tuple):
        return right_list(text, expect)
    if isinstance(expect, int):
        return last_number(text) == expect
    if isinstance(expect, dict):
        return parsed_json(text) == expect
    return str(expect) in text


def share(hits: Sequence[bool]) -> float:
    """Return the share of True, 0 of nothing."""
    return sum(hits) / len(hits) if hits else 0.0
