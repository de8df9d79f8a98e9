"""Formats of tool calls and reasoning: from one description of each, what reads them (here) and what writes them.

answer_formats.toml describes how a call, its arguments and a list of calls are written. No other file knows a model:
the grammars of answers.py are written from the same descriptions. The chat template shows which format a model uses.
Text that turns out not to be a call is content, unchanged.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from penstock.errors import fail, invalid
from penstock.interface.plugins import import_files
from penstock.tokenizer.answer_reader import (
    BROKEN,
    IS_STRING,
    MARK,
    NAME_RUN,
    WORD_RUN,
    Functions,
    Kind,
    Reader,
    Steps,
    parse_json,
    quoted,
    read_literal,
    schema_of,
    to_json,
    types_of,
    words_of,
)

ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "tool_name")
KEYS = (*ARGUMENTS, *NAMES, "id", "type", "tool_call_id")  # an object with any other key is not a call

# --- a call that is a JSON object -------------------------------------------------------------------------------------


def read_call(reader: Reader, functions: Functions | None) -> Steps[bool]:
    """Read the object of a call, and deliver it. If the name precedes the arguments, these are delivered as they come.

    Args:
        functions: those that may be called; None: any.

    Returns:
        Whether it was a call. If so, the held text can be dropped; else it is not markup, or the rest of a broken call.
    """
    name: str | None = None
    arguments: str | None = None
    is_out = False
    if not (yield from reader.accept("{")):
        return False
    while True:
        key = yield from _key(reader)
        if key not in KEYS:
            return False
        if key in ARGUMENTS and not is_out and name is not None and (yield from reader.peek()) == "{":
            yield from read_arguments(reader, name)
            is_out = True
        else:
            value = yield from _value(reader)
            if value is None or (is_out and key in (*NAMES, *ARGUMENTS)):
                return False
            if key in ARGUMENTS:
                arguments = value
            if key in NAMES:
                name = _text(value)
                if not name or (functions is not None and name not in functions):
                    return False
        yield from reader.space()
        if (yield from reader.accept("}")):
            break
        if not (yield from reader.accept(",")):
            return False
    if is_out:
        return True
    arguments = _as_object(arguments)
    if name is None or arguments is None:
        return False
    reader.begin_call(name)
    reader.emit(arguments)
    return True


def read_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Read an object without a name, and deliver it as the arguments of a call of `name`."""
    if (yield from reader.peek()) != "{":
        return False
    reader.begin_call(name)
    reader.begin(Kind.ARGUMENTS)
    yield from reader.value()
    reader.hold()
    return True


def _text(value: str) -> str | None:
    parsed = parse_json(value)
    return parsed if isinstance(parsed, str) else None


def _as_object(value: str | None) -> str | None:
    """Convert arguments to the JSON of an object; None if they are not an object. Some models leave out empty
    arguments, or write arguments as a string."""
    if value is None or value == "null":
        return "{}"
    if value.startswith('"'):
        value = _text(value) or ""
    return value if isinstance(parse_json(value), dict) else None


def _key(reader: Reader) -> Steps[str | None]:
    """Read a key, its colon and the white space around them. Return the key; None if there is none."""
    yield from reader.space()
    start = len(reader.held)
    if not (yield from reader.string()):
        return None
    key = _text(reader.held[start:])
    yield from reader.space()
    if not (yield from reader.accept(":")):
        return None
    yield from reader.space()
    return key


def _value(reader: Reader) -> Steps[str | None]:
    """Read a value, which stays held. Return it; None if it is not JSON."""
    start = len(reader.held)
    if not (yield from reader.value()):
        return None
    value = reader.held[start:]
    return value if parse_json(value) is not BROKEN else None


