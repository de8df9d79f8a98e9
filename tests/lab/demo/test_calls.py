"""Conversations with tools: what training reads is what the template writes, every value is right, and what is held out
stays out."""

import json
import re
from functools import cache
from random import Random

import pytest

from penstock.tokenizer.hf import load_tokenizer
from penstock.weights.hub import MODEL_DIR
from penstock_lab.training import calls, chats, corpus, heldout_cases, packing, records, sums, words
from penstock_lab.training.chats import Turn

TAGGED = re.compile(r"<(tool_call|tool_response)>\n(.*?)\n</\1>", re.S)
TOOLS = re.compile(r"<tools>\n(.*)\n</tools>", re.S)


@cache
def talks() -> list[list[Turn]]:
    """Conversations as the second and the later trainings have them."""
    rng = Random(4)
    usual = [calls.conversation(records.Source(rng)) for _ in range(100)]
    return usual + [
        calls.conversation(source(rng), usual_share=0.5)
        for source in (corpus.spelling, corpus.piecing)
        for _ in range(50)
    ]


@cache
def json_talks() -> list[list[Turn]]:
    """Requests for JSON as the second and the later trainings have them."""
    rng = Random(4)
    usual = [records.task(records.Source(rng)) for _ in range(200)]
    return usual + [records.task(source(rng)) for source in (corpus.spelling, corpus.piecing) for _ in range(100)]


def test_spelled_words_are_new():
    """Guards against names to copy that are few enough to be learned by heart."""
    rng = Random(4)
    made = [records.spelled(rng) for _ in range(1000)]
    assert len(set(made)) > 700
    assert all(word.isalpha() and word.islower() for word in made)


def test_pieced_words_have_all_tokens():
    """Guards against tokens that no name or word to copy has, which the model then cannot copy."""
    tokenizer, rng = load_tokenizer(MODEL_DIR), Random(4)
    made = [records.pieced(rng, capital) for capital in (True, False) for _ in range(10_000)]
    assert all(re.fullmatch(r"[A-Za-z]+", word) for word in made)
    used = {token_id for word in made for token_id in tokenizer.encode(f'"{word}"', add_special_tokens=False)}
    inner = records.pieces()["inner"]
    assert len(inner) > 1000
    assert {tokenizer.token_to_text(token_id) for token_id in used}.issuperset(inner)


def as_messages(turns: list[Turn]) -> tuple[list[dict], list[object]]:
    """The messages and tools that a client would send for these turns."""
    messages, tools = [], []
    for role, content in turns:
        found = [text for _, text in TAGGED.findall(content)]
        if role == "system":
            tools = [json.loads(line) for line in TOOLS.search(content)[1].splitlines()]
            said = content[: content.index("<tools>")]
            messages += [{"role": "system", "content": said}] if said else []
        elif found and role == "user":
            messages += [{"role": "tool", "tool_call_id": "x", "content": text} for text in found]
        elif found:
            made = [{"id": "x", "type": "function", "function": json.loads(text)} for text in found]
            messages.append({"role": role, "content": None, "tool_calls": made})
        else:
            messages.append({"role": role, "content": content})
    return messages, tools


def test_training_reads_what_the_template_writes():
    """Guards against a prompt that the model was not trained on: the text of tools, calls and results."""
    template = load_tokenizer(MODEL_DIR).chat_template
    for turns in talks():
        messages, tools = as_messages(turns)
        assert template.render(messages, tools=tools, add_generation_prompt=False) == chats.render(turns)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add", "parameters": {}}}]])
