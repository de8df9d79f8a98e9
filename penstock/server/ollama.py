"""/api/...: Ollama's API, as a translation of bodies to chats and embeddings, and of outputs to its lines of JSON.

What a body asks for is computed as the chat request that asks for the same, so the same conversation has the same
tokens over both APIs; `raw` is a completion of the prompt. Calls need no ids there: a result answers the first open
call of its `tool_name`. Defaults are the model's own, not Ollama's.

`keep_alive` is how long one of several models stays loaded after its last request (client/model_pool.py); the only one
of a server, and a pinned one, stay. The options of LOADING, about how a model was loaded, are hints.
"""

import json
import math
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.input_processor import PromptRequest
from penstock.errors import InvalidRequestError, NotSupportedError, check_int, fail
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.interface.pooling import PoolingParams
from penstock.interface.sampling_params import MAX_TOKENS, SamplingParams
from penstock.server.api_errors import until_disconnect
from penstock.server.completions import ChatAnswers
from penstock.server.context import ServerContext, context_of, json_response, log_of, model_of, read_body, within_limits
from penstock.server.embeddings import EmbeddingRequest, floats, pooled
from penstock.server.generation import NDJSON, EventStream, Generation
from penstock.server.inputs import (
    TOO_LONG,
    Rules,
    Texts,
    chat_params,
    chat_prompts,
    check_form,
    completion_prompts,
    ending_before_suffix,
    rules_of,
    salted,
    with_rules,
)
from penstock.server.messages import input_of, renaming, text_of_input, thinking_fields
from penstock.server.openai_requests import (
    ChatRequest,
    CompletionRequest,
    ComputingRequest,
    Strict,
    Tool,
    to_request,
)
from penstock.server.openai_responses import TokenNames, chat_logprobs
from penstock.tokenizer.answer_formats import reasoning_format_of, tool_format_of
from penstock.tokenizer.answer_reader import Kind, Part

# --- the options ------------------------------------------------------------------------------------------------------


