"""Every format of tool calls: what its parser reads, whole, in pieces, cut and malformed, and what its grammar allows.

The texts are what the models' own chat templates write for an assistant's message with two calls. They are written out
here, not made from the descriptions that are tested.
"""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.errors import InvalidRequestError
from penstock.tokenizer.answer_formats import REASONING, ToolFormat, formats, tool_format_of, tool_formats
from penstock.tokenizer.answer_reader import Kind, to_json, types_of
from penstock.tokenizer.answers import AnswerParser, Calls, Function, Message, answer_grammar, literal, read_message

FORMATS = tool_formats()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "now": {"type": "boolean"},
        "opts": {"type": "object"},
    },
    "required": ["city"],
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "time": NONE}
CITY = 'Pa"r]is)\n<b>é'
ARGUMENTS = {"city": CITY, "days": 2, "now": True, "opts": {"x": [1, True, None, {"y": "}"}]}}
J = json.dumps(ARGUMENTS, ensure_ascii=False)
PYTHON = f'city={json.dumps(CITY, ensure_ascii=False)}, days=2, now=True, opts={{"x": [1, true, null, {{"y": "}}"}}]}}'
O = '{"x": [1, true, null, {"y": "}"}]}'  # noqa: E741
DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">' + CITY + "</｜DSML｜parameter>\n"
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="now" string="false">true</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="opts" string="false">{O}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n'
)


def tagged(begin: str, middle: str, end: str) -> str:
    values = {"city": CITY, "days": "2", "now": "true", "opts": O}
    return "".join(f"{begin}{key}{middle}{value}{end}" for key, value in values.items())


GLM = tagged("<arg_key>", "</arg_key>#<arg_value>", "</arg_value>#")
SEED, PARAM = tagged("<parameter=", ">", "</parameter>\n"), tagged('<param name="', '">', "</param>")
OBJECTS = f'{{"name": "weather", "arguments": {J}}}', '{"name": "time", "arguments": {}}'
QWEN = f"<function=weather>\n{tagged('<parameter=', '>' + chr(10), chr(10) + '</parameter>' + chr(10))}</function>"
TEXTS = {  # a call of weather with ARGUMENTS and, but for those that write one call only, a call of time without any
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{J}<|call|>",
    "openai_recipient_first": f"to=functions.weather<|channel|>commentary json<|message|>{J}<|call|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n'
    + tagged('<parameter name="', '">', "</parameter>\n")
    + '</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>",
    "gigachat35": f"<｜GCML｜tool_calls>\n{DSML.replace('DSML', 'GCML')}</｜GCML｜tool_calls>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{J}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{J}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{J}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "gemma4": f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:2,now:true,opts:{O}}}<tool_call|>'
    "<|tool_call>call:time{}<tool_call|>",
    "functiongemma": f"<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:2,now:true,opts:{O}}}"
    "<end_function_call><start_function_call>call:time{}<end_function_call>",
    "gemma3": f"```tool_code\nweather({PYTHON})\ntime()\n```",
    "glm45": f"<tool_call>weather\n{GLM.replace('#', chr(10))}</tool_call>\n<tool_call>time\n</tool_call>",
    "hy_v3": f"<tool_calls>\n<tool_call>weather<tool_sep>\n{GLM.replace('#', chr(10))}</tool_call>\n"
    "<tool_call>time<tool_sep>\n</tool_call>\n</tool_calls>",
    "glm47": f"<tool_call>weather{GLM.replace('#', '')}</tool_call><tool_call>time</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=weather>\n{SEED}</function>"
    "\n</seed:tool_call>\n<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>",
    "qwen3_coder": f"<tool_call>\n{QWEN}\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "minicpm5": f'<function name="weather">{PARAM}</function>\n<function name="time"></function>',
    "functionary_v3": f"<function=weather>{J}</function><function=time>{{}}</function>",
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{J}[TOOL_CALLS]time[ARGS]{{}}",
    "mistral": f"[TOOL_CALLS][{', '.join(OBJECTS)}]",
    "lfm2": f"<|tool_call_start|>[weather({PYTHON}), time()]<|tool_call_end|>",
    "pythonic": f"[weather({PYTHON}), time()]",
    "phi4_mini_json": f"functools[{', '.join(OBJECTS)}]",
    "phi4_mini_tags": f"<|tool_call|>[{', '.join(OBJECTS)}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "nemotron_json": f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>",
    "jamba": f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>",
    "minimax": "<tool_calls>\n{}\n{}\n</tool_calls>".format(*OBJECTS),
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": ' + J + "},\n    "
    '{"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>',
    "command_r": 'Action: ```json\n[\n    {"tool_name": "weather", "parameters": '
    + J
    + '},\n    {"tool_name": "time", "parameters": {}}\n]\n```',
    "apertus": f'<|tools_prefix|>[{{"weather": {J}}}, {{"time": {{}}}}]<|tools_suffix|>',
    "solar_open": "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>weather<|tool_call:args|>"
    f"{J}<|tool_call:end|><|tool_call:begin|>1<|tool_call:name|>time<|tool_call:args|>{{}}<|tool_call:end|><|calls|>",
    "gigachat3": "".join(f"<|function_call|>{item}" for item in OBJECTS),
    "hermes": "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in OBJECTS),
    "llama3_json": "; ".join(OBJECTS).replace("arguments", "parameters"),
}
ONE_CALL = ("openai", "openai_recipient_first")
BYTES = LLTokenizer("byte")


