"""Answers with reasoning and tool calls: read from the text that comes, and demanded by a grammar.

AnswerParser splits the text of an answer into reasoning, content and tool calls, piece by piece or at once.
answer_grammar describes what a request asks for, in Lark's notation as llguidance reads it and in the markup that the
model was trained on: at least one call (`required`), a call of one function, at most one call, or free text in which
every call that begins obeys its function's schema. How calls are written is in answer_formats.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.errors import invalid
from penstock.tokenizer.answer_formats import (
    ReasoningFormat,
    ToolFormat,
    read_answer,
    reasoning_format_of,
    tool_format_of,
)
from penstock.tokenizer.answer_reader import ANY_WORD, IS_STRING, MARK, Functions, Kind, Part, Reader, Steps, types_of

if TYPE_CHECKING:
    from penstock.tokenizer.tokenizer import Tokenizer

TAIL = 32  # tokens at the end of a prompt in which the beginning of reasoning is looked for


class AnswerParser:
    """Splits one answer into its parts, as its text comes. Only markup and the white space around it are dropped.

    Args:
        tool_format: how the model writes calls; None: nothing is a call.
        functions: the functions that the request offers, with the schemas of their parameters; None: any.
        reasoning: how the model writes reasoning; None: nothing is reasoning.
        is_thinking: whether the answer begins within reasoning.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        functions: Functions | None = None,
        *,
        reasoning: ReasoningFormat | None = None,
        is_thinking: bool = False,
    ) -> None:
        self._reader = Reader()
        self._steps = self._read(tool_format, functions, reasoning, is_thinking)

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

    def _read(
        self,
        tool_format: ToolFormat | None,
        functions: Functions | None,
        reasoning: ReasoningFormat | None,
        is_thinking: bool,
    ) -> Steps[None]:
        if reasoning is not None:
            yield from reasoning.read(self._reader, is_open=is_thinking)
        yield from read_answer(self._reader, tool_format, functions, reasoning)
        yield from self._reader.rest()


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
    tool_format, reasoning = tool_format_of(template), reasoning_format_of(template)
    is_thinking = reasoning is not None and reasoning.end in text and not text.lstrip().startswith(reasoning.begin)
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


def is_within(reasoning: ReasoningFormat, prompt_token_ids: Sequence[int], tokenizer: "Tokenizer") -> bool:
    """Tell whether a prompt ends within reasoning, so that the answer begins there."""
    tail = tokenizer.decode(list(prompt_token_ids[-TAIL:]), skip_special_tokens=False).rstrip()
    return tail.endswith(reasoning.begin) or (reasoning.implied and not tail.endswith(reasoning.end))


