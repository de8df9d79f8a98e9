"""The demo model on our own engine: the promises of its card, measured by the same code that wrote the card."""

import json
import re

import pytest

from penstock import LLM
from penstock_lab.prove import demo_answers
from penstock_lab.training import heldout_cases
from penstock_lab.training.evaluate import (
    ENDING_PROMPTS,
    JSON_PROMPTS,
    SUM_PROMPTS,
    answered,
    generate_with,
    kept_kinds,
    parsed_json,
    right,
    story_oddities,
    sum_shares,
)

CLOSED_FIELDS = ("age", "color", "count", "day", "degrees", "has_dog", "hour", "kind", "place", "price", "room")


@pytest.fixture(scope="module")
def llm():
    with LLM(model="demo", threads=1, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def generate(llm):
    return generate_with(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_45_of_50_fixed_prompts_end_by_themselves(generate, temperature):
    pairs = answered(generate, ENDING_PROMPTS, temperature, 400)
    assert len(pairs) == 50
    assert sum(completion.ended for _, completion in pairs) >= 45


def test_few_stories_are_odd_at_the_models_own_settings(generate):
    """Guards against weights that mix other kinds of text into stories, and against sampling defaults that are lost."""
    found = story_oddities(generate, None)
    assert found["stories"] == 100
    assert found["odd"] <= 4, found["all"]


def test_conversations_keep_stories_and_sums_apart(generate):
    """Guards against a story that was asked for and is none, and against sums that become tool calls."""
    found = kept_kinds(generate, None)
    assert found["story"]["of_kind"] >= 0.95 * found["story"]["asked"] == 38
    assert found["sum"]["of_kind"] >= 0.9 * found["sum"]["asked"]


def test_8_of_10_sums_are_right(generate):
    """All 441 sums up to 20 + 20, the ones that training never stated among them."""
    found = sum_shares(answered(generate, SUM_PROMPTS, 0.0, 80))
    assert found["all"] >= 0.8
    assert found["held_out"] >= 0.8


def test_json_answers_parse_and_8_of_10_are_right(generate):
    pairs = answered(generate, JSON_PROMPTS, 0.0, 80)
    assert sum(parsed_json(completion.text) is not None for _, completion in pairs) >= 0.9 * len(pairs) > 20
    assert sum(right(prompt, completion.text) is True for prompt, completion in pairs) >= 0.8 * len(pairs)


def test_19_of_20_held_out_calls_and_json_answers_are_right(generate):
    """Guards against weights that know their names instead of copying them; every sixth case is looked at."""
    cases = (heldout_cases.tool_cases() + heldout_cases.json_cases())[::6]
    done = generate([prompt for _, prompt, _ in cases], 0.0, 120)
    hits = [heldout_cases.right(kind, text, one.text) for (kind, _, text), one in zip(cases, done, strict=True)]
    assert sum(hits) >= 0.95 * len(hits) > 60
    texts = [one.text for one in generate(heldout_cases.direct_prompts()[::3], 0.0, 30)]
    assert sum("<tool_call>" in text for text in texts) <= 1


def test_held_out_json_answers_are_right_under_their_schemas(llm):
    """Guards against a form that pushes values aside, and against weights that copy only the names they know.

    Values of short lists and numbers are right; whole answers fail by names that training never stated.
    """
    cases = heldout_cases.json_cases()[::3]
    found = [
        demo_answers.verdicts_of(right, text)
        for (_, _, right), text in zip(cases, demo_answers.answers(llm, cases, 0.0), strict=True)
    ]
    assert sum(all(hit for _, hit in verdicts) for verdicts in found) >= 0.9 * len(found) > 20
    closed = [hit for verdicts in found for name, hit in verdicts if name in CLOSED_FIELDS]
    assert sum(closed) >= 0.97 * len(closed) > 20


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}},
    {"type": "function", "function": {"name": "weather", "description": "Get the weather of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
]  # fmt: skip
QUESTIONS = {
    "What is 123 + 45?": "168",
    "What is the weather in Oslo?": "4 degrees, rain",
    "Thank you!": None,
    "What is 30 + 12, and what is the weather in Rome?": "21 degrees, sun",
    "Add 25 and 40, then add 100 to the result.": "165",
    "Add the temperatures in Oslo and Rome.": "25",
    "Add up 70, 8 and 200.": "278",
}
SKIES = {"Oslo": (4, "rain"), "Rome": (21, "sun")}


def run_tool(name: str, arguments: dict) -> str:
    """Carry out a call as a user's program would."""
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    degrees, sky = SKIES[arguments["city"]]
    return json.dumps({"city": arguments["city"], "temperature": degrees, "sky": sky})


def test_an_agent_of_more_than_ten_calls_ends_with_the_right_answers(llm, generate):
    """The whole round trip in one conversation within the context: question, calls, results, answer."""
    template, messages, made = llm.get_tokenizer().chat_template, [], 0
    for question, expected in QUESTIONS.items():
        messages.append({"role": "user", "content": question})
        for _ in range(4):
            (done,) = generate([template.render(messages, tools=TOOLS)], 0.0, 120)
            calls = [json.loads(text) for text in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", done.text)]
            if not calls:
                break
            called = [{"id": "x", "type": "function", "function": call} for call in calls]
            messages.append({"role": "assistant", "content": None, "tool_calls": called})
            messages += [{"role": "tool", "tool_call_id": "x", "content": run_tool(**call)} for call in calls]
            made += len(calls)
        messages.append({"role": "assistant", "content": done.text})
        assert done.ended
        assert expected is None or expected in done.text, (question, done.text)
    assert made == 11
