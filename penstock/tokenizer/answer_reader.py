"""Reads an answer whose text arrives in pieces: markup and values. Parts are delivered as soon as they are certain.

    text:   ... | delivered | held: may be markup | not read yet |
                            sent                  at

A grammar is written as plain code over a `Reader`: a generator that yields wherever it needs more text. What it
delivers depends on the text alone, never on how the text was cut into pieces. So a stream that is computed again gives
the same parts, and so does the whole text at once. Every step moves forward, so the work is linear in the text.
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

MAX_HELD = 2**16  # maximum number of characters that are held as possible markup; a longer text is content
MAX_SPACE = 64  # maximum number of characters of white space before markup that count as part of it
SPACE = " \t\r\n"

T = TypeVar("T")
Steps = Generator[None, None, T]  # code that yields where it needs more text, and finally returns a T
_SPACES = re.compile(r"[ \t\r\n]+")
_STRING_RUN = re.compile(r'[^"\\]+')
_NESTED_RUN = re.compile(r'[^"{}\[\]]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
WORD_RUN = re.compile(r"[-A-Za-z0-9_]+")
NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_PYTHON_RUNS = {quote: re.compile(rf"[^{quote}\\\\]+") for quote in "\"'"}

ANY_WORD, IS_STRING = "NUMBER", "IS_STRING"  # words of the markup that may vary
TAG = r"""<[^<>\s="]+>|<\|"\|>|\[[A-Z_ ]+\]"""
MARK = re.compile(rf"｜DSML｜|(?!<[^<>]*DSML)(?:{TAG})")  # what may be a token of its own
WORD = re.compile(rf"{TAG}|{IS_STRING}|{ANY_WORD}|(?:(?!{TAG}|{IS_STRING}|{ANY_WORD})\S)+")


def words_of(markup: str) -> list[str]:
    return WORD.findall(markup)


def quoted(text: str) -> str:
    """Write a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


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
        last_word: what `words` last read in place of a word that may vary.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.last_word = self._text = ""
        self._at = self._sent = 0
        self._ended = False
        self._kind: Kind | None = None  # the kind of the text being delivered; None: text is held
        self._is_quoted = False  # whether that text is delivered as the inside of a JSON string
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

    def begin(self, kind: Kind, *, quoted: bool = False) -> None:
        """Deliver the held text, and the text that is read from here on, as `kind`.

        quoted: deliver it as the inside of a JSON string.
        """
        self._kind, self._is_quoted = kind, quoted

    def hold(self) -> None:
        self._deliver()
        self._kind = None

    def drop(self) -> None:
        """Drop the held text, which was markup."""
        self._sent = self._at

    def rest_of_text(self) -> str:
        return self._text[self._at :]

    @property
    def held(self) -> str:
        return self._text[self._sent : self._at]

    def back(self, num_held: int) -> None:
        """Continue with the text after the first `num_held` held characters."""
        self._at = self._sent + num_held

    def emit(self, text: str) -> None:
        """Drop the held text, and deliver a piece of the last call's arguments in its place."""
        self.drop()
        self._parts.append(Part(Kind.ARGUMENTS, text, self.num_calls - 1))

    def begin_call(self, name: str) -> None:
        """Drop the held text, and deliver the beginning of a call."""
        self.drop()
        self._parts.append(Part(Kind.CALL, name, self.num_calls))
        self.num_calls += 1

    def _deliver(self) -> None:
        if self._kind is not None and self._sent < self._at:
            call = self.num_calls - 1 if self._kind is Kind.ARGUMENTS else -1
            text = self._text[self._sent : self._at]
            self._parts.append(Part(self._kind, quoted(text)[1:-1] if self._is_quoted else text, call))
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

    def words(self, markup: str, *, closes: bool = False) -> Steps[bool]:
        """Read markup, with any white space between its words.

        Args:
            closes: whether it ends something. All of it may then be missing.

        Returns:
            Whether its last word was read or, if it closes something, its first. Models leave out some of the others.
        """
        words = words_of(markup)
        is_read = closes or not words
        for number, word in enumerate(words):
            yield from self.space()
            if word in (ANY_WORD, IS_STRING):
                self.last_word = yield from self.run(WORD_RUN)
                continue
            found = yield from self.accept(word)
            is_read = found if not closes or number == 0 else is_read
        return is_read

    def comes(self, words: Sequence[str]) -> Steps[bool]:
        """Check whether one of the words comes next, without reading it."""
        for word in words:
            if (yield from self.accept(word)):
                self._at -= len(word)
                return True
        return False

    def read(self, count: int) -> Steps[str]:
        """Read so many characters, or as many as there are."""
        found = ""
        while len(found) < count and (char := (yield from self.peek())):
            self._at += 1
            found += char
        return found

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next. Return whether it did."""
        while True:
            rest = self._text[self._at : min(self._at + len(literal), self._end())]
            if rest == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(rest) or not self._waits():
                if self._ended and literal.startswith(self._text[self._at :]):
                    self._at = len(self._text)  # cut within it
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

    def until(self, marks: Sequence[str], *, trims: bool = True) -> Steps[str]:
        """Read up to the first mark and hold it, if `trims` with the white space before it. Return the mark; "" if none
        comes. Of marks that begin at the same place, the longest counts."""
        longest = max(map(len, marks))
        while True:
            found = min((place for mark in marks if (place := self._text.find(mark, self._at)) >= 0), default=-1)
            if found >= 0 and not self._may_grow(marks, self._text[found : found + longest]):
                self._at = self._before_space(found) if trims else found
                self.hold()
                mark = max((mark for mark in marks if self._text.startswith(mark, found)), key=len)
                self._at = found + len(mark)
                return mark
            if self._ended and trims:
                self._at = len(self._text)
                self._deliver()
                return ""
            tail = max(self._at, len(self._text) - longest + 1) if found < 0 else found
            starts = (at for at in range(tail, len(self._text)) if any(m.startswith(self._text[at:]) for m in marks))
            end = next(starts, len(self._text)) if found < 0 else found
            self._at = self._before_space(end) if trims else end
            if self._ended:  # within a value, what may be the beginning of its end is not delivered
                self.hold()
                self._at = len(self._text)
                return ""
            yield

    def _may_grow(self, marks: Sequence[str], text: str) -> bool:
        """Check whether more text could complete a mark that is longer than the one found."""
        return not self._ended and any(len(mark) > len(text) and mark.startswith(text) for mark in marks)

    def up_to(self, marks: Sequence[str]) -> Steps[str | None]:
        """Read held text and the first mark after it. Return the text; None, with nothing read, if no mark comes."""
        start = self._at - self._sent
        while True:
            places = [(self._text.find(mark, self._sent + start, self._end()), -len(mark)) for mark in marks]
            found = min((place for place in places if place[0] >= 0), default=None)
            if found is not None:
                text = self._text[self._sent + start : found[0]]
                self._at = found[0] - found[1]
                return text
            if not self._waits():
                return None
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


# --- values of arguments ----------------------------------------------------------------------------------------------

CLOSING = {"[": "]", "(": ")", "{": "}"}
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits
MAX_DEPTH = 64  # of a value in Python's notation
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_KEY_RUN = re.compile(r"[^:{}\[\](),\s]+")

Schema = Mapping[str, Any] | None
Functions = Mapping[str, Schema]  # the functions that a request offers, by name, with the schemas of their parameters


def types_of(schema: Any, root: Schema = None, depth: int = 8) -> frozenset[str] | None:
    """Find the JSON types that a schema allows; None if it does not say. root: the schema that `$ref` refers to."""
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        return types_of(target, root, depth - 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(TYPES.get(type(value), "null") for value in values)
    if isinstance(schema.get("type"), str | list):
        return frozenset([schema["type"]] if isinstance(schema["type"], str) else map(str, schema["type"]))
    options = schema.get("anyOf") or schema.get("oneOf")
    found = [types_of(option, root, depth - 1) for option in options] if isinstance(options, list) else [None]
    return None if None in found else frozenset().union(*(types for types in found if types is not None))


def schema_of(functions: Functions | None, name: str, key: str) -> tuple[Any, Schema]:
    """Find the schema of an argument, None if there is none, and that of the function's parameters."""
    root = (functions or {}).get(name)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    return (properties.get(key) if isinstance(properties, Mapping) else None), root


def to_json(text: str, types: frozenset[str] | None) -> str:
    """Convert a value that is written without quotes: JSON of an allowed type, the same in Python's notation, or else
    a string."""
    value = text.strip()
    for candidate in (value, _python_to_json(value) if value[:1] in ("[", "{", *"TFN") else value):
        parsed = parse_json(candidate)
        if parsed is not BROKEN and (types is None or _type_of(parsed) & types):
            return candidate
    return quoted(text)


def _python_to_json(value: str) -> str:
    """Convert a value in Python's notation; "" if it is none."""
    reader = Reader()
    reader.begin_call("")
    reader.feed(value + " ", ended=True)
    steps = read_literal(reader)
    try:
        next(steps)
    except StopIteration as end:
        is_whole = end.value and not reader.rest_of_text().strip()
        return "".join(part.text for part in reader.take()[1:]) if is_whole else ""
    raise AssertionError("a text that has ended needs no more text")


def _type_of(value: Any) -> set[str]:
    if type(value) in (int, float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {TYPES.get(type(value), "null")}


def read_literal(reader: Reader, quote: str = "", depth: int = MAX_DEPTH) -> Steps[bool]:
    """Read a value in the notation of Python or JSON, and deliver it as JSON.

    Args:
        quote: a mark that stands around strings, too.

    Returns:
        Whether it was a complete value. What has been delivered before a mistake is the beginning of one.
    """
    yield from reader.space()
    if quote and (yield from reader.accept(quote)):
        reader.emit('"')
        reader.begin(Kind.ARGUMENTS, quoted=True)
        found = yield from reader.until((quote,), trims=False)
        reader.hold()
        reader.emit('"' if found else "")
        return bool(found)
    char = yield from reader.peek()
    if char in _PYTHON_RUNS:
        return (yield from _read_python_string(reader, char))
    if char in CLOSING and depth:
        return (yield from _read_items(reader, char, quote, depth - 1))
    word = yield from reader.run(_SCALAR_RUN)
    if not word or not (yield from reader.peek()):
        return False  # at the end of the text, the word may be cut
    word = CONSTANTS.get(word, word)
    reader.emit(word if parse_json(word) is not BROKEN else quoted(word))
    return True


def _read_items(reader: Reader, opening: str, quote: str, depth: int) -> Steps[bool]:
    """Read a list, tuple or dictionary, whose keys may be without quotes."""
    yield from reader.accept(opening)
    reader.emit("{" if opening == "{" else "[")
    separator = ""
    while True:
        yield from reader.space()
        if (yield from reader.accept(CLOSING[opening])):
            reader.emit("}" if opening == "{" else "]")
            return True
        if separator:
            if not (yield from reader.accept(",")):
                return False
            yield from reader.space()
            if (yield from reader.comes([CLOSING[opening]])):
                continue
        reader.emit(separator)
        separator = ", "
        if opening == "{" and not (yield from _read_item_key(reader, quote)):
            return False
        if not (yield from read_literal(reader, quote, depth)):
            return False


def _read_item_key(reader: Reader, quote: str) -> Steps[bool]:
    if (yield from reader.comes(["'", '"', *([quote] if quote else [])])):
        if not (yield from read_literal(reader, quote, 0)):
            return False
    elif key := (yield from reader.run(_KEY_RUN)):
        reader.emit(quoted(key))
    yield from reader.space()
    if not (yield from reader.accept(":")):
        return False
    reader.emit(": ")
    return True


def _read_python_string(reader: Reader, quote: str) -> Steps[bool]:
    yield from reader.accept(quote)
    reader.emit('"')
    while True:
        reader.begin(Kind.ARGUMENTS, quoted=True)
        yield from reader.run(_PYTHON_RUNS[quote])
        reader.hold()
        if (yield from reader.accept(quote)):
            reader.emit('"')
            return True
        if not (yield from reader.accept("\\")):
            return False
        code = yield from reader.read(1)
        if code in CODES:
            digits = yield from reader.read(CODES[code])
            is_code = re.fullmatch("[0-9a-fA-F]+", digits) is not None and int(digits, 16) <= 0x10FFFF
            # Two surrogates are written as JSON does, which makes them one character.
            escaped = f"\\u{digits}" if len(digits) == CODES["u"] else quoted(chr(int(digits, 16)))[1:-1]
            reader.emit(escaped if is_code else quoted(f"\\{code}{digits}")[1:-1])
        else:
            known = code if code in "\\'\"/" else ESCAPES.get(code, f"\\{code}")
            reader.emit(quoted(known)[1:-1] if code else "")


BROKEN = object()


def parse_json(value: str) -> object:
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return BROKEN


def _refuse(constant: str) -> None:
    raise ValueError(constant)
