"""POST /v1/completions and /v1/chat/completions: one path from request to answer, and two answer formats."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.input_processor import PromptRequest
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import CompletionOutput, FinishReason, LogprobsAt, RequestOutput
from penstock.interface.sampling_params import FEW_LOGPROBS, SamplingParams
from penstock.server import openai_responses as shapes
from penstock.server.api_errors import ApiError, until_disconnect
from penstock.server.client_fields import without_unread_hints
from penstock.server.context import ServerContext, json_response, log_of, model_of, read_body, within_limits
from penstock.server.generation import EventStream, Generation, sse_data
from penstock.server.inputs import (
    Rules,
    chat_params,
    chat_prompts,
    check_form,
    completion_params,
    completion_prompts,
    cut_prompts,
    ending_before_suffix,
    num_top,
    rules_of,
    salted,
    with_rules,
)
from penstock.server.kept_calls import Frame, KeptCall, Source
from penstock.server.openai_requests import ChatRequest, CompletionRequest
from penstock.server.resumption import continued, keep, stream_of
from penstock.tokenizer.answer_reader import Kind, Part
from penstock.tokenizer.answers import AnswerParser, InputReader, Message, ReasoningCounter, call_id
from penstock.tokenizer.tokenizer import Tokenizer

Body = TypeVar("Body", CompletionRequest, ChatRequest)


async def create_completion(request: Request) -> Response:
    """Complete prompts, as one answer or as a stream of server-sent events."""
    return await _create(request, "completions", CompletionRequest, completion_params, completion_prompts)


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as one answer or as a stream of server-sent events."""
    return await _create(request, "chat", ChatRequest, chat_params, chat_prompts)


async def _create(
    request: Request,
    kind: str,
    body_type: type[Body],
    params_of: Callable[[Body, ModelInfo], SamplingParams],
    prompts_of: Callable[[ServerContext, Body, ModelInfo], Awaitable[list[PromptRequest]]],
) -> Response:
    """Validate the request, run it, and send the answer whole or as a stream."""
    body: Any = await read_body(request, body_type)
    body = body.with_tools() if isinstance(body, ChatRequest) else body
    body.check()
    context, log = await model_of(request, body.model, body.timeout), log_of(request)
    info = context.info()
    envelope = {"model": context.shown_name(body.model), "system_fingerprint": context.fingerprint(log.adapter)}
    if (last := request.headers.get("last-event-id")) is not None:
        return continued(request, kind, body, last)
    context.arrive(log)  # refuse it before spending time on the prompt
    params = params_of(body, info)
    await check_form(request, body, params)
    read = body
    if isinstance(body, ChatRequest) and context.options.unknown_fields == "warn":
        read = without_unread_hints(body, context.tokenizer().chat_template, log.ignored)
    prompts = await cut_prompts(context, body, params, await prompts_of(context, read, info))
    prompts = salted(request, uuid4().hex if body.cache_prompt is False else body.cache_salt, prompts)
    if isinstance(body, ChatRequest):
        params = await with_rules(context, body, rules_of(context, body, prompts[0]), params)
    elif body.suffix:
        params = ending_before_suffix(context, params)
    params = within_limits(request, params, prompts, priority=body.priority, timeout_s=body.timeout)
    answer_id = f"{SHAPES[kind].id_prefix}-{uuid4().hex}"
    if body.resumable:
        context.arrived(log)
        grace_s = context.options.resume_grace_s
        call = await keep(request, answer_id, kind, body, params, prompts, grace_s=grace_s, keep_s=grace_s)
        return stream_of(context, call, [])
    generation = Generation(context, answer_id, prompts, params, log)
    shape = _shape(kind, body, generation, {"created": int(time.time()), **envelope})
    if body.stream:
        return EventStream(shape.chunks(), stall_timeout_s=context.options.stall_timeout_s)
    return json_response(await until_disconnect(request.receive, shape.whole()))


def source_of(context: ServerContext, call: KeptCall, generation: Generation) -> Source:
    begun = call.begun
    body = msgspec.json.decode(begun.body, type=CompletionRequest if begun.kind == "completions" else ChatRequest)
    envelope = {"created": begun.created, "model": begun.model, "system_fingerprint": begun.fingerprint}
    return _shape(begun.kind, body, generation, envelope)


