"""Answers with reasoning and tool calls: read from the text that comes, and demanded by a grammar.

AnswerParser splits the text of an answer into reasoning, content and tool calls, piece by piece or at once.
answer_grammar describes what a request asks for, in Lark's notation as llguidance reads it and in the markup that the
model was trained on: at least one call (`required`), a call of one function, at most one call, or free text in which
every call that begins obeys its function's schema. How calls are written is in answer_formats.py.
"""

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from penstock.tokenizer.answer_formats import AnyName, Kind, Part, Reader, Steps, ToolFormat, tool_format_of

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
        """Read the next piece of text. Return the parts that it completes."""
        return self._go_on(text, ended=False)

    def finish(self) -> list[Part]:
        """Read to the end. Return the parts that were held back. No push may follow."""
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
    """Read a whole answer. The parser must be new."""
    message = Message()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message


def assistant_message(text: str, template: str) -> dict[str, Any]:
    """Convert a whole answer to the message that it adds to its conversation, in OpenAI's format.

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
    """Make the id of a call, which is the same whenever the answer is computed again."""
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


# --- the grammar ------------------------------------------------------------------------------------------------------

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
RULES = """\
start: {start}
TEXT: /(.|\\n)*/
NOT_A_CALL: /[ \\t\\r\\n]*([^ \\t\\r\\n{{](.|\\n)*)?/
BLANK: /\\n{{0,2}}/
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is a JSON schema; None if the function has no parameters."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may have.

    Attributes:
        required: the answer consists of calls only; else calls may come anywhere in its text.
        many: more than one call is allowed.
        answer: the JSON schema of an answer without calls, where calls are not required; None: any text.
    """

    functions: Sequence[Function]
    required: bool
    many: bool = True
    answer: str | None = None


def answer_grammar(
    tool_format: ToolFormat | None, calls: Calls, spell: Callable[[str], str], *, reasoning: bool, is_thinking: bool
) -> str:
    """Write the grammar of an answer.

    Args:
        tool_format: None if there are no functions; then the grammar is that of `calls.answer`.
        spell: returns a mark of the format as a term of the grammar: a text in quotes, or a special token.
        reasoning, is_thinking: as in AnswerParser. Reasoning may come before what is required.
    """
    before = "thinking BLANK" if is_thinking else f"({spell(THINK)} thinking BLANK)?" if reasoning else ""
    used = {"start": f"{before} answer" if tool_format is None else _start(tool_format, calls, spell, before)}
    if tool_format is not None and "to_call" in used["start"]:
        used |= _lazily("to_call", tool_format.marks[0], spell)
    if calls.answer is not None:
        used["answer"] = f"%json {calls.answer}"
    if "thinking" in used["start"]:
        used |= _lazily("thinking", END_OF_THINKING, spell)
    rules = [RULES.format(start=used.pop("start")), *(f"{name}: {rule}\n" for name, rule in used.items())]
    if tool_format is None:
        return "".join(rules)
    names = [f"call_{index}" for index in range(len(calls.functions))]
    rules.append(f"call: {' | '.join(names)}\n")
    for name, function in zip(names, calls.functions, strict=True):
        head, tail = tool_format.around_arguments(function.name, spell)
        schema = _schema(function, is_enforced=calls.required or function.strict)
        rules.append(f"{name}: {head} {name}_arguments {tail}\n{name}_arguments: %json {schema}\n")
    return "".join(rules)


def literal(text: str) -> str:
    """Write a text as a term of the grammar."""
    return json.dumps(text)


def _start(tool_format: ToolFormat, calls: Calls, spell: Callable[[str], str], thoughts: str) -> str:
    opening = spell(tool_format.marks[0]) if tool_format.opens else ""
    group = tool_format.group(many=calls.many)
    all_calls = f"{opening} {group}"
    if calls.many and tool_format.between is not None:
        all_calls += f" ({tool_format.between} {opening} {group})*"
    if calls.required or calls.answer is not None:
        either = all_calls if calls.required else f"(answer | {all_calls})"
        return f"{thoughts} {either}"
    if not tool_format.opens:
        return f"NOT_A_CALL | {all_calls}"
    return f"(to_call {group})* TEXT" if calls.many else f"TEXT | to_call {group}"


def _lazily(name: str, mark: str, spell: Callable[[str], str]) -> dict[str, str]:
    """Write the rules for a text up to and including the first mark, which may be one token or spelled out."""
    term = spell(mark)
    spelled_out = f"TEXT {literal(mark)}"
    if term == literal(mark):
        return {f"{name}[lazy]": spelled_out}
    return {name: f"{name}_token | {name}_text", f"{name}_token": f"TEXT {term}", f"{name}_text[lazy]": spelled_out}


def _schema(function: Function, *, is_enforced: bool) -> str:
    """Write the schema of a function's arguments. If the function is strict, anything in its schema that the grammar
    cannot express is an error."""
    own = {"properties": {}, "additionalProperties": False} if function.parameters is None else function.parameters
    guidance = SPACING if function.strict else {**SPACING, "lenient": True}
    return json.dumps({"type": "object", **(own if is_enforced else {}), "x-guidance": guidance})
