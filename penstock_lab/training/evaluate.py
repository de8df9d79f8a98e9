"""Evaluate a model on the fixed prompts of prompts.yaml.

    python -m penstock_lab.training.evaluate MODEL_DIR [--json FILE]

evaluate() needs only a function from prompts to completions, such as generate_with() makes, so it can measure any
engine. What makes a story odd is defined in story_check.py.
"""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from penstock import LLM, SamplingParams
from penstock_lab.training import chats, heldout_cases, stories, story_check, sums, words

MAX_TOKENS = 400
SHORT_MAX_TOKENS = 80
CASE_MAX_TOKENS = 120
TEMPERATURE = 0.8
SAMPLE_SEED = 0
STORIES = 100
CONVERSATIONS, ANSWERS = 20, 4  # number of conversations, and of answers in each


@dataclass(frozen=True)
class Prompt:
    """Text for the model, including special tokens (encode it with add_special_tokens=False), and the right answer.

    Attributes:
        expect: a word, a number, the kind and length of a list, or JSON; None if there is no single right answer.
    """

    kind: str
    text: str
    expect: Any = None


@dataclass(frozen=True)
class Completion:
    """The generated text without its end token, and whether it ended by itself."""

    text: str
    ended: bool


Pairs = Sequence[tuple[Prompt, Completion]]
# (texts with special tokens written out, temperature, max tokens) -> one completion per text. A temperature of 0 is
# greedy; None stands for the sampling settings of the model's generation_config.json.
Generate = Callable[[Sequence[str], float | None, int], list[Completion]]


def user(kind: str, question: str, expect: Any = None, system: str | None = None) -> Prompt:
    turns = [("system", system)] if system else []
    return Prompt(kind, chats.render_prompt([*turns, ("user", question)]), expect)


FIXED: dict[str, Any] = yaml.safe_load(words.read_text("prompts.yaml"))
ENDING_PROMPTS: tuple[Prompt, ...] = (
    *(Prompt("story", chats.BOS + text) for text in FIXED["openings"]),
    *(
        user(kind, text.replace("{kite}", FIXED["kite"]).replace("{mouse}", FIXED["mouse"]), *rest)
        for kind, rows in FIXED["questions"].items()
        for text, *rest in rows
    ),
    Prompt("chat", chats.render_prompt([*map(tuple, FIXED["talk"])]), 4),
)
STORY_PROMPTS = tuple(prompt for prompt in ENDING_PROMPTS if prompt.kind == "story")
SUM_PROMPTS = tuple(user("sum", f"What is {a} + {b}?", a + b) for a, b in sums.ALL_PAIRS)
JSON_PROMPTS = tuple(
    user("json", form["ask"].format(*values), dict(zip(form["keys"], values, strict=False)))
    for form in FIXED["json_forms"]
    for values in form["rows"]
)


