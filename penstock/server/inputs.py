"""Turns a request body into what the engine takes: prompts as token ids, and SamplingParams with the answer's grammar.

Lengths are checked before any text is tokenised, and ids before anything is computed for them. A value comes from the
request, else from the model's defaults, else from OpenAI's defaults. SamplingParams checks the ranges.

The form of an answer is OpenAI's `response_format`, `text.format` of /v1/responses, or vLLM's `structured_outputs` with
its older spellings `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from msgspec import structs, to_builtins
from starlette.requests import Request

from penstock.client.input_processor import PromptRequest, check_num_tokens, check_salt
from penstock.errors import (
    InvalidRequestError,
    check_bool,
    check_ids,
    check_int,
    check_nesting,
    check_str,
    fail,
    invalid,
    shown,
    unsupported,
)
from penstock.interface.messages import ModelInfo
from penstock.interface.sampling_params import MAX_LOGPROBS, MAX_TOKENS, RequestOutputKind, SamplingParams, fields_of
from penstock.interface.structured_outputs import FIELD, WHITESPACE, StructuredOutputsParams
from penstock.server.api_errors import until_disconnect
from penstock.server.client_fields import MAX_MESSAGES
from penstock.server.context import FLOW, ServerContext, account_of, context_of
from penstock.server.openai_requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    CustomTool,
    GenerationRequest,
    Message,
    NamedChoice,
    Tool,
)
from penstock.tokenizer.answer_formats import ReasoningFormat, ToolFormat, reasoning_format_of, tool_format_of
from penstock.tokenizer.answers import AnswerParser, Calls, Function, answer_grammar, is_within, literal, thinking_ids
from penstock.tokenizer.chat_template import takes_several_calls
from penstock.tokenizer.fill_in import fill_in_of
from penstock.tokenizer.template_variables import KWARGS, check_template_kwargs
from penstock.tokenizer.tokenizer import (
    RenderedChat,
    check_prompt_length,
    effort_variables,
    render_chat,
    switch_variables,
    turn_of,
    verbosity_variables,
)

T = TypeVar("T")
Texts = Sequence[str | list[int]]  # each is a text or token ids
LONG_TEXT = 4096  # characters or ids; only a few longer texts are tokenised at the same time
SHARE_FOR_ANSWER = 4  # 1 / SHARE_FOR_ANSWER of the context is kept free for the answer, if turns are left out
TOO_LONG = "context_length_exceeded"
NOISE = ("temperature", "top_p", "top_k", "min_p")  # the fields that say how to sample


# --- tokenising -------------------------------------------------------------------------------------------------------


async def encode(
    context: ServerContext, text: str | RenderedChat, *, add_special_tokens: bool, total: int = 0
) -> list[int]:
    """Tokenise a text or conversation. `total` is the number of characters in all texts of the call."""
    tokenizer = context.tokenizer()
    if isinstance(text, RenderedChat):
        work = partial(text.token_ids, tokenizer, add_special_tokens=add_special_tokens)
        return await tokenizing(context, work, len(text.text))
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await tokenizing(context, work, max(len(text), total))


async def decode(context: ServerContext, ids: list[int], *, skip_special_tokens: bool = False) -> str:
    work = partial(context.tokenizer().decode, ids, skip_special_tokens=skip_special_tokens)
    return await tokenizing(context, work, len(ids))


async def tokenizing(context: ServerContext, work: Callable[[], T], size: int) -> T:
    """Run tokenizer work in a thread, so that streams continue. Long work waits for its turn among the flows."""
    if size <= LONG_TEXT:
        return await asyncio.to_thread(work)
    async with context.tokenizing.turn(FLOW.get()):
        return await asyncio.to_thread(work)


# --- prompts ----------------------------------------------------------------------------------------------------------


async def completion_prompts(context: ServerContext, body: CompletionRequest, info: ModelInfo) -> list[PromptRequest]:
    """List the prompts of a call in order; `body.prompt` is a text, token ids, or a list of either."""
    items = split_texts("prompt", body.prompt)
    limit, is_cut = context.options.max_choices, body.truncate_prompt_tokens is not None
    if len(items) * body.num_choices > limit:
        name = "n" if len(items) == 1 else "prompt"
        many = f"{len(items)} prompts times n = {body.num_choices}"
        raise invalid(name, f"{many} are too many; at most {limit} choices per call")
    for item in items:
        if not isinstance(item, str):
            _check_ids(item, info, is_cut=is_cut)
            await asyncio.sleep(0)  # let other requests run in between
    total = sum(len(item) for item in items if isinstance(item, str))
    prompts = []
    for item in items:
        if body.suffix:
            special = body.add_special_tokens is not False
            prompts.append(await between(context, item, body.suffix, info, add_special_tokens=special))
            if not is_cut:
                check_num_tokens("prompt", len(prompts[-1].token_ids), info.max_model_len)
        elif isinstance(item, str):
            special = body.add_special_tokens is not False
            how = {"add_special_tokens": special, "is_cut": is_cut}
            ids = await _encode(context, item, info, "prompt", **how, total=total)
            prompts.append(PromptRequest(ids, item))
        else:
            skip = body.skip_special_tokens is not False
            text = await decode(context, item, skip_special_tokens=skip) if body.echo else None
            prompts.append(PromptRequest(item, text))
        await asyncio.sleep(0)
    return prompts


async def between(
    context: ServerContext, prompt: str | list[int], suffix: str, info: ModelInfo, **options: Any
) -> PromptRequest:
    """Make the prompt that asks for the text between a prompt and its suffix. options: those of FillIn.prompt."""
    fill_in = fill_in_of(context.tokenizer())
    if fill_in is None or not isinstance(prompt, str):
        what = "this model's tokenizer has no tokens for filling in" if fill_in is None else "the prompt must be a text"
        raise invalid("suffix", what)
    check_prompt_length(prompt + suffix, info.max_model_len)
    work = partial(fill_in.prompt, context.tokenizer(), prompt, suffix, **options)
    size = sum(len(text) for _, text in options.get("files", ()))
    return PromptRequest(await tokenizing(context, work, len(prompt) + len(suffix) + size), prompt)


def ending_before_suffix(context: ServerContext, params: SamplingParams) -> SamplingParams:
    """Let an answer between a prompt and its suffix end at the tokens that do not belong to it."""
    fill_in = fill_in_of(context.tokenizer())
    more = () if fill_in is None else fill_in.stop_token_ids
    return params.settled(stop_token_ids=tuple(dict.fromkeys([*(params.stop_token_ids or ()), *more])))


async def cut_prompts(
    context: ServerContext, body: CompletionRequest | ChatRequest, params: SamplingParams, prompts: list[PromptRequest]
) -> list[PromptRequest]:
    """Cut the prompts as truncate_prompt_tokens says. What is left is checked when the engine's client gets it."""
    found = []
    for prompt in prompts:
        ids = params.truncated(prompt.token_ids, context.known_info().max_model_len)
        if len(ids) < len(prompt.token_ids):
            echo = isinstance(body, CompletionRequest) and body.echo
            text = await decode(context, ids, skip_special_tokens=params.skip_special_tokens) if echo else None
            prompt = replace(prompt, token_ids=ids, text=text)
        found.append(prompt)
    return found


