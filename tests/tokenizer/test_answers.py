"""Reasoning and tool calls in the text of an answer, however it is cut; and the grammars of calls."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from penstock.tokenizer.answer_formats import (
    REASONING,
    ReasoningFormat,
    ToolFormat,
    formats,
    tool_format_of,
    tool_formats,
)
from penstock.tokenizer.answer_reader import Kind, Part
from penstock.tokenizer.answers import (
    AnswerParser,
    Calls,
    Function,
    InputReader,
    Message,
    ReasoningCounter,
    answer_grammar,
    call_id,
    literal,
    quoted_input,
    read_message,
)

FORMATS: dict[str, ToolFormat] = tool_formats()
THINK: ReasoningFormat = formats(REASONING)["qwen3"]
NAMES = {"add": None, "weather": None}
ADD = '{"a": 1, "b": 2}'
CITY = '{"city": "St. </tool_call> \\"}]\\""}'
CASES: list[tuple[str, str, Any]] = [  # format, text, (content, calls)
    ("hermes", f'Sure. \n<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', ("Sure.", [("add", ADD)])),
    ("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "weather"}}</tool_call> Bye', ("Bye", [("weather", CITY)])),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', ("", [("now", "{}")])),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', ("", [("add", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1', ("", [("add", '{"a": [1')])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {} oops} ', (" oops} ", [("add", "{}")])),
    ("llama3_json", f'{{"name": "add", "parameters": {ADD}}}; {{"type": "function", "name": "weather"}}',
     ("", [("add", ADD), ("weather", "{}")])),
    ("llama3_json", f' <|python_tag|>{{"name": "add", "parameters": {ADD}}}', ("", [("add", ADD)])),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, {{"name": "now", "id": "x"}}]',
     ("", [("add", ADD), ("now", "{}")])),
    ("mistral", f"Hm. [TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]weather[CALL_ID]x1[ARGS]{CITY}",
     ("Hm.", [("add", ADD), ("weather", CITY)])),
]  # fmt: skip
NO_CALLS = [
    ("hermes", " Just text. \n"),
    ("hermes", "\n<tool_call> 3 < 4"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_ca"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", ' {"answer": {"name": "add"}}'),
    ("llama3_json", "<|python_tag|>print(3)"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]add and more"),
]
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "</function>", "[add(", "a=", ")",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<|channel|>", "<|message|>", "commentary to=functions.", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<think>", "</think>", "{", "}", "[", "]",
    '{"name": "add", "arguments": ', '"', "\\", ": ", ", ", "; ", " ", "\n", '"arguments"', "null", "7", "add", "é",
]  # fmt: skip


def joined(parts: list[Part]) -> list[Part]:
    """Parts of one kind behind each other as one: how they are cut is the stream's."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].kind is part.kind is not Kind.CALL and found[-1].call == part.call:
            found[-1] = part._replace(text=found[-1].text + part.text)
        else:
            found.append(part)
    return found


def read(name: str | None, pieces: list[str], **options: Any) -> list[Part]:
    parser = AnswerParser(None if name is None else FORMATS[name], NAMES, **options)
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def message_of(name: str, text: str) -> Message:
    return read_message(AnswerParser(FORMATS[name], NAMES), text)


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_told_from_text(name: str, text: str, expected: Any) -> None:
    """Guards against markup in the content, arguments that are changed or cut, and calls that are lost when broken."""
    message = message_of(name, text)
    assert (message.content, [(call.name, call.arguments) for call in message.calls]) == expected
    assert read(name, list(text)) == read(name, [text])


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    """Guards against text that disappears, or an error, because it looks like the beginning of a call."""
    assert message_of(name, text) == Message(content=text)
    assert read(name, list(text)) == [Part(Kind.CONTENT, text)]


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 80), max_size=6),
    st.sampled_from([None, *FORMATS]),
    st.sampled_from([{}, {"reasoning": THINK}, {"reasoning": THINK, "is_thinking": True}]),
)
def test_any_cut_gives_the_same_parts(text: str, cuts: list[int], name: str | None, options: Any) -> None:
    """Guards against a stream that says something else than the whole answer, or than its own second computation."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = read(name, [text], **options)
    assert read(name, pieces, **options) == whole
    if all(part.kind is Kind.CONTENT for part in whole) and not options:
        assert "".join(part.text for part in whole) == text


@pytest.mark.parametrize(
    "text", ['<tool_call>{"id":[', '<tool_call>{"name":"', "[TOOL_CALLS][[{", '{"id": "a\\', " \n"]
)
def test_hostile_text_costs_linear_time(text: str) -> None:
    """Guards against a parser that starts again at every mark: these would take minutes (CVE-2025-48887)."""
    text *= 4_000
    for name in FORMATS:
        pieces = [text[at : at + 50] for at in range(0, len(text), 50)]
        assert sum(len(part.text) for part in read(name, pieces)) > len(text) // 2


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\nWell.\n</think>\n\nHi", False, ("Well.", "Hi")),
        ("Well.</think>Hi", True, ("Well.", "Hi")),
        ("Well, well", True, ("Well, well", "")),
        ("<think>\nLet me count \n\n", False, ("Let me count \n\n", "")),
        ("Let me count. ", True, ("Let me count. ", "")),
        ("Abc\n\n</thi", True, ("Abc\n\n</thi", "")),
        ("<think>\n\n</think>\n\nHi", False, ("", "Hi")),
        (" I <think> so</think>", False, ("", " I <think> so</think>")),
    ],
)
def test_reasoning_is_told_apart(text: str, is_thinking: bool, expected: Any) -> None:
    """Guards against thoughts in the content, and against content that is taken for thoughts."""
    message = read_message(AnswerParser(None, reasoning=THINK, is_thinking=is_thinking), text)
    assert (message.reasoning, message.content) == expected
    counter = ReasoningCounter(THINK, is_thinking=is_thinking)
    for byte in text.encode():
        counter.add(bytes([byte]))
    end = text.find("</think>") + len("</think>") if "</think>" in text else len(text)
    assert counter.count == (end if is_thinking or text.startswith("<think>") else 0)


def test_ids_of_calls_come_back() -> None:
    """Guards against random ids, which a second computation could not repeat; Mistral's have 9 characters."""
    ids = [call_id(FORMATS["hermes"], "chatcmpl-1", choice, call) for choice in (0, 1) for call in (0, 1)]
    assert len(set(ids)) == 4
    assert ids[0] == call_id(FORMATS["hermes"], "chatcmpl-1", 0, 0)
    short = call_id(FORMATS["mistral"], "chatcmpl-1", 0, 0)
    assert len(short) == 9
    assert short.isalnum()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    """Guards against reading one model's calls in another one's way."""
    found = tool_format_of(template)
    assert (None if found is None else found.name) == name
    assert tool_format_of("[TOOL_CALLS]name[ARGS]") is FORMATS["mistral_args"]