def _shape(kind: str, body: Any, generation: Generation, envelope: dict[str, Any]) -> "Shape[Any]":
    generation.only_prompt = kind == "completions" and body.max_tokens == 0
    names = None
    if body.logprobs is not None or body.prompt_logprobs is not None:
        names = shapes.TokenNames(generation.context.tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))
    tier = {} if body.service_tier is None else {"service_tier": "default"}
    return SHAPES[kind](body, generation, names, {"id": generation.id, **envelope, **tier})


@dataclass(slots=True)
class Shape(ABC, Generic[Body]):
    """Formats the outputs of one call as OpenAI's answer, or as its chunks.

    Attributes:
        names: present whenever log-probabilities are requested.
        envelope: the fields that every answer and chunk of the call repeats.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    body: Body
    generation: Generation
    names: shapes.TokenNames | None
    envelope: dict[str, Any]
    _begun: set[int] = field(default_factory=set)  # choices whose first part has been shaped

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> Any:
        """Format a choice of prompt `index` as the API defines it."""

    @abstractmethod
    def _chunks(self, index: int, output: RequestOutput) -> Iterator[shapes.Completion]:
        """Yield the chunks for one output of prompt `index`."""

    async def whole(self) -> shapes.Completion:
        outputs = await self.generation.collect()
        params = self.generation.params
        if any(output.prompt_logprobs for output in outputs) or (params.logprobs or 0) not in range(FEW_LOGPROBS + 1):
            # many: in a thread, so that others are served meanwhile
            return await asyncio.to_thread(self._whole, outputs)
        return self._whole(outputs)

    def _whole(self, outputs: list[RequestOutput]) -> shapes.Completion:
        choices = [
            self._choice(index, output, choice)
            for index, output in enumerate(outputs)
            for choice in self._best(output.outputs)
        ]
        more = {"usage": self.generation.usage(), "seed": self.generation.seed(), **self._prompt_fields(outputs[0])}
        more["timeline"] = self._timeline()
        return shapes.Completion(object=self.whole_object, choices=choices, **self.envelope, **more)

    def _best(self, choices: list[CompletionOutput]) -> list[CompletionOutput]:
        """List the choices of the answer to one prompt: in their order, or the best of best_of."""
        ordered = sorted(choices, key=lambda choice: choice.index)
        if self.body.best_of is None:
            return ordered
        ordered.sort(key=lambda choice: -(choice.cumulative_logprob or 0.0))
        return [replace(choice, index=index) for index, choice in enumerate(ordered[: self._num_choices])]

    @property
    def _num_choices(self) -> int:
        """The number of choices of the answer to one prompt."""
        return self.generation.params.n if self.body.best_of is None else self.body.n or 1

    async def chunks(self) -> AsyncGenerator[shapes.Completion | None, None]:
        """Yield the chunks as they come, and None after each keep-alive interval without output."""
        async with aclosing(self.generation.outputs()) as outputs:
            async for item in outputs:
                if item is None:
                    yield None
                    continue
                chunks = self._chunks(*item)
                for chunk in chunks if item[1].prompt_logprobs is None else await asyncio.to_thread(list, chunks):
                    yield chunk
        if self.body.usage_at_end or self.body.timeline:
            usage = self.generation.usage() if self.body.usage_at_end else UNSET
            line = self._timeline()
            yield shapes.Completion(object=self.chunk_object, choices=[], usage=usage, timeline=line, **self.envelope)

    # A shape is the Source of a stream that is kept.

    async def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the chunks as frames, in one lane per choice and one for the usage at the end."""
        num_choices = len(self.generation.prompts) * self.generation.params.n
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                if chunk is None:
                    yield None
                else:
                    lane = chunk.choices[0].index if chunk.choices else num_choices
                    yield lane, sse_data(msgspec.json.encode(chunk))

    def last_frames(self, failure: ApiError | None) -> list[Frame]:
        return []

    def result(self, failure: ApiError | None = None, status: str | None = None) -> bytes | None:
        return None

    def _timeline(self) -> dict[str, Any] | UnsetType:
        return self.generation.timeline.shown() if self.body.timeline else UNSET

    def _chunk(self, choice: Any, **more: Any) -> shapes.Completion:
        """Make a chunk with one choice. Its usage is null if the usage comes at the end of the stream."""
        usage: shapes.Usage | UnsetType | None = None if self.body.usage_at_end else UNSET
        if self.body.usage_always:
            usage = self.generation.usage()
        return shapes.Completion(object=self.chunk_object, choices=[choice], usage=usage, **self.envelope, **more)

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """List the fields about the prompt that a whole answer has outside its choices."""
        return {}

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        reason = choice.finish_reason
        return {"finish_reason": None if reason is None else reason.value, "stop_reason": choice.stop_reason}

    def _token_ids(self, choice: CompletionOutput) -> list[int] | UnsetType:
        return choice.token_ids if self.body.return_token_ids else UNSET