def thinking_ids(
    reasoning: ReasoningFormat | None, tokenizer: "Tokenizer", *, is_thinking: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the tokens of SamplingParams.thinking_token_ids.

    Raises:
        InvalidRequestError: it is not known how the model writes reasoning, or its end is more than one token, which
            could be written with other tokens too.
    """
    name = "thinking_token_budget"
    if reasoning is None:
        raise invalid(name, "how this model writes its reasoning is not known; a server has --reasoning-parser")
    begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (reasoning.begin, reasoning.end))
    if len(end) != 1:
        raise invalid(
            name, f"not supported for this model: {reasoning.end}, the end of its reasoning, is not one token"
        )
    return (() if is_thinking else begin), end


INPUT = "input"  # the only argument of a function that stands for a tool which is called with a text
OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
HIGH = r"u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a character, whose second half may follow
CHARS = re.compile(
    rf'(?:[^"\\]|\\(?:[^u]|(?!{HIGH})u[0-9a-fA-F]{{4}}|{HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u]))))*'
)


def quoted_input(text: str) -> str:
    """Write the arguments of a function that stands for a tool which is called with a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the text out of such arguments, piece by piece. Arguments of any other form are the text themselves."""

    def __init__(self) -> None:
        self._held = ""
        self._is_string: bool | None = None  # None: not known yet

    def read(self, piece: str) -> str:
        self._held += piece
        if self._is_string is None:
            opening = OPENING.match(self._held)
            if opening is None and f'{{"{INPUT}":"'.startswith("".join(self._held.split())):
                return ""
            self._is_string = opening is not None
            self._held = self._held[0 if opening is None else opening.end() :]
        found = CHARS.match(self._held) if self._is_string else None
        text = self._held if found is None else found[0]
        self._held = self._held[len(text) :]
        if not self._is_string:
            return text
        # A lone half of a character, which JSON allows, is no text.
        return str(json.loads(f'"{text}"', strict=False)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning. It reads bytes, because tokens may cut characters.

    Args:
        is_thinking: whether the answer begins within reasoning.
    """

    def __init__(self, reasoning: ReasoningFormat, *, is_thinking: bool) -> None:
        self.count = 0
        self._begin, self._end = reasoning.begin.encode(), reasoning.end.encode()
        self._again = "outside" if reasoning.again else "after"
        self._state = "inside" if is_thinking else "before"
        self._bytes = b""

    def add(self, token: bytes) -> None:
        if self._state == "after":
            return
        self._bytes += token
        if self._state == "outside":
            self._bytes = self._bytes[-len(self._begin) :]
            self._state = "inside" if self._bytes.endswith(self._begin) else "outside"
            return
        self.count += 1
        if self._state == "before":
            start = self._bytes.lstrip()
            if not self._begin.startswith(start[: len(self._begin)]):
                self.count, self._state = 0, self._again
            elif len(start) >= len(self._begin):
                self._state = "inside"
        if self._state == "inside":
            if self._end in self._bytes:
                self._state = self._again
            self._bytes = self._bytes[1 - len(self._end) :]


# --- the grammar ------------------------------------------------------------------------------------------------------

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
RULES = """\
start: {start}
TEXT: /(.|\\n)*/
KEY: /[^<>"=:,(){{}}\\[\\]\\s]+/
BLANK: /\\n{{0,2}}/
"""
NOT_A_CALL = "/[ \\t\\r\\n]*([^ \\t\\r\\n{}](.|\\n)*)?/"  # the character in braces begins a call
UNENFORCED = ("pattern", "format", "minLength", "maxLength")  # of strings without quotes
Spell = Callable[[str], str]


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
    tool_format: ToolFormat | None,
    calls: Calls,
    spell: Spell,
    *,
    reasoning: ReasoningFormat | None = None,
    is_thinking: bool = False,
) -> str:
    """Write the grammar of an answer.

    Args:
        tool_format: None if there are no functions; then the grammar is that of `calls.answer`.
        spell: returns a mark of the format as a term of the grammar: a text in quotes, or a special token.
        reasoning, is_thinking: as in AnswerParser. Reasoning may come before what is required.

    Raises:
        InvalidRequestError: the schema of a strict function demands something that the format cannot express.
    """
    before = content = ""
    if reasoning is not None:
        after = _spelled(reasoning.after, spell) or "BLANK"
        before = f"thinking {after}" if is_thinking else f"({_spelled(reasoning.begin, spell)} thinking {after})?"
        content = _spelled(reasoning.answer, spell)
    answer = f"{content} answer"
    used = {"start": f"{before} {answer if tool_format is None else _start(tool_format, calls, spell, content)}"}
    if tool_format is not None and "to_call" in used["start"]:
        used |= _lazily("to_call", tool_format.opener, spell)
    if calls.answer is not None:
        used["answer"] = f"%json {calls.answer}"
    if reasoning is not None:
        used |= _lazily("thinking", reasoning.end, spell)
    rules = [RULES.format(start=used.pop("start"))]
    if tool_format is not None:
        used["call"] = " | ".join(f"call_{index}" for index in range(len(calls.functions)))
        for index, function in enumerate(calls.functions):
            used |= _call_rules(tool_format, f"call_{index}", function, spell, is_required=calls.required)
    return "".join([*rules, *(f"{name}: {rule}\n" for name, rule in used.items())])


def literal(text: str) -> str:
    """Write a text as a term of the grammar."""
    return json.dumps(text)


def _spelled(markup: str, spell: Spell, **words: str) -> str:
    """Write markup as terms, its marks as `spell` writes them. words: what stands for words like NAME, as terms."""
    words = {ANY_WORD: "/[0-9]+/", **words}
    pieces = re.split(f"({MARK.pattern}|{'|'.join(words)})", markup)
    return " ".join(
        words.get(piece) or (spell if MARK.fullmatch(piece) else literal)(piece) for piece in pieces if piece
    )


def _start(tool_format: ToolFormat, calls: Calls, spell: Spell, content: str) -> str:
    opening = _spelled(tool_format.opener, spell)
    before, between, after = (
        _spelled(text, spell)
        for text in (tool_format.before.removeprefix(tool_format.opener), tool_format.between, tool_format.after)
    )
    if tool_format.before:
        group = f"{before} call ({between} call)* {after}" if calls.many else f"{before} call {after}"
        all_calls = f"{opening} {group}"
    else:
        group, all_calls = "call", f"{opening} call"
        if calls.many:
            all_calls += f" ({between} {opening} call)*"
    if tool_format.bare:
        first, *last = (f"({_spelled(tag, spell)})?" for tag in tool_format.tags)
        all_calls = f"{first} {all_calls} {' '.join(last)}"
    if calls.required or calls.answer is not None:
        return all_calls if calls.required else f"({content} answer | {all_calls})"
    if content:
        return f"({content} TEXT | {all_calls})"
    if tool_format.bare:
        first_char = (tool_format.before or tool_format.call)[0]
        return f"({NOT_A_CALL.format(re.escape(first_char))} | {all_calls})"
    return f"(to_call {group})* TEXT" if calls.many else f"(TEXT | to_call {group})"


def _lazily(name: str, mark: str, spell: Spell) -> dict[str, str]:
    """Write the rules for a text up to and including the first mark, which may be one token or spelled out."""
    term = _spelled(mark, spell)
    spelled_out = f"TEXT {literal(mark)}"
    if term == _spelled(mark, literal):
        return {f"{name}[lazy]": spelled_out}
    return {name: f"{name}_token | {name}_text", f"{name}_token": f"TEXT {term}", f"{name}_text[lazy]": spelled_out}


