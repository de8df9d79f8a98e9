"""Request bodies with the field names of OpenAI and vLLM, decoded strictly. Knows no engine.

The structs declare the supported parameters; client_fields.py has those that clients know and this server refuses or
ignores. Any other name is an error. Every parameter may be null, which means "not given". SamplingParams checks the
ranges.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from penstock.errors import InvalidRequestError, NotSupportedError, check_float, check_int, fail, invalid
from penstock.interface.sampling_params import MAX_CHOICES, TYPES, fields_of, unknown_field
from penstock.server.client_fields import strip_unsupported
from penstock.tokenizer.answers import INPUT, Function, quoted_input

# --- tools ------------------------------------------------------------------------------------------------------------


MAX_TOOLS = 1024
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Strict(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all request bodies. `place` is the body's name in UNSUPPORTED."""

    place: ClassVar[str] = ""


class FunctionDefinition(Strict, kw_only=True, frozen=True):
    """A function of `tools`; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_shown(self) -> dict[str, Any]:
        """Convert the function for the chat template, without `strict`, which concerns only the server."""
        names = ("name", "description", "parameters")
        function = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"type": "function", "function": function}

    def as_function(self) -> Function:
        return Function(self.name, self.parameters, bool(self.strict))


class FunctionTool(Strict, kw_only=True, frozen=True, tag_field="type", tag="function"):
    function: FunctionDefinition


class Grammar(Strict, kw_only=True, frozen=True):
    syntax: Literal["lark", "regex"]
    definition: str


class TextFormat(Strict, kw_only=True, frozen=True, tag_field="type", tag="text"):
    pass


class GrammarFormat(Strict, kw_only=True, frozen=True, tag_field="type", tag="grammar"):
    grammar: Grammar


class CustomDefinition(Strict, kw_only=True, frozen=True):
    """A tool that is called with a text, whose form `format` may give."""

    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class CustomTool(Strict, kw_only=True, frozen=True, tag_field="type", tag="custom"):
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        """The function that the model is shown instead, whose only argument is the text. It is always enforced.

        Raises:
            NotSupportedError: the text has a form that the string of an argument cannot be held to.
        """
        text = {"type": "string"}
        if isinstance(self.custom.format, GrammarFormat):
            if self.custom.format.grammar.syntax != "regex":
                message = f"tools: {self.custom.name}: a grammar of the syntax lark is not supported; regex is"
                raise NotSupportedError(message, param="tools")
            text["pattern"] = f"^(?:{self.custom.format.grammar.definition})$"
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        name, description = self.custom.name, self.custom.description
        return FunctionDefinition(name=name, description=description, parameters=schema, strict=True)


Tool = FunctionTool | CustomTool


class FunctionName(Strict, kw_only=True, frozen=True):
    name: str


class FunctionChoice(Strict, kw_only=True, frozen=True, tag_field="type", tag="function"):
    """The `tool_choice` that forces a call of one function."""

    function: FunctionName


class CustomChoice(Strict, kw_only=True, frozen=True, tag_field="type", tag="custom"):
    """The `tool_choice` that forces a call of one custom tool."""

    custom: FunctionName

    @property
    def function(self) -> FunctionName:
        return self.custom


NamedChoice = FunctionChoice | CustomChoice


class Allowed(Strict, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class AllowedChoice(Strict, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    """The `tool_choice` that allows only some of the tools. The model is still shown all of them."""

    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


# --- calls in messages ------------------------------------------------------------------------------------------------


class CalledFunction(Strict, kw_only=True, frozen=True):
    """The function of a tool call. `parsed_arguments` is added by the openai client, which sends its messages back."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class CalledCustom(Strict, kw_only=True, frozen=True):
    name: str
    input: str


