"""Read text that arrives in pieces, and deliver the parts of an answer as soon as they are certain.

    text:   ... | delivered | held: may be markup | not read yet |
                            sent                  at

A grammar is written as plain code over a `Reader`: a generator that yields wherever it needs more text. What it
delivers depends on the text alone, never on how the text was cut into pieces. So a stream that is computed again gives
the same parts, and so does the whole text at once. Every step moves forward, so the work is linear in the text.
"""

import re
from collections.abc import Generator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

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
        """Add text that has arrived."""
        self._text = self._text[self._sent :] + text
        self._at, self._sent = self._at - self._sent, 0
        self._ended = ended

    def take(self) -> list[Part]:
        """Return the new parts."""
        self._deliver()
        parts, self._parts = self._parts, []
        return parts

    # --- for a grammar: delivering, holding and dropping text -----------------------------------------------------

    def begin(self, kind: Kind) -> None:
        """Deliver the held text, and the text that is read from here on, as `kind`."""
        self._kind = kind

    def hold(self) -> None:
        """Hold the text that is read from here on."""
        self._deliver()
        self._kind = None

    def drop(self) -> None:
        """Drop the held text, which was markup."""
        self._sent = self._at

    @property
    def held(self) -> str:
        """The held text."""
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
        """Return the end of the text that may be read now. At most MAX_HELD characters are held."""
        return len(self._text) if self._kind is not None else min(len(self._text), self._sent + MAX_HELD)

    def _waits(self) -> bool:
        """Return whether to wait for more text at the end of the present text."""
        return not self._ended and (self._kind is not None or len(self._text) < self._sent + MAX_HELD)

    def peek(self) -> Steps[str]:
        """Return the next character without reading it, or "" at the end."""
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
        """Read white space."""
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
        """Return where the white space before `end` begins. It is unread, and has at most MAX_SPACE characters."""
        start = end
        while start > max(self._at, end - MAX_SPACE) and self._text[start - 1] in SPACE:
            start -= 1
        return start

    def rest(self) -> Steps[None]:
        """Read to the end."""
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