def _call_rules(
    tool_format: ToolFormat, rule: str, function: Function, spell: Spell, *, is_required: bool
) -> dict[str, str]:
    """Write the rules for one call of a function, after the first word of calls."""
    opener = "" if tool_format.before else tool_format.opener
    head, _, tail = tool_format.call.removeprefix(opener).partition("ARGUMENTS")
    name = literal(function.name)
    call = f"{_spelled(head, spell, NAME=name)} {rule}_arguments {_spelled(tail, spell)}"
    own: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    own = own if function.parameters is None else function.parameters
    is_enforced = is_required or function.strict
    if not tool_format.argument:
        schema = _json({"type": "object", **(own if is_enforced else {})}, function)
        return {rule: call, f"{rule}_arguments": schema}
    if not is_enforced or not isinstance(own.get("properties"), dict):
        argument = _argument(tool_format, f"{rule}_any", "KEY", None, function, spell)
        join = literal(tool_format.join) if tool_format.join else ""
        return {rule: call, f"{rule}_arguments": f"({rule}_any ({join} {rule}_any)*)?", **argument}
    used = {rule: call}
    # Each argument comes in its turn: `a` is what may follow if there was none yet, `b` if there was one.
    required, last = own.get("required") or (), len(own["properties"])
    used |= {f"{rule}_a{last}": '""', f"{rule}_b{last}": '""', f"{rule}_arguments": f"{rule}_a0"}
    for number, (key, schema) in enumerate(own["properties"].items()):
        term, join = f"{rule}_value_{number}", literal(tool_format.join) if tool_format.join else ""
        used |= _argument(tool_format, term, literal(key), schema, function, spell)
        for letter, separator in (("a", ""), ("b", join)):
            skipped = "" if key in required else f" | {rule}_{letter}{number + 1}"
            used[f"{rule}_{letter}{number}"] = f"{separator} {term} {rule}_b{number + 1}{skipped}"
    return used


def _argument(
    tool_format: ToolFormat, rule: str, key: str, schema: Any, function: Function, spell: Spell
) -> dict[str, str]:
    """Write the rules for one argument. schema: of its value; None: any value."""
    types = types_of(schema, function.parameters)
    head, _, tail = tool_format.argument.partition("VALUE")
    is_text = '("true" | "false")' if types is None else literal("true" if "string" in types else "false")
    begin = _spelled(head, spell, KEY=key, **{IS_STRING: is_text})
    value = schema if isinstance(schema, Mapping) else {}
    found = {f"{rule}_json": _json({**value, **_definitions(function)}, function)}
    choices = value["enum"] if "enum" in value else [value["const"]] if "const" in value else []
    is_string = types is not None and types == {"string"}
    if tool_format.values == "raw":
        if is_string and choices:
            return {rule: f"{begin} ({' | '.join(map(literal, choices))}) {_spelled(tail, spell)}"}
        if types is not None and "string" not in types:
            return {rule: f"{begin} {rule}_json {_spelled(tail, spell)}", **found}
        _check_text(value, function)
        end = tail.rstrip()
        return {rule: f"{begin} {rule}_text {_spelled(tail[len(end) :], spell)}", **_lazily(f"{rule}_text", end, spell)}
    if tool_format.values == "python":
        constants = [*(["True", "False"] if types is None or "boolean" in types else [])]
        constants += ["None"] if types is None or "null" in types else []
        return {
            rule: f"{begin} ({' | '.join([*map(literal, constants), f'{rule}_json'])}) {_spelled(tail, spell)}",
            **found,
        }
    quote = _spelled(tool_format.values, spell)
    if is_string and choices:
        return {rule: f"{begin} {quote} ({' | '.join(map(literal, choices))}) {quote} {_spelled(tail, spell)}"}
    if types is not None and "string" not in types:
        return {rule: f"{begin} {rule}_json {_spelled(tail, spell)}", **found}
    _check_text(value, function)
    text = _lazily(f"{rule}_text", tool_format.values, spell)
    other = {} if is_string else found
    return {
        rule: f"{begin} ({quote} {rule}_text{f' | {rule}_json' if other else ''}) {_spelled(tail, spell)}",
        **text,
        **other,
    }


def _check_text(schema: Mapping[str, Any], function: Function) -> None:
    """Raise InvalidRequestError if a strict function demands of a text what its grammar cannot express."""
    unenforced = [name for name in UNENFORCED if name in schema]
    if function.strict and unenforced:
        reason = f"this model writes texts without quotes, so {unenforced[0]} is not supported"
        raise invalid("tools", f"the parameters of {function.name} cannot be enforced: {reason}")


def _definitions(function: Function) -> dict[str, Any]:
    """List what references in the schemas of a function's parameters refer to."""
    own = function.parameters or {}
    return {name: own[name] for name in ("$defs", "definitions") if name in own}


def _json(schema: Mapping[str, Any], function: Function) -> str:
    """Write the schema of a value. If the function is strict, anything in its schema that the grammar cannot express is
    an error."""
    guidance = SPACING if function.strict else {**SPACING, "lenient": True}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"
