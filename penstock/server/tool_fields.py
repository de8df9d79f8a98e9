"""The fields of a request that are about tools, with OpenAI's names."""

import re
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequestError
from penstock.tokenizer.answers import Function
from penstock.validation import fail

MAX_TOOLS = 1024
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class _Strict(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of the structs in this file: unknown fields are errors."""


class FunctionDefinition(_Strict, kw_only=True, frozen=True):
    """A function of `tools`; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, kw_only=True, frozen=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_shown(self) -> dict[str, Any]:
        """Return the tool as the chat template sees it, without `strict`, which concerns only the server."""
        function = {"name": self.function.name}
        for name in ("description", "parameters"):
            if getattr(self.function, name) is not None:
                function[name] = getattr(self.function, name)
        return {"type": "function", "function": function}

    def as_function(self) -> Function:
        """Return the tool in the form that the grammar needs."""
        return Function(self.function.name, self.function.parameters, bool(self.function.strict))


class FunctionName(_Strict, kw_only=True, frozen=True):
    name: str


class NamedChoice(_Strict, kw_only=True, frozen=True, tag_field="type", tag="function"):
    """The `tool_choice` that forces a call of one function."""

    function: FunctionName


class AllowedEntry(_Strict, kw_only=True, frozen=True):
    type: Literal["function"]
    function: FunctionName


class Allowed(_Strict, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedEntry]


class AllowedChoice(_Strict, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    """The `tool_choice` that allows only some of the tools. The model is still shown all of them."""

    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


# --- the same for /v1/responses, where a function's fields are on the same level as its type --------------------------


class FunctionTool(FunctionDefinition, kw_only=True, frozen=True):
    """An entry of a response's `tools`."""

    type: Literal["function"]

    def as_tool(self) -> Tool:
        """Return the same in the form of a chat request."""
        fields = {name: getattr(self, name) for name in FunctionDefinition.__struct_fields__}
        return Tool(type="function", function=FunctionDefinition(**fields))


class FunctionChoice(_Strict, kw_only=True, frozen=True, tag_field="type", tag="function"):
    name: str

    def as_choice(self) -> NamedChoice:
        """Return the same in the form of a chat request."""
        return NamedChoice(function=FunctionName(name=self.name))


class AllowedFunction(_Strict, kw_only=True, frozen=True):
    type: Literal["function"]
    name: str


class AllowedFunctions(_Strict, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]

    def as_choice(self) -> AllowedChoice:
        """Return the same in the form of a chat request."""
        entries = [AllowedEntry(type="function", function=FunctionName(name=tool.name)) for tool in self.tools]
        return AllowedChoice(allowed_tools=Allowed(mode=self.mode, tools=entries))


ResponseToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions


# --- calls in messages ------------------------------------------------------------------------------------------------


class CalledFunction(_Strict, kw_only=True, frozen=True):
    """The function of a tool call. `parsed_arguments` is added by the openai client, which sends its messages back."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(_Strict, kw_only=True, frozen=True):
    """A tool call in a message of the assistant. `index` occurs if a client built the message from a stream."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None

    def as_shown(self) -> dict[str, Any]:
        """Return the tool call as the chat template sees it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolUse:
    """What the tool fields of a body mean together. A mixin for ChatRequest, which has the fields."""

    __slots__ = ()

    tools: list[Tool] | None
    tool_choice: ToolChoice | None

    @property
    def offered(self) -> list[Tool]:
        """Return the tools that the model is shown: none if tool_choice is "none", so that it calls none."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def callable_names(self) -> list[str]:
        """Return the names of the tools that the model may call."""
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return [choice.function.name]
        if isinstance(choice, AllowedChoice):
            return [entry.function.name for entry in choice.allowed_tools.tools]
        return [tool.function.name for tool in self.offered]

    @property
    def must_call(self) -> bool:
        """Return whether the answer has to be a tool call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedChoice)

    def check_tools(self) -> None:
        """Raise InvalidRequestError for invalid tools, and for a tool_choice that names no offered tool."""
        check_tools(self.tools)
        known = {tool.function.name for tool in self.tools or ()}
        if not known and self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        for name in [] if self.tool_choice == "none" else self.callable_names:
            if name not in known:
                raise fail("tool_choice", name, f"the name of one of the tools: {', '.join(sorted(known))[:200]}")
        if known and self.tool_choice != "none" and not self.callable_names:
            raise InvalidRequestError("tool_choice: allowed_tools lists no tool", param="tool_choice")


def check_tools(tools: list[Tool] | None) -> None:
    """Raise InvalidRequestError for too many tools, a bad or repeated name, or parameters that are no object schema."""
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: {len(tools or ())} are too many; at most {MAX_TOOLS}", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools or ()):
        function, place = tool.function, f"tools[{index}].function"
        if NAME.fullmatch(function.name) is None:
            allowed = "1 to 64 letters, digits, underscores, dots or dashes"
            raise InvalidRequestError(fail(f"{place}.name", function.name, allowed).message, param="tools")
        if function.name in names:
            raise InvalidRequestError(f"{place}.name: {function.name} is the name of two tools", param="tools")
        names.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            message = f'{place}.parameters: must be the JSON schema of an object, of type "object"'
            raise InvalidRequestError(message, param="tools")


def check_calls(messages: list[Any]) -> None:
    """Raise InvalidRequestError if a tool's result answers no earlier call, or if a wrong role has calls or results."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.tool_calls and message.role != "assistant":
            raise _refused(f"{place}.tool_calls: only the assistant calls tools, not the role {message.role}")
        known.update(call.id for call in message.tool_calls or ())
        if message.role != "tool":
            if message.tool_call_id is not None:
                raise _refused(f"{place}.tool_call_id: only a message of the role tool answers a call")
        elif message.tool_call_id is None:
            raise _refused(f"{place}.tool_call_id: missing; it is the id of the call that this message answers")
        elif message.tool_call_id not in known:
            shown = fail("tool_call_id", message.tool_call_id, "the id of a call in an earlier message").message
            raise _refused(f"{place}.{shown}")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
