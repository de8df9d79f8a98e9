"""Render chat messages to the prompt format that a model was trained on, with the model's own Jinja template.

A template is a program that comes with the weights, never with a request. It runs in Jinja's immutable sandbox, sees
only plain JSON values, and renders what Transformers' apply_chat_template renders, character for character, except
that a call is never left out where another form of its message shows it (CallForm), and that a template named "rag" is
chosen for documents. Its time and memory are limited by the caller that serves requests (client/text.py), not here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidRequestError, ModelLoadError, fail, invalid
from penstock.tokenizer.template_variables import KWARGS, check_template_kwargs

Message = Mapping[str, Any]

# The errors that a template can raise: Jinja's own, and Python's from the values that it handles.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
TOO_LARGE_ERRORS = (RecursionError, MemoryError)
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # templates read the first name
MARK = "END_OF_FINAL_MESSAGE_MARK"  # followed by a space, which is lost if the template trims messages


class ChatTemplate:
    """A model's chat template, or its named templates.

    Args:
        source: one template, or several as {name: template} or a list of {"name", "template"}. "tool_use" renders
            conversations with tools (also with an empty list, as in Transformers), "rag" those with documents, and
            "default" all others.
        special_tokens: further variables of the template (bos_token, ...).
        chosen: name of the only template to use, or a file with another one.

    Nothing is compiled before the first use, because Jinja computes constants of a template when it compiles it, and
    they may need any amount of memory: a server leaves that to its text process.

    Raises:
        ModelLoadError: there is no template to use.
    """

    def __init__(self, source: Any, special_tokens: Mapping[str, str] | None = None, chosen: str | None = None) -> None:
        self._sources = _named_sources(source, chosen)
        self._forms: dict[str, CallForm] = {}
        self._special_tokens = dict(special_tokens or {})

    @cached_property
    def _templates(self) -> dict[str, jinja2.Template]:
        environment = _make_environment()
        return {name: _compile(environment, name, text) for name, text in self._sources.items()}

    def compile(self) -> None:
        """Compile the templates, as otherwise the first use does. Raise ModelLoadError if one does not parse."""
        _ = self._templates

    @property
    def text(self) -> str:
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
        """Render a conversation as a prompt. It contains the special tokens: encode with add_special_tokens=False.

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
            raise invalid("continue_final_message", "needs add_generation_prompt=false")
        check_template_kwargs(template_kwargs or {})
        values = {
            **self._special_tokens,
            **_plain(KWARGS, template_kwargs or {}),
            "messages": messages,
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        given = {"tool_use": tools is not None, "rag": bool(documents), "default": True}
        name = next(name for name, is_given in given.items() if is_given and name in self._sources)
        has_calls = any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages or ())
        form = self._form_of_calls(name) if has_calls else CallForm()
        values["messages"] = _plain_messages(messages, form)
        run = self._run_to_final_message if continue_final_message else self._run
        return run(name, values)

    def _form_of_calls(self, name: str) -> "CallForm":
        """Find, by trying, how a template wants messages with calls: the first form in which it shows a call; if it
        shows none, the first that it does not refuse; if it refuses all, that of Transformers."""
        if name not in self._forms:
            tried = [(form, self._probe(name, form)) for form in CALL_FORMS]
            accepted = [(form, text) for form, text in tried if text is not None]
            shown = [(form, text) for form, text in accepted if PROBED_NAMES[0] in text and PROBED_VALUE in text]
            self._forms[name] = [*shown, *accepted, *tried][0][0]
        return self._forms[name]

    def _probe(self, name: str, form: "CallForm") -> str | None:
        """Render a conversation with a call in this form; None if the template refuses it."""
        messages = _plain_messages(conversation_with_calls(1), form)
        values = {**self._special_tokens, "messages": messages, "tools": PROBED_TOOLS, "documents": None}
        try:
            return self._run(name, {**values, "add_generation_prompt": False})
        except InvalidRequestError:
            return None

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


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _named_sources(source: Any, chosen: str | None) -> dict[str, str]:
    """List the templates by name; `chosen` alone, as "default", if it is given."""
    if isinstance(source, list) and all(isinstance(item, dict) for item in source):
        source = {item.get("name"): item.get("template") for item in source}
    sources = {"default": source} if isinstance(source, str) else {} if source is None else source
    if not isinstance(sources, dict) or not all(isinstance(item, str) for pair in sources.items() for item in pair):
        raise ModelLoadError("chat_template: must be a string, or a list of objects with name and template")
    if chosen in sources:
        return {"default": sources[chosen]}
    if chosen is not None:
        file = Path(chosen).expanduser()
        if not file.is_file():
            names = ", ".join(sorted(sources)) or "none"
            allowed = f"a file, or the name of one of the model's templates ({names})"
            raise fail("chat_template", chosen, allowed)
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"chat_template: {file} cannot be read: {error}") from None
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