def parser_of(name: str, **options: Any) -> AnswerParser:
    return AnswerParser(FORMATS[name], FUNCTIONS, **options)


def summary(message: Message) -> tuple[str, list[tuple[str, Any]]]:
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.calls]


def in_pieces(parser: AnswerParser, text: str, size: int = 1) -> Message:
    message = Message()
    for start in range(0, len(text), size):
        message.add(parser.push(text[start : start + size]))
    message.add(parser.finish())
    return message


def test_every_format_is_tested() -> None:
    """Guards against a description that nothing here reads."""
    assert set(TEXTS) == set(FORMATS)


@pytest.mark.parametrize("name", TEXTS)
def test_calls_as_templates_write_them(name: str) -> None:
    """Guards against markup in the content, and arguments that are changed, lost or given another type."""
    calls = [("weather", ARGUMENTS), ("time", {})][: 1 if name in ONE_CALL else 2]
    whole = read_message(parser_of(name), TEXTS[name])
    assert summary(whole) == ("", calls)
    for size in (1, 3, 17):
        assert in_pieces(parser_of(name), TEXTS[name], size) == whole
    if not FORMATS[name].bare:
        around = read_message(parser_of(name), f"Let me see.\n{TEXTS[name]}")
        assert summary(around) == ("Let me see.", calls)


@pytest.mark.parametrize("name", TEXTS)
def test_arguments_come_piece_by_piece(name: str) -> None:
    """Guards against a stream that is silent until a long argument has ended."""
    parser, text = parser_of(name), TEXTS[name]
    start = text.index(CITY[:2])
    parser.push(text[:start])
    pieces = [part for char in CITY[:2] + "ris" for part in parser.push(char)]
    assert {part.kind for part in pieces} == {Kind.ARGUMENTS}
    assert "".join(part.text for part in pieces).lstrip('"').startswith("Pa")


@pytest.mark.parametrize("name", TEXTS)
def test_cut_anywhere(name: str) -> None:
    """Guards against an error where an answer is cut, a call that claims to be whole, and markup that becomes content
    once a call has begun."""
    text, whole = TEXTS[name], read_message(parser_of(name), TEXTS[name])
    for end in range(len(text)):
        message = read_message(parser_of(name), text[:end])
        assert in_pieces(parser_of(name), text[:end]) == message
        if message.calls:
            assert whole.calls[0].arguments.startswith(message.calls[0].arguments.removesuffix("null")), text[:end]
            content = message.content
            # A second call that is not known to be one is what the model wrote.
            assert not content or (len(message.calls) == 1 and text[:end].endswith(content)), (text[:end], content)
            assert len(content) < 75, content


