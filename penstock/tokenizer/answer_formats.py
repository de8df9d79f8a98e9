"""Formats of tool calls, read from text that arrives in pieces. Parts are delivered as soon as they are certain.

    hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>           Hermes, Qwen 2.5 and 3
    llama3_json  {"name": "add", "parameters": {"a": 1}}, perhaps after <|python_tag|>       Llama 3.1 to 3.3
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                        Mistral
                 [TOOL_CALLS]add[ARGS]{"a": 1}                                               its newer models

The chat template shows which format a model uses. Text that turns out not to be a call is content, unchanged.

    text:   ... | delivered | held: may be markup | not read yet |
                            sent                  at

A grammar is written as plain code over a `Reader`: a generator that yields wherever it needs more text. What it
delivers depends on the text alone, never on how the text was cut into pieces. So a stream that is computed again gives
the same parts, and so does the whole text at once. Every step moves forward, so the work is linear in the text.
"""

import json
import re
from collections.abc import Callable, Container, Generator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, TypeVar

MAX_HELD = 2**16  # maximum number of characters that are held as possible markup; a longer text is content
MAX_SPACE = 64  # maximum number of characters of white space before markup that count as part of it
SPACE = " \t\r\n"

T = TypeVar("T")
Steps = Generator[None, None, T]  # code that yields where it needs more text, and finally returns a T
_SPACES = re.compile(r"[ \t\r\n]+")
_STRING_RUN = re.compile(r'[^"\\]+')
_NESTED_RUN = re.compile(r'[^"{}\[\]]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")


class Kind(Enum):
    """The kind of a part of an answer."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # the beginning of a tool call; the text is the function's name
    ARGUMENTS = "arguments"  # a piece of the call's arguments; together the pieces are JSON


class Part(NamedTuple):
    """A part of an answer. `call` is the index of the tool call, from 0; it is -1 in content and reasoning."""

    kind: Kind
    text: str
    call: int = -1


class Reader:
    """Reads the text of one answer. See the picture in the module's docstring.

    Attributes:
        num_calls: the number of tool calls that have begun.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""
        self._at = self._sent = 0
        self._ended = False
        self._kind: Kind | None = None  # the kind of the text being delivered; None: text is held
        self._parts: list[Part] = []

    # --- for the caller that has the text --------------------------------------------------------------------------

    def feed(self, text: str, *, ended: bool = False) -> None:
        self._text = self._text[self._sent :] + text
        self._at, self._sent = self._at - self._sent, 0
        self._ended = ended

    def take(self) -> list[Part]:
        """Deliver the parts that have become certain, and return all parts since the last call."""
        self._deliver()
        parts, self._parts = self._parts, []
        return parts

    # --- for a grammar: delivering, holding and dropping text -----------------------------------------------------

    def begin(self, kind: Kind) -> None:
        """Deliver the held text, and the text that is read from here on, as `kind`."""
        self._kind = kind

    def hold(self) -> None:
        self._deliver()
        self._kind = None

    def drop(self) -> None:
        """Drop the held text, which was markup."""
        self._sent = self._at

    @property
    def held(self) -> str:
        return self._text[self._sent : self._at]

    def begin_call(self, name: str, arguments: str | None = None) -> None:
        """Drop the held text, and deliver the beginning of a call. The arguments follow, unless they are given here."""
        self.drop()
        call = self.num_calls
        self.num_calls += 1
        self._parts.append(Part(Kind.CALL, name, call))
        if arguments is None:
            self.begin(Kind.ARGUMENTS)
        else:
            self._parts.append(Part(Kind.ARGUMENTS, arguments, call))

    def _deliver(self) -> None:
        if self._kind is not None and self._sent < self._at:
            call = self.num_calls - 1 if self._kind is Kind.ARGUMENTS else -1
            self._parts.append(Part(self._kind, self._text[self._sent : self._at], call))
            self._sent = self._at

    # --- for a grammar: reading -----------------------------------------------------------------------------------

    def _end(self) -> int:
        """Find the end of the text that may be read now. At most MAX_HELD characters are held."""
        return len(self._text) if self._kind is not None else min(len(self._text), self._sent + MAX_HELD)

    def _waits(self) -> bool:
        """Decide whether to wait for more text at the end of the present text."""
        return not self._ended and (self._kind is not None or len(self._text) < self._sent + MAX_HELD)

    def peek(self) -> Steps[str]:
        """Look at the next character without reading it; "" at the end."""
        while self._at >= self._end() and self._waits():
            yield
        return self._text[self._at : min(self._at + 1, self._end())]

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next. Return whether it did."""
        while True:
            rest = self._text[self._at : min(self._at + len(literal), self._end())]
            if rest == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(rest) or not self._waits():
                return False
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as many characters as match `pattern`, a character class with a plus. Return them."""
        found = ""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at, self._end())
            if match is None:
                break
            self._at = match.end()
            found += match.group()
        return found

    def space(self) -> Steps[str]:
        return (yield from self.run(_SPACES))

    def until(self, marks: Sequence[str]) -> Steps[str]:
        """Read up to the first mark, and hold it and the white space before it. Return the mark; "" if none comes."""
        longest = max(map(len, marks))
        while True:
            found = min((place for mark in marks if (place := self._text.find(mark, self._at)) >= 0), default=-1)
            if found >= 0:
                self._at = self._before_space(found)
                self.hold()
                mark = next(mark for mark in marks if self._text.startswith(mark, found))
                self._at = found + len(mark)
                return mark
            if self._ended:
                self._at = len(self._text)
                return ""
            tail = max(self._at, len(self._text) - longest + 1)
            starts = (at for at in range(tail, len(self._text)) if any(m.startswith(self._text[at:]) for m in marks))
            self._at = self._before_space(next(starts, len(self._text)))
            yield

    def _before_space(self, end: int) -> int:
        """Find where the white space before `end` begins. It is unread, and has at most MAX_SPACE characters."""
        start = end
        while start > max(self._at, end - MAX_SPACE) and self._text[start - 1] in SPACE:
            start -= 1
        return start

    def rest(self) -> Steps[None]:
        while True:
            self._at = len(self._text)
            if self._ended:
                return
            yield

    # --- for a grammar: JSON --------------------------------------------------------------------------------------

    def string(self) -> Steps[bool]:
        """Read a JSON string with its quotes. Return whether there was a complete one."""
        if not (yield from self.accept('"')):
            return False
        while True:
            yield from self.run(_STRING_RUN)
            char = yield from self.peek()
            self._at += len(char)
            if char in ('"', ""):
                return bool(char)
            escaped = yield from self.peek()
            self._at += len(escaped)

    def value(self) -> Steps[bool]:
        """Read a JSON value by its brackets and quotes, without checking what is between them. Return whether there was
        a complete one."""
        char = yield from self.peek()
        if char == '"':
            return (yield from self.string())
        if char not in ("{", "["):
            return bool((yield from self.run(_SCALAR_RUN)))
        depth = 0
        while char := (yield from self.peek()):
            if char == '"':
                if not (yield from self.string()):
                    return False
                continue
            if char not in "{}[]":
                yield from self.run(_NESTED_RUN)
                continue
            self._at += 1
            depth += 1 if char in "{[" else -1
            if depth == 0:
                return True
        return False


