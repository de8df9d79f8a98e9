"""Splits the text of an answer into reasoning, content and tool calls, piece by piece or at once."""

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from penstock.tokenizer.answers.calls import AnyName
from penstock.tokenizer.answers.formats import ToolFormat, tool_format_of
from penstock.tokenizer.answers.reader import Kind, Part, Reader, Steps

THINK, END_OF_THINKING = "<think>", "</think>"
REASONING_PARSERS = ("qwen3", "deepseek_r1")


class AnswerParser:
    """Splits one answer into its parts, as its text comes. Only markup and the white space around it are dropped.

    Args:
        tool_format: how the model writes calls; None: nothing is a call.
        names: the names of the functions that the request offers.
        reasoning: whether text between <think> and </think> at the beginning is reasoning.
        is_thinking: whether the prompt has already opened <think>.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Container[str] | None = None,
        *,
        reasoning: bool = False,
        is_thinking: bool = False,
    ) -> None:
        self._reader = Reader()
        self._names = AnyName() if names is None else names
        self._steps = self._read(tool_format, reasoning, is_thinking)

    @property
    def num_calls(self) -> int:
        """The number of tool calls that have begun."""
        return self._reader.num_calls

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next piece of text brings."""
        return self._go_on(text, ended=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back. No push may follow."""
        return self._go_on("", ended=True)

    def _go_on(self, text: str, *, ended: bool) -> list[Part]:
        self._reader.feed(text, ended=ended)
        next(self._steps, None)
        return self._reader.take()

    def _read(self, tool_format: ToolFormat | None, reasoning: bool, is_thinking: bool) -> Steps[None]:
        reader = self._reader
        if reasoning:
            yield from _read_reasoning(reader, is_thinking)
        if tool_format is not None:
            yield from tool_format.read(reader, self._names)
        else:
            reader.begin(Kind.CONTENT)
        yield from reader.rest()


def _read_reasoning(reader: Reader, is_thinking: bool) -> Steps[None]:
    """Read the model's reasoning, and hold the text after it. Without an end mark, all text is reasoning."""
    reader.hold()
    yield from reader.space()
    if not (yield from reader.accept(THINK)) and not is_thinking:
        return
    yield from reader.space()
    reader.drop()
    reader.begin(Kind.REASONING)
    if (yield from reader.until([END_OF_THINKING])):
        yield from reader.space()
        reader.drop()


@dataclass
class Call:
    """A tool call. `arguments` is JSON, unless the model wrote something else."""

    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Sequence[Part]) -> None:
        """Add parts in their order."""
        for part in parts:
            if part.kind is Kind.CONTENT:
                self.content += part.text
            elif part.kind is Kind.REASONING:
                self.reasoning += part.text
            elif part.kind is Kind.CALL:
                self.calls.append(Call(part.text))
            else:
                self.calls[part.call].arguments += part.text


def read_message(parser: AnswerParser, text: str) -> Message:
    """Return a whole answer. The parser must be new."""
    message = Message()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message


def assistant_message(text: str, template: str) -> dict[str, Any]:
    """Return a whole answer as the message that it adds to its conversation, in OpenAI's format.

    Args:
        template: text of the model's chat template, which shows how the model writes calls and reasoning.
    """
    tool_format = tool_format_of(template)
    reasoning = END_OF_THINKING in template
    is_thinking = reasoning and END_OF_THINKING in text and not text.lstrip().startswith(THINK)
    message = read_message(AnswerParser(tool_format, reasoning=reasoning, is_thinking=is_thinking), text)
    found: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls and tool_format is not None:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {"id": call_id(tool_format, text, 0, number), "type": "function", "function": asdict(call)}
            for number, call in enumerate(message.calls)
        ]
    return found


def call_id(tool_format: ToolFormat, answer_id: str, choice: int, call: int) -> str:
    """Return the id of a call, which is the same whenever the answer is computed again."""
    digest = blake2b(f"{answer_id} {choice} {call}".encode(), digest_size=12).hexdigest()
    return tool_format.id_prefix + digest[: tool_format.id_length]


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning. It reads bytes, because tokens may cut characters.

    Args:
        is_thinking: whether the prompt has already opened <think>.
    """

    def __init__(self, *, is_thinking: bool) -> None:
        self.count = 0
        self._state = "inside" if is_thinking else "before"
        self._bytes = b""

    def add(self, token: bytes) -> None:
        """Take the bytes of the next token."""
        if self._state == "after":
            return
        self._bytes += token
        self.count += 1
        if self._state == "before":
            start, opening = self._bytes.lstrip(), THINK.encode()
            if not opening.startswith(start[: len(opening)]):
                self.count, self._state = 0, "after"
            elif len(start) >= len(opening):
                self._state = "inside"
        if self._state == "inside":
            if END_OF_THINKING.encode() in self._bytes:
                self._state = "after"
            self._bytes = self._bytes[1 - len(END_OF_THINKING) :]