# --- the formats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model writes its reasoning; the fields are explained in answer_formats.toml."""

    name: str
    begin: str
    end: str
    aliases: Sequence[str] = ()
    template: str = ""
    implied: bool = False
    again: bool = False
    drops: Sequence[str] = ()
    after: str = ""
    answer: str = ""

    @property
    def marks(self) -> list[str]:
        markup = (self.begin, self.end, self.after, self.answer, *self.drops)
        return [mark for text in markup for mark in MARK.findall(text)]

    def read(self, reader: Reader, *, is_open: bool) -> Steps[None]:
        """Read reasoning at the beginning of an answer, and hold the text after it. Without an end mark, all text is
        reasoning. is_open: whether the prompt has already begun it."""
        reader.hold()
        yield from reader.space()
        if (yield from reader.accept(self.begin)) or is_open:
            yield from self.read_open(reader)

    def read_open(self, reader: Reader) -> Steps[None]:
        yield from reader.space()
        reader.drop()
        reader.begin(Kind.REASONING)
        if (yield from reader.until([self.end])):
            yield from reader.space()
            reader.drop()


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls; the fields are explained in answer_formats.toml."""

    name: str
    call: str
    aliases: Sequence[str] = ()
    template: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    argument: str = ""
    join: str = ""
    values: str = "json"
    wraps: Sequence[str] = ()
    bare: bool = False
    once: bool = False
    tags: Sequence[str] = ()
    skips: str = ""
    reads: Sequence[str] = ()
    id_prefix: str = "call_"
    id_length: int = 24

    def __post_init__(self) -> None:
        for text, names in ((self.call, ("NAME", "ARGUMENTS")), (self.argument or "KEYVALUE", ("KEY", "VALUE"))):
            if any(text.count(name) != 1 for name in names):
                raise fail(TOOLS, text, f"a text with {' and '.join(names)}, each once")

    @cached_property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with the name as a value, whose keys may come in any order."""
        return re.search(r'": "NAME".*": ARGUMENTS\}', self.call) is not None

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """The markup before the name, between name and arguments, and after the arguments."""
        if self.is_object:
            return self.call[: self.call.index("{")], "", self.call.partition("ARGUMENTS}")[2]
        head, _, rest = self.call.partition("NAME")
        return head, *rest.split("ARGUMENTS")  # type: ignore[return-value]  # two

    @cached_property
    def opener(self) -> str:
        """The first word of calls, which only they have; "" if calls are bare."""
        return "" if self.bare else words_of(self.before or self.call.partition("NAME")[0])[0]

    @cached_property
    def openers(self) -> list[str]:
        """Words with which calls may begin. Models leave out the first, sometimes."""
        if self.bare:
            return list(self.tags[:1])
        head = words_of(self.parts[0])
        return list(dict.fromkeys([self.opener, *(word for word in head if len(word) > 1 and word[0] in "<[")]))

    @property
    def marks(self) -> list[str]:
        """Texts that may be special tokens of the model; the answer's text must then include them."""
        markup = (self.before, self.call, self.between, self.after, self.argument, self.values, *self.tags, self.skips)
        return [mark for text in markup for mark in MARK.findall(text)]

    def others(self) -> list["ToolFormat"]:
        return [tool_formats()[name] for name in self.reads]

    def read(self, reader: Reader, functions: Functions | None, mark: str) -> Steps[None]:
        """Read calls at an opener, `mark`, which is not read yet. What is no call stays held, at least the opener."""
        start, begun = len(reader.held), reader.num_calls
        furthest = start + len(mark)
        for tool_format in (self, *self.others()):
            is_whole = yield from tool_format._read_calls(reader, functions)
            if is_whole or reader.num_calls > begun:
                if not (yield from reader.peek()):
                    reader.drop()  # cut within a call, or within its end
                return
            furthest = max(furthest, len(reader.held))
            reader.back(start)
        reader.back(furthest)

    def _read_calls(self, reader: Reader, functions: Functions | None) -> Steps[bool]:
        if self.bare:
            yield from reader.space()
            yield from reader.accept(self.tags[0])
        head = words_of(self.parts[0])
        leads = head[:1] if self.opener not in head and len(self.openers) > 1 else []
        if self.before and not (yield from reader.words(self.before)) and not (yield from reader.comes(leads)):
            return False
        while True:
            yield from reader.space()
            if not (yield from self._read_call(reader, functions)):
                return False
            yield from reader.space()
            yield from reader.words(self.between, closes=True)
            is_closed = bool(self.after) and (yield from reader.words(self.after, closes=True))
            for tag in self.tags[1:]:
                yield from reader.words(tag, closes=True)
            yield from reader.space()
            reader.drop()
            if is_closed or (not self.bare and not self.before) or leads:
                return True

    def _read_call(self, reader: Reader, functions: Functions | None) -> Steps[bool]:
        head, middle, tail = self.parts
        if head and not (yield from reader.words(head)):
            return False
        known = functions if self.bare else None
        if self.is_object:
            yield from reader.space()
            is_whole = yield from read_call(reader, known)
        else:
            name = yield from reader.run(NAME_RUN)
            if not name or (known is not None and name not in known):
                return False
            if self.skips and (yield from reader.accept(self.skips)):
                yield from reader.run(WORD_RUN)
            is_named = yield from reader.words(middle)
            yield from reader.space()
            if self.argument:
                is_whole = is_named and (yield from self._read_arguments(reader, name, functions))
            else:
                is_whole = yield from read_arguments(reader, name)
        if is_whole:
            yield from reader.words(tail, closes=True)
        return is_whole

    def _read_arguments(self, reader: Reader, name: str, functions: Functions | None) -> Steps[bool]:
        """Read arguments that are written one by one, and deliver an object. Return whether its end has come."""
        head, _, rest = self.argument.partition("KEY")
        middle, _, end = rest.partition("VALUE")
        first, tail = words_of(middle)[0], words_of(self.parts[2])[0]
        if not self.parts[1].strip() and not (yield from reader.comes([*words_of(head)[:1], tail])):
            return False  # the name could be any word
        reader.begin_call(name)
        reader.emit("{")
        separator = ""
        while not (yield from reader.comes([tail])):
            if (head and not (yield from reader.words(head))) or (key := (yield from reader.up_to([first]))) is None:
                return False
            if not (yield from reader.words(middle.replace(first, "", 1))):
                return False
            key = key.strip()
            reader.emit(f"{separator}{quoted(key)}: ")
            separator = ", "
            types = types_of(*schema_of(functions, name, key))
            if IS_STRING in middle and types is None:
                types = frozenset(["string"]) if reader.last_word == "true" else None
            if self.values != "raw":
                is_whole = yield from read_literal(reader, "" if self.values == "python" else self.values)
                is_whole = is_whole and (yield from reader.words(end))
            else:
                is_whole = yield from self._read_raw(reader, end.strip(), types, pad="\n" * middle.endswith("\n"))
            if not is_whole:
                return False
            yield from reader.space()
            if self.join:
                yield from reader.accept(self.join.strip())
                yield from reader.space()
            reader.drop()
        reader.emit("}")
        return True

    def _read_raw(self, reader: Reader, closing: str, types: frozenset[str] | None, pad: str) -> Steps[bool]:
        """Read a value without quotes. Strings are delivered as they come; others are converted when they are whole."""
        yield from reader.accept(pad)
        if self.wraps and (yield from reader.accept(self.wraps[0])):
            closing = self.wraps[1] + closing
        marks = [pad + closing, closing]
        reader.drop()
        if types is None or types != {"string"}:
            text = yield from reader.up_to(marks)
            if text is not None:
                reader.emit(to_json(text, types))
                return True
        is_text = types is None or "string" in types
        reader.emit('"' if is_text else "")
        reader.begin(Kind.ARGUMENTS, quoted=is_text)
        found = yield from reader.until(marks, trims=False)
        reader.hold()
        if found:
            reader.emit('"' if is_text else "")
        return bool(found)


