"""Read text that arrives in pieces, and deliver the parts of an answer as soon as they are certain.

    text:   ... | delivered | held: may be markup | not read yet |
                            sent                  at

A grammar is written as plain code over a `Reader`: a generator that yields wherever it needs more text. What it
delivers depends on the text alone, never on how it was cut into pieces, so a stream that is computed again, or the
whole text at once, gives the same parts. Every step moves forward, so the work is linear in the text.
"""

import re
from collections.abc import Generator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

MAX_HELD = 2**16  # characters of markup that may wait for their meaning; longer ones are content
MAX_SPACE = 64  # characters of white space before markup that belong to it
SPACE = " \t\r\n"

T = TypeVar("T")
Steps = Generator[None, None, T]  # code that yields where it needs more text, and returns a T
_SPACES = re.compile(r"[ \t\r\n]+")
_STRING_RUN = re.compile(r'[^"\\]+')
_NESTED_RUN = re.compile(r'[^"{}\[\]]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")


class Kind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # a tool call begins; the text is the function's name
    ARGUMENTS = "arguments"  # more of the call's arguments, which together are JSON


class Part(NamedTuple):
    """A part of an answer; `call` counts the tool calls from 0, and is -1 in content and reasoning."""

    kind: Kind
    text: str
    call: int = -1


class Reader:
    """The text of one answer. See the module's picture.

    Attributes:
        num_calls: tool calls that have begun.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""
        self._at = self._sent = 0
        self._ended = False
        self._kind: Kind | None = None  # of what is delivered; None: it is held
        self._parts: list[Part] = []

    # --- for whoever has the text --------------------------------------------------------------------------------

    def feed(self, text: str, *, ended: bool = False) -> None:
        """Add text that has arrived."""
        self._text = self._text[self._sent :] + text
        self._at, self._sent = self._at - self._sent, 0
        self._ended = ended

    def take(self) -> list[Part]:
        """Return the parts that are new."""
        self._deliver()
        parts, self._parts = self._parts, []
        return parts

    # --- for a grammar: what becomes of the text ------------------------------------------------------------------

    def begin(self, kind: Kind) -> None:
        """Deliver what is held, and what is read from here on, as `kind`."""
        self._kind = kind

    def hold(self) -> None:
        """Keep back what is read from here on."""
        self._deliver()
        self._kind = None

    def drop(self) -> None:
        """Forget what is held: it was markup."""
        self._sent = self._at

    @property
    def held(self) -> str:
        """Return what is held."""
        return self._text[self._sent : self._at]

    def begin_call(self, name: str, arguments: str | None = None) -> None:
        """Deliver the beginning of a call and forget what is held; the arguments follow unless they are given."""
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
        """Return up to where may be read now: text that is held too long is read no further."""
        return len(self._text) if self._kind is not None else min(len(self._text), self._sent + MAX_HELD)

    def _waits(self) -> bool:
        """Return whether text may still come behind what there is."""
        return not self._ended and (self._kind is not None or len(self._text) < self._sent + MAX_HELD)

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at >= self._end() and self._waits():
            yield
        return self._text[self._at : min(self._at + 1, self._end())]

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if the text goes on with it."""
        while True:
            rest = self._text[self._at : min(self._at + len(literal), self._end())]
            if rest == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(rest) or not self._waits():
                return False
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as many characters as `pattern`, a class of characters with a plus, matches."""
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
        """Read up to a mark, and hold it and the white space before it. Returns the mark; "" where none comes."""
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
        """Return where the white space before `end` begins, but for what has been delivered or is too long."""
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
        """Read a JSON string, with its quotes."""
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
        """Read a JSON value by its brackets and quotes; what is between them is not checked."""
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
