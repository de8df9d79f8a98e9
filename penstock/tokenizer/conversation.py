"""Convert chat messages to token ids, so that a message cannot write control tokens.

A chat template puts control tokens (<|im_end|>) between messages. Spelled out inside a message they must remain text:
otherwise a user could end their own turn and write one of the system. So a mark is put inside each such spelling before
the template runs. The rendered text is cut at the marks and tokenised in parts, so that no spelling is ever whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import validation as check
from penstock.errors import InvalidRequestError
from penstock.tokenizer.chat_template import text_of_content
from penstock.tokenizer.tokenizer import Tokenizer, encode_all

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters, which normal text does not contain


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's template renders it. `parts` is the same text, cut inside spelled-out tokens."""

    text: str
    parts: tuple[str, ...]

    def token_ids(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of the prompt. Templates write BOS themselves, so no special tokens are added by default."""
        first, *others = encode_all(tokenizer, self.parts)
        ids = [*first, *(token_id for other in others for token_id in other)]
        if not add_special_tokens:
            return ids
        around = tokenizer.encode(self.parts[0], add_special_tokens=True)
        before = next(at for at in range(len(around)) if around[at : at + len(first)] == first)
        return [*around[:before], *ids, *around[before + len(first) :]]


def turn_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: the content is one text, and arguments of tool calls are objects.

    An assistant's content may be null beside tool calls. Arguments that are not JSON stay text: the model wrote them,
    and they must not end the conversation.
    """
    calls = message.get("tool_calls")
    content = message.get("content")
    if calls and content is None:
        content = ""
    turn = {**message, "content": text_of_content(content, message["role"])}
    if not calls:
        return {name: value for name, value in turn.items() if name != "tool_calls"}
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise check.fail("messages", calls, "a list of tool calls, each an object with the function that it calls")
    return {**turn, "tool_calls": [_call_of(call) for call in calls]}


def _call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. The function may be in a field `function`, or be the call
    itself."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_of(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "arguments": arguments}


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> RenderedChat:
    """Render a conversation with the tools that it offers. options: those of ChatTemplate.render.

    Raises:
        InvalidRequestError: there is no chat template, or it does not support tools, or it refuses the conversation.
    """
    template = tokenizer.chat_template
    if template is None:
        message = "messages: the model has no chat template; send a prompt"
        raise InvalidRequestError(message, param="messages", code="no_chat_template")
    if tools and "tools" not in template.text:
        message = "tools: the model's chat template does not support tools, so the model would not see them"
        raise InvalidRequestError(message, param="tools", code="no_tools")
    spellings = [tokenizer.token_to_text(token_id) for token_id in tokenizer.special_ids]
    spellings = sorted((text for text in spellings if len(text) > 1), key=len, reverse=True)
    mark = _unused_mark((messages, tools))
    if tools:
        options["tools"] = [_mark(tool, spellings, mark) for tool in tools]
    text = template.render([_mark(message, spellings, mark) for message in messages], **options)
    text = text.replace(ascii(mark)[1:-1], mark)  # a template may write JSON with escapes
    return RenderedChat(text.replace(mark, ""), tuple(text.split(mark)))


def _unused_mark(messages: Any) -> str:
    used = repr(messages)
    for mark in MARKS:
        if mark not in used and ascii(mark)[1:-1] not in used:
            return mark
    raise InvalidRequestError("messages: contain every noncharacter from U+FDD0 to U+FDEF", param="messages")


def _mark(value: Any, spellings: Sequence[str], mark: str) -> Any:
    """Return the value with a mark after the first character of every spelling in its texts."""
    if isinstance(value, str):
        for spelling in spellings:
            value = value.replace(spelling, spelling[0] + mark + spelling[1:])
        return value
    if isinstance(value, Mapping):
        return {_mark(name, spellings, mark): _mark(item, spellings, mark) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, spellings, mark) for item in value]
    return value
