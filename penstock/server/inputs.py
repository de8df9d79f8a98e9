"""Turns a request body into what the engine takes: prompts as token ids, and SamplingParams.

Lengths are checked before any text is tokenised, and ids before anything is computed for them. A value comes from the
request, else from the model's defaults, else from OpenAI's defaults. SamplingParams checks the ranges.

The form of an answer is OpenAI's `response_format`, `text.format` of /v1/responses, or vLLM's `structured_outputs` with
its older spellings `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from msgspec import to_builtins
from starlette.requests import Request

from penstock.client.input_processor import PromptRequest, check_num_tokens, check_salt
from penstock.errors import (
    InvalidRequestError,
    NotSupportedError,
    check_bool,
    check_ids,
    check_int,
    check_nesting,
    check_str,
    fail,
    shown,
)
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import MAX_LOGPROBS, MAX_TOKENS, RequestOutputKind, SamplingParams, fields_of
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.server.context import ServerContext, account_of, context_of
from penstock.server.openai_requests import (
    MAX_MESSAGES,
    Body,
    ChatRequest,
    CompletionRequest,
    Message,
    PinRequest,
    TokenizeRequest,
    Tool,
    check_tools,
)
from penstock.tokenizer.tokenizer import (
    KWARGS,
    RenderedChat,
    check_prompt_length,
    check_template_kwargs,
    effort_variables,
    render_chat,
    turn_of,
)

T = TypeVar("T")
LONG_TEXT = 4096  # characters or ids; only a few longer texts are tokenised at the same time
NOISE = ("temperature", "top_p", "top_k", "min_p")  # the fields that say how to sample


# --- tokenising -------------------------------------------------------------------------------------------------------


async def encode(
    context: ServerContext, text: str | RenderedChat, *, add_special_tokens: bool, total: int = 0
) -> list[int]:
    """Return the ids of a text or conversation. `total` is the number of characters in all texts of the call."""
    tokenizer = context.tokenizer()
    if isinstance(text, RenderedChat):
        work = partial(text.token_ids, tokenizer, add_special_tokens=add_special_tokens)
        return await _tokenizing(context, work, len(text.text))
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await _tokenizing(context, work, max(len(text), total))


async def decode(context: ServerContext, ids: list[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of the ids."""
    work = partial(context.tokenizer().decode, ids, skip_special_tokens=skip_special_tokens)
    return await _tokenizing(context, work, len(ids))


async def _tokenizing(context: ServerContext, work: Callable[[], T], size: int) -> T:
    """Run tokenizer work in a thread, so that streams continue. Work on more than LONG_TEXT items waits for a slot."""
    if size <= LONG_TEXT:
        return await asyncio.to_thread(work)
    async with context.tokenizing:
        return await asyncio.to_thread(work)


# --- prompts ----------------------------------------------------------------------------------------------------------


async def completion_prompts(context: ServerContext, body: CompletionRequest, info: ModelInfo) -> list[PromptRequest]:
    """Return the prompts of a call in order; `body.prompt` is a text, token ids, or a list of either."""
    items = _split(body.prompt)
    limit = context.options.max_choices
    if len(items) * (body.n or 1) > limit:
        name = "n" if len(items) == 1 else "prompt"
        message = f"{name}: {len(items)} prompts times n = {body.n or 1} are too many; at most {limit} choices per call"
        raise InvalidRequestError(message, param=name)
    for item in items:
        if not isinstance(item, str):
            _check_ids(item, info)
            await asyncio.sleep(0)  # let other requests run in between
    total = sum(len(item) for item in items if isinstance(item, str))
    prompts = []
    for item in items:
        if isinstance(item, str):
            special = body.add_special_tokens is not False
            ids = await _encode(context, item, info, "prompt", add_special_tokens=special, total=total)
            prompts.append(PromptRequest(ids, item))
        else:
            skip = body.skip_special_tokens is not False
            text = await decode(context, item, skip_special_tokens=skip) if body.echo else None
            prompts.append(PromptRequest(item, text))
        await asyncio.sleep(0)
    return prompts