class ToolCall(Strict, kw_only=True, frozen=True):
    """A tool call in a message of the assistant. `index` occurs if a client built the message from a stream."""

    id: str
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("function", "custom") if getattr(self, name) is not None]
        if given != [self.type]:
            raise ValueError(
                f"a call of the type {self.type} has the field {self.type}, and no other for what is called"
            )

    def as_shown(self) -> dict[str, Any]:
        """Convert the tool call for the chat template, which sees a function and no index."""
        called: Any = self.function or self.custom
        arguments = called.arguments if self.custom is None else quoted_input(self.custom.input)
        return {"id": self.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


def check_tools(tools: list[Tool] | None) -> None:
    """Raise InvalidRequestError for too many tools, a bad or repeated name, or parameters that are no object schema."""
    if len(tools or ()) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools or ())} are too many; at most {MAX_TOOLS}")
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


# --- bodies -----------------------------------------------------------------------------------------------------------


Body = TypeVar("Body", bound="Strict")


class ComputingRequest(Strict, kw_only=True, frozen=True):
    """The fields of every request that the engine computes. `user` and those after it are labels for the log."""

    model: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    request_id: str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for values that are out of range or contradict each other."""
        if self.timeout is not None:
            check_float("timeout", self.timeout, 0.0, 86400.0, low_open=True)


def with_sampling_fields(body: type[Body]) -> type[Body]:
    """Add to a body those fields of SamplingParams that its route has; each of them may be null.

    A class declares by itself only the fields that the code of the server reads.
    """
    declared = body.__struct_fields__
    missing = [(name, TYPES[name] | None, None) for name in fields_of(body.place) if name not in declared]
    made = msgspec.defstruct(body.__name__, missing, bases=(body,), module=body.__module__, kw_only=True, frozen=True)
    return cast(type[Body], made)


ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(ComputingRequest, kw_only=True, frozen=True):
    """The fields that completions and chat completions share, beside those that `with_sampling_fields` adds.

    Attributes:
        max_tokens: -1 goes to the end of the context, as None does in SamplingParams.
        best_of: answers that are computed; the n with the highest cumulative log-probability are returned.
        repeat_penalty: llama.cpp's name of repetition_penalty.
        cache_prompt: llama.cpp's; False finds no cached prefix, and leaves none for other requests.
        service_tier: the answer says that it was served as "default".
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    resumable: bool | None = None
    timeline: bool | None = None
    prompt_cache_key: str | None = None
    repeat_penalty: float | None = None
    cache_prompt: bool | None = None
    service_tier: ServiceTier | None = None

    def check(self) -> None:
        if self.best_of is not None:
            check_int("best_of", self.best_of, max(self.n or 1, 1), MAX_CHOICES)
            for name in ("stream", "use_beam_search"):
                if getattr(self, name) and self.best_of > (self.n or 1):
                    raise invalid("best_of", f"more than n is not allowed with {name}")
        if self.repeat_penalty is not None and getattr(self, "repetition_penalty", None) is not None:
            raise invalid("repeat_penalty", "not allowed with repetition_penalty, its name here")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed with stream: true")
        if self.resumable and not self.stream:
            raise invalid("resumable", "only allowed with stream: true")
        if self.resumable and self.use_beam_search:
            raise invalid("resumable", "not allowed with use_beam_search: the answer comes at the end, and as a whole")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "not available with stream: true")
        if self.resumable and self.timeline:
            message = "not allowed with resumable: such a stream has the same bytes whenever it is computed"
            raise invalid("timeline", message)
        super().check()

    @property
    def num_choices(self) -> int:
        """The number of answers that are computed for each prompt."""
        return self.best_of or self.n or 1

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