def last_number(text: str) -> int | None:
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def parsed_json(text: str) -> object:
    """Parse the whole text as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def right_list(text: str, kind: str, count: int) -> bool:
    """Accept a numbered list of `count` different items of a kind."""
    items = [line.split(". ", 1)[1].strip() for line in text.strip().splitlines() if re.match(r"\d+\. \S", line)]
    return len(items) == len(set(items)) == count and set(items) <= set(words.CATEGORIES[kind])


def right(prompt: Prompt, text: str) -> bool | None:
    """Judge an answer; None if the prompt has no right answer."""
    expect = prompt.expect
    if expect is None:
        return parsed_json(text) is not None if prompt.kind == "json" else None
    if prompt.kind == "list":
        return right_list(text, *expect)
    if isinstance(expect, int):
        return last_number(text) == expect
    if isinstance(expect, dict):
        return parsed_json(text) == expect
    return expect in text


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


def answered(generate: Generate, prompts: Sequence[Prompt], temperature: float | None, limit: int) -> Pairs:
    return list(zip(prompts, generate([p.text for p in prompts], temperature, limit), strict=True))


def hits(pairs: Pairs) -> list[bool]:
    return [right(prompt, completion.text) is True for prompt, completion in pairs]


def scores(pairs: Pairs) -> dict[str, dict[str, int]]:
    """Count the prompts of each kind, those that have a right answer, and the right answers."""
    result: dict[str, dict[str, int]] = {}
    for prompt, completion in pairs:
        verdict = right(prompt, completion.text)
        row = result.setdefault(prompt.kind, {"prompts": 0, "scored": 0, "right": 0})
        row["prompts"] += 1
        row["scored"] += verdict is not None
        row["right"] += verdict is True
    return result


def sum_shares(pairs: Pairs) -> dict[str, float]:
    """Compute the shares of correct sums among all pairs, the pairs seen in training, and the held-out pairs."""
    by_pair = dict(zip(sums.ALL_PAIRS, hits(pairs), strict=True))
    return {
        "all": share(list(by_pair.values())),
        "seen": share([hit for pair, hit in by_pair.items() if pair not in sums.HELD_OUT]),
        "held_out": share([hit for pair, hit in by_pair.items() if pair in sums.HELD_OUT]),
    }


def fixed_prompts(generate: Generate, temperature: float) -> dict[str, object]:
    """Run the fifty prompts at one temperature. Return how many end by themselves, scores by kind, and every text."""
    pairs = answered(generate, ENDING_PROMPTS, temperature, MAX_TOKENS)
    return {
        "prompts": len(pairs),
        "ended": sum(completion.ended for _, completion in pairs),
        "scores": scores(pairs),
        "texts": [{"prompt": prompt.text, "text": done.text, "ended": done.ended} for prompt, done in pairs],
    }


def story_oddities(generate: Generate, temperature: float | None) -> dict[str, Any]:
    """Have 100 stories told to the openings and requests of prompts.yaml in turn, and count and list the odd ones."""
    asked = [STORY_PROMPTS[number % len(STORY_PROMPTS)] for number in range(STORIES)]
    reasons = [
        story_check.oddities(re.sub(r"<\|\w+\|>", " ", prompt.text).strip(), story.text, story.ended)
        for prompt, story in answered(generate, asked, temperature, MAX_TOKENS)
    ]
    return {
        "stories": len(reasons),
        "odd": sum(map(bool, reasons)),
        "reasons": dict(Counter(kind for found in reasons for kind in {reason.split(":")[0] for reason in found})),
        "all": {number: found for number, found in enumerate(reasons) if found},
    }


def odd_of_the_generator() -> int:
    """Count the odd ones among 1,000 new stories of the generator, to check the check."""
    rng = Random("fresh stories")
    return sum(bool(story_check.oddities("", stories.tell(rng).text, ended=True)) for _ in range(1000))


def wanted(number: int) -> list[Prompt]:
    """Draw what the user asks for in a conversation: a story and a sum in turn, or a sum and a story."""
    rng = Random(f"conversation {number}")
    asks = []
    for place in range(ANSWERS):
        if (number + place) % 2:
            a, b = rng.choice(sums.ALL_PAIRS)
            asks.append(Prompt("sum", f"What is {a} + {b}?", a + b))
        else:
            about = stories.article(rng.choice(words.KINDS))
            forms = (*words.PHRASES["story_asks"], *words.PHRASES["about_asks"])
            asks.append(Prompt("story", rng.choice(forms).format(about)))
    return asks


def is_story(done: Completion) -> bool:
    """Accept a text of a story's length that ends by itself, without digits and the marks of JSON and tool calls."""
    long = len(done.text.split()) >= story_check.SHORTEST
    return long and done.ended and not re.search(r"[\d{}\[\]<>]", done.text)


def is_sum(done: Completion) -> bool:
    """Accept one short sentence with a number, right or wrong."""
    return done.ended and len(done.text.split()) <= 12 and last_number(done.text) is not None