# --- a call that is a JSON object -------------------------------------------------------------------------------------

ARGUMENTS = ("arguments", "parameters")
KEYS = (*ARGUMENTS, "name", "id", "type")  # an object with any other key is not a call


class AnyName:
    """Contains every name. It is used where the markup alone shows that an object is a call."""

    def __contains__(self, name: object) -> bool:
        return True


def read_call(reader: Reader, names: Container[str]) -> Steps[bool]:
    """Read the object of a call, and deliver it. If the name precedes the arguments, these are delivered as they come.

    Args:
        names: the names of the functions that may be called.

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
            reader.begin_call(name)
            yield from reader.value()
            reader.hold()
            is_out = True
        else:
            value = yield from _value(reader)
            if value is None or (is_out and key in ("name", *ARGUMENTS)):
                return False
            if key in ARGUMENTS:
                arguments = value
            if key == "name":
                name = _text(value)
                if not name or name not in names:
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
    reader.begin_call(name, arguments)
    return True


def read_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Read an object without a name, and deliver it as the arguments of a call of `name`."""
    if (yield from reader.peek()) != "{":
        return False
    reader.begin_call(name)
    yield from reader.value()
    reader.hold()
    return True


def give_up(reader: Reader) -> None:
    """Deliver the held text as content, because it is not markup."""
    reader.begin(Kind.CONTENT)


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
    return value if _parsed(value) is not _BROKEN else None


_BROKEN = object()


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return _BROKEN


def _text(value: str) -> str | None:
    parsed = _parsed(value)
    return parsed if isinstance(parsed, str) else None


def _as_object(value: str | None) -> str | None:
    """Convert arguments to the JSON of an object; None if they are not an object. Some models leave out empty
    arguments, or write arguments as a string."""
    if value is None or value == "null":
        return "{}"
    if value.startswith('"'):
        value = _text(value) or ""
    return value if isinstance(_parsed(value), dict) else None


# --- the formats ------------------------------------------------------------------------------------------------------

_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")