@pytest.mark.parametrize("name", TEXTS)
def test_malformed(name: str) -> None:
    """Guards against an endless loop, an error, or text that disappears where a model makes a mistake."""
    text = TEXTS[name]
    for at in range(0, len(text), 7):
        for wrong in ("", "~", "<", '"', "}"):
            damaged = text[:at] + wrong + text[at + 2 :]
            message = read_message(parser_of(name), damaged)
            assert in_pieces(parser_of(name), damaged, 5) == message
            if not message.calls:
                assert message.content == damaged
    head = text[: text.index("weather")]
    assert read_message(parser_of(name), f"{head}, they say") == Message(content=f"{head}, they say")


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar_of(
    name: str, *names: str, functions: dict[str, Any] = FUNCTIONS, strict: bool = True, **fields: Any
) -> str:
    listed = [Function(key, functions[key], strict=strict) for key in names or functions]
    return answer_grammar(FORMATS[name], Calls(listed, **{"required": True, **fields}), literal)


def first_call(name: str) -> str:
    """The text with the first call only."""
    form, text = FORMATS[name], TEXTS[name]
    if name in ONE_CALL:
        return text
    end = text.rindex("time")
    rest = (form.before and form.between) or ""
    head = form.parts[0] if not form.is_object else form.call[: form.call.index("NAME")]
    lead = head.replace("NUMBER", "1")
    return text[: end - len(lead) - len(rest if form.before else form.between)] + form.after


def test_an_indented_list_of_actions() -> None:
    """Guards against calls of Command R that are read only in one arrangement: models indent every key."""
    arguments = json.dumps({"tool_name": "weather", "parameters": {"city": "Oslo"}}, indent=4)
    text = f"Action: ```json\n[\n{arguments}\n]\n```"
    assert summary(read_message(parser_of("command_r"), text)) == ("", [("weather", {"city": "Oslo"})])


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("command_r", "{{'Write \\'Action:\\' followed by a json-formatted list of actions'}}"),
        ("command_r", "Write 'Action:' followed by a json-formatted list of actions"),
        ("gigachat35", "{{ '<｜GCML｜tool_calls>' }}{% if thinking %}</think>{% endif %}"),
        ("hy_v3", "<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>{{ key }}</arg_key>\n<arg_value>"),
    ],
)
def test_templates_that_resemble_others(name: str, template: str) -> None:
    """Guards against a format that is found in the template of another: Hy3 has tags of GLM and of MiniMax."""
    assert tool_format_of(template) is FORMATS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_the_grammar_writes_what_the_parser_reads(name: str) -> None:
    """Guards against a demanded call that is written in another way than the model was trained on, that is not read, or
    whose arguments do not follow the schema."""
    text, one = TEXTS[name], first_call(name)
    assert summary(read_message(parser_of(name), one)) == ("", [("weather", ARGUMENTS)])
    grammar = grammar_of(name)
    assert allows(grammar, text)
    assert allows(grammar, one)
    named = grammar_of(name, "weather", many=False)
    assert allows(named, one)
    assert not allows(named, text) or name in ONE_CALL
    for wrong in ("Hi", f"Hi {one}", one.replace("weather", "wether"), one.replace("2", "two", 1), ""):
        assert not allows(grammar, wrong), wrong
    assert not allows(grammar_of(name, "time"), one)