@with_sampling_fields
class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/completions. `inputs` determines which of the four kinds of prompt it has."""

    place: ClassVar[str] = "completions"

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.suffix and self.echo:
            raise invalid("suffix", "not allowed with echo: the answer ends no text")


class ContentPart(Strict, kw_only=True, frozen=True):
    type: str
    text: str | None = None
    cache_control: dict[str, Any] | None = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES = get_args(Role)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Message(Strict, kw_only=True, frozen=True):
    """One turn of a conversation.

    Clients send reasoning back in `reasoning_content` or `reasoning`. `parsed` is added by the openai client, and
    `provider_specific_fields` by litellm; both are ignored.
    """

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    provider_specific_fields: dict[str, Any] | None = None


@with_sampling_fields
class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    place: ClassVar[str] = "chat"

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        self.check_tools()
        check_calls(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only allowed with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_completion_tokens", "differs from max_tokens, its older name; give one of them")

    def with_tools(self) -> "ChatRequest":
        """Write the functions of the older API as tools, and their calls and results as those of tools. `functions`
        stays: it asks for an answer in its own form, with one call at most."""
        in_turns = any(turn.function_call or turn.role == "function" for turn in self.messages)
        if not self.functions and not in_turns and not isinstance(self.function_call, FunctionName):
            return self
        if self.tools is not None or self.tool_choice is not None:
            raise invalid("functions", "not allowed with tools, their newer name")
        messages: list[Message] = []
        call_id = None
        for index, turn in enumerate(self.messages):
            if turn.function_call is not None and not turn.tool_calls:
                call_id = f"f{index:08}"  # nine letters and digits, the kind that all templates take
                call = ToolCall(id=call_id, function=turn.function_call)
                turn = msgspec.structs.replace(turn, function_call=None, tool_calls=[call])
            elif turn.role == "function":
                turn = msgspec.structs.replace(turn, role="tool", tool_call_id=call_id)
            messages.append(turn)
        choice = self.function_call
        return msgspec.structs.replace(
            self,
            messages=messages,
            tools=[FunctionTool(function=function) for function in self.functions or ()],
            tool_choice=FunctionChoice(function=choice) if isinstance(choice, FunctionName) else choice,
            parallel_tool_calls=False if self.functions else None,
        )

    # What the tool fields mean together.

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown: none if tool_choice is "none", so that it calls none."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def callable_names(self) -> list[str]:
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return [choice.function.name]
        if isinstance(choice, AllowedChoice):
            return [entry.function.name for entry in choice.allowed_tools.tools]
        return [tool.function.name for tool in self.offered]

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedChoice)

    def check_tools(self) -> None:
        """Raise InvalidRequestError for invalid tools, and for a tool_choice that names no offered tool."""
        check_tools(self.tools)
        known = {tool.function.name for tool in self.tools or ()}
        if not known and self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "there are no tools to choose from")
        for name in [] if self.tool_choice == "none" else self.callable_names:
            if name not in known:
                raise fail("tool_choice", name, f"the name of one of the tools: {', '.join(sorted(known))[:200]}")
        if known and self.tool_choice != "none" and not self.callable_names:
            raise invalid("tool_choice", "allowed_tools lists no tool")


class PromptOrMessages(Strict, kw_only=True, frozen=True):
    """A prompt, or messages to render."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequestError unless a body has either a prompt, or messages and what is rendered with them."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if self.messages is None and getattr(self, name, None):
                raise invalid(name, "only with messages: a prompt is not rendered")


class PinRequest(PromptOrMessages, kw_only=True, frozen=True):
    """POST /v1/cache/pin: a prompt, or the messages with which conversations begin."""

    place: ClassVar[str] = "pin"

    name: str | None = None
    cache_salt: str | None = None


class PrefillRequest(Strict, kw_only=True, frozen=True):
    """POST /v1/kv/prefill: a prompt to be computed for an engine elsewhere.

    Attributes:
        store: name of that engine's block directory.
        adapter: id of the prompt's adapter (client/adapters.py).
    """

    store: str
    prompt_token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None


class BlocksRequest(Strict, kw_only=True, frozen=True):
    """POST /v1/kv/blocks: names of block files."""

    names: list[str]


# --- from bytes to a body ---------------------------------------------------------------------------------------------

