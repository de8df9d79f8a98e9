"""Convert chat messages to token ids, so that a message cannot write control tokens.

A chat template puts control tokens (<|im_end|>) between messages. Spelled out inside a message they must remain text:
otherwise a user could end their own turn and write one of the system. So a mark is put inside each such spelling before
the template runs. The rendered text is cut at the marks and tokenised in parts, so that no spelling is ever whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError, fail, shown
from penstock.tokenizer.chat_template import KWARGS, ChatTemplate, check_template_kwargs, text_of_content
from penstock.tokenizer.tokenizer import Tokenizer, encode_all

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters, which normal text does not contain

LISTS = ("tools", "documents")  # what a conversation may come with, if the template shows it to the model


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's template renders it. `parts` is the same text, cut inside spelled-out tokens."""

    text: str
    parts: tuple[str, ...]

    def token_ids(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of the prompt. Templates write BOS themselves, so no special tokens are added by default.

        Raises:
            InvalidRequestError: the tokenizer adds special tokens inside a text, not only around it.
        """
        encoded = encode_all(tokenizer, self.parts)
        ids = [token_id for part in encoded for token_id in part]
        if not add_special_tokens:
            return ids
        text, part = next((pair for pair in zip(self.parts, encoded, strict=True) if pair[1]), ("", []))
        around = tokenizer.encode(text, add_special_tokens=True)
        for before in range(len(around) - len(part) + 1):
            if around[before : before + len(part)] == part:
                return [*around[:before], *ids, *around[before + len(part) :]]
        message = "add_special_tokens: this tokenizer does not add them around the prompt"
        raise InvalidRequestError(message, param="add_special_tokens")


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
        raise fail("messages", calls, "a list of tool calls, each an object with the function that it calls")
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
    **options: Any,
) -> RenderedChat:
    """Render a conversation. options: those of ChatTemplate.render. Only the template writes control tokens.

    Raises:
        InvalidRequestError: there is no chat template, or it does not read the tools, documents or further variables
            that are given, or it refuses the conversation.
    """
    template = tokenizer.chat_template
    if template is None:
        message = "messages: the model has no chat template; send a prompt"
        raise InvalidRequestError(message, param="messages", code="no_chat_template")
    for name in LISTS:
        options[name] = options.get(name) or None
        if options[name] and name not in template.text:
            message = f"{name}: the model's chat template does not support {name}, so the model would not see them"
            raise InvalidRequestError(message, param=name, code=f"no_{name}")
    check_variables(template, options.get("template_kwargs") or {})
    spellings = [tokenizer.token_to_text(token_id) for token_id in tokenizer.special_ids]
    spellings = sorted((text for text in spellings if len(text) > 1), key=len, reverse=True)
    mark = _unused_mark((messages, options))
    options = {name: _mark(value, spellings, mark) for name, value in options.items()}
    text = template.render([_mark(message, spellings, mark) for message in messages], **options)
    text = text.replace(ascii(mark)[1:-1], mark)  # a template may write JSON with escapes
    return RenderedChat(text.replace(mark, ""), tuple(text.split(mark)))


def check_variables(template: ChatTemplate | None, variables: Mapping[str, Any], param: str = KWARGS) -> None:
    """Raise InvalidRequestError for further variables that must not be set, or that the template does not read."""
    check_template_kwargs(variables, param)
    for name in variables:
        if template is None or not _is_read(template.text, name):
            message = f"{param}: the model's chat template reads no variable named {shown(name)}"
            raise InvalidRequestError(message, param=param, code="no_variable")


def effort_variables(template: ChatTemplate | None, effort: str) -> dict[str, Any]:
    """Return the variables that tell a template how much the model should think, with vLLM's names.

    Raises:
        NotSupportedError: the template has neither levels, nor a switch that "none" turns off.
    """
    has_levels, has_switch = (
        template is not None and _is_read(template.text, name) for name in ("reasoning_effort", "enable_thinking")
    )
    if not has_levels and not (has_switch and effort == "none"):
        text = "reasoning_effort: the model's chat template has no levels of reasoning"
        raise NotSupportedError(f"{text}, only none" if has_switch else text, param="reasoning_effort")
    levels = {"reasoning_effort": effort} if has_levels else {}
    return levels | ({"enable_thinking": effort != "none"} if has_switch else {})


def _is_read(text: str, name: Any) -> bool:
    """Return whether a template's text contains a name, which it does if the template reads a variable of that name."""
    return isinstance(name, str) and name.isidentifier() and re.search(rf"\b{name}\b", text) is not None


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