@pytest.mark.parametrize("name", TEXTS)
def test_the_grammar_of_free_text(name: str) -> None:
    """Guards against a strict function or a limit of one call that keeps the model from just answering."""
    text, one = TEXTS[name], first_call(name)
    free, single = grammar_of(name, required=False), grammar_of(name, required=False, many=False)
    for answer in ("Just text.", "", one):
        assert allows(free, answer)
        assert allows(single, answer)
    assert allows(free, text)
    assert not allows(single, text) or name in ONE_CALL
    loose = grammar_of(name, required=False, many=False, strict=False)
    assert allows(loose, one)


NESTED = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": ["boolean", "null"]},
    },
    "required": ["unit", "where"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.argument])
def test_schemas_of_single_arguments(name: str) -> None:
    """Guards against references, choices and null in the schema of one argument that nothing follows, or that the
    parser reads as text."""
    functions = {"weather": NESTED}
    form = FORMATS[name]
    head, tail = form.argument.split("VALUE")
    is_python = form.values == "python"
    quote = {"raw": "", "python": '"'}.get(form.values, form.values)

    def written(**values: str) -> str:
        items = [
            head.replace("KEY", key).replace("IS_STRING", "true" if key in ("unit", "note") else "false") + value + tail
            for key, value in values.items()
        ]
        call = form.call.replace("NAME", "weather").replace("ARGUMENTS", form.join.join(items))
        return form.before + call + form.after

    grammar = grammar_of(name, functions=functions)
    null = "None" if is_python else "null"
    text = written(unit=f"{quote}C{quote}", where='{"x": 1.5}', note=f"{quote}hi{quote}", flag=null)
    assert allows(grammar, text)
    message = read_message(AnswerParser(form, functions), text)
    assert summary(message) == ("", [("weather", {"unit": "C", "where": {"x": 1.5}, "note": "hi", "flag": None})])
    assert allows(grammar, written(unit=f"{quote}F{quote}", where='{"x": 1}'))
    assert not allows(grammar, written(unit=f"{quote}K{quote}", where='{"x": 1.5}'))
    assert not allows(grammar, written(unit=f"{quote}C{quote}", where='{"y": 1.5}'))
    assert not allows(grammar, written(unit=f"{quote}C{quote}"))


def test_what_text_without_quotes_cannot_follow_is_refused() -> None:
    """Guards against a strict function whose pattern is ignored in silence."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}, "required": ["a"]}
    with pytest.raises(InvalidRequestError, match="pattern"):
        grammar_of("qwen3_coder", functions={"f": schema})
    assert allows(grammar_of("qwen3_coder", functions={"f": schema}, strict=False), "<tool_call>\n<function=f>\n"
                  "<parameter=a>\ny\n</parameter>\n</function>\n</tool_call>")  # fmt: skip
    assert grammar_of("hermes", functions={"f": schema})


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("2", None, "2"), ("2", {"string"}, '"2"'), ("2.0", {"integer"}, "2.0"), ("2.5", {"integer"}, '"2.5"'),
        ("two", {"integer"}, '"two"'), ("null", {"string", "null"}, "null"), (" x ", None, '" x "'),
        ("{'x': [1, True, None]}", {"object"}, '{"x": [1, true, null]}'), ("True", {"boolean"}, "true"),
        ("{'x': 1} and more", {"object"}, '"{\'x\': 1} and more"'), ("NaN", {"number"}, '"NaN"'), ("", None, '""'),
        ("[" * 100, {"array"}, '"' + "[" * 100 + '"'), ("True", None, "true"), ("1e999", {"number"}, "1e999"),
    ],
)  # fmt: skip
def test_values_without_quotes(text: str, types: Any, expected: str) -> None:
    """Guards against numbers that become texts and the other way round, and against Python's notation in JSON."""
    assert to_json(text, None if types is None else frozenset(types)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"[f(a='it\'s', b=\"x\")]", None),
        (r"""[weather(city='it\'s "so"\n\x41\u00e9\ud83d\ude00 \d')]""", 'it\'s "so"\nA\u00e9\U0001f600 \\d'),
        ("[weather(city=[1, (2, 3),], days={'a': None, })]", [1, [2, 3]]),
        ("[weather(city=-1.5e3)]", -1500.0),
        ("[weather(city=Paris)]", "Paris"),
    ],
)
def test_pythons_notation(text: str, expected: Any) -> None:
    """Guards against escapes, quotes, tuples and trailing commas that only JSON's reader understands."""
    message = read_message(parser_of("pythonic"), text)
    found = json.loads(message.calls[0].arguments)["city"] if message.calls else None
    assert found == expected


