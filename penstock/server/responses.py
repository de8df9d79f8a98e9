"""/v1/responses: the body and its conversion to a chat and SamplingParams, the Response object, its events, the routes.

A response is always a kept call: it is stored unless `store` is false, it runs on without a connection if `background`
is true, and its stream can be read again from any sequence_number.

The events depend on the tokens alone, so a sequence_number means the same place in the stream however often the
response is computed. The items that they tell of, and those of an input, are in response_items.py.
"""

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError, NotSupportedError, check_int, check_nesting, shown
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import FEW_LOGPROBS, MAX_TOKENS, SamplingParams
from penstock.server.api_errors import ApiError, unavailable, until_disconnect
from penstock.server.client_fields import without_unread_hints
from penstock.server.completions import ChatAnswers
from penstock.server.context import ServerContext, context_of, json_response, log_of, model_of, read_body, within_limits
from penstock.server.generation import Generation
from penstock.server.inputs import (
    chat_prompts,
    check_form,
    latest_prompts,
    rules_of,
    salted,
    sampling_params,
    with_rules,
)
from penstock.server.kept_calls import Frame, KeptCall
from penstock.server.messages import renaming
from penstock.server.openai_requests import (
    ChatRequest,
    ComputingRequest,
    Effort,
    ServiceTier,
    Strict,
    to_request,
    with_sampling_fields,
)
from penstock.server.openai_responses import TokenNames
from penstock.server.response_items import Conversation, OutputItem, TextLogprobs, items_of, listed_items
from penstock.server.resumption import keep, owner_of, resume, stream_of
from penstock.tokenizer.answer_reader import Kind, Part

# --- the body ---------------------------------------------------------------------------------------------------------


# The values of `include` that add nothing: thoughts are always in an answer, unencrypted; the others are about tools,
# and parts, that this server refuses.
INCLUDED = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
NAMES = {  # field of a chat -> field of a response
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "tools": "tools",
    "verbosity": "text.verbosity",
}

INSIDE = {"].function.": "].", "].custom.": "]."}  # what names a part of a chat's tool -> of a response's
naming_the_response = partial(renaming, NAMES, INSIDE)


def check_include(wanted: Sequence[str]) -> None:
    """Raise NotSupportedError for a value of `include` that would not be included."""
    for name in wanted:
        if name not in (*INCLUDED, LOGPROBS):
            message = f"include: {shown(name)} is not supported; {', '.join((*INCLUDED, LOGPROBS))} are"
            raise NotSupportedError(message, param="include")


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise InvalidRequestError for metadata beyond OpenAI's limits; it is stored with the response."""
    given = metadata or {}
    if len(given) > 16 or any(len(name) > 64 or len(value) > 512 for name, value in given.items()):
        message = "metadata: at most 16 pairs are allowed, with names of 64 and values of 512 characters"
        raise InvalidRequestError(message, param="metadata")