def kept_kinds(generate: Generate, temperature: float | None) -> dict[str, Any]:
    """Hold conversations in which stories and sums are asked for in turn.

    Returns:
        For each kind, how often it was asked for, and how many answers were of that kind; for sums also how many were
        right; and every conversation.
    """
    plans = [wanted(number) for number in range(CONVERSATIONS)]
    talks: list[list[chats.Turn]] = [[] for _ in plans]
    found = {"story": Counter[str](), "sum": Counter[str]()}
    for asks in zip(*plans, strict=True):
        for turns, ask in zip(talks, asks, strict=True):
            turns.append(("user", ask.text))
        answers = generate([chats.render_prompt(turns) for turns in talks], temperature, MAX_TOKENS)
        for turns, ask, done in zip(talks, asks, answers, strict=True):
            turns.append(("assistant", done.text))
            of_kind = is_story(done) if ask.kind == "story" else is_sum(done)
            found[ask.kind].update(asked=1, of_kind=of_kind, right=right(ask, done.text) is True)
    return {"story": dict(found["story"]), "sum": dict(found["sum"]), "all": talks}


def evaluate(generate: Generate) -> dict[str, Any]:
    """Compute all figures of the model card that need generation."""
    json_pairs = answered(generate, JSON_PROMPTS, 0.0, SHORT_MAX_TOKENS)
    return {
        "greedy": fixed_prompts(generate, 0.0),
        "sampled": fixed_prompts(generate, TEMPERATURE),
        "sums": sum_shares(answered(generate, SUM_PROMPTS, 0.0, SHORT_MAX_TOKENS)),
        "json": {
            "prompts": len(json_pairs),
            "parse": share([parsed_json(completion.text) is not None for _, completion in json_pairs]),
            "right": share(hits(json_pairs)),
        },
        "odd_of_the_generator": odd_of_the_generator(),
        "stories": story_oddities(generate, None),
        "stories_at_1": story_oddities(generate, 1.0),
        "conversations": kept_kinds(generate, None),
        "conversations_at_1": kept_kinds(generate, 1.0),
        "held_out": heldout_cases.measure(
            lambda texts, temperature: [done.text for done in generate(texts, temperature, CASE_MAX_TOKENS)]
        ),
    }


def generate_with(llm: LLM) -> Generate:
    """Generate with an engine. With the model's own settings, text number n has the seed n; otherwise all have 0."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None  # prompts are texts, so the engine was made with a tokenizer

    def generate(texts: Sequence[str], temperature: float | None, limit: int) -> list[Completion]:
        prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        params = [
            llm.get_default_sampling_params(seed=number, max_tokens=limit)
            if temperature is None
            else SamplingParams(temperature=temperature, seed=SAMPLE_SEED, max_tokens=limit)
            for number in range(len(texts))
        ]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [Completion(output.text, output.finish_reason == "stop") for output in outputs]

    return generate


def measure(model_dir: Path) -> dict[str, Any]:
    """Evaluate the model of a directory; `seconds` is how long it took."""
    began = time.monotonic()
    with LLM(model=str(model_dir), max_num_seqs=64) as llm:
        figures = evaluate(generate_with(llm))
    return figures | {"seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--json", type=Path, help="write all figures and texts here")
    args = parser.parse_args()
    figures = measure(args.model_dir)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False), encoding="utf-8")
    for name in ("greedy", "sampled"):
        print(name, json.dumps({key: value for key, value in figures[name].items() if key != "texts"}))
    print("sums", figures["sums"], "json", figures["json"], figures["seconds"], "s")
    for name in ("stories", "stories_at_1", "conversations", "conversations_at_1"):
        print(name, json.dumps({key: value for key, value in figures[name].items() if key != "all"}))
    print("held out", json.dumps(figures["held_out"]))


if __name__ == "__main__":
    main()