def _split(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        return [prompt]
    kind = type(prompt[0]) if prompt else None
    if kind not in (str, list) or set(map(type, prompt)) != {kind}:
        raise fail("prompt", prompt, "a text, a list of texts, a list of token ids or a list of lists of token ids")
    return prompt


def _check_ids(ids: list[Any], info: ModelInfo) -> None:
    if not ids:
        raise fail("prompt", ids, "at least one token id")
    check_num_tokens("prompt", len(ids), info.max_model_len)
    check_ids("prompt", ids, info.vocab_size)


async def chat_prompts(context: ServerContext, body: ChatRequest, info: ModelInfo) -> list[PromptRequest]:
    """Return the call's only prompt: the conversation as the model's own template renders it."""
    chat = await _render(context, body, info, body.offered, body.documents)
    ids = await _encode(context, chat, info, "messages", add_special_tokens=bool(body.add_special_tokens))
    return [PromptRequest(ids)]


async def tokenize(context: ServerContext, body: TokenizeRequest, info: ModelInfo) -> list[int]:
    """Return the ids for POST /tokenize. A text that is too long for a prompt is refused as it would be as a prompt."""
    check_one_prompt(body)
    if body.messages is None:
        check_prompt_length(body.prompt or "", info.max_model_len)
        return await encode(context, body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    check_tools(body.tools)
    chat = await _render(context, body, info, body.tools)
    check_prompt_length(chat.text, info.max_model_len, param="messages")
    return await encode(context, chat, add_special_tokens=bool(body.add_special_tokens))


def check_one_prompt(body: TokenizeRequest | PinRequest) -> None:
    """Raise InvalidRequestError unless a body has either a prompt, or messages and what is rendered with them."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
    for name in ("tools", KWARGS, "continue_final_message"):
        if body.messages is None and getattr(body, name, None):
            raise InvalidRequestError(f"{name}: only with messages: a prompt is not rendered", param=name)


async def _encode(
    context: ServerContext,
    prompt: str | RenderedChat,
    info: ModelInfo,
    param: str,
    *,
    add_special_tokens: bool,
    total: int = 0,
) -> list[int]:
    text = prompt.text if isinstance(prompt, RenderedChat) else prompt
    if not text:
        raise fail(param, text, "a text of at least one character")
    check_prompt_length(text, info.max_model_len, param=param)
    ids = await encode(context, prompt, add_special_tokens=add_special_tokens, total=total)
    if not ids:
        raise InvalidRequestError(f"{param}: the text has no tokens", param=param)
    check_num_tokens(param, len(ids), info.max_model_len)
    return ids


async def _render(
    context: ServerContext,
    body: ChatRequest | TokenizeRequest,
    info: ModelInfo,
    tools: Sequence[Tool] | None,
    documents: list[dict[str, Any]] | None = None,
) -> RenderedChat:
    """Render a conversation with the model's own template, and the server's variables overridden by the body's.

    A variable that is null is not given.
    """
    messages, kwargs = body.messages or [], body.chat_template_kwargs or {}
    if not 1 <= len(messages) <= MAX_MESSAGES:
        message = f"messages: {len(messages)} messages are not allowed; give 1 to {MAX_MESSAGES}"
        raise InvalidRequestError(message, param="messages")
    turns = [_turn(message) for message in messages]
    options: dict[str, Any] = {"tools": [tool.as_shown() for tool in tools or ()], "documents": documents}
    check_template_kwargs(kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    implied = _implied(context, body)
    if contradicted := [name for name in implied if given.get(name, implied[name]) != implied[name]]:
        message = f"reasoning_effort: {KWARGS} has another {contradicted[0]}"
        raise InvalidRequestError(message, param="reasoning_effort")
    options["template_kwargs"] = {**(context.options.default_chat_template_kwargs or {}), **implied, **given}
    for name, value in (("messages", turns), ("tools", options["tools"]), ("documents", documents), (KWARGS, given)):
        check_nesting(name, value)
    text = "".join(turn["content"] for turn in turns) + "".join(str(value) for value in options.values() if value)
    check_prompt_length(text, info.max_model_len, param="messages")
    continues = bool(body.continue_final_message)
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    options |= {"add_generation_prompt": adds, "continue_final_message": continues}
    work = partial(render_chat, context.tokenizer(), turns, **options)
    return await _tokenizing(context, work, len(text))


def _implied(context: ServerContext, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the variables of the template that `reasoning_effort` stands for."""
    if isinstance(body, TokenizeRequest) or body.reasoning_effort is None:
        return {}
    return effort_variables(context.tokenizer().chat_template, body.reasoning_effort)


def _turn(message: Message) -> dict[str, Any]:
    """Return a message as the template sees it. The role `developer` becomes `system`, the name that templates know."""
    if message.role == "function":
        text = "messages: the role function is not supported; its newer name is tool, with a tool_call_id"
        raise NotSupportedError(text, param="messages")
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = to_builtins(message.content)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    return turn_of(
        turn if not message.tool_calls else {**turn, "tool_calls": [c.as_shown() for c in message.tool_calls]}
    )


def salted(request: Request, given: str | None, prompts: list[PromptRequest]) -> list[PromptRequest]:
    """Return the prompts with the call's cache_salt, which includes the key's name where requests are salted by key.

    Raises:
        InvalidRequestError: the given value is not a valid salt.
    """
    check_salt(given)
    account = account_of(request)
    salt = given
    if account is not None and context_of(request).options.cache_salt_by_key:
        salt = blake2b(f"{account.name} {given or ''}".encode(), digest_size=16).hexdigest()  # a name has no space
    return prompts if salt is None else [dataclasses.replace(prompt, cache_salt=salt) for prompt in prompts]


# --- sampling parameters ----------------------------------------------------------------------------------------------


def completion_params(body: CompletionRequest, info: ModelInfo) -> SamplingParams:
    """Return the SamplingParams of a completion; it generates 16 tokens by default.

    With `max_tokens: 0`, which needs `echo`, the engine generates a token that the answer leaves out.

    `echo` with `logprobs` needs the prompt's log-probabilities too. If `prompt_logprobs` asks for a different number of
    them, the larger number is computed, and each field of the answer shows the number asked for.
    """
    own: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens == 0:
        for name, is_wrong in (("max_tokens", not body.echo), ("use_beam_search", body.use_beam_search)):
            if is_wrong:
                raise InvalidRequestError(f"{name}: max_tokens 0 needs echo, and no beam search", param=name)
        check_int("min_tokens", body.min_tokens, 0, 0, optional=True)
        own["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        if body.use_beam_search:
            raise InvalidRequestError("echo: not allowed with logprobs and use_beam_search", param="echo")
        check_int("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        own["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling_params(body, info, own, streams=bool(body.stream))


def chat_params(body: ChatRequest, info: ModelInfo) -> SamplingParams:
    """Return the SamplingParams of a chat answer; by default it may fill the rest of the context."""
    own: dict[str, Any] = {"max_tokens": info.default_sampling.get("max_tokens")}
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        check_int(name, value, 1, MAX_TOKENS, optional=True)
        own["max_tokens"] = own["max_tokens"] if value is None else value
    check_int("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS, optional=True)
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    return sampling_params(body, info, own, streams=bool(body.stream))


def sampling_params(body: Body, info: ModelInfo, own: dict[str, Any], *, streams: bool) -> SamplingParams:
    """Return the SamplingParams of a body. `own` are the fields that its route spells in a way of its own."""
    given = {name: value for name in fields_of(body.place) if (value := getattr(body, name)) is not None}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    defaults = info.default_sampling
    if given.get("use_beam_search"):  # nothing is sampled
        defaults = {name: value for name, value in defaults.items() if name not in NOISE}
    own |= {"structured_outputs": form_of(body), "output_kind": kind}
    params = SamplingParams(**{**defaults, **given, **own})
    params.check_vocabulary(info.vocab_size)
    return params


# --- the form of an answer --------------------------------------------------------------------------------------------


FORMAT, TEXT = "response_format", "text"
SCHEMA_KEYS = ("name", "description", "schema", "strict")
KINDS = ("text", "json_object", "json_schema")
GUIDED = ("json", "regex", "choice", "grammar")  # forms that vLLM once had as fields of their own
MAX_NAME, MAX_DESCRIPTION = 64, 4096  # characters


def form_of(body: Any) -> StructuredOutputsParams | None:
    """Return the form that a body asks for; None: any text.

    Raises:
        InvalidRequestError: the form is malformed, or given in two fields; `param` is the field.
    """
    forms = {name: form for name, value in _given(body) if (form := _read(name, value)) is not None}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidRequestError(f"{second}: not allowed with {first}, which gives a form too", param=second)
    return next(iter(forms.values()), None)


def _given(body: Any) -> list[tuple[str, Any]]:
    """Return the fields about the form that a body has, with their values."""
    return [(name, value) for name in READERS if (value := getattr(body, name, None)) is not None]


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    with naming(name):
        return READERS[name](value)


async def check_form(context: ServerContext, body: Any, params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field, for a form that the model cannot follow."""
    if params.structured_outputs is not None:
        with naming(_given(body)[-1][0]):  # a field before it only says that the form is free
            await context.client.check_form(params.structured_outputs)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Turn errors about the form into errors about the field in which the body gives it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != FIELD or field == FIELD:
            raise
        _, _, reason = error.message.partition(": ")
        raise InvalidRequestError(f"{field}: {reason}", param=field, code=error.code) from None


def _of_text(value: Any) -> StructuredOutputsParams | None:
    """Return the form from the field `text` of /v1/responses; None for {} and for a format of type text."""
    if not isinstance(value, Mapping):
        raise fail(TEXT, value, 'an object like {"format": {"type": "text"}}')
    if value.get("verbosity") is not None:
        raise NotSupportedError("text.verbosity: not supported; this is not built yet", param=TEXT)
    _check_keys(TEXT, value, ("format", "verbosity"))
    wanted = value.get("format")
    return None if wanted is None else _of_format(TEXT, wanted, lambda given: given)


def _of_format(field: str, value: Any, schema_of: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, Mapping):
        raise fail(field, value, 'an object like {"type": "json_object"}')
    kind = value.get("type")
    if kind == "structural_tag":
        raise NotSupportedError(f"{field}: the type structural_tag is not supported; it is not built yet", param=field)
    if kind not in KINDS:
        raise fail(field, kind, f"an object whose type is one of {', '.join(KINDS)}")
    if kind != "json_schema":
        _check_keys(field, value, ("type",))
        return None if kind == "text" else StructuredOutputsParams(json_object=True)
    return _of_schema(field, schema_of(value))


def _nested_schema(value: Mapping[str, Any]) -> Any:
    """Return the schema's description, which chat has in a separate field, and /v1/responses next to the type."""
    _check_keys(FORMAT, value, ("type", "json_schema"))
    return value.get("json_schema")


def _of_schema(field: str, value: Any) -> StructuredOutputsParams:
    """Return the form for a named schema. `strict` changes nothing: a schema is always followed or refused."""
    if not isinstance(value, Mapping) or value.get("schema") is None:
        raise fail(field, value, 'a format with a name and a schema: {"name": "answer", "schema": {...}}')
    _check_keys(field, value, ("type", *SCHEMA_KEYS))
    with naming(field):
        try:
            check_str(FIELD, value.get("name"), max_length=MAX_NAME, optional=True)
            check_str(FIELD, value.get("description"), max_length=MAX_DESCRIPTION, optional=True)
            if value.get("strict") is not None:
                check_bool(FIELD, value["strict"])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error.message} (of name, description or strict)", param=FIELD) from None
        return StructuredOutputsParams(json=value["schema"])


def _check_keys(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((str(key) for key in value if key not in known), None)
    if unknown is not None:
        raise InvalidRequestError(f"{field}.{shown(unknown)}: unknown key; known are {', '.join(known)}", param=field)


def _of_guided(kind: str, value: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams.of({kind: value})


# The fields in which a body may give the form, and how they are read.
READERS: dict[str, Callable[[Any], StructuredOutputsParams | None]] = {
    FORMAT: partial(_of_format, FORMAT, schema_of=_nested_schema),
    TEXT: _of_text,
    FIELD: StructuredOutputsParams.of,
    **{f"guided_{kind}": partial(_of_guided, kind) for kind in GUIDED},
}
