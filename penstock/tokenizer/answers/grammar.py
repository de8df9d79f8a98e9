"""The grammar of answers that call tools, in Lark's notation as llguidance reads it.

It describes what a request asks for, in the markup that the model was trained on: at least one call (`required`), a
call of one function, at most one call, or free text in which every call that begins obeys its function's schema.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tokenizer.answers.answer import END_OF_THINKING, THINK
from penstock.tokenizer.answers.formats import ToolFormat

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
    """Return the grammar of an answer.

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
    """Return a text as a term of the grammar."""
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
    """Return the rules for a text up to and including the first mark, which may be one token or spelled out."""
    term = spell(mark)
    spelled_out = f"TEXT {literal(mark)}"
    if term == literal(mark):
        return {f"{name}[lazy]": spelled_out}
    return {name: f"{name}_token | {name}_text", f"{name}_token": f"TEXT {term}", f"{name}_text[lazy]": spelled_out}


def _schema(function: Function, *, is_enforced: bool) -> str:
    """Return the schema of a function's arguments. If the function is strict, anything in its schema that the grammar
    cannot express is an error."""
    own = {"properties": {}, "additionalProperties": False} if function.parameters is None else function.parameters
    guidance = SPACING if function.strict else {**SPACING, "lenient": True}
    return json.dumps({"type": "object", **(own if is_enforced else {}), "x-guidance": guidance})
