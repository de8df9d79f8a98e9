"""Chat messages to the prompt text that a model was trained on, by the model's own Jinja template.

A template is a program that came with the weights: it runs in Jinja's immutable sandbox, sees plain JSON values only,
and renders what Transformers' apply_chat_template renders, character for character. Its time and memory are not
limited here. Templates come from the model's directory, never from a request. Nothing here knows tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.validation import shown

Message = Mapping[str, Any]

# What a template can raise: Jinja's own errors, and Python's from the values that it handles.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
TOO_LARGE_ERRORS = (RecursionError, MemoryError)
OWN_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first is the one that templates read
MARK = "END_OF_FINAL_MESSAGE_MARK"  # a space follows it, which is lost if the template trims messages


class ChatTemplate:
    """A model's chat template, or its named templates.

    Args:
        source: one template; or several, as {name: template} or a list of {"name", "template"} ("default" is used,
            "tool_use" with tools).
        special_tokens: names that the template sees (bos_token, ...).

    Raises:
        ModelLoadError: a template does not parse.
    """

    def __init__(self, source: Any, special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources = _named_sources(source)
        self._special_tokens = dict(special_tokens or {})
        environment = make_environment()
        self._templates = {name: _compile(environment, name, text) for name, text in self.sources.items()}

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
        """Return the prompt of a conversation, special tokens included: tokenise it with add_special_tokens=False.

        Args:
            add_generation_prompt: end with the header of the model's answer.
            continue_final_message: end inside the last message, so that the model continues it; needs
                add_generation_prompt=False.
            template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError: the template refuses the conversation; the message is the template's own.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message: needs add_generation_prompt=false", param="continue_final_message"
            )
        values = {
            **self._special_tokens,
            **_checked_kwargs(template_kwargs or {}),
            "messages": _plain_messages(messages),
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._choose(tools is not None)
        if not continue_final_message:
            return self._run(name, values)
        return self._run_to_final_message(name, values)

    def _choose(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"

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
        """Mark the end of the final message and cut the rendered text there."""
        final = _mark_end(values["messages"][-1])
        if "content" not in self.sources[name]:
            raise _refused("messages: the chat template reads no content, so none can be continued")
        text = self._run(name, values)
        if MARK not in text or final.strip() not in text:
            raise _refused("messages: the chat template leaves out (part of) the final message to be continued")
        cut = text.rindex(MARK)
        return text[:cut] if text.startswith(MARK + " ", cut) else text[:cut].rstrip()


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _named_sources(source: Any) -> dict[str, str]:
    if isinstance(source, list) and all(isinstance(item, dict) for item in source):
        source = {item.get("name"): item.get("template") for item in source}
    sources = {"default": source} if isinstance(source, str) else source
    if not isinstance(sources, dict) or not all(isinstance(item, str) for pair in sources.items() for item in pair):
        raise ModelLoadError("chat_template: must be a string, or a list of objects with name and template")
    if "default" not in sources:
        raise ModelLoadError(
            f"chat_template: none is named 'default'; there are: {', '.join(sorted(sources)) or 'none'}"
        )
    return dict(sources)


def _compile(environment: jinja2.Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(f"chat_template {name!r}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, SyntaxError, ValueError, *TOO_LARGE_ERRORS) as error:
        raise ModelLoadError(f"chat_template {name!r}: cannot be compiled: {type(error).__name__}") from error


# ---- what goes into a template


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A fresh copy as templates expect it: no null values (many templates would print "None"), reasoning under the
    name that they read."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _refused("messages: must be a list of at least one message")
    for message in messages:
        if not isinstance(message, Mapping):
            raise _refused(f"messages: {shown(message)} is no message; it must be an object with role and content")
    return [_with_reasoning(_plain("messages", message)) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    given = [message[name] for name in REASONING_NAMES if name in message]
    return {"thinking": given[0], **message, REASONING_NAMES[0]: given[0]} if given else message


def _plain(param: str, value: Any) -> Any:
    """A copy made of JSON's own types: an object with methods could do harm in a template."""
    try:
        return _copy(param, value)
    except RecursionError as error:
        raise InvalidRequestError(f"{param}: nested too deep", param=param) from error


def _copy(param: str, value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_copy(param, name): _copy(param, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(param, item) for item in value]
    raise InvalidRequestError(f"{param}: {shown(value)} is no plain JSON value", param=param)


def _checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in OWN_ARGUMENTS or name in {"chat_template", "tokenize"}:
            raise InvalidRequestError(f"chat_template_kwargs: {name} cannot be set here", param="chat_template_kwargs")
    copied: dict[str, Any] = _plain("chat_template_kwargs", kwargs)
    return copied


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the message's last text and return the text without it."""
    holder, name = message, "content"
    if isinstance(message.get("content"), list):
        parts = [part for part in message["content"] if isinstance(part, dict) and "text" in part]
        holder, name = (parts[-1] if parts else {}), "text"
    text = holder.get(name)
    if not isinstance(text, str):
        raise _refused("messages: the final message has no text that could be continued")
    holder[name] = f"{text}{MARK} "
    return text


# ---- what a template can call


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja with the settings, filters and functions that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _DictMaker(),
        "namespace": _Namespace,
    }
    return environment


class _GenerationBlock(Extension):
    """The block {% generation %} ... {% endgeneration %}, which marks text for training; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012  Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _DictMaker:
    """`dict` for templates, without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that takes no names beginning with an underscore."""

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
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
