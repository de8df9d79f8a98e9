"""How families of models write tool calls: one class per format. The chat template shows which format a model uses.

    hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>           Hermes, Qwen 2.5 and 3
    llama3_json  {"name": "add", "parameters": {"a": 1}}, perhaps after <|python_tag|>       Llama 3.1 to 3.3
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                        Mistral
                 [TOOL_CALLS]add[ARGS]{"a": 1}                                               its newer models

`read` splits an answer into its parts. Text that turns out not to be a call is content, unchanged.
"""

import json
import re
from collections.abc import Callable, Container
from typing import ClassVar

from penstock.tokenizer.answers.calls import AnyName, give_up, read_arguments, read_call
from penstock.tokenizer.answers.reader import Kind, Reader, Steps

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
        """Return the grammar of what follows the first mark."""
        return "call"

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        """Return the grammar of a call before and after its arguments. spell: returns the term of a mark."""
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
    """Reads what Mistral reads, but its grammar makes calls in the newer models' format."""

    between = ""

    def group(self, *, many: bool) -> str:
        return "call"

    def around_arguments(self, name: str, spell: Callable[[str], str]) -> tuple[str, str]:
        return f"{json.dumps(name)} {spell(self.marks[1])}", ""


TOOL_FORMATS: dict[str, ToolFormat] = {item.name: item for item in (Hermes(), Llama3(), Mistral())}
OTHER_MARKUP = ("<function=", "<arg_key>", "<|tool_call>")  # shows formats with Hermes' tags but other contents


def tool_format_of(template: str, name: str = "auto") -> ToolFormat | None:
    """Return the format with this name or, for "auto", the one that a chat template's text shows; None if unknown."""
    if name == "mistral" or (name == "auto" and "[TOOL_CALLS]" in template):
        return NewMistral() if "[ARGS]" in template else TOOL_FORMATS["mistral"]
    if name != "auto":
        return TOOL_FORMATS.get(name)
    if "<tool_call>" in template and not any(markup in template for markup in OTHER_MARKUP):
        return TOOL_FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return TOOL_FORMATS["llama3_json"]
    return None
