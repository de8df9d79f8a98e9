"""What clients send that is not served: refused by name, or ignored where it cannot change a text.

Both are applied to the decoded JSON before it is converted, so that the bodies declare only supported fields. What may
be ignored, and who sends it, is in ignored_fields.toml.
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from penstock.errors import InvalidRequestError, NotSupportedError, shown, unsupported
from penstock.tokenizer.tokenizer import effort_variables, verbosity_variables

if TYPE_CHECKING:
    from penstock.tokenizer.chat_template import ChatTemplate

Chat = TypeVar("Chat", bound=msgspec.Struct)
MAX_MESSAGES = 4096  # in a conversation; also the number of parts of a message that are searched
INSIDE = {  # place -> the fields in which lists of other places are
    "block": {"content": "block"},
    "chat": {"messages": "message", "tools": "chat_tool"},
    "completion": {"input_extra": "extra_file"},
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
    "defer_loading": Unsupported("client_tool", (False,)),
    "document": Unsupported("block"),
    "documents": Unsupported("completions", ([],), instead="a prompt is not rendered; chat completions take them"),
    "echo": Unsupported("chat", (False,)),
    "enable_response_messages": Unsupported("responses", (False,)),
    "file": Unsupported("part"),
    "file_search": Unsupported("tool"),
    "guided_decoding_backend": Unsupported(neutral=("auto", "guidance"), instead="llguidance is the only backend"),
    "guided_whitespace_pattern": Unsupported(instead="it is whitespace_pattern in structured_outputs"),
    "image": Unsupported("block"),
    "image_generation": Unsupported("tool"),
    "image_url": Unsupported("part"),
    "include_reasoning": Unsupported("responses", (True,)),
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
    "plugins": Unsupported("chat completions", ([],)),
    "previous_input_messages": Unsupported("responses"),
    "prompt": Unsupported("responses"),
    "prompt_embeds": Unsupported("completions"),
    "redacted_thinking": Unsupported("block"),
    "refusal": Unsupported("message part"),
    "search_result": Unsupported("block"),
    "server_tool_use": Unsupported("block"),
    "service_tier": Unsupported("messages", ("auto", "standard_only")),
    "shell": Unsupported("tool"),
    "shift": Unsupported("ollama_chat ollama_generate", (False,)),
    "speed": Unsupported("messages", ("standard",)),
    "safe_prompt": Unsupported("chat", (False,)),
    "structural_tag": Unsupported(instead="it is a key of structured_outputs, or a type of response_format"),
    "template": Unsupported("ollama_generate", ("",), forbidden=True),
    "text_editor": Unsupported("client_tool"),
    "tool_search": Unsupported("tool"),
    "transforms": Unsupported("chat completions", ([],)),
    "tool_search_tool_bm25": Unsupported("client_tool"),
    "tool_search_tool_regex": Unsupported("client_tool"),
    "toolset_name": Unsupported("block"),
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
    for name in sorted(UNSUPPORTED.keys() & body.keys()):
        if _applies(name, place) and not _is_neutral(name, value := body.pop(name)):
            raise _refusal(name, value)
    for item, inner in _parts_of(body, place):
        strip_unsupported(item, inner)


class Ignored(NamedTuple):
    """A row of ignored_fields.toml, which describes its columns."""

    places: str
    clients: str
    about: str


@cache
def ignored_fields() -> dict[str, Ignored]:
    text = Path(__file__).with_name("ignored_fields.toml").read_text(encoding="utf-8")
    return {name: Ignored(**row) for name, row in tomllib.loads(text).items()}


def take_ignored(body: Any, place: str) -> dict[str, Ignored]:
    """Remove from `body`, in place, the fields of ignored_fields.toml, and return the rows of those that were not null.

    Args:
        body: decoded JSON. Anything but an object is left for the typed decoding.
        place: as in `strip_unsupported`.
    """
    found: dict[str, Ignored] = {}
    if isinstance(body, dict):
        for name in sorted(ignored_fields().keys() & body.keys()):
            if place in ignored_fields()[name].places.split() and body.pop(name) is not None:
                found[name] = ignored_fields()[name]
        for item, inner in _parts_of(body, place):
            found |= take_ignored(item, inner)
    return found


UNREAD = {
    "reasoning_effort": Ignored("chat", "coding agents", "how much to think, in levels that the chat template lacks"),
    "verbosity": Ignored("chat", "coding agents", "how much to write, in levels that the chat template lacks"),
}


def without_unread_hints(chat: Chat, template: "ChatTemplate | None", ignored: dict[str, Ignored]) -> Chat:
    """Copy a chat without the levels that its template does not read, and note these in `ignored`. The effort "none"
    stays: a model that thinks all the same has not done what it was asked."""
    for name, variables_of in (("reasoning_effort", effort_variables), ("verbosity", verbosity_variables)):
        value = getattr(chat, name)
        try:
            if value not in (None, "none"):
                variables_of(template, value)
        except NotSupportedError:
            ignored[name] = UNREAD[name]
            chat = msgspec.structs.replace(chat, **{name: None})
    return chat


def _parts_of(body: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yield the items of the lists in which a body has parts of other places, with their place."""
    for key, inner in INSIDE.get(place, {}).items():
        items = body.get(key)
        for item in islice(items, MAX_MESSAGES) if isinstance(items, list) else ():
            yield item, inner


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
    return unsupported(name, f"{shown(value)} is not supported; this is not built yet")