def split_texts(param: str, prompt: str | list[Any]) -> Texts:
    """Split a field that holds one text or list of token ids, or several of them."""
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        return [prompt]
    kind = type(prompt[0]) if prompt else None
    if kind not in (str, list) or set(map(type, prompt)) != {kind}:
        raise fail(param, prompt, "a text, a list of texts, a list of token ids or a list of lists of token ids")
    return prompt


def _check_ids(ids: list[Any], info: ModelInfo, *, is_cut: bool) -> None:
    if not ids:
        raise fail("prompt", ids, "at least one token id")
    if not is_cut:
        check_num_tokens("prompt", len(ids), info.max_model_len)
    check_ids("prompt", ids, info.vocab_size)


async def chat_prompts(context: ServerContext, body: ChatRequest, info: ModelInfo) -> list[PromptRequest]:
    """Make the call's only prompt: the conversation as the model's own template renders it."""
    chat = await render(context, body, info, body.offered, body.documents)
    how = {"add_special_tokens": bool(body.add_special_tokens), "is_cut": body.truncate_prompt_tokens is not None}
    return [PromptRequest(await _encode(context, chat, info, "messages", **how))]


def room_for_prompt(info: ModelInfo, max_tokens: int | None) -> int:
    """Count the tokens that a prompt may have if there is to be room for an answer."""
    size = info.max_model_len
    return size - min(max_tokens or size, size // SHARE_FOR_ANSWER)


async def latest_prompts(
    context: ServerContext, body: ChatRequest, info: ModelInfo, max_tokens: int | None
) -> list[PromptRequest]:
    """Make the call's only prompt, without as many of the oldest turns as it takes to leave room for an answer.

    Whole turns are left out, because templates expect alternating roles, and results need their calls. What the system
    says first, and the last turn, always stay.
    """
    messages, room = body.messages, room_for_prompt(info, max_tokens)
    first = next((at for at, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    starts = [first, *(at for at in range(first + 1, len(messages)) if messages[at].role == "user")]
    found: dict[int, list[PromptRequest]] = {}
    low, high, middle = 0, len(starts) - 1, 0
    last = high
    while low not in found:  # the first start that fits lies between low and high
        shortened = structs.replace(body, messages=[*messages[:first], *messages[starts[middle] :]])
        try:
            prompts = await chat_prompts(context, shortened, info)
            fits = middle == last or len(prompts[0].token_ids or ()) <= room
        except InvalidRequestError as error:
            if error.code != TOO_LONG or middle == last:
                raise
            fits = False
        if fits:
            found[middle], high = prompts, middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return found[low]


async def _encode(
    context: ServerContext,
    prompt: str | RenderedChat,
    info: ModelInfo,
    param: str,
    *,
    add_special_tokens: bool,
    is_cut: bool,
    total: int = 0,
) -> list[int]:
    """Tokenise a prompt. is_cut: whether it may be too long, because it will be cut."""
    text = prompt.text if isinstance(prompt, RenderedChat) else prompt
    if not text:
        raise fail(param, text, "a text of at least one character")
    check_prompt_length(text, info.max_model_len, param=param)
    ids = await encode(context, prompt, add_special_tokens=add_special_tokens, total=total)
    if not ids:
        raise invalid(param, "the text has no tokens")
    if not is_cut:
        check_num_tokens(param, len(ids), info.max_model_len)
    return ids


async def render(
    context: ServerContext,
    body: ChatRequest,
    info: ModelInfo,
    tools: Sequence[Tool] | None,
    documents: list[dict[str, Any]] | None = None,
) -> RenderedChat:
    """Render a conversation with the model's own template, and the server's variables overridden by the body's.

    A variable that is null is not given.
    """
    messages, kwargs = body.messages or [], body.chat_template_kwargs or {}
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("messages", f"{len(messages)} messages are not allowed; give 1 to {MAX_MESSAGES}")
    turns = [_turn(message) for message in messages]
    options: dict[str, Any] = {"tools": [tool.function.as_shown() for tool in tools or ()], "documents": documents}
    if kwargs:
        check_template_kwargs(kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    implied = _implied(context, body)
    if contradicted := [name for name in implied if given.get(name, implied[name]) != implied[name]]:
        param = "reasoning_effort" if getattr(body, contradicted[0], None) is None else contradicted[0]
        raise invalid(param, f"{KWARGS} has another {contradicted[0]}")
    options["template_kwargs"] = {**(context.options.default_chat_template_kwargs or {}), **implied, **given}
    for name, value in (("messages", turns), ("tools", options["tools"]), ("documents", documents), (KWARGS, given)):
        check_nesting(name, value)
    text = "".join(turn["content"] or "" for turn in turns) + "".join(str(value) for value in options.values() if value)
    check_prompt_length(text, info.max_model_len, param="messages")
    continues = bool(body.continue_final_message)
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    options |= {"add_generation_prompt": adds, "continue_final_message": continues}
    work = partial(render_chat, context.tokenizer(), turns, **options)
    return await tokenizing(context, work, len(text))


def _implied(context: ServerContext, body: ChatRequest) -> dict[str, Any]:
    """Find the variables of the template that `reasoning_effort`, `enable_thinking` and `verbosity` stand for."""
    template, effort, verbosity = context.tokenizer().chat_template, body.reasoning_effort, body.verbosity
    implied = {} if effort is None else effort_variables(template, effort)
    if body.enable_thinking is not None:
        text = "" if template is None else template.text
        reasons = reasoning_format_of(text, context.options.reasoning_parser) is not None
        switch = switch_variables(template, enable_thinking=body.enable_thinking, reasons=reasons)
        if {**switch, **implied} != {**implied, **switch}:
            raise invalid("enable_thinking", "reasoning_effort says otherwise")
        implied |= switch
    return implied if verbosity is None else implied | verbosity_variables(template, verbosity)


def _turn(message: Message) -> dict[str, Any]:
    """Convert a message for the template. The role `developer` becomes `system`, the name that templates know."""
    if message.role == "function" or message.function_call is not None:
        raise unsupported("messages", "the role function is only supported by chat completions; its newer name is tool")
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = to_builtins(message.content)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    return turn_of(
        turn if not message.tool_calls else {**turn, "tool_calls": [c.as_shown() for c in message.tool_calls]}
    )


def salted(request: Request, given: str | None, prompts: list[PromptRequest]) -> list[PromptRequest]:
    """Set the call's cache_salt in its prompts; it includes the key's name where requests are salted by key.

    Raises:
        InvalidRequestError: the given value is not a valid salt.
    """
    check_salt(given)
    salt = given
    if context_of(request).options.cache_salt_by_key:
        name = account_of(request).name  # has no space
        salt = blake2b(f"{name} {given or ''}".encode(), digest_size=16).hexdigest()
    return prompts if salt is None else [replace(prompt, cache_salt=salt) for prompt in prompts]


# --- sampling parameters ----------------------------------------------------------------------------------------------


def completion_params(body: CompletionRequest, info: ModelInfo) -> SamplingParams:
    """Make the SamplingParams of a completion; it generates 16 tokens by default.

    With `max_tokens: 0`, which needs `echo`, the engine generates a token that the answer leaves out.

    `echo` with `logprobs` needs the prompt's log-probabilities too. If `prompt_logprobs` asks for a different number of
    them, the larger number is computed, and each field of the answer shows the number asked for.
    """
    own: dict[str, Any] = {"logprobs": body.logprobs}
    check_listed(body)
    if body.max_tokens == -1:
        own["max_tokens"] = None
    if body.max_tokens == 0:
        for name, is_wrong in (("max_tokens", not body.echo), ("use_beam_search", body.use_beam_search)):
            if is_wrong:
                raise invalid(name, "max_tokens 0 needs echo, and no beam search")
        check_int("min_tokens", body.min_tokens, 0, 0, optional=True)
        own["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        if body.use_beam_search:
            raise invalid("echo", "not allowed with logprobs and use_beam_search")
        check_int("logprobs", body.logprobs, -1, MAX_LOGPROBS)
        own["prompt_logprobs"] = max(num_top(body.logprobs), num_top(body.prompt_logprobs))
    return sampling_params(body, info, own, streams=bool(body.stream))


def chat_params(body: ChatRequest, info: ModelInfo) -> SamplingParams:
    """Make the SamplingParams of a chat answer; by default it may fill the rest of the context."""
    own: dict[str, Any] = {"max_tokens": info.default_sampling.get("max_tokens")}
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value == -1:
            own["max_tokens"] = None
        elif value is not None:
            check_int(name, value, 1, MAX_TOKENS)
            own["max_tokens"] = value
    check_int("top_logprobs", body.top_logprobs, -1, MAX_LOGPROBS, optional=True)
    check_listed(body)
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    return sampling_params(body, info, own, streams=bool(body.stream))


def num_top(count: int | None) -> int:
    """Read a number of most likely tokens as a request gives it."""
    return MAX_LOGPROBS if count == -1 else count or 0


def check_listed(body: CompletionRequest | ChatRequest) -> None:
    """Raise InvalidRequestError for ids whose log-probabilities the answer would not show."""
    if body.logprob_token_ids and body.logprobs in (None, False):
        raise invalid("logprob_token_ids", "only allowed with logprobs")


def sampling_params(body: Body, info: ModelInfo, own: dict[str, Any], *, streams: bool) -> SamplingParams:
    """Make the SamplingParams of a body. `own` are the fields that its route spells in a way of its own."""
    given = {name: value for name in fields_of(body.place) if (value := getattr(body, name)) is not None}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    defaults = info.default_sampling
    if {**given, **own}.get("use_beam_search"):  # nothing is sampled
        defaults = {name: value for name, value in defaults.items() if name not in NOISE}
    own |= {"structured_outputs": form_of(body), "output_kind": kind}
    if isinstance(body, GenerationRequest):
        if body.repeat_penalty is not None:
            own["repetition_penalty"] = body.repeat_penalty
        if body.best_of is not None:
            own |= {"n": body.best_of, "logprobs": own.get("logprobs") or 0}
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
    """Read the form that a body asks for; None: any text.

    Raises:
        InvalidRequestError: the form is malformed, or given in two fields; `param` is the field.
    """
    forms = {name: form for name, value in _given(body) if (form := _read(name, value)) is not None}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise invalid(second, f"not allowed with {first}, which gives a form too")
    return next(iter(forms.values()), None)


def _given(body: Any) -> list[tuple[str, Any]]:
    """List the fields about the form that a body has, with their values."""
    return [(name, value) for name in READERS if (value := getattr(body, name, None)) is not None]


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    with naming(name):
        return READERS[name](value)


async def check_form(request: Request, body: Any, params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field, for a form that the model cannot follow.

    It may wait for other forms, but not once the client has left.
    """
    if params.structured_outputs is not None:
        with naming(_given(body)[-1][0]):  # a field before it only says that the form is free
            checking = context_of(request).client.check_form(params.structured_outputs, FLOW.get())
            await until_disconnect(request.receive, checking)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Turn errors about the form into errors about the field in which the body gives it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != FIELD or field == FIELD:
            raise
        _, _, reason = error.message.partition(": ")
        raise invalid(field, f"{reason}", error.code) from None


def _of_text(value: Any) -> StructuredOutputsParams | None:
    """Read the form in the field `text` of /v1/responses; None for {} and for a format of type text."""
    if not isinstance(value, Mapping):
        raise fail(TEXT, value, 'an object like {"format": {"type": "text"}}')
    if value.get("verbosity") not in (None, "low", "medium", "high"):
        raise fail("text.verbosity", value["verbosity"], "low, medium or high")
    _check_keys(TEXT, value, ("format", "verbosity"))
    wanted = value.get("format")
    return None if wanted is None else _of_format(TEXT, wanted, lambda given: given)


def _of_format(field: str, value: Any, schema_of: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, Mapping):
        raise fail(field, value, 'an object like {"type": "json_object"}')
    kind = value.get("type")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(value))
    if kind not in KINDS:
        raise fail(field, kind, f"an object whose type is one of {', '.join(KINDS)}")
    if kind != "json_schema":
        _check_keys(field, value, ("type",))
        return None if kind == "text" else StructuredOutputsParams(json_object=True)
    return _of_schema(field, schema_of(value))


def _nested_schema(value: Mapping[str, Any]) -> Any:
    """Find the schema's description, which chat has in a separate field, and /v1/responses next to the type."""
    _check_keys(FORMAT, value, ("type", "json_schema"))
    return value.get("json_schema")


def _of_schema(field: str, value: Any) -> StructuredOutputsParams:
    """Read the form of a named schema. `strict` changes nothing: a schema is always followed or refused."""
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
    "grammar": partial(_of_guided, "grammar"),  # llama.cpp's names
    "json_schema": partial(_of_guided, "json"),
}


# --- tools and reasoning ----------------------------------------------------------------------------------------------
# Which grammar the answers to a chat request have to follow, and how they are parsed.


SCHEMA_AT = re.compile(r" at (\d+)\(\d+\): failed to compile JSON schema: (.*)", re.DOTALL)  # in llguidance's messages
RULE = re.compile(r"call_(\d+)_\w+: %json")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for parsing an answer.

    Attributes:
        tool_format: how its tool calls are written; None: it has no tool calls.
        functions: the functions that it may call, with the schemas of their parameters.
        custom: names of those that stand for tools which are called with a text.
        reasoning, is_thinking: as in AnswerParser.
    """

    tool_format: ToolFormat | None = None
    functions: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    custom: frozenset[str] = frozenset()

    def parser(self) -> AnswerParser | None:
        """Make a parser for one answer; None if all of it is content."""
        if self.tool_format is None and self.reasoning is None:
            return None
        return AnswerParser(self.tool_format, self.functions, reasoning=self.reasoning, is_thinking=self.is_thinking)

    @property
    def marks(self) -> list[str]:
        """The texts that separate the parts of an answer."""
        formats: Sequence[ToolFormat | ReasoningFormat | None] = (self.reasoning, self.tool_format)
        return list(dict.fromkeys(mark for item in formats if item is not None for mark in item.marks))


def rules_of(context: ServerContext, body: ChatRequest, prompt: PromptRequest) -> Rules:
    """Choose the rules for a request's answers. They depend only on data that a journal keeps."""
    tokenizer, options = context.tokenizer(), context.options
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.text
    reasoning = None if _has_another_form(body) else reasoning_format_of(template, options.reasoning_parser)
    is_thinking = reasoning is not None and is_within(reasoning, prompt.token_ids, tokenizer)
    if not body.offered:
        return Rules(reasoning=reasoning, is_thinking=is_thinking)
    callable_names = body.callable_names
    functions = {tool.function.name: tool.function.parameters for tool in body.offered}
    functions = {name: schema for name, schema in functions.items() if name in callable_names}
    custom = frozenset(tool.function.name for tool in body.offered if isinstance(tool, CustomTool))
    return Rules(tool_format_of(template, options.tool_call_parser), functions, reasoning, is_thinking, custom)


def _has_another_form(body: ChatRequest) -> bool:
    """Check whether the answer must have a form other than JSON, which leaves no room for reasoning."""
    given = body.structured_outputs or {}
    kinds = ("regex", "choice", "grammar", "structural_tag")
    is_tag = (body.response_format or {}).get("type") == "structural_tag"
    return is_tag or any(given.get(kind) or getattr(body, f"guided_{kind}", None) is not None for kind in kinds)


async def with_rules(context: ServerContext, body: ChatRequest, rules: Rules, params: SamplingParams) -> SamplingParams:
    """Add to the parameters what enforces the request's tools, and keep marks that are special tokens in the text.

    Raises:
        InvalidRequestError: the requested form cannot be combined with the tools, or it is not known how the model
            calls tools.
    """
    is_raw = context.options.tool_call_parser == "none" and not _constrains(body)
    if body.offered and rules.tool_format is None and not is_raw:
        raise unsupported("tools", "how this model calls them is not known; start the server with --tool-call-parser")
    if params.thinking_token_budget not in (None, -1) and rules.reasoning is not None:
        find = partial(thinking_ids, rules.reasoning, context.tokenizer(), is_thinking=rules.is_thinking)
        params = params.settled(thinking_token_ids=await asyncio.to_thread(find))
    if not rules.marks:
        return params
    tokens = await _tokens_of(context, rules.marks)
    if context.tokenizer().special_ids.intersection(tokens.values()):
        params = params.settled(skip_special_tokens=False)
    once = rules.tool_format is None or rules.tool_format.once
    several = once or await _takes_several_calls(context)
    is_constrained = rules.tool_format is not None and (_constrains(body) or not several)
    if not is_constrained and params.structured_outputs is None:
        return params
    functions = [tool.function.as_function() for tool in body.offered if tool.function.name in rules.functions]
    many = (
        several and not once and body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedChoice)
    )
    calls = Calls(functions, body.must_call, many, _answer_schema(params.structured_outputs, body))
    grammar = answer_grammar(
        rules.tool_format, calls, partial(_term, tokens), reasoning=rules.reasoning, is_thinking=rules.is_thinking
    )
    form = StructuredOutputsParams(grammar=grammar)
    try:
        await context.client.check_form(form, FLOW.get())
    except InvalidRequestError as error:
        raise _refusal(error, grammar.splitlines(), functions) from None
    return params.settled(structured_outputs=form)


def _refusal(error: InvalidRequestError, lines: list[str], functions: Sequence[Function]) -> InvalidRequestError:
    """Turn an error about the generated grammar into an error about the function whose schema caused it."""
    place = SCHEMA_AT.search(error.message)
    rule = None if place is None else RULE.match(lines[int(place[1]) - 1])
    if place is None or rule is None:
        return invalid("tools", f"they cannot be enforced: {error.message}", error.code)
    reason = re.split(r"\s+\d+ \| ", place[2])[0]
    message = f"tools: the parameters of {functions[int(rule[1])].name} cannot be enforced: {reason}"
    return InvalidRequestError(message, param="tools")


def _constrains(body: ChatRequest) -> bool:
    """Check whether a request restricts its tool calls beyond offering the tools."""
    some = len(body.callable_names) < len(body.offered)
    strict = any(tool.function.strict for tool in body.offered)
    return bool(body.offered) and (body.must_call or some or strict or body.parallel_tool_calls is False)


def _answer_schema(form: StructuredOutputsParams | None, body: ChatRequest) -> str | None:
    """Choose the JSON schema of an answer without a tool call; None if its form is free, or a call is required."""
    if form is None:
        return None
    if form.json is None and not form.json_object:
        message = "with tools only json and json_object are allowed; tool_choice none leaves them out"
        raise invalid("structured_outputs", message)
    if body.must_call:
        return None
    schema = {"type": "object"} if form.json is None else json.loads(str(form.json))
    guidance: dict[str, Any] = {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}
    if form.disable_any_whitespace:
        guidance = {"whitespace_flexible": False}
    return json.dumps({**schema, "x-guidance": guidance} if isinstance(schema, dict) else schema)


async def _takes_several_calls(context: ServerContext) -> bool:
    """Find out, once, whether the chat template takes several calls in one message. Where it takes one, as Llama 3.1's,
    an answer with more could not be sent back."""
    if context.takes_several_calls is None:
        template = context.tokenizer().chat_template
        context.takes_several_calls = template is None or await asyncio.to_thread(takes_several_calls, template)
    return context.takes_several_calls


async def _tokens_of(context: ServerContext, marks: Sequence[str]) -> dict[str, int]:
    """Find the marks that are a single token, with the token's id."""
    tokenizer = context.tokenizer()
    unknown = [mark for mark in marks if mark not in context.mark_tokens]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for mark in unknown:
        ids = await asyncio.to_thread(encode, mark)
        is_one = len(ids) == 1 and tokenizer.token_to_text(ids[0]) == mark
        context.mark_tokens[mark] = ids[0] if is_one else None
    return {mark: token_id for mark in marks if (token_id := context.mark_tokens[mark]) is not None}


def _term(tokens: dict[str, int], mark: str) -> str:
    """Write a mark as a term of the grammar: as a token if it is a single token, else as text."""
    return f"<[{tokens[mark]}]>" if mark in tokens else literal(mark)