def test_types_of_schemas() -> None:
    """Guards against an endless search where a schema refers to itself."""
    loop = {"$ref": "#/$defs/A"}
    assert types_of(loop, {"$defs": {"A": loop}}) is None
    assert types_of({"anyOf": [{"type": "string"}, {"const": 3}]}) == frozenset(["string", "integer"])
    assert types_of({"description": "anything"}) is None


# --- gpt-oss, whose answers consist of channels -----------------------------------------------------------------------


CHANNELS = (
    "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
    "<|end|><|start|>assistant<|channel|>analysis<|message|>Now.<|end|><|start|>assistant"
)


@pytest.mark.parametrize(
    ("rest", "content", "calls"),
    [
        (TEXTS["openai"], "One moment.", [("weather", ARGUMENTS)]),
        (TEXTS["openai"].replace(" <|constrain|>json", ""), "One moment.", [("weather", ARGUMENTS)]),
        (" " + TEXTS["openai_recipient_first"], "One moment.", [("weather", ARGUMENTS)]),
        ("<|channel|>final<|message|>It rains.<|return|>", "One moment.It rains.", []),
        ("<|channel|>final<|message|>It rains, the channel says", "One moment.It rains, the channel says", []),
    ],
)
def test_channels(rest: str, content: str, calls: Any) -> None:
    """Guards against analysis in the content, calls in the content, and channels' names in either."""
    harmony = formats(REASONING)["openai_gptoss"]
    text = CHANNELS + rest
    message = read_message(parser_of("openai", reasoning=harmony), text)
    assert (message.reasoning, *summary(message)) == ("I should look.Now.", content, calls)
    assert in_pieces(parser_of("openai", reasoning=harmony), text) == message
    plain = read_message(AnswerParser(None, reasoning=harmony), text)
    assert plain.reasoning == "I should look.Now."


def test_the_grammar_of_channels() -> None:
    """Guards against a demanded call without room for analysis, or without the header that the model writes then."""
    harmony = formats(REASONING)["openai_gptoss"]
    calls = Calls([Function("weather", WEATHER)], required=True)
    grammar = answer_grammar(FORMATS["openai"], calls, literal, reasoning=harmony)
    assert allows(grammar, TEXTS["openai"])
    assert allows(grammar, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{TEXTS['openai']}")
    assert not allows(grammar, "<|channel|>final<|message|>Hi")
    form = answer_grammar(None, Calls([], False, answer='{"type": "object"}'), literal, reasoning=harmony)
    assert allows(form, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}")


def test_names_of_parsers() -> None:
    """Guards against vLLM's names that are unknown here, and against two formats with one name."""
    names = [name for form in FORMATS.values() for name in (form.name, *form.aliases)]
    assert len(names) == len(set(names))
    theirs = (
        "deepseek_v3 deepseek_v31 deepseek_v32 functiongemma gemma4 gigachat3 glm45 glm47 granite granite4 hermes "
        "jamba kimi_k2 llama3_json llama4_json llama4_pythonic minimax minimax_m2 mistral olmo3 openai phi4_mini_json "
        "pythonic qwen3_coder qwen3_xml seed_oss step3p5"
    )
    assert set(theirs.split()) <= set(names)
    found = tool_format_of("", "qwen3_xml")
    assert isinstance(found, ToolFormat)
    assert found.name == "qwen3_coder"