MISSING = "Object missing required field `"
UNKNOWN = "Object contains unknown field `"
# Half of a character that JSON writes as two escapes, as clients send it that cut a text between the two.
LONE_SURROGATE = re.compile(
    rb"\\(?<!\\\\)u[dD]"  # a backslash that is not itself escaped
    rb"(?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
MAX_SEARCHED = 2**20  # bytes of a body that is not JSON


MAX_VALUES = 2**18  # values in a body; no other request is served while they are decoded, for 20 to 40 ms
MAX_STRINGS, MAX_NESTED = 2**16, 40_000  # strings, and lists, objects and their members, which take longer
SLICE = 2**18  # bytes that are looked at between two moments at which other requests are served


def check_values(data: bytes) -> None:
    """Raise InvalidRequestError for a body with so many values that decoding it would hold up all other requests."""
    at = num_values = num_strings = num_nested = 0
    in_string = False
    while at < len(data):
        piece = data[at : at + SLICE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # its last character is escaped
            piece = data[at : at + SLICE + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        num_strings += (len(parts) - in_string) // 2
        in_string ^= len(parts) % 2 == 0
        num_values += outside.count(b",")
        num_nested += sum(map(outside.count, (b"[", b"{", b":")))
        if num_values > MAX_VALUES or num_strings > MAX_STRINGS or num_nested > MAX_NESTED:
            what = f"{MAX_VALUES} values, {MAX_STRINGS} strings and {MAX_NESTED} lists, objects and members of objects"
            raise InvalidRequestError(f"the body has more than {what}", code="too_many_values")


def parse(data: bytes, kind: type[Strict]) -> Any:
    """Decode the JSON of a request of type `kind`. Raise InvalidRequestError if it is not valid JSON, or too much."""
    check_values(data)
    with _naming_the_field():
        try:
            return msgspec.json.decode(data)
        except msgspec.ValidationError:  # a number is out of range, and only the typed decoder names its field
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError:
            if found := LONE_SURROGATE.search(data, 0, MAX_SEARCHED):
                message = f"the body is not valid JSON: {found[0].decode()} is a lone surrogate, half of a character"
                raise InvalidRequestError(message, code="invalid_json") from None
            raise


def to_request(parsed: Any, kind: type[Body]) -> Body:
    """Convert the result of `parse` to a `kind`. Raise InvalidRequestError, naming the field, if it does not fit."""
    strip_unsupported(parsed, kind.place)
    if isinstance(parsed, dict):
        for name in parsed:
            if name not in kind.__struct_fields__:
                raise unknown_field(name, kind.__struct_fields__)
    with _naming_the_field():
        return msgspec.convert(parsed, kind, str_keys=True)


@contextlib.contextmanager
def _naming_the_field() -> Iterator[None]:
    try:
        yield
    except msgspec.ValidationError as exc:
        raise _invalid_field(str(exc)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"the body is not valid JSON: {exc}", code="invalid_json") from None


def _invalid_field(message: str) -> InvalidRequestError:
    """Turn "Expected `int`, got `str` - at `$.n`" into an error about n.

    The path is the last part. A field name before it comes from the caller, and may look like a path.
    """
    what, found, path = message.rpartition("`$")
    if not found:
        what, path = message, ""
    what = what.removesuffix(" - at `key` in ").removesuffix(" - at ")
    path = path.removeprefix(".").removesuffix("`")
    code, field = "invalid_type", ""
    for start, name in ((UNKNOWN, "unknown_field"), (MISSING, "missing_field")):
        if what.startswith(start):
            code, field = name, what[len(start) :].removesuffix("`")
    if path.endswith("role") and what.startswith("Invalid enum value"):
        what += f"; it must be one of {', '.join(ROLES)}"
    param = ".".join(part for part in (path, field) if part) or None
    return InvalidRequestError(f"{param or 'the body'}: {what[0].lower()}{what[1:]}", param=param, code=code)