# --- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": ONE["llama3_json"] + '; {"name": "now", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": ONE["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
}
BYTES = LLTokenizer("byte")


def allows(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer of the grammar."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar_of(name: str, *, thinking: bool | None = None, **fields: Any) -> str:
    functions = [Function("add", SCHEMA, strict=True), Function("now")]
    calls = Calls(functions, **{"required": True, **fields})
    options: Any = {"reasoning": None if thinking is None else THINK, "is_thinking": bool(thinking)}
    return answer_grammar(FORMATS[name], calls, literal, **options)


@pytest.mark.parametrize("name", ONE)
def test_the_grammar_of_calls_is_what_the_parser_reads(name: str) -> None:
    """Guards against a demanded call in markup that nobody reads, text beside it, and wrong arguments."""
    grammar = grammar_of(name)
    for text, count in ((ONE[name], 1), (TWO[name], 2)):
        assert allows(grammar, text)
        assert allows(grammar_of(name, many=False), text) is (count == 1)
        message = message_of(name, text) if name != "llama3_json" else read_message(AnswerParser(FORMATS[name]), text)
        assert (message.content, len(message.calls)) == ("", count)
        assert json.loads(message.calls[0].arguments) == {"a": 1, "b": 2}
    for wrong in ("Hi", f"Hi {ONE[name]}", ONE[name].replace("add", "sub"), ONE[name].replace("2", '"2"')):
        assert not allows(grammar, wrong)
    assert allows(grammar_of(name, thinking=True), f"Well.\n</think>\n\n{ONE[name]}")
    assert not allows(grammar_of(name, thinking=True), "Well.\n</think>\n\nHi")
    assert allows(grammar_of(name, thinking=False), f"<think>Well.</think>{ONE[name]}")


@pytest.mark.parametrize("name", ONE)
def test_the_grammar_of_text_with_calls(name: str) -> None:
    """Guards against strict functions that are called with anything, or that keep the model from just answering."""
    free, single = grammar_of(name, required=False), grammar_of(name, required=False, many=False)
    for text in (ONE[name], TWO[name], "Just text.", ""):
        assert allows(free, text)
        assert allows(single, text) is (text != TWO[name])
    assert not allows(free, ONE[name].replace("2", '"2"'))
    answer = grammar_of(name, required=False, answer='{"type": "array"}')
    assert allows(answer, "[1]")
    assert allows(answer, ONE[name])
    assert not allows(answer, "Just text.")


@settings(max_examples=200, deadline=None)
@given(st.text(), st.booleans(), st.data())
def test_the_text_of_a_custom_tool(text: str, ascii_only: bool, data: st.DataObject) -> None:
    """Guards against escapes and halves of characters that are cut between two pieces, and a text of other letters."""
    written = json.dumps({"input": text}) if ascii_only else quoted_input(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=5)))
    pieces = [written[start:end] for start, end in itertools.pairwise([0, *cuts, len(written)])]
    for parts in (pieces, list(written), [written]):
        reader = InputReader()
        assert "".join(map(reader.read, parts)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud800b"}', "a\ufffdb"), ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input":"\\udc00"}', "\ufffd"), ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"patch": "x"}', '{"patch": "x"}'), ('{"input": {}}', '{"input": {}}'), ("just text", "just text"),
        ('{"input": "cut \\u12', "cut "), ('{"inp', ""),
    ],
)  # fmt: skip
def test_arguments_that_are_no_such_text(arguments: str, text: str) -> None:
    """Guards against half a character, which cannot be sent, and against losing what a model writes in another form."""
    reader = InputReader()
    assert "".join(map(reader.read, arguments)) == text
    assert InputReader().read(arguments) == text