class ToolFormat:
    """Base of the formats.

    Attributes:
        name: the name that vLLM's --tool-call-parser uses.
        marks: texts that may be special tokens of the model; the answer's text must then include them.
        opens: whether the first mark stands before every call.
        between: the grammar of what separates calls that follow each other; None: calls are in a list.
        id_length: the number of characters of a call's id after its prefix; Mistral's templates accept no other length.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    opens: ClassVar[bool] = True
    between: ClassVar[str | None] = ""
    id_prefix: ClassVar[str] = "call_"
    id_length: ClassVar[int] = 24

    def read(self, reader: Reader, names: Container[str]) -> Steps[None]:
        """Read an answer to its end. names: the names of the request's functions."""
        raise NotImplementedError

    def group(self, *, many: bool) -> str:
        """Write the grammar of the calls that follow the first mark."""
        return "call"

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        """Write the grammar of a call before and after its arguments. spell: returns the term of a mark."""
        return json.dumps(f'{{"name": "{name}", "arguments": '), json.dumps("}")


class Hermes(ToolFormat):
    """Calls between tags, anywhere in the text."""

    name = "hermes"
    marks = ("<tool_call>", "</tool_call>")
    between = json.dumps("\n")

    def read(self, reader: Reader, names: Container[str]) -> Steps[None]:
        opening, closing = self.marks
        reader.begin(Kind.CONTENT)
        while (yield from reader.until([opening])):
            yield from reader.space()
            if (yield from read_call(reader, AnyName())):
                yield from reader.space()
                yield from reader.accept(closing)  # some models leave out the last one
                yield from reader.space()
                reader.drop()
            give_up(reader)

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        head, tail = super().around_arguments(name, spell)
        line = json.dumps("\n")
        return f"{line} {head}", f"{tail} {line} {spell(self.marks[1])}"


class Llama3(ToolFormat):
    """Calls as objects that begin the answer or follow a control token, if they name a function of the request."""

    name = "llama3_json"
    marks = ("<|python_tag|>",)
    opens = False
    between = json.dumps("; ")

    def read(self, reader: Reader, names: Container[str]) -> Steps[None]:
        reader.hold()
        yield from reader.space()
        if (yield from reader.accept(self.marks[0])):
            yield from reader.space()
        while True:
            if (yield from reader.peek()) == "{":
                yield from self._calls(reader, names)
            give_up(reader)
            if not (yield from reader.until(self.marks)):
                return
            yield from reader.space()

    def _calls(self, reader: Reader, names: Container[str]) -> Steps[None]:
        while (yield from read_call(reader, names)):
            yield from reader.space()
            reader.drop()
            if (yield from reader.accept(";")):
                yield from reader.space()
                reader.drop()
            if (yield from reader.peek()) != "{":
                return

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        return json.dumps(f'{{"name": "{name}", "parameters": '), json.dumps("}")


class Mistral(ToolFormat):
    """A list of calls after a control token. The newer models' format, with a token before each name, is read, too."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    between: ClassVar[str | None] = None
    id_prefix = ""
    id_length = 9

    def read(self, reader: Reader, names: Container[str]) -> Steps[None]:
        reader.begin(Kind.CONTENT)
        while (yield from reader.until(self.marks[:1])):
            yield from reader.space()
            is_list = yield from reader.accept("[")
            is_whole = yield from (self._list(reader) if is_list else self._named(reader))
            if is_whole:
                yield from reader.space()
                reader.drop()
            give_up(reader)

    def _list(self, reader: Reader) -> Steps[bool]:
        while True:
            yield from reader.space()
            if not (yield from read_call(reader, AnyName())):
                return False
            yield from reader.space()
            reader.drop()
            if (yield from reader.accept("]")):
                return True
            if not (yield from reader.accept(",")):
                return False

    def _named(self, reader: Reader) -> Steps[bool]:
        name = yield from reader.run(_NAME_RUN)
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.run(_NAME_RUN)
        yield from reader.accept("[ARGS]")
        yield from reader.space()
        return bool(name) and (yield from read_arguments(reader, name))

    def group(self, *, many: bool) -> str:
        return '"[" call (", " call)* "]"' if many else '"[" call "]"'


class NewMistral(Mistral):
    """Reader of the same formats as Mistral, whose grammar makes calls in the newer models' format."""

    between = ""

    def group(self, *, many: bool) -> str:
        return "call"

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        return f"{json.dumps(name)} {spell(self.marks[1])}", ""


TOOL_FORMATS: dict[str, ToolFormat] = {item.name: item for item in (Hermes(), Llama3(), Mistral())}
OTHER_MARKUP = ("<function=", "<arg_key>", "<|tool_call>")  # shows formats with Hermes' tags but other contents


def tool_format_of(template: str, name: str = "auto") -> ToolFormat | None:
    """Find the format with this name or, for "auto", the one that a chat template's text shows; None if unknown."""
    if name == "mistral" or (name == "auto" and "[TOOL_CALLS]" in template):
        return NewMistral() if "[ARGS]" in template else TOOL_FORMATS["mistral"]
    if name != "auto":
        return TOOL_FORMATS.get(name)
    if "<tool_call>" in template and not any(markup in template for markup in OTHER_MARKUP):
        return TOOL_FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return TOOL_FORMATS["llama3_json"]
    return None
