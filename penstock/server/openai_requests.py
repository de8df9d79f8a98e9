"""Request bodies with the field names of OpenAI and vLLM, decoded strictly. Knows no engine.

The structs declare the supported parameters; UNSUPPORTED lists those that clients know and this server refuses.
Any other name is an error. Every parameter may be null, which means "not given". SamplingParams checks the ranges.
"""

import contextlib
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec

from penstock.errors import InvalidRequestError, NotSupportedError, check_float, fail, shown
from penstock.interface.sampling_params import TYPES, fields_of, unknown_field
from penstock.tokenizer.answers import Function

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


class Tool(Strict, kw_only=True, frozen=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_shown(self) -> dict[str, Any]:
        """Convert the tool for the chat template, without `strict`, which concerns only the server."""
        function = {"name": self.function.name}
        for name in ("description", "parameters"):
            if getattr(self.function, name) is not None:
                function[name] = getattr(self.function, name)
        return {"type": "function", "function": function}

    def as_function(self) -> Function:
        return Function(self.function.name, self.function.parameters, bool(self.function.strict))


class FunctionName(Strict, kw_only=True, frozen=True):
    name: str


class NamedChoice(Strict, kw_only=True, frozen=True, tag_field="type", tag="function"):
    """The `tool_choice` that forces a call of one function."""

    function: FunctionName


class AllowedEntry(Strict, kw_only=True, frozen=True):
    type: Literal["function"]
    function: FunctionName


class Allowed(Strict, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedEntry]


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


class ToolCall(Strict, kw_only=True, frozen=True):
    """A tool call in a message of the assistant. `index` occurs if a client built the message from a stream."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None

    def as_shown(self) -> dict[str, Any]:
        """Convert the tool call for the chat template, which sees no type and no index."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


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


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(ComputingRequest, kw_only=True, frozen=True):
    """The fields that completions and chat completions share, beside those that `with_sampling_fields` adds."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
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

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only allowed with stream: true", param="stream_options")
        if self.resumable and not self.stream:
            raise InvalidRequestError("resumable: only allowed with stream: true", param="resumable")
        if self.resumable and self.use_beam_search:
            message = "resumable: not allowed with use_beam_search: the answer comes at the end, and as a whole"
            raise InvalidRequestError(message, param="resumable")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs: not available with stream: true", param="prompt_logprobs")
        if self.resumable and self.timeline:
            message = "timeline: not allowed with resumable: such a stream has the same bytes whenever it is computed"
            raise InvalidRequestError(message, param="timeline")
        super().check()

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
    echo: bool | None = None
    logprobs: int | None = None


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
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
            raise InvalidRequestError("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_completion_tokens: differs from max_tokens, its older name; give one of them"
            raise InvalidRequestError(message, param="max_completion_tokens")

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
            raise InvalidRequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        for name in [] if self.tool_choice == "none" else self.callable_names:
            if name not in known:
                raise fail("tool_choice", name, f"the name of one of the tools: {', '.join(sorted(known))[:200]}")
        if known and self.tool_choice != "none" and not self.callable_names:
            raise InvalidRequestError("tool_choice: allowed_tools lists no tool", param="tool_choice")


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
            raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if self.messages is None and getattr(self, name, None):
                raise InvalidRequestError(f"{name}: only with messages: a prompt is not rendered", param=name)


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


# --- what this server refuses of OpenAI's and vLLM's parameters and routes --------------------------------------------
# Applied to the decoded JSON before it is converted, so that the bodies declare only supported fields.


MAX_MESSAGES = 4096  # in a conversation; also the number of parts of a message that are searched
INSIDE = {  # place -> the fields in which lists of other places are
    "block": {"content": "block"},
    "chat": {"messages": "message"},
    "message": {"content": "part"},
    "messages": {"messages": "turn", "tools": "client_tool"},
    "ollama_chat": {"messages": "ollama_message"},
    "pin": {"messages": "message"},
    "responses": {"tools": "tool"},
    "tokenize": {"messages": "message"},
    "turn": {"content": "block"},
}
# Places whose `type` may be unsupported -> the field that holds them. Anthropic's types of tools end in a date.
OF_TYPE = {"block": "messages", "client_tool": "tools", "part": "messages", "tool": "tools"}
DATE = re.compile(r"_20\d{6}")


class Unsupported(NamedTuple):
    """The refusal of a parameter.

    Attributes:
        places: the routes, or parts of a body, where clients send the parameter; elsewhere it is an unknown name.
        neutral: values that mean the same as leaving the parameter out. Like null, they are accepted.
        forbidden: whether a request may never set it.
        instead: what there is instead; without it, support is planned.
    """

    places: str = "completions chat"
    neutral: tuple[Any, ...] = ()
    forbidden: bool = False
    instead: str = ""


KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}  # an edit of a context that removes nothing
UNSUPPORTED: dict[str, Unsupported] = {
    "annotations": Unsupported("message", ([],)),
    "allowed_callers": Unsupported("client_tool", (["direct"],)),
    "apply_patch": Unsupported("tool"),
    "bash": Unsupported("client_tool"),
    "audio": Unsupported("chat message"),
    "best_of": Unsupported(neutral=(1,)),
    "chat_template": Unsupported("completions chat responses tokenize pin", forbidden=True),
    "chat_template_kwargs": Unsupported("completions", ({},), instead="a prompt is not rendered; see /tokenize"),
    "citations": Unsupported("block", ([],)),
    "code_execution": Unsupported("client_tool"),
    "code_interpreter": Unsupported("tool"),
    "computer": Unsupported("tool client_tool"),
    "container": Unsupported("messages"),
    "container_upload": Unsupported("block"),
    "context_management": Unsupported("messages", ({"edits": []}, {"edits": [KEEPS_ALL]})),
    "computer_use_preview": Unsupported("tool"),
    "context": Unsupported("ollama_generate", ([],), instead="send the conversation to /api/chat"),
    "conversation": Unsupported("responses"),
    "custom": Unsupported("tool"),
    "defer_loading": Unsupported("client_tool", (False,)),
    "document": Unsupported("block"),
    "documents": Unsupported("completions", ([],), instead="a prompt is not rendered; chat completions take them"),
    "echo": Unsupported("chat", (False,)),
    "enable_response_messages": Unsupported("responses", (False,)),
    "file": Unsupported("part"),
    "file_search": Unsupported("tool"),
    "function_call": Unsupported("chat message", ("none", "auto")),
    "functions": Unsupported("chat", ([],)),
    "guided_decoding_backend": Unsupported(neutral=("auto", "guidance"), instead="llguidance is the only backend"),
    "guided_whitespace_pattern": Unsupported(instead="it is whitespace_pattern in structured_outputs"),
    "image": Unsupported("block"),
    "image_generation": Unsupported("tool"),
    "image_url": Unsupported("part"),
    "include_reasoning": Unsupported("chat responses", (True,)),
    "images": Unsupported("ollama_message ollama_generate", ([],)),
    "inference_geo": Unsupported("messages"),
    "input_audio": Unsupported("part"),
    "input_examples": Unsupported("client_tool", ([],)),
    "kv_transfer_params": Unsupported("completions chat responses"),
    "local_shell": Unsupported("tool"),
    "max_tool_calls": Unsupported("responses"),
    "mcp": Unsupported("tool"),
    "mcp_servers": Unsupported("messages", ([],)),
    "mcp_toolset": Unsupported("client_tool"),
    "memory": Unsupported("client_tool"),
    "media_io_kwargs": Unsupported("completions chat responses tokenize", forbidden=True),
    "mm_processor_kwargs": Unsupported("completions chat responses tokenize", forbidden=True),
    "modalities": Unsupported("chat", (["text"],)),
    "moderation": Unsupported("responses"),
    "namespace": Unsupported("tool"),
    "output_attentions": Unsupported(neutral=(False,)),
    "output_hidden_states": Unsupported(neutral=(False,)),
    "prediction": Unsupported("chat"),
    "previous_input_messages": Unsupported("responses"),
    "prompt": Unsupported("responses"),
    "prompt_cache_retention": Unsupported("responses", ("in_memory",)),
    "prompt_embeds": Unsupported("completions"),
    "redacted_thinking": Unsupported("block"),
    "refusal": Unsupported("message part"),
    "search_result": Unsupported("block"),
    "server_tool_use": Unsupported("block"),
    "service_tier": Unsupported("completions chat responses messages", ("auto", "default", "standard_only")),
    "shell": Unsupported("tool"),
    "shift": Unsupported("ollama_chat ollama_generate", (False,)),
    "speed": Unsupported("messages", ("standard",)),
    "store": Unsupported(neutral=(False,)),
    "structural_tag": Unsupported(),
    "suffix": Unsupported("completions ollama_generate", ("",)),
    "template": Unsupported("ollama_generate", ("",), forbidden=True),
    "text_editor": Unsupported("client_tool"),
    "tool_search": Unsupported("tool"),
    "tool_search_tool_bm25": Unsupported("client_tool"),
    "tool_search_tool_regex": Unsupported("client_tool"),
    "toolset_name": Unsupported("block"),
    "top_logprobs": Unsupported("responses", (0,)),
    "truncate": Unsupported("ollama_chat ollama_generate", (False,)),
    "video_url": Unsupported("part"),
    "verbose": Unsupported("ollama_show", (False,)),
    "vllm_xargs": Unsupported("completions chat responses"),
    "web_fetch": Unsupported("client_tool"),
    "web_search": Unsupported("tool client_tool"),
    "web_search_2025_08_26": Unsupported("tool"),
    "web_search_options": Unsupported("chat"),
    "web_search_preview": Unsupported("tool"),
}

UNSUPPORTED_ROUTES = (
    "/v1/responses/{id}/input_items",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/load",
    *(f"/api/{name}" for name in ("create", "copy", "delete", "push")),
)


def strip_unsupported(body: Any, place: str) -> None:
    """Remove from `body`, in place, the unsupported parameters whose value changes nothing.

    Args:
        body: decoded JSON. Anything but an object is ignored here, and refused by the typed decoding.
        place: selects the rows of the table that apply, by their `places`.

    Raises NotSupportedError for a planned parameter and InvalidRequestError for a forbidden one.
    """
    if not isinstance(body, dict):
        return
    if place in OF_TYPE and isinstance(kind := body.get("type"), str) and _applies(DATE.sub("", kind), place):
        raise _refusal(OF_TYPE[place], {"type": kind})
    _check_best_of(body)
    for name in sorted(UNSUPPORTED.keys() & body.keys()):
        if _applies(name, place) and not _is_neutral(name, value := body.pop(name)):
            raise _refusal(name, value)
    for key, inner in INSIDE.get(place, {}).items():
        items = body.get(key)
        for item in islice(items, MAX_MESSAGES) if isinstance(items, list) else ():
            strip_unsupported(item, inner)


def _check_best_of(body: dict[str, Any]) -> None:
    """Refuse a best_of that is less than n: the best of one answer cannot be several."""
    best_of, n = body.get("best_of"), body.get("n")
    if type(best_of) is int and type(n) is int and best_of < n:
        raise InvalidRequestError(f"best_of: {best_of} is less than n = {shown(n)}", param="best_of")


def _applies(name: str, place: str) -> bool:
    return name in UNSUPPORTED and place in UNSUPPORTED[name].places.split()


def _is_neutral(name: str, value: Any) -> bool:
    """Check that a value changes nothing. Types count: true is not 1."""
    return value is None or any(value == same and type(value) is type(same) for same in UNSUPPORTED[name].neutral)


def _refusal(name: str, value: Any) -> InvalidRequestError:
    if name in UNSUPPORTED and UNSUPPORTED[name].forbidden:
        message = f"{name}: not accepted from a request; the model's own template and processing are used"
        return InvalidRequestError(message, param=name, code="not_allowed")
    if name in UNSUPPORTED and UNSUPPORTED[name].instead:
        message = f"{name}: {shown(value)} is not supported; {UNSUPPORTED[name].instead}"
        return InvalidRequestError(message, param=name, code="not_supported")
    return NotSupportedError(f"{name}: {shown(value)} is not supported; this is not built yet", param=name)