@dataclass(frozen=True)
class CallForm:
    """How a template gets messages with calls.

    content: what stands for content that is null. It is left out ({}), as in Transformers; but some templates demand a
        text, and others write calls only if it is null.
    as_text: arguments are JSON texts, which some templates concatenate, instead of objects.
    """

    content: Mapping[str, str | None] = field(default_factory=dict)
    as_text: bool = False


CONTENTS: list[dict[str, str | None]] = [{}, {"content": ""}, {"content": None}]
CALL_FORMS = [CallForm(content, as_text) for as_text in (False, True) for content in CONTENTS]
PROBED_NAMES, PROBED_VALUE = ("probed_call_a", "probed_call_b"), "probed_value"
PROBED_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]


def conversation_with_calls(count: int) -> list[dict[str, Any]]:
    """Make a conversation with so many calls in one message, to find out what a template does with them."""
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": {"key": PROBED_VALUE}}}
        for number, name in enumerate(PROBED_NAMES[:count])
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "1"} for call in calls]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def takes_several_calls(template: Any) -> bool:
    """Check whether a template shows several calls of one message: some refuse them, or show only the first. True if it
    shows none."""

    def shown(count: int) -> bool:
        try:
            text = template.render(conversation_with_calls(count), tools=PROBED_TOOLS, add_generation_prompt=False)
        except InvalidRequestError:
            return False
        return all(name in text for name in PROBED_NAMES[:count])

    return shown(2) or not shown(1)


def _plain_messages(messages: Sequence[Message], form: CallForm) -> list[dict[str, Any]]:
    """Copy messages without null values (many templates would print "None"), with reasoning under the usual name."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _refused("messages: must be a list of at least one message")
    plain = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise fail("messages", message, "an object with role and content")
        copied = {name: value for name, value in _plain("messages", message).items() if value is not None}
        if copied.get("tool_calls") and message.get("content") is None:
            copied |= form.content
        if form.as_text and copied.get("tool_calls"):
            copied["tool_calls"] = [_with_text(call) for call in copied["tool_calls"]]
        for name in REASONING_NAMES:
            if name in copied:
                copied = {"thinking": copied[name], **copied, REASONING_NAMES[0]: copied[name]}
                break
        plain.append(copied)
    return plain


def _with_text(call: Any) -> Any:
    """Copy a call with its arguments as a text."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text(call["function"])}
    is_object = isinstance(call, Mapping) and isinstance(call.get("arguments"), Mapping)
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if is_object else call


def _plain(param: str, value: Any) -> Any:
    """Copy a value with JSON's own types only, because an object with methods could do harm in a template."""
    try:
        if isinstance(value, Mapping):
            return {_plain(param, name): _plain(param, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(param, item) for item in value]
    except RecursionError as error:
        raise invalid(param, "nested too deep") from error
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
    """Make a Jinja environment with the settings, filters and functions that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        optimized=False,  # True would compute more constants, such as 'a' * 10**9, when a template is compiled
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
    """Write JSON without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
