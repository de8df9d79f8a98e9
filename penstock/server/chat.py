"""POST /v1/chat/completions: messages in, a message or its deltas out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.interface.outputs import CompletionOutput, RequestOutput
from penstock.server.context import context_of, read_body
from penstock.server.disconnect import until_disconnect
from penstock.server.generation import Generation
from penstock.server.json_response import json_response
from penstock.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from penstock.server.openai_requests import ChatRequest, label_text
from penstock.server.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from penstock.server.prompts import chat_prompt
from penstock.server.request_log import log_of
from penstock.server.sampling import chat_params
from penstock.server.sse import EventStream


async def create_chat_completion(request: Request) -> Response:
    """Validate, run, answer."""
    context, log = context_of(request), log_of(request)
    body = await read_body(request, ChatRequest)
    log.labels = label_text(body)
    body.check()
    info = context.info()
    model = context.check_model(body.model)
    params = chat_params(body, info)
    prompt = await chat_prompt(context, body, info)
    generation = Generation(context, f"chatcmpl-{uuid4().hex}", [prompt], params, log)
    names = TokenNames(context.tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))
    envelope = {"created": context.now(), "model": model, "system_fingerprint": info.system_fingerprint}
    answer = ChatAnswers(body, generation, names, envelope)
    if body.stream:
        return EventStream(answer.chunks(), stall_timeout_s=context.options.stall_timeout_s)
    return json_response(await until_disconnect(request.receive, answer.whole()))


@dataclass(slots=True)
class ChatAnswers:
    """Shapes the outputs of one call, whole or in chunks."""

    body: ChatRequest
    generation: Generation
    names: TokenNames
    envelope: dict[str, Any]
    _begun: set[int] = field(default_factory=set)

    async def whole(self) -> ChatCompletion:
        (output,) = await self.generation.collect()
        choices = [self._choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        answer = ChatCompletion(
            id=self.generation.id,
            object="chat.completion",
            choices=choices,
            usage=self.generation.usage(),
            seed=self.generation.seed(),
            **self.envelope,
        )
        if self.body.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self.names, output.prompt_logprobs or [])
        return answer

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatAnswer(role="assistant", content=choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=None if choice.finish_reason is None else choice.finish_reason.value,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk | None, None]:
        """Per choice: the role, the text as it comes, an empty delta with the finish reason."""
        async with aclosing(self.generation.outputs()) as moves:
            async for move in moves:
                if move is None:
                    yield None
                    continue
                for choice in move[1].outputs:
                    for chunk in self._choice_chunks(move[1], choice):
                        yield chunk
        if self.body.usage_at_end:
            yield self._chunk([], usage=self.generation.usage())

    def _choice_chunks(self, output: RequestOutput, choice: CompletionOutput) -> list[ChatChunk]:
        chunks = []
        if choice.index not in self._begun:
            chunks.append(self._role_chunk(output, choice.index))
            self._begun.add(choice.index)
        if choice.text or (choice.token_ids and self._shows_tokens()):
            chunks.append(self._text_chunk(choice))
        if choice.finish_reason is not None:
            last = ChunkChoice(
                index=choice.index,
                delta=Delta(),
                finish_reason=choice.finish_reason.value,
                stop_reason=choice.stop_reason,
            )
            chunks.append(self._chunk([last], usage=self._usage(), seed=self.generation.seed()))
        return chunks

    def _shows_tokens(self) -> bool:
        """Whether a token without text of its own is worth a chunk."""
        return bool(self.body.logprobs or self.body.return_token_ids or self.body.usage_always)

    def _role_chunk(self, output: RequestOutput, index: int) -> ChatChunk:
        chunk = self._chunk([ChunkChoice(index=index, delta=Delta(role="assistant", content=""))], usage=self._usage())
        if self.body.return_token_ids:
            chunk.prompt_token_ids = output.prompt_token_ids
        return chunk

    def _text_chunk(self, choice: CompletionOutput) -> ChatChunk:
        piece = ChunkChoice(
            index=choice.index,
            delta=Delta(content=choice.text),
            logprobs=self._logprobs(choice),
            token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
        )
        return self._chunk([piece], usage=self._usage())

    def _usage(self) -> Usage | UnsetType | None:
        """What the chunks before the last one say of usage."""
        if self.body.usage_always:
            return self.generation.usage()
        return None if self.body.usage_at_end else UNSET

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(
            id=self.generation.id, object="chat.completion.chunk", choices=choices, **self.envelope, **more
        )

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.names, choice.token_ids, choice.logprobs or [], self.body.top_logprobs or 0)
