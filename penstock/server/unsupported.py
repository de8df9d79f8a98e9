"""Parameters and routes of OpenAI and vLLM that this server refuses.

The table of parameters is applied to the decoded JSON before it is converted to a request body, so the body types
declare only supported fields.
"""

from itertools import islice
from typing import Any, NamedTuple

from penstock.errors import InvalidRequestError, NotSupportedError, shown

MAX_MESSAGES = 4096  # in a conversation; also the number of parts of a message that are searched
INSIDE = {
    "chat": ("messages", "message"),
    "message": ("content", "part"),
    "pin": ("messages", "message"),
    "responses": ("tools", "tool"),
    "tokenize": ("messages", "message"),
}
OF_TYPE = {"part": "messages", "tool": "tools"}  # places whose `type` may be unsupported -> the field that holds them


class Unsupported(NamedTuple):
    """How a parameter is refused.

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


UNSUPPORTED: dict[str, Unsupported] = {
    "allowed_token_ids": Unsupported(),
    "annotations": Unsupported("message", ([],)),
    "apply_patch": Unsupported("tool"),
    "audio": Unsupported("chat message"),
    "best_of": Unsupported(neutral=(1,)),
    "chat_template": Unsupported("completions chat responses tokenize pin", forbidden=True),
    "chat_template_kwargs": Unsupported("completions", ({},), instead="a prompt is not rendered; see /tokenize"),
    "code_interpreter": Unsupported("tool"),
    "computer": Unsupported("tool"),
    "computer_use_preview": Unsupported("tool"),
    "conversation": Unsupported("responses"),
    "custom": Unsupported("tool"),
    "documents": Unsupported("completions", ([],), instead="a prompt is not rendered; chat completions take them"),
    "echo": Unsupported("chat", (False,)),
    "enable_response_messages": Unsupported("responses", (False,)),
    "file": Unsupported("part"),
    "file_search": Unsupported("tool"),
    "function_call": Unsupported("chat message", ("none", "auto")),
    "functions": Unsupported("chat", ([],)),
    "guided_decoding_backend": Unsupported(neutral=("auto", "guidance"), instead="llguidance is the only backend"),
    "guided_whitespace_pattern": Unsupported(instead="it is whitespace_pattern in structured_outputs"),
    "image_generation": Unsupported("tool"),
    "image_url": Unsupported("part"),
    "include_reasoning": Unsupported("chat responses", (True,)),
    "input_audio": Unsupported("part"),
    "kv_transfer_params": Unsupported("completions chat responses"),
    "local_shell": Unsupported("tool"),
    "logprob_token_ids": Unsupported(),
    "max_tool_calls": Unsupported("responses"),
    "mcp": Unsupported("tool"),
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
    "reasoning": Unsupported("responses", ({},)),
    "refusal": Unsupported("message part"),
    "repetition_detection": Unsupported(),
    "service_tier": Unsupported("completions chat responses", ("auto", "default")),
    "shell": Unsupported("tool"),
    "store": Unsupported(neutral=(False,)),
    "structural_tag": Unsupported(),
    "suffix": Unsupported("completions"),
    "thinking_token_budget": Unsupported(),
    "tool_search": Unsupported("tool"),
    "top_logprobs": Unsupported("responses", (0,)),
    "truncate_prompt_tokens": Unsupported(),
    "truncation": Unsupported("responses", ("disabled",)),
    "truncation_side": Unsupported(),
    "verbosity": Unsupported("chat"),
    "video_url": Unsupported("part"),
    "vllm_xargs": Unsupported("completions chat responses"),
    "web_search": Unsupported("tool"),
    "web_search_2025_08_26": Unsupported("tool"),
    "web_search_options": Unsupported("chat"),
    "web_search_preview": Unsupported("tool"),
}

UNSUPPORTED_ROUTES = (
    "/v1/responses/{id}/input_items",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load",
    "/openapi.json",
    "/docs",
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
    if place in OF_TYPE and isinstance(kind := body.get("type"), str) and _applies(kind, place):
        raise _refusal(OF_TYPE[place], {"type": kind})
    _check_best_of(body)
    for name in sorted(UNSUPPORTED.keys() & body.keys()):
        if _applies(name, place) and not _is_neutral(name, value := body.pop(name)):
            raise _refusal(name, value)
    key, inner = INSIDE.get(place, ("", ""))
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
    """Return whether a value changes nothing. Types count: true is not 1."""
    return value is None or any(value == same and type(value) is type(same) for same in UNSUPPORTED[name].neutral)


def _refusal(name: str, value: Any) -> InvalidRequestError:
    if name in UNSUPPORTED and UNSUPPORTED[name].forbidden:
        message = f"{name}: not accepted from a request; the model's own template and processing are used"
        return InvalidRequestError(message, param=name, code="not_allowed")
    if name in UNSUPPORTED and UNSUPPORTED[name].instead:
        message = f"{name}: {shown(value)} is not supported; {UNSUPPORTED[name].instead}"
        return InvalidRequestError(message, param=name, code="not_supported")
    return NotSupportedError(f"{name}: {shown(value)} is not supported; this is not built yet", param=name)
