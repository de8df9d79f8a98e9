"""POST /v1/completions and /v1/chat/completions: one path from the request to the answer, two shapes."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import CompletionOutput, LogprobsAt, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.server.context import ServerContext, context_of, json_response, log_of, read_body
from penstock.server.generation import EventStream, Generation, until_disconnect
from penstock.server.inputs import EncodedPrompt, chat_params, chat_prompts, completion_params, completion_prompts
from penstock.server.logprobs import LegacyWriter, TokenNames, chat_logprobs, cut, joined, prompt_logprobs
from penstock.server.openai_requests import ChatRequest, CompletionRequest
from penstock.server.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    LegacyLogprobs,
    Usage,
)

Body = TypeVar("Body", CompletionRequest, ChatRequest)
Chunk = Completion | ChatChunk


async def create_completion(request: Request) -> Response:
    return await _answer(request, CompletionRequest, completion_params, completion_prompts, CompletionShape)


async def create_chat_completion(request: Request) -> Response:
    return await _answer(request, ChatRequest, chat_params, chat_prompts, ChatShape)


async def _answer(
    request: Request,
    kind: type[Body],
    params_of: Callable[[Body, ModelInfo], SamplingParams],
    prompts_of: Callable[[ServerContext, Body, ModelInfo], Awaitable[list[EncodedPrompt]]],
    shape: "type[Shape[Body]]",
) -> Response:
    """Validate the request, run it and send the answer, whole or as a stream."""
    context, log = context_of(request), log_of(request)
    body = await read_body(request, kind)
    body.check()
    info = context.info()
    envelope = {"model": context.check_model(body.model), "system_fingerprint": info.system_fingerprint}
    params = params_of(body, info)
    prompts = await prompts_of(context, body, info)
    generation = Generation(context, f"{shape.id_prefix}-{uuid4().hex}", prompts, params, log)
    names = None
    if body.logprobs is not None or body.prompt_logprobs is not None:
        names = TokenNames(context.tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))
    shaped = shape(body, generation, names, {"id": generation.id, "created": int(time.time()), **envelope})
    if body.stream:
        return EventStream(shaped.chunks(), stall_timeout_s=context.options.stall_timeout_s)
    return json_response(await until_disconnect(request.receive, shaped.whole()))


@dataclass(slots=True)
class Shape(ABC, Generic[Body]):
    """Turns the outputs of one call into OpenAI's answer, or into its chunks.

    Attributes:
        names: present whenever log-probabilities are requested.
        envelope: the fields that every answer and chunk of the call repeats.
    """

    id_prefix: ClassVar[str]

    body: Body
    generation: Generation
    names: TokenNames | None
    envelope: dict[str, Any]
    _begun: set[int] = field(default_factory=set)  # choices of which a chunk has been sent

    @abstractmethod
    async def whole(self) -> Completion | ChatCompletion: ...

    @abstractmethod
    def _pieces(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        """Yield the chunks that an output of prompt `index` brings."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> Chunk: ...

    async def chunks(self) -> AsyncGenerator[Chunk | None, None]:
        """Yield the chunks as they come; None after each silent keep-alive interval."""
        async with aclosing(self.generation.outputs()) as outputs:
            async for item in outputs:
                if item is None:
                    yield None
                    continue
                for chunk in self._pieces(*item):
                    yield chunk
        if self.body.usage_at_end:
            yield self._chunk([], usage=self.generation.usage())

    def _usage(self) -> Usage | UnsetType | None:
        """Return the usage that the chunks before the last one carry."""
        if self.body.usage_always:
            return self.generation.usage()
        return None if self.body.usage_at_end else UNSET

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        reason = choice.finish_reason
        return {"finish_reason": None if reason is None else reason.value, "stop_reason": choice.stop_reason}

    def _token_ids(self, choice: CompletionOutput) -> list[int] | UnsetType:
        return choice.token_ids if self.body.return_token_ids else UNSET


def _in_order(output: RequestOutput) -> list[CompletionOutput]:
    return sorted(output.outputs, key=lambda choice: choice.index)