@dataclass(slots=True)
class ChatShape(Shape[ChatRequest]):
    """The chat format. A streamed choice begins with its role and ends with an empty delta and the finish reason."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    _answers: "ChatAnswers" = field(init=False)

    def __post_init__(self) -> None:
        context, prompts = self.generation.context, self.generation.prompts
        rules = rules_of(context, self.body, prompts[0])
        tokenizer = context.tokenizer() if rules.marks else None
        self._answers = ChatAnswers(self.generation.id, rules, tokenizer, legacy=bool(self.body.functions))
        self._answers.shows_reasoning = self.body.include_reasoning is not False

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.generation.prompts[0].token_ids
        if self.body.prompt_logprobs is not None and self.names is not None:
            fields["prompt_logprobs"] = shapes.prompt_logprobs(self.names, output.prompt_logprobs or [])
        return fields

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> shapes.ChatChoice:
        message = self._answers.message(choice)
        self.generation.num_reasoning_tokens = self._answers.num_reasoning_tokens
        return self._content(choice, message=message, **self._ending(choice))

    def _chunks(self, index: int, output: RequestOutput) -> Iterator[shapes.Completion]:
        for choice in output.outputs:
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                role = shapes.ChatChoice(index=choice.index, delta=shapes.Delta(role="assistant", content=""))
                prompt_ids = self.generation.prompts[0].token_ids if self.body.return_token_ids else UNSET
                yield self._chunk(role, prompt_token_ids=prompt_ids)
            deltas = self._answers.deltas(choice)
            self.generation.num_reasoning_tokens = self._answers.num_reasoning_tokens
            shows_tokens = self.body.logprobs or self.body.return_token_ids or self.body.usage_always
            if not deltas and choice.token_ids and shows_tokens:  # a token that completes no text still gets a chunk
                deltas = [shapes.Delta(content="")]
            for number, delta in enumerate(deltas):  # only the first delta shows the tokens
                shaped = self._content(choice, delta=delta) if number == 0 else None
                yield self._chunk(shaped or shapes.ChatChoice(index=choice.index, delta=delta))
            if choice.finish_reason is not None:
                last = shapes.ChatChoice(index=choice.index, delta=shapes.Delta(), **self._ending(choice))
                yield self._chunk(last, seed=self.generation.seed())

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        return {**Shape._ending(self, choice), "finish_reason": self._answers.finish_reason(choice)}

    def _content(self, choice: CompletionOutput, **more: Any) -> shapes.ChatChoice:
        logprobs = None
        if self.body.logprobs and self.names is not None:
            wanted = num_top(self.body.top_logprobs), self.body.logprob_token_ids or ()
            logprobs = shapes.chat_logprobs(self.names, choice.token_ids, choice.logprobs or [], *wanted)
        return shapes.ChatChoice(index=choice.index, logprobs=logprobs, token_ids=self._token_ids(choice), **more)


@dataclass(slots=True)
class CompletionShape(Shape[CompletionRequest]):
    """The legacy completions format. A choice's index is its prompt's index * n + its index for that prompt."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    _writers: dict[int, shapes.LegacyWriter] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[LogprobsAt | None]] = field(default_factory=dict)  # sent once in a stream
    _held: dict[int, list[CompletionOutput]] = field(default_factory=dict)  # choices that wait for _prompt_logprobs

    def _chunks(self, index: int, output: RequestOutput) -> Iterator[shapes.Completion]:
        for choice in self._ready(index, output):
            shaped = self._choice(index, output, choice)
            shows_tokens = shaped.token_ids is not UNSET or shaped.logprobs is not None or self.body.usage_always
            if shaped.text or shaped.finish_reason or shows_tokens:
                seed = self.generation.seed() if shaped.finish_reason else UNSET
                yield self._chunk(shaped, seed=seed)

    def _ready(self, index: int, output: RequestOutput) -> list[CompletionOutput]:
        """Select the choices to send now. An echo with log-probabilities waits until the prompt's are known."""
        held = self._held.pop(index, []) + output.outputs
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        waits = self.body.echo and self.body.logprobs is not None and index not in self._prompt_logprobs
        if waits and not output.finished:
            self._held[index] = held
            return []
        return held

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> shapes.CompletionChoice:
        """Format a choice, or its new part in a stream. The first part echoes the prompt if `echo` is set."""
        index = prompt_index * self._num_choices + choice.index
        first = index not in self._begun
        self._begun.add(index)
        prompt = self.generation.prompts[prompt_index]
        echo = first and bool(self.body.echo)
        shaped = shapes.CompletionChoice(
            index=index,
            text=(prompt.text or "") + choice.text if echo else choice.text,
            logprobs=self._logprobs(index, output, choice, echo=echo),
            token_ids=self._token_ids(choice),
            prompt_token_ids=prompt.token_ids if first and self.body.return_token_ids else UNSET,
            **self._ending(choice),
        )
        if self.body.prompt_logprobs is not None and self.names is not None:
            places = shapes.cut(prompt.token_ids, output.prompt_logprobs or [], num_top(self.body.prompt_logprobs))
            shaped.prompt_logprobs = shapes.prompt_logprobs(self.names, places)
        return shaped

    def _logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput, *, echo: bool
    ) -> shapes.LegacyLogprobs | None:
        if self.body.logprobs is None or self.names is None:
            return None
        if index not in self._writers:
            skip = self.generation.params.skip_special_tokens
            self._writers[index] = shapes.LegacyWriter(self.names, skip_special_tokens=skip)
        writer = self._writers[index]
        if not echo:
            return writer.write(choice.token_ids, choice.logprobs or [])
        prompt_index = index // self._num_choices
        ids = self.generation.prompts[prompt_index].token_ids
        places = output.prompt_logprobs or self._prompt_logprobs.get(prompt_index, [])
        prompt_lists = writer.write(ids, shapes.cut(ids, places, num_top(self.body.logprobs)))
        return shapes.joined(prompt_lists, writer.write(choice.token_ids, choice.logprobs or []))