class Reasoning(Strict, kw_only=True, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Strict, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None


@with_sampling_fields
class ResponseRequest(ComputingRequest, kw_only=True, frozen=True):
    """POST /v1/responses: OpenAI's fields, beside those that `with_sampling_fields` adds."""

    place: ClassVar[str] = "responses"

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    reasoning: Reasoning | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    structured_outputs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        if self.background and self.store is False:
            raise InvalidRequestError(
                "background: a response in the background is stored; leave out store", param="store"
            )
        super().check()
        check_metadata(self.metadata)
        check_include(self.include or ())
        check_int("top_logprobs", self.top_logprobs, 0, FEW_LOGPROBS, optional=True)
        if self.top_logprobs and not self.shows_logprobs:
            raise InvalidRequestError(f"top_logprobs: only allowed with include: {LOGPROBS}", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only allowed with stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            message = "stream_options.include_obfuscation: true is not supported; this is not built yet"
            raise NotSupportedError(message, param="stream_options.include_obfuscation")


def nested(value: Any) -> Any:
    """Write tools, or the choice of one, as a chat has them: what is beside the type here is there in a field that is
    called as the type."""
    if isinstance(value, list):
        return [nested(item) for item in value]
    if not isinstance(value, dict) or value.get("type") not in ("function", "custom", "grammar", "allowed_tools"):
        return value
    inner = {name: nested(item) if name in ("format", "tools") else item for name, item in value.items()}
    return {"type": inner.pop("type"), value["type"]: inner}


def chat_of(body: ResponseRequest) -> ChatRequest:
    """Convert a response's body to a chat request: its conversation, its tools and the form of its answer.

    Raises:
        InvalidRequestError: something is malformed; the error uses the names of a response's fields.
    """
    conversation = Conversation()
    for item in items_of(body.input):
        conversation.add(item)
    messages = conversation.messages
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    for name in ("tools", "tool_choice"):
        check_nesting(name, getattr(body, name))
    with naming_the_response():
        fields = {"messages": messages, "structured_outputs": body.structured_outputs}
        chat = msgspec.structs.replace(
            to_request({**fields, "tools": nested(body.tools), "tool_choice": nested(body.tool_choice)}, ChatRequest),
            parallel_tool_calls=body.parallel_tool_calls,
            chat_template_kwargs=body.chat_template_kwargs,
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
            verbosity=None if body.text is None else body.text.get("verbosity"),
        )
        chat.check_tools()
    return chat


def response_params(body: ResponseRequest, info: ModelInfo) -> SamplingParams:
    """Make the SamplingParams of a response; by default it may fill the rest of the context."""
    check_int("max_output_tokens", body.max_output_tokens, 1, MAX_TOKENS, optional=True)
    max_tokens = info.default_sampling.get("max_tokens") if body.max_output_tokens is None else body.max_output_tokens
    own = {"max_tokens": max_tokens, "logprobs": (body.top_logprobs or 0) if body.shows_logprobs else None}
    return sampling_params(body, info, own, streams=True)


# --- the response -----------------------------------------------------------------------------------------------------


_encode = msgspec.json.Encoder().encode
ITEMS = {
    Kind.CONTENT: "message",
    Kind.REASONING: "reasoning",
}  # kind of a part -> type of its item, unless it is a call
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "prompt_cache_key", "user",
          "safety_identifier")  # fmt: skip


class ResponseSource:
    """Computes one response. Implements kept_calls.Source."""

    def __init__(self, context: ServerContext, call: KeptCall, generation: Generation) -> None:
        self._begun = call.begun
        self._generation = generation
        self._body = msgspec.json.decode(call.begun.body, type=ResponseRequest)
        rules = rules_of(context, chat_of(self._body), call.begun.prompts[0])
        tokenizer, top = context.tokenizer(), call.begun.params.logprobs
        self._answers = ChatAnswers(call.begun.id, rules, tokenizer if rules.marks else None)
        self._logprobs = None if top is None else TextLogprobs(TokenNames(tokenizer, as_ids=False), top)
        self._number = 0
        self._items: list[OutputItem] = []
        self._is_running = False
        self._reason: FinishReason | None = None

    # --- the stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the events. A response that is refused at once has no events, unless it runs in the background."""
        if self._body.background:
            for frame in self._head():
                yield frame
        async with aclosing(self._generation.outputs()) as outputs:
            async for item in outputs:
                for frame in self._head():
                    yield frame
                if item is None:
                    yield None
                    continue
                self._is_running = True
                (choice,) = item[1].outputs
                self._reason = choice.finish_reason
                if self._logprobs is not None:
                    self._logprobs.hold(choice)
                for part in self._answers.parts(choice):
                    for frame in self._part(part):
                        yield frame
                self._generation.num_reasoning_tokens = self._answers.num_reasoning_tokens

    def _head(self) -> Iterator[Frame]:
        if self._number == 0:
            status = "queued" if self._body.background else "in_progress"
            yield self._event("response.created", {"response": self._response(status)})
            yield self._event("response.in_progress", {"response": self._response("in_progress")})

    def _part(self, part: Part) -> Iterator[Frame]:
        """Yield the events of the next part of the answer."""
        logprobs = [] if self._logprobs is None else self._logprobs.take(part)
        kind = ITEMS.get(part.kind)
        if part.kind is Kind.CALL or (kind and (not self._items or self._items[-1].kind != kind)):
            yield from self._end_item("completed")
            yield from self._begin_item(part)
        if part.kind is not Kind.CALL:
            yield self._event(*self._items[-1].grow(part.text, logprobs))

    def _begin_item(self, part: Part) -> Iterator[Frame]:
        kind, call = ITEMS.get(part.kind), {}
        if kind is None:
            kind = "custom_tool_call" if self._answers.is_custom(part.text) else "function_call"
            call = {"call_id": self._answers.call_id(0, part.call), "name": part.text}
        self._items.append(OutputItem(kind, len(self._items), self._begun.id, **call))
        yield from (self._event(*event) for event in self._items[-1].begin())

    def _end_item(self, status: str) -> Iterator[Frame]:
        if self._items:
            yield from (self._event(*event) for event in self._items[-1].end(status))

    def last_frames(self, failure: ApiError | None) -> list[Frame]:
        if failure is not None:
            if self._number == 0:
                return []
            return [self._event("response.failed", {"response": self._response("failed", failure)})]
        status = self._final_status()
        empty = [] if self._items else list(self._begin_item(Part(Kind.CONTENT, "")))
        ended = list(self._end_item(status))
        return [*empty, *ended, self._event(f"response.{status}", {"response": self._response(status)})]

    def _event(self, kind: str, fields: dict[str, Any]) -> Frame:
        body = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return 0, b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    # --- the whole answer ------------------------------------------------------------------------------------------

    def result(self, failure: ApiError | None = None, status: str | None = None) -> bytes | None:
        if failure is not None:
            status = "failed"
        elif status is None and self._reason is not None:
            status = self._final_status()
        elif status is None:
            status = "in_progress" if self._is_running else "queued"
        return _encode(self._response(status, failure))

    def _final_status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str, failure: ApiError | None = None) -> dict[str, Any]:
        begun, body = self._begun, self._body
        is_cut = status == "incomplete"
        return {
            "id": begun.id,
            "object": "response",
            "created_at": begun.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "error": None if failure is None else {"code": _code(failure), "message": failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": begun.model,
            "output": self._output(status),
            "store": body.store is not False,
            "temperature": begun.params.temperature,
            "top_p": begun.params.top_p,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            **{name: getattr(body, name) for name in ECHOED},
            "metadata": body.metadata or {},
            "reasoning": body.reasoning or Reasoning(),
            "truncation": body.truncation or "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
            "seed": begun.prompts[0].seed,
            "system_fingerprint": begun.fingerprint,
        }

    def _output(self, status: str) -> list[dict[str, Any]]:
        """List the items. Only the last one can be incomplete or in progress."""
        last = status if status in ("completed", "in_progress") else "incomplete"
        final = len(self._items) - 1
        return [item.shown(last if index == final else "completed") for index, item in enumerate(self._items)]

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {**usage.prompt_tokens_details, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._generation.num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _code(failure: ApiError) -> str:
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if failure.status >= 500 else "invalid_prompt"


# --- routes -----------------------------------------------------------------------------------------------------------


KIND = "responses"
INCLUDE = ("include", "include[]")  # names of this parameter in a query; the openai client writes the second
TRUE, FALSE = ("true", "True", "1"), ("false", "False", "0")


async def create_response(request: Request) -> Response:
    """Handle POST /v1/responses: answer an input, at once, as events or in the background."""
    body = await read_body(request, ResponseRequest)
    body.check()
    context = await model_of(request, body.model, body.timeout)
    info = context.info()
    body = msgspec.structs.replace(_with_previous(request, body), model=context.shown_name(body.model))
    params = response_params(body, info)
    await check_form(request, body, params)
    chat = chat_of(body)
    if context.options.unknown_fields == "warn":
        chat = without_unread_hints(chat, context.tokenizer().chat_template, log_of(request).ignored)
    with naming_the_response():
        if body.truncation == "auto":
            prompts = await latest_prompts(context, chat, info, body.max_output_tokens)
        else:
            prompts = await chat_prompts(context, chat, info)
        prompts = salted(request, body.cache_salt, prompts)
        rules = rules_of(context, chat, prompts[0])
        params = await with_rules(context, chat, rules, params)
    summary = None if body.reasoning is None else body.reasoning.summary
    if summary not in (None, "auto") and rules.reasoning:
        message = f"reasoning.summary: {summary} is not supported; thoughts are returned whole, without a summary"
        raise NotSupportedError(message, param="reasoning.summary")
    params = within_limits(request, params, prompts, priority=body.priority, timeout_s=body.timeout)
    call = await keep(
        request, f"resp_{uuid4().hex}", KIND, body, params, prompts,
        grace_s=None if body.background else 0.0,
        keep_s=0.0 if body.store is False else context.options.response_retention_s,
    )  # fmt: skip
    if body.stream:
        return stream_of(context, call, [], done=b"")
    if not body.background:
        await until_disconnect(request.receive, _finished(context, call))
        if call.failure is not None:
            raise call.failure.with_traceback(None)
    return _json(call)


def _with_previous(request: Request, body: ResponseRequest) -> ResponseRequest:
    """Put the conversation of the previous response, if the body names one, before its own input."""
    if body.previous_response_id is None:
        return body
    try:
        call = context_of(request).kept.get(body.previous_response_id, KIND, owner_of(request))
    except ApiError as error:
        message = f"previous_response_id: {error.message}"
        raise InvalidRequestError(message, param="previous_response_id", code="previous_response_not_found") from None
    answer = msgspec.json.decode(call.result) if call.ended and call.result else {}
    if answer.get("status") not in ("completed", "incomplete"):
        message = "previous_response_id: that response has no answer to continue"
        raise InvalidRequestError(message, param="previous_response_id")
    previous = msgspec.json.decode(call.begun.body, type=ResponseRequest)
    # The earlier response's instructions are left out.
    return msgspec.structs.replace(body, input=[*items_of(previous.input), *answer["output"], *items_of(body.input)])


async def _finished(context: ServerContext, call: KeptCall) -> None:
    async for _ in context.kept.read(call, [], context.options.keep_alive_s):
        pass


def _json(call: KeptCall) -> Response:
    body = call.result if call.ended else None if call.source is None else call.source.result()
    if body is None and call.failure is not None:
        raise call.failure.with_traceback(None)
    if body is None:
        raise unavailable("the response is not available yet")
    return Response(body, media_type="application/json")


def _fetch(request: Request) -> KeptCall:
    context = context_of(request)
    context.check_started()
    resume(context)  # only has work right after a server with a journal has started
    return context.kept.get(request.path_params["id"], KIND, owner_of(request))


async def retrieve_response(request: Request) -> Response:
    """Handle GET /v1/responses/{id}: send the response as it is now, or its events with ?stream=true."""
    given = _query(request)
    call = _fetch(request)
    if not given["stream"]:
        return _json(call)
    return stream_of(context_of(request), call, [given["starting_after"] + 1], done=b"")


def _query(request: Request) -> dict[str, Any]:
    """Read `stream` and `starting_after`. Raise ApiError for other parameters, except include_obfuscation=false."""
    query = dict(request.query_params)
    stream = query.pop("stream", "false")
    if stream not in TRUE + FALSE:
        raise ApiError(400, f"stream: {ascii(stream)[:60]} must be true or false", param="stream", code="invalid_value")
    after = query.pop("starting_after", None)
    if after is not None and (stream in FALSE or not after.isascii() or not after.isdigit() or len(after) > 9):
        message = "starting_after: must be the sequence_number of an event, with stream=true"
        raise ApiError(400, message, param="starting_after", code="invalid_value")
    if query.get("include_obfuscation") in FALSE:
        del query["include_obfuscation"]
    _refuse_others(query)
    return {"stream": stream in TRUE, "starting_after": -1 if after is None else int(after)}


def _refuse_others(query: Iterable[str]) -> None:
    for name in query:
        shown = ascii(name)[1:-1][:60]
        raise ApiError(400, f"{shown}: not supported; this is not built yet", param=shown, code="not_implemented")


async def list_input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{id}/input_items: list what the response answers, from the last item to the first."""
    query = dict(request.query_params)
    included = [text for name in INCLUDE if query.pop(name, None) for text in request.query_params.getlist(name)]
    check_include(included)
    limit, order, after = query.pop("limit", "20"), query.pop("order", "desc"), query.pop("after", None)
    _refuse_others(query)
    if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= 100:
        raise ApiError(400, "limit: must be a number from 1 to 100", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: must be asc or desc", param="order", code="invalid_value")
    call = _fetch(request)
    given = items_of(msgspec.json.decode(call.begun.body, type=ResponseRequest).input)
    items = list(listed_items(given, call.begun.id, logprobs=LOGPROBS in included))[:: 1 if order == "asc" else -1]
    start = 0 if after is None else next((at for at, item in enumerate(items, 1) if item["id"] == after), -1)
    if start < 0:
        raise ApiError(400, "after: must be the id of an item of this input", param="after", code="invalid_value")
    data, first, last = items[start : start + int(limit)], None, None
    if data:
        first, last = data[0]["id"], data[-1]["id"]
    more = {"first_id": first, "last_id": last, "has_more": start + len(data) < len(items)}
    return json_response({"object": "list", "data": data, **more})


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{id}/cancel: stop a response. One that has ended is returned unchanged."""
    call = _fetch(request)
    if call.begun.grace_s is not None:
        raise ApiError(400, "Only a response in the background can be cancelled.", code="not_in_background")
    await context_of(request).kept.cancel(call)
    return _json(call)


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{id}: delete a response; one that runs is stopped."""
    call = _fetch(request)
    await context_of(request).kept.delete(call)
    return json_response({"id": call.begun.id, "object": "response", "deleted": True})