@dataclass(slots=True)
class ChatShape(Shape[ChatRequest]):
    """Chat: per choice of a stream the role, the text as it comes, and an empty delta with the finish reason."""

    id_prefix = "chatcmpl"

    async def whole(self) -> ChatCompletion:
        (output,) = await self.generation.collect()
        answer = ChatCompletion(
            object="chat.completion",
            choices=[self._choice(choice) for choice in _in_order(output)],
            usage=self.generation.usage(),
            seed=self.generation.seed(),
            **self.envelope,
        )
        if self.body.return_token_ids:
            answer.prompt_token_ids = self.generation.prompts[0].token_ids
        if self.body.prompt_logprobs is not None and self.names is not None:
            answer.prompt_logprobs = prompt_logprobs(self.names, output.prompt_logprobs or [])
        return answer

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatAnswer(role="assistant", content=choice.text),
            logprobs=self._logprobs(choice),
            token_ids=self._token_ids(choice),
            **self._ending(choice),
        )

    def _pieces(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        for choice in output.outputs:
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                prompt_ids = self.generation.prompts[index].token_ids if self.body.return_token_ids else UNSET
                yield self._delta(choice, Delta(role="assistant", content=""), prompt_token_ids=prompt_ids)
            if choice.text or (choice.token_ids and self._shows_tokens()):
                extra = {"logprobs": self._logprobs(choice), "token_ids": self._token_ids(choice)}
                yield self._delta(choice, Delta(content=choice.text), extra)
            if choice.finish_reason is not None:
                yield self._delta(choice, Delta(), self._ending(choice), seed=self.generation.seed())

    def _shows_tokens(self) -> bool:
        """Return whether a token that completes no text gets a chunk."""
        return bool(self.body.logprobs or self.body.return_token_ids or self.body.usage_always)

    def _delta(self, choice: CompletionOutput, delta: Delta, extra: dict[str, Any] | None = None, **more: Any) -> Chunk:
        """Return a chunk with one delta; `extra` are fields of the choice, `more` of the chunk."""
        piece = ChunkChoice(index=choice.index, delta=delta, **(extra or {}))
        return self._chunk([piece], usage=self._usage(), **more)

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=choices, **self.envelope, **more)

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs or self.names is None:
            return None
        return chat_logprobs(self.names, choice.token_ids, choice.logprobs or [], self.body.top_logprobs or 0)


@dataclass(slots=True)
class CompletionShape(Shape[CompletionRequest]):
    """The legacy shape. A choice's index is its prompt's index * n + its index among the prompt's choices."""

    id_prefix = "cmpl"

    _writers: dict[int, LegacyWriter] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[LogprobsAt | None]] = field(default_factory=dict)  # sent once in a stream
    _held: dict[int, list[CompletionOutput]] = field(default_factory=dict)  # pieces that wait for them

    async def whole(self) -> Completion:
        outputs = await self.generation.collect()
        choices = [
            self._choice(index, output, choice) for index, output in enumerate(outputs) for choice in _in_order(output)
        ]
        return self._chunk(choices, usage=self.generation.usage(), seed=self.generation.seed())

    def _pieces(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        for choice in self._ready(index, output):
            shaped = self._choice(index, output, choice)
            shows_tokens = shaped.token_ids is not UNSET or shaped.logprobs is not None or self.body.usage_always
            if shaped.text or shaped.finish_reason or shows_tokens:
                seed = self.generation.seed() if shaped.finish_reason else UNSET
                yield self._chunk([shaped], usage=self._usage(), seed=seed)

    def _ready(self, index: int, output: RequestOutput) -> list[CompletionOutput]:
        """Return the choices to send now: an echo with log-probabilities waits until those of the prompt are known."""
        held = self._held.pop(index, []) + output.outputs
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        waits = self.body.echo and self.body.logprobs is not None and index not in self._prompt_logprobs
        if waits and not output.finished:
            self._held[index] = held
            return []
        return held

    def _chunk(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(object="text_completion", choices=choices, **self.envelope, **more)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        """Return a choice, or the new part of it. The first part echoes the prompt where that is requested."""
        index = prompt_index * self.generation.params.n + choice.index
        first = index not in self._begun
        self._begun.add(index)
        prompt = self.generation.prompts[prompt_index]
        echo = first and bool(self.body.echo)
        shaped = CompletionChoice(
            index=index,
            text=(prompt.text or "") + choice.text if echo else choice.text,
            logprobs=self._logprobs(index, output, choice, echo=echo),
            token_ids=self._token_ids(choice),
            prompt_token_ids=prompt.token_ids if first and self.body.return_token_ids else UNSET,
            **self._ending(choice),
        )
        if self.body.prompt_logprobs is not None and self.names is not None:
            places = cut(prompt.token_ids, output.prompt_logprobs or [], self.body.prompt_logprobs)
            shaped.prompt_logprobs = prompt_logprobs(self.names, places)
        return shaped

    def _logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput, *, echo: bool
    ) -> LegacyLogprobs | None:
        if self.body.logprobs is None or self.names is None:
            return None
        if index not in self._writers:
            skip = self.generation.params.skip_special_tokens
            self._writers[index] = LegacyWriter(self.names, skip_special_tokens=skip)
        writer = self._writers[index]
        if not echo:
            return writer.write(choice.token_ids, choice.logprobs or [])
        prompt_index = index // self.generation.params.n
        ids = self.generation.prompts[prompt_index].token_ids
        places = output.prompt_logprobs or self._prompt_logprobs.get(prompt_index, [])
        prompt_lists = writer.write(ids, cut(ids, places, self.body.logprobs))
        return joined(prompt_lists, writer.write(choice.token_ids, choice.logprobs or []))