def read_answer(
    reader: Reader, tool_format: ToolFormat | None, functions: Functions | None, reasoning: ReasoningFormat | None
) -> Steps[None]:
    """Read an answer after its reasoning to the end. Either format may be None."""
    formats = [] if tool_format is None else [tool_format, *tool_format.others()]
    openers = [mark for item in formats for mark in item.openers]
    drops = [] if reasoning is None else list(reasoning.drops)
    again = [reasoning.begin] if reasoning is not None and reasoning.again else []
    mark, at_call = "", tool_format is not None and tool_format.bare
    reader.hold()
    while True:
        if at_call and tool_format is not None:
            yield from tool_format.read(reader, functions, mark)
        reader.begin(Kind.CONTENT)  # what is held is not markup
        at_call = False
        marks = [*openers, *drops, *again]
        if not marks:
            return
        mark = yield from reader.until(marks)
        if not mark:
            return
        if mark in drops or mark in again:
            yield from reader.space()
            reader.drop()
            if mark in again and reasoning is not None:
                yield from reasoning.read_open(reader)
        else:
            reader.back(len(reader.held) - len(mark))
            at_call = True


# --- the table of formats ---------------------------------------------------------------------------------------------

FILE = Path(__file__).with_name("answer_formats.toml")
TOOLS, REASONING = "tool_call_parser", "reasoning_parser"  # the options that name a format
SECTIONS: dict[str, tuple[str, Any]] = {TOOLS: ("tools", ToolFormat), REASONING: ("reasoning", ReasoningFormat)}
Format = ToolFormat | ReasoningFormat