SHAPES: dict[str, type[Shape[Any]]] = {"completions": CompletionShape, "chat": ChatShape}


# --- what a chat answer consists of -----------------------------------------------------------------------------------


TOOL_CALLS, FUNCTION_CALL = "tool_calls", "function_call"


class ChatAnswers:
    """Parses the choices of one call according to its rules.

    Attributes:
        num_reasoning_tokens: in all choices so far.
        legacy: whether a call is shown as function_call, as in the API before tools.
        shows_reasoning: whether messages and deltas have it.
    """

    def __init__(self, answer_id: str, rules: Rules, tokenizer: Tokenizer | None, *, legacy: bool = False) -> None:
        self.legacy, self.shows_reasoning = legacy, True
        self.num_reasoning_tokens = 0
        self._id = answer_id
        self._rules = rules
        self._tokenizer = tokenizer  # None: all is content
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningCounter] = {}
        self._inputs: dict[tuple[int, int], InputReader] = {}  # by choice and call

    def message(self, choice: CompletionOutput) -> shapes.ChatMessage:
        """Format a whole choice as a message. If it has tool calls and no text, its content is null."""
        message = Message()
        message.add(self.parts(choice))
        shaped = shapes.ChatMessage(role="assistant", content=message.content)
        if message.reasoning and self.shows_reasoning:
            shaped.reasoning_content = shaped.reasoning = message.reasoning
        if message.calls and self.legacy:
            shaped.content = message.content or None
            shaped.function_call = {"name": message.calls[0].name, "arguments": message.calls[0].arguments}
        elif message.calls:
            shaped.content = message.content or None
            shaped.tool_calls = [
                self._shown_call(self.call_id(choice.index, number), call.name, call.arguments)
                for number, call in enumerate(message.calls)
            ]
        return shaped

    def deltas(self, choice: CompletionOutput) -> list[shapes.Delta]:
        """Format the new part of a choice, one delta per parsed part."""
        shown = [part for part in self.parts(choice) if self.shows_reasoning or part.kind is not Kind.REASONING]
        return [self._delta(choice.index, part) for part in shown]

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """Name the reason why a choice has ended: "tool_calls" if it stopped after one; None while it runs."""
        if choice.finish_reason is None:
            return None
        parser = self._parsers.get(choice.index)
        calls = parser is not None and parser.num_calls and choice.finish_reason is FinishReason.STOP
        if calls:
            return FUNCTION_CALL if self.legacy else TOOL_CALLS
        return choice.finish_reason.value

    def parts(self, choice: CompletionOutput) -> list[Part]:
        """Parse a choice: the parts that its new text adds, or all parts of a whole choice."""
        parser = self._parsers.get(choice.index) or self._rules.parser()
        if parser is None:
            return [Part(Kind.CONTENT, choice.text)] if choice.text else []
        self._parsers[choice.index] = parser
        self._count(choice)
        parts = parser.push(choice.text) + (parser.finish() if choice.finish_reason is not None else [])
        return [read for part in parts if (read := self._read(choice.index, part)) is not None]

    def _read(self, choice: int, part: Part) -> Part | None:
        """Take the text of a custom tool out of the arguments that it is in; None if a part has none of it."""
        if part.kind is Kind.CALL and self.is_custom(part.text):
            self._inputs[choice, part.call] = InputReader()
        reader = self._inputs.get((choice, part.call)) if part.kind is Kind.ARGUMENTS else None
        if reader is None:
            return part
        return part._replace(text=text) if (text := reader.read(part.text)) else None

    def is_custom(self, name: str) -> bool:
        """Tell whether a tool is called with a text."""
        return name in self._rules.custom

    def call_id(self, choice: int, call: int) -> str:
        """Make the id of tool call number `call` of a choice, counted from 0."""
        assert self._rules.tool_format is not None
        return call_id(self._rules.tool_format, self._id, choice, call)

    def _count(self, choice: CompletionOutput) -> None:
        reasoning, is_thinking = self._rules.reasoning, self._rules.is_thinking
        if reasoning is None or self._tokenizer is None:
            return
        counter = self._counters.setdefault(choice.index, ReasoningCounter(reasoning, is_thinking=is_thinking))
        before = counter.count
        for token_id in choice.token_ids:
            counter.add(self._tokenizer.token_to_bytes(token_id))
        self.num_reasoning_tokens += counter.count - before

    def _delta(self, index: int, part: Part) -> shapes.Delta:
        if part.kind is Kind.CONTENT:
            return shapes.Delta(content=part.text)
        if part.kind is Kind.REASONING:
            return shapes.Delta(reasoning_content=part.text, reasoning=part.text)
        if self.legacy:
            named = {"name": part.text, "arguments": ""}
            return shapes.Delta(function_call=named if part.kind is Kind.CALL else {"arguments": part.text})
        if part.kind is Kind.CALL:
            return shapes.Delta(
                tool_calls=[{"index": part.call, **self._shown_call(self.call_id(index, part.call), part.text, "")}]
            )
        piece = {"custom": {"input": part.text}} if (index, part.call) in self._inputs else {}
        return shapes.Delta(tool_calls=[{"index": part.call, **(piece or {"function": {"arguments": part.text}})}])

    def _shown_call(self, call_id: str, name: str, arguments: str) -> shapes.ToolCall:
        if self.is_custom(name):
            return {"id": call_id, "type": "custom", "custom": {"name": name, "input": arguments}}
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
