"""Render chat messages to the prompt format that a model was trained on, with the model's own Jinja template.

A template puts control tokens (<|im_end|>) between messages. Spelled out inside a message they must remain text:
otherwise a user could end their own turn and write one of the system. So render_chat puts a mark inside each such
spelling before the template runs. The rendered text is cut at the marks and tokenised in parts, so that no spelling is
ever whole.

A template is a program that comes with the weights, never with a request. It runs in Jinja's immutable sandbox, sees
only plain JSON values, and renders what Transformers' apply_chat_template renders, character for character. Its time
and memory are limited by the caller that serves requests (client/text.py), not here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidRequestError, ModelLoadError, NotSupportedError, fail, shown
from penstock.tokenizer.tokenizer import Tokenizer, encode_all

Message = Mapping[str, Any]

# The errors that a template can raise: Jinja's own, and Python's from the values that it handles.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
TOO_LARGE_ERRORS = (RecursionError, MemoryError)
KWARGS = "chat_template_kwargs"  # vLLM's name for further variables of the template
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
    | {"conversation", KWARGS}
)
MAX_INTEGER = 2**63 - 1  # of a variable
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # templates read the first name
PLANNED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url"})
MARK = "END_OF_FINAL_MESSAGE_MARK"  # followed by a space, which is lost if the template trims messages


class ChatTemplate:
    """A model's chat template, or its named templates.

    Args:
        source: one template, or several as {name: template} or a list of {"name", "template"}. "tool_use" renders
            conversations with tools, "default" all others.
        special_tokens: further variables of the template (bos_token, ...).

    Raises:
        ModelLoadError: a template does not parse.
    """

    def __init__(self, source: Any, special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = _named_sources(source)
        self._special_tokens = dict(special_tokens or {})
        environment = _make_environment()
        self._templates = {name: _compile(environment, name, text) for name, text in self._sources.items()}

    @property
    def text(self) -> str:
        """The source text of all templates."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. It contains the special tokens: encode with add_special_tokens=False.

        Args:
            add_generation_prompt: end with the header of the model's answer.
            continue_final_message: end inside the last message, so that the model continues it; needs
                add_generation_prompt=False.
            template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError: an argument is invalid, or the template refuses the conversation (then the message is
                the template's own).
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message: needs add_generation_prompt=false", param="continue_final_message"
            )
        check_template_kwargs(template_kwargs or {})
        values = {
            **self._special_tokens,
            **_plain(KWARGS, template_kwargs or {}),
            "messages": _plain_messages(messages),
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        run = self._run_to_final_message if continue_final_message else self._run
        return run(name, values)

    def _run(self, name: str, values: dict[str, Any]) -> str:
        try:
            return self._templates[name].render(values)
        except jinja2.UndefinedError as error:
            raise _refused(f"messages: the chat template needs a value that is missing: {error}") from error
        except RENDER_ERRORS as error:
            raise _refused(str(error) or type(error).__name__) from error
        except TOO_LARGE_ERRORS as error:
            raise _refused("messages: too deep or too large for the chat template") from error

    def _run_to_final_message(self, name: str, values: dict[str, Any]) -> str:
        """Mark the end of the final message and return the rendered text up to the mark."""
        final = _mark_end(values["messages"][-1])
        if "content" not in self._sources[name]:
            raise _refused("messages: the chat template reads no content, so no message can be continued")
        text = self._run(name, values)
        if MARK not in text or final.strip() not in text:
            raise _refused("messages: the chat template leaves out (part of) the final message to be continued")
        cut = text.rindex(MARK)
        return text[:cut] if text.startswith(MARK + " ", cut) else text[:cut].rstrip()


def check_template_kwargs(kwargs: Mapping[str, Any], param: str = KWARGS) -> None:
    """Raise InvalidRequestError for variables of a template with a reserved name, at any depth, or a huge integer."""
    if not isinstance(kwargs, Mapping):
        raise fail(param, kwargs, 'an object like {"enable_thinking": false}')
    nodes: list[Any] = [kwargs]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            if names := RESERVED_NAMES.intersection(node):
                message = f"{param}: {min(names)} cannot be set here"
                raise InvalidRequestError(message, param=param, code="not_allowed")
            nodes.extend(node.values())
        elif isinstance(node, list | tuple):
            nodes.extend(node)
        elif isinstance(node, int) and abs(node) > MAX_INTEGER:
            raise fail(param, node, f"made of integers up to {MAX_INTEGER}")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _named_sources(source: Any) -> dict[str, str]:
    if isinstance(source, list) and all(isinstance(item, dict) for item in source):
        source = {item.get("name"): item.get("template") for item in source}
    sources = {"default": source} if isinstance(source, str) else source
    if not isinstance(sources, dict) or not all(isinstance(item, str) for pair in sources.items() for item in pair):
        raise ModelLoadError("chat_template: must be a string, or a list of objects with name and template")
    if "default" not in sources:
        names = ", ".join(sorted(sources)) or "none"
        raise ModelLoadError(f"chat_template: no template is named 'default'; found: {names}")
    return dict(sources)


def _compile(environment: jinja2.Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(f"chat_template {name!r}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, SyntaxError, ValueError, *TOO_LARGE_ERRORS) as error:
        raise ModelLoadError(f"chat_template {name!r}: cannot be compiled: {type(error).__name__}") from error


# ---- the values that a template sees


def text_of_content(content: Any, role: str) -> str:
    """Return a message's content as one text; text parts are joined by newlines.

    Raises:
        InvalidRequestError: the content is neither a string nor a list of at least one part {"type": "text", "text":
            "..."}.
        NotSupportedError: a part is an image, audio, video or a file.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        return "\n".join(_text_of_part(part) for part in content)
    raise fail("messages", content, f"a string or a list of text parts, as the content of the {role} message")


def _text_of_part(part: Any) -> str:
    fields = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if isinstance(fields.get("type"), str) and fields["type"] in PLANNED_PARTS:
        raise NotSupportedError(f"messages: parts of type {fields['type']} are not built yet", param="messages")
    if set(fields) != {"type", "text"} or fields["type"] != "text" or not isinstance(fields["text"], str):
        raise fail("messages", part, 'a part of the content like {"type": "text", "text": "..."}')
    return fields["text"]


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies without null values (many templates would print "None"), with reasoning under the usual name."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _refused("messages: must be a list of at least one message")
    plain = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise fail("messages", message, "an object with role and content")
        copied = {name: value for name, value in _plain("messages", message).items() if value is not None}
        for name in REASONING_NAMES:
            if name in copied:
                copied = {"thinking": copied[name], **copied, REASONING_NAMES[0]: copied[name]}
                break
        plain.append(copied)
    return plain


def _plain(param: str, value: Any) -> Any:
    """Return a copy made of JSON's own types, because an object with methods could do harm in a template."""
    try:
        if isinstance(value, Mapping):
            return {_plain(param, name): _plain(param, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(param, item) for item in value]
    except RecursionError as error:
        raise InvalidRequestError(f"{param}: nested too deep", param=param) from error
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise fail(param, value, "a plain JSON value")


def _mark_end(message: dict[str, Any]) -> str:
    """Append MARK to the message's last text in place; return the text without it."""
    holder, name = message, "content"
    if isinstance(message.get("content"), list):
        parts = [part for part in message["content"] if isinstance(part, dict) and "text" in part]
        holder, name = (parts[-1] if parts else {}), "text"
    text = holder.get(name)
    if not isinstance(text, str):
        raise _refused("messages: the final message has no text to continue")
    holder[name] = f"{text}{MARK} "
    return text


# ---- the functions a template can call


def _make_environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja with the settings, filters and functions that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        optimized=False,  # True would compute constants, such as 'a' * 10**9, when the template is loaded
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _DictMaker(),
        "namespace": _Namespace,
    }
    return environment


class _GenerationBlock(Extension):
    """The block {% generation %} ... {% endgeneration %}, which marks text for training and is only rendered here."""

    tags = {"generation"}  # noqa: RUF012  Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _DictMaker:
    """The function `dict` of templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    fromkeys = staticmethod(dict.fromkeys)


class _Namespace(jinja2.utils.Namespace):
    """The function `namespace` of templates, which takes no names beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `self` may be one of the names
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a name in a namespace must not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- conversations to token ids ---------------------------------------------------------------------------------------

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