NAMES = {  # field of a chat -> option of this API
    **{name: name for name in (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty",
        "mirostat", "mirostat_tau", "mirostat_eta",
    )},
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
LOADING = (  # about a model that is loaded already, and the first tokens that survive a shift of the context: none is
    "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "use_mmap", "use_mlock",
)  # fmt: skip
NEUTRAL: dict[str, Any] = {  # option -> the only value that is accepted, which asks for what is done anyway
    "repeat_last_n": -1, "penalize_newline": True, "tfs_z": 1.0, "logits_all": False, "vocab_only": False,
    "embedding_only": False,
}  # fmt: skip
ENDLESS = (-1, -2)  # values of num_predict: to the end of the context
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")


class OllamaOptions(Strict, kw_only=True, frozen=True):
    """The `options` of a body, by Ollama's names."""

    num_ctx: int | None = None
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    tfs_z: float | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for an option whose only accepted value is another."""
        for name, value in NEUTRAL.items():
            if getattr(self, name) not in (None, value):
                message = f"options.{name}: only {json.dumps(value)} is supported"
                raise NotSupportedError(message, param=f"options.{name}")

    def chat_fields(self) -> dict[str, Any]:
        """List the fields of a chat that the options stand for."""
        fields = {name: value for name, own in NAMES.items() if (value := getattr(self, own)) is not None}
        if fields.get("max_tokens") in ENDLESS:
            del fields["max_tokens"]
        if fields.get("seed") == -1:  # another answer each time
            del fields["seed"]
        return fields


# --- the bodies -------------------------------------------------------------------------------------------------------


class CalledFunction(Strict, kw_only=True, frozen=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Strict, kw_only=True, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict, kw_only=True, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(ComputingRequest, kw_only=True, frozen=True):
    """The fields of all bodies that something is computed for."""

    model: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.keep_alive, str) and DURATION.fullmatch(self.keep_alive) is None:
            raise fail("keep_alive", self.keep_alive, "a number of seconds, or a duration like 5m")
        self.given.check()

    @property
    def keep_s(self) -> float | None:
        """The seconds of keep_alive; infinity for a negative one, None if it is not given."""
        if self.keep_alive is None:
            return None
        if isinstance(self.keep_alive, float):
            return math.inf if self.keep_alive < 0 else self.keep_alive
        parts = re.findall(r"(\d+(?:\.\d+)?)([a-zµ]*)", self.keep_alive)
        seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
        return math.inf if self.keep_alive.startswith("-") else seconds

    @property
    def given(self) -> OllamaOptions:
        return self.options or OllamaOptions()


class TextRequest(OllamaRequest, kw_only=True, frozen=True):
    """The fields that /api/chat and /api/generate share.

    Attributes:
        names: field of a chat -> field of this body, for errors.
    """

    names: ClassVar[dict[str, str]] = {
        **{name: f"options.{own}" for name, own in NAMES.items()},
        "response_format": "format", "reasoning_effort": "think",
    }  # fmt: skip

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def messages_of_chat(self) -> list[dict[str, Any]]:
        """List the messages of the chat; none asks only for the model to be loaded."""
        raise NotImplementedError

    def shaped(self, part: dict[str, Any]) -> dict[str, Any]:
        """Arrange a part of the answer as this route does."""
        raise NotImplementedError


class OllamaChatRequest(TextRequest, kw_only=True, frozen=True):
    """POST /api/chat."""

    place: ClassVar[str] = "ollama_chat"

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None

    def messages_of_chat(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        unanswered: list[tuple[str, str]] = []  # id and name of each call
        for index, turn in enumerate(self.messages or ()):
            message: dict[str, Any] = {"role": turn.role, "content": turn.content or ""}
            if turn.thinking:
                message["reasoning_content"] = turn.thinking
            if turn.tool_calls:
                message["content"] = turn.content or None
                message["tool_calls"] = calls = [_call(call, len(found), at) for at, call in enumerate(turn.tool_calls)]
                unanswered += [(call["id"], call["function"]["name"]) for call in calls]
            if turn.role == "tool":
                message["tool_call_id"] = _answered(turn, unanswered, f"messages[{index}]")
            elif turn.tool_name is not None or turn.tool_call_id is not None:
                text = f"messages[{index}].tool_name: only a message of the role tool answers a call"
                raise InvalidRequestError(text, param="messages")
            found.append(message)
        return found

    def shaped(self, part: dict[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", **part}}


def _call(call: OllamaCall, message: int, index: int) -> dict[str, Any]:
    """Convert a call. One without an id gets one of nine letters and digits, the kind that all templates take."""
    function = {"name": call.function.name, "arguments": text_of_input(call.function.arguments)}
    return {"id": call.id or f"c{message:04}{index:04}", "type": "function", "function": function}


def _answered(turn: OllamaMessage, unanswered: list[tuple[str, str]], place: str) -> str:
    """Find the id of the call that a result answers, and take it from those that are open."""
    for at, (call_id, name) in enumerate(unanswered):
        if turn.tool_call_id in (None, call_id) and turn.tool_name in (None, name):
            del unanswered[at]
            return call_id
    message = f"{place}.tool_name: no call in an earlier message is left for this result to answer"
    raise InvalidRequestError(message, param="messages")


class OllamaGenerateRequest(TextRequest, kw_only=True, frozen=True):
    """POST /api/generate."""

    place: ClassVar[str] = "ollama_generate"
    names: ClassVar[dict[str, str]] = {**TextRequest.names, "messages": "prompt"}

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is not rendered."""
        return bool(self.raw or self.suffix)

    def check(self) -> None:
        super().check()
        for name in ("system", "think"):
            if self.is_plain and getattr(self, name):
                message = f"{name}: not allowed with raw or suffix: the prompt is not rendered"
                raise InvalidRequestError(message, param=name)

    def messages_of_chat(self) -> list[dict[str, Any]]:
        texts = (("system", self.system), ("user", self.prompt)) if self.prompt else ()
        return [{"role": role, "content": text} for role, text in texts if text]

    def shaped(self, part: dict[str, Any]) -> dict[str, Any]:
        thinking = {"thinking": part["thinking"]} if "thinking" in part else {}
        return {"response": part.get("content", ""), **thinking}


class OllamaEmbedRequest(OllamaRequest, kw_only=True, frozen=True):
    """POST /api/embed."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OllamaRequest, kw_only=True, frozen=True):
    """POST /api/embeddings, which is older."""

    prompt: str


# --- from the body to a chat ------------------------------------------------------------------------------------------


def chat_of(context: ServerContext, body: TextRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Convert a body to the chat request that asks for the same.

    Raises:
        InvalidRequestError: something is malformed, or not supported.
    """
    fields: dict[str, Any] = {"messages": messages, "stream": body.streams, **body.given.chat_fields()}
    fields |= _thinking_fields(context, body.think)
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True  # the answer continues the text that the client has begun
    if isinstance(body.format, dict):
        wanted = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise fail("format", body.format, '"json" or a JSON schema')
    if isinstance(body, OllamaChatRequest) and body.tools is not None:
        fields["tools"] = [msgspec.to_builtins(tool) for tool in body.tools]
    for name in ("logprobs", "top_logprobs"):
        fields[name] = getattr(body, name)
    chat = to_request(fields, ChatRequest)
    chat.check()
    return chat


def _thinking_fields(context: ServerContext, think: bool | str | None) -> dict[str, Any]:
    """Find the fields of a chat for `think`: a switch, or a level. A model that cannot think is not asked to."""
    if isinstance(think, str):
        return {"reasoning_effort": think}
    if think and "thinking" not in capabilities(context):
        raise NotSupportedError("think: true is not supported; this model does not reason", param="think")
    kind = {None: None, True: "enabled", False: "disabled"}[think]
    return thinking_fields(context, kind, None, None, "think: false")


def _within_context(body: TextRequest, params: SamplingParams, prompt: PromptRequest) -> SamplingParams:
    """End the answer where the prompt and it have num_ctx tokens. Raise InvalidRequestError if the prompt has them."""
    most = body.given.num_ctx
    if most is None:
        return params
    room = most - len(prompt.token_ids)
    if room < 1:
        message = f"options.num_ctx: {most} tokens have no room for the prompt's {len(prompt.token_ids)} and an answer"
        raise InvalidRequestError(message, param="options.num_ctx", code=TOO_LONG)
    return params.settled(max_tokens=room if params.max_tokens is None else min(room, params.max_tokens))


# --- the answer -------------------------------------------------------------------------------------------------------


FRAGMENTS = {Kind.CONTENT: "content", Kind.REASONING: "thinking"}


class OllamaAnswer:
    """Shapes the outputs of one call as one object, or as its lines."""

    def __init__(self, body: TextRequest, rules: Rules, generation: Generation, envelope: dict[str, Any]) -> None:
        tokenizer = generation.context.tokenizer()
        self._body, self._generation, self._envelope = body, generation, envelope
        self._answers = ChatAnswers(generation.id, rules, tokenizer if rules.marks else None)
        self._names = TokenNames(tokenizer, as_ids=False)
        self._call: Part | None = None  # whose arguments are not complete
        self._arguments: list[str] = []

    async def whole(self) -> dict[str, Any]:
        """Wait for the whole answer."""
        (output,) = await self._generation.collect()
        choice, joined = output.outputs[0], {"content": ""}
        for part in self._fragments(choice):
            for name, value in part.items():
                joined[name] = joined[name] + value if name in joined else value
        return {**self._line(joined), **self._logprobs(choice), **self._ending(output)}

    async def lines(self) -> AsyncGenerator[bytes | None, None]:
        """Yield the lines as they come. The first one waits for the first output, so that a refusal has its status."""
        last = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                if item is None:
                    yield encoded(self._line({}))  # an empty part keeps the connection open
                    continue
                last = item[1]
                logprobs = self._logprobs(last.outputs[0])
                parts = list(self._fragments(last.outputs[0])) or ([{}] if logprobs.get("logprobs") else [])
                for part in parts:
                    yield encoded({**self._line(part), **logprobs})
                    logprobs = {}
        if last is not None:
            yield encoded({**self._line({}), **self._ending(last)})

    def _fragments(self, choice: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the new parts of the answer; a call, which this API does not cut, when it is complete."""
        for part in self._answers.parts(choice):
            if part.kind is Kind.ARGUMENTS:
                self._arguments.append(part.text)
                continue
            yield from self._end_call()
            if part.kind is Kind.CALL:
                self._call = part
            else:
                yield {FRAGMENTS[part.kind]: part.text}
        if choice.finish_reason is not None:
            yield from self._end_call()

    def _end_call(self) -> Iterator[dict[str, Any]]:
        if self._call is None:
            return
        call, arguments = self._call, input_of("".join(self._arguments))
        self._call, self._arguments = None, []
        function = {"index": call.call, "name": call.text, "arguments": arguments}
        yield {"tool_calls": [{"id": self._answers.call_id(0, call.call), "function": function}]}

    def _line(self, part: dict[str, Any]) -> dict[str, Any]:
        return {**self._envelope, "created_at": shown_time(time.time()), **self._body.shaped(part), "done": False}

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any]:
        if not self._body.logprobs:
            return {}
        found = chat_logprobs(self._names, choice.token_ids, choice.logprobs or [], self._body.top_logprobs or 0)
        return {"logprobs": found["content"]}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        log, reason = self._generation.log, output.outputs[0].finish_reason
        total = log.age_s()
        prompt = output.arrivals[0].first - log.started if output.arrivals else total
        return {
            "done": True,
            "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": log.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": log.num_completion_tokens,
            "eval_duration": _nanoseconds(max(0.0, total - prompt)),
            "seed": self._generation.seed(),
            "system_fingerprint": self._generation.context.fingerprint(self._generation.log.adapter),
        }


def encoded(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def shown_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# --- routes that compute ----------------------------------------------------------------------------------------------


async def create_ollama_chat(request: Request) -> Response:
    """Handle POST /api/chat: answer a conversation in Ollama's format, whole or as lines of JSON."""
    return await _create(request, await read_body(request, OllamaChatRequest))


async def create_ollama_text(request: Request) -> Response:
    """Handle POST /api/generate: answer a prompt, or continue it (`raw`), in Ollama's format."""
    return await _create(request, await read_body(request, OllamaGenerateRequest))


async def _create(request: Request, body: TextRequest) -> Response:
    body.check()
    name = model_name(request, body.model)
    messages = body.messages_of_chat()
    if not messages and body.keep_s == 0.0:
        return _unloaded(request, body, name)
    context, log = await model_of(request, name, body.timeout), log_of(request)
    _keep(context, body)
    info, envelope = context.info(), {"model": name}
    check_int("options.num_ctx", body.given.num_ctx, 1, info.max_model_len, optional=True)
    num_predict = body.given.num_predict
    if num_predict not in ENDLESS:
        check_int("options.num_predict", num_predict, 1, MAX_TOKENS, optional=True)
    if not messages:
        return _shown(body, name, "load")
    context.arrive(log)  # refuse it before spending time on the prompt
    with renaming(body.names):
        chat = chat_of(context, body, messages)
        params = chat_params(chat, info)
        await check_form(request, chat, params)
        if isinstance(body, OllamaGenerateRequest) and body.is_plain:
            rules, text = Rules(), to_request({"prompt": body.prompt, "suffix": body.suffix}, CompletionRequest)
            prompts = await completion_prompts(context, text, info)
            params = ending_before_suffix(context, params) if body.suffix else params
        else:
            prompts = await chat_prompts(context, chat, info)
            rules = rules_of(context, chat, prompts[0])
            params = await with_rules(context, chat, rules, params)
        params = _within_context(body, params, prompts[0])
        prompts = salted(request, body.cache_salt, prompts)
        params = within_limits(request, params, prompts, priority=body.priority, timeout_s=body.timeout)
    generation = Generation(context, f"ollama-{uuid4().hex}", prompts, params, log)
    answer = OllamaAnswer(body, rules, generation, envelope)
    if body.streams:
        return EventStream(answer.lines(), stall_timeout_s=context.options.stall_timeout_s, done=b"", media=NDJSON)
    return json_response(await until_disconnect(request.receive, answer.whole()))


def _keep(context: ServerContext, body: OllamaRequest) -> None:
    """Keep the model loaded for as long as the body says."""
    if body.keep_s is not None:
        context.models.keep(context.model, body.keep_s)


def _unloaded(request: Request, body: TextRequest, name: str) -> Response:
    """Put a model to sleep as soon as nothing uses it."""
    context = context_of(request).named(name)
    if context.model.pinned:
        message = "keep_alive: 0 is not supported; this server keeps this model loaded"
        raise NotSupportedError(message, param="keep_alive")
    _keep(context, body)
    return _shown(body, name, "unload")


def _shown(body: TextRequest, name: str, reason: str) -> Response:
    """Answer a request without a prompt, which asks for the model to be loaded or unloaded."""
    shown = {"created_at": shown_time(time.time()), **body.shaped({}), "done": True, "done_reason": reason}
    return json_response({"model": name, **shown})


async def create_ollama_embed(request: Request) -> Response:
    """Handle POST /api/embed: compute the vectors of texts, each of length 1."""
    body = await read_body(request, OllamaEmbedRequest)
    texts: Texts = [body.input] if isinstance(body.input, str) else body.input
    cut = await _cut(request, body, truncates=body.truncate is not False)
    params = PoolingParams(truncate_prompt_tokens=cut, dimensions=body.dimensions, normalize=True)
    log = log_of(request)

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        counts = {"load_duration": 0, "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs)}
        vectors = [floats(output) for output in outputs]
        return {"embeddings": vectors, "total_duration": _nanoseconds(log.age_s()), **counts}

    return await pooled(request, _embedding(request, body), {"input": texts}, params, answer)


async def create_ollama_embedding(request: Request) -> Response:
    """Handle POST /api/embeddings: compute the vector of a text, not divided by its length."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    params = PoolingParams(truncate_prompt_tokens=await _cut(request, body, truncates=True), normalize=False)
    fields: dict[str, Texts] = {"prompt": [body.prompt]}
    return await pooled(
        request, _embedding(request, body), fields, params, lambda outputs: {"embedding": floats(outputs[0])}
    )


async def _cut(request: Request, body: OllamaRequest, *, truncates: bool) -> int | None:
    """Find the number of tokens to which texts are cut, -1: the context. Raise for options about sampling."""
    body.check()
    options = body.given
    for name in OllamaOptions.__struct_fields__:
        if name not in (*LOADING, *NEUTRAL, "num_ctx") and getattr(options, name) is not None:
            message = f"options.{name}: not allowed for an embedding, for which nothing is sampled"
            raise InvalidRequestError(message, param=f"options.{name}")
    context = await model_of(request, model_name(request, body.model), body.timeout)
    _keep(context, body)
    check_int("options.num_ctx", options.num_ctx, 1, context.info().max_model_len, optional=True)
    if options.num_ctx is not None and not truncates:
        message = "options.num_ctx: not allowed with truncate: false, which refuses what is longer than the context"
        raise InvalidRequestError(message, param="options.num_ctx")
    return (options.num_ctx or -1) if truncates else None


def _embedding(request: Request, body: OllamaRequest) -> EmbeddingRequest:
    """Make the body with the fields that all embeddings share."""
    model = model_name(request, body.model)
    return EmbeddingRequest(
        model=model, input=[], cache_salt=body.cache_salt, priority=body.priority, timeout=body.timeout
    )


# --- the model --------------------------------------------------------------------------------------------------------


LATEST = ":latest"  # clients of Ollama add this tag


def model_name(request: Request, name: str) -> str:
    """Find the name under which a model is served. Raise ApiError (404) for a model that is not served."""
    contexts = context_of(request).all
    found = name if any(name in context.model_names() for context in contexts) else name.removesuffix(LATEST)
    contexts[0].named(found)
    return found


def capabilities(context: ServerContext) -> list[str]:
    """List what a model can do, as far as it is known."""
    info, options = context.info_if_loaded(), context.options
    if info is None:
        return ["completion"]
    template = context.tokenizer().chat_template
    text = "" if template is None else template.text
    switches = "enable_thinking" in text or "reasoning_effort" in text
    found = {
        "completion": info.has_lm_head,
        "tools": tool_format_of(text, options.tool_call_parser) is not None,
        "thinking": switches or reasoning_format_of(text, options.reasoning_parser) is not None,
        "embedding": not info.pooler.unsupported,
    }
    return [name for name, has in found.items() if has]