def test_the_template_renders_as_transformers_does(tools):
    """Guards against a template that leans on one renderer: null content, arguments as text, results in a row."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    ours = load_tokenizer(MODEL_DIR)
    as_text = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1, "b":2}'}}
    as_object = {"id": "2", "type": "function", "function": {"name": "wetter", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Both, please"},
        {"role": "assistant", "content": None, "tool_calls": [as_text, as_object]},
        {"role": "tool", "tool_call_id": "1", "content": "3\n"},
        {"role": "tool", "tool_call_id": "2", "content": "4 degrees"},
        {"role": "assistant", "content": "Once more:", "tool_calls": [as_object]},
        {"role": "tool", "tool_call_id": "2", "content": "5 degrees"},
    ]
    for shown in (messages, messages[1:]):
        text = theirs.apply_chat_template(shown, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.chat_template.render(shown, tools=tools) == text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert '"a":1, "b":2}}\n</tool_call>\n<tool_call>\n{"name": "wetter", "arguments": {"city": "Zürich"}}' in text
    assert "<|user|><tool_response>\n3\n</tool_response>\n<tool_response>\n4 degrees\n</tool_response><|end|>" in text


def test_every_conversation_fits_the_context():
    """Guards against a document that is longer than a row, which packing cannot hold."""
    tokenizer = load_tokenizer(MODEL_DIR)
    lengths = [len(tokenizer.encode(chats.render(turns), add_special_tokens=False)) for turns in talks()]
    assert max(lengths) <= 1024
    assert max(lengths) > 700


def test_calls_and_answers_hold_what_was_asked_and_found():
    """Guards against a generator that teaches wrong sums, or a city or a number that stands nowhere before."""
    for turns in talks():
        for place, (role, content) in enumerate(turns):
            made = [json.loads(text) for tag, text in TAGGED.findall(content) if tag == "tool_call"]
            before = " ".join(text for _, text in turns[:place])
            for call in made:
                assert all(str(value) in before for value in call["arguments"].values()), call
            if role == "assistant" and not made and "sum of" in content:
                *row, total = map(int, re.findall(r"\d+", content))
                assert sum(row) == total


def test_what_is_held_out_is_never_stated():
    """Guards against figures of the card that measure memory."""
    text = "\n".join(content for turns in talks() + json_talks() for _, content in turns)
    stated = set(re.findall(r"[A-Z]\w+", text))
    assert stated.isdisjoint(words.HELDOUT_NAMES)
    assert not [city for city in words.HELDOUT_CITIES if re.search(rf"\b{city}\b", text)]
    source = records.Source(Random(0))
    added = [tuple(map(int, pair)) for pair in re.findall(r'\{"(?:a|x|first|left)": (\d+), "\w+": (\d+)\}', text)]
    assert len(added) > 100
    assert all(source.allows(a, b) for a, b in added)
    assert {pair for pair in sums.ALL_PAIRS if not source.allows(*pair)} == sums.HELD_OUT


def test_held_out_cases_are_held_out():
    """Guards against cases whose values training knows after all, and against kinds of too few cases to judge."""
    cases = heldout_cases.tool_cases()
    kinds = [kind for kind, _, _ in cases]
    assert min(map(kinds.count, set(kinds))) >= 50
    source = records.Source(Random(0), held_out=True)
    made = [
        json.loads(text) for kind, _, right in cases for tag, text in TAGGED.findall(right) if "renamed" not in kind
    ]
    assert {call["arguments"]["city"] for call in made if call["name"] == "weather"} <= set(words.HELDOUT_CITIES)
    assert all(source.allows(*call["arguments"].values()) for call in made if call["name"] == "add")
    named = [right for _, _, right in heldout_cases.json_cases() if '"name"' in right]
    assert sum(any(name in right for name in words.HELDOUT_NAMES) for right in named) == len(named)


def test_json_answers_hold_what_the_sentence_says():
    """Guards against answers with values that stand nowhere in the request."""
    for turns in json_talks():
        answer = json.loads(turns[-1][1])
        for value in answer.values():
            parts = value if isinstance(value, list) else [value]
            assert answer
            assert all(isinstance(part, bool) or str(part) in turns[-2][1] for part in parts)


def test_tool_tokens_change_no_other_text():
    """Guards against a tokenizer that reads old conversations differently, or a vocabulary of another size."""
    plain = packing.train_tokenizer(["Once upon a time there was a tool.", '{"name": "À ÿ õ"}'] * 9, vocab_size=300)
    tagged = packing.with_tool_tokens(plain)
    assert tagged.get_vocab_size() == plain.get_vocab_size()
    for text in ("Once upon a time", "À õö÷ø ÿ 漢字 \U0010ffff 🙂", '{"name": "tool_call>"}'):
        assert tagged.encode(text).ids == plain.encode(text).ids
        assert tagged.decode(tagged.encode(text).ids) == text
    for tag in chats.TOOL_TOKENS:
        (token_id,) = tagged.encode(tag, add_special_tokens=False).ids
        assert tagged.decode([token_id]) == tag  # it is text: a reader who skips special tokens still sees it
    assert packing.with_tool_tokens(tagged).to_str() == tagged.to_str()