@cache
def formats(option: str) -> dict[str, Any]:
    """Read the formats of a kind, by name, in the order in which a template is searched for them."""
    return read_formats(FILE, option)


def tool_formats() -> dict[str, ToolFormat]:
    return formats(TOOLS)


def read_formats(file: Path, option: str) -> dict[str, Any]:
    """Read the formats of a kind in a file. Raise InvalidRequestError if one is not described as it must be."""
    section, kind = SECTIONS[option]
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8")).get(section, {})
        return {name: kind(name=name, **row) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise invalid(option, f"{file}: {error}") from None


def register_parser(parser: Format) -> Format:
    """Add a format of tool calls or reasoning of the user's own. A subclass of ToolFormat may read in its own way."""
    formats(TOOLS if isinstance(parser, ToolFormat) else REASONING)[parser.name] = parser
    return parser


@cache
def format_in(file: str, option: str) -> Any:
    """Find the first format in a TOML file, or the first that a Python file registers. Raise InvalidRequestError if
    there is none."""
    known = set(formats(option))
    if file.endswith(".py"):
        import_files([file])
        found = [item for name, item in formats(option).items() if name not in known]
    else:
        found = list(read_formats(Path(file), option).values())
    if not found:
        raise invalid(option, f"{file} has no new format of this kind")
    return found[0]


def parser_names(option: str) -> list[str]:
    """List the names of a kind of formats, with their aliases."""
    return [name for item in formats(option).values() for name in (item.name, *item.aliases)]


def format_of(option: str, template: str, name: str = "auto") -> Any:
    """Find the format with this name, alias or file or, for "auto", the first that the chat template's text shows; None
    if there is none."""
    table = formats(option).values()
    if name == "auto":
        return next((item for item in table if item.template and re.search(item.template, template)), None)
    if name.endswith((".toml", ".py")):
        return format_in(name, option)
    name = "mistral_args" if name == "mistral" and "[ARGS]" in template else name
    return next((item for item in table if name in (item.name, *item.aliases)), None)


def tool_format_of(template: str, name: str = "auto") -> ToolFormat | None:
    found: ToolFormat | None = format_of(TOOLS, template, name)
    return found


def reasoning_format_of(template: str, name: str = "auto") -> ReasoningFormat | None:
    found: ReasoningFormat | None = format_of(REASONING, template, name)
    return found
