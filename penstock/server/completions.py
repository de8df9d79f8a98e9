"""POST /v1/completions: the legacy shape. Choice index = prompt index * n + choice of the prompt."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.interface.outputs import CompletionOutput, LogprobsAt, RequestOutput
from penstock.server.context import context_of, read_body
from penstock.server.disconnect import until_disconnect
from penstock.server.generation import Generation
from penstock.server.json_response import json_response
from penstock.server.logprobs import LegacyWriter, TokenNames, cut, joined, prompt_logprobs
from penstock.server.openai_requests import CompletionRequest, label_text
from penstock.server.openai_responses import Completion, CompletionChoice, LegacyLogprobs, Usage
from penstock.server.prompts import completion_prompts
from penstock.server.request_log import log_of
from penstock.server.sampling import completion_params
from penstock.server.sse import EventStream


async def create_completion(request: Request) -> Response:
    """Validate, run, answer."""
    context, log = context_of(request), log_of(request)
    body = await read_body(request, CompletionRequest)
    log.labels = label_text(body)
    body.check()
    info = context.info()
    model = context.check_model(body.model)
    params = completion_params(body, info)
    prompts = await completion_prompts(context, body, info)
    generation = Generation(context, f"cmpl-{uuid4().hex}", prompts, params, log)
    names = (
        TokenNames(context.tokenizer(), as_ids=bool(body.return_tokens_as_token_ids)) if _names_needed(body) else None
    )
    envelope = {"created": context.now(), "model": model, "system_fingerprint": info.system_fingerprint}
    answer = CompletionAnswer(body, generation, names, envelope)
    if body.stream:
        return EventStream(answer.chunks(), stall_timeout_s=context.options.stall_timeout_s)
    return json_response(await until_disconnect(request.receive, answer.whole()))


def _names_needed(body: CompletionRequest) -> bool:
    return body.logprobs is not None or body.prompt_logprobs is not None


Held = tuple[RequestOutput, CompletionOutput]


@dataclass(slots=True)
class CompletionAnswer:
    """Shapes the outputs of one call, whole or in chunks. `names` is there whenever log-probabilities are wanted."""

    body: CompletionRequest
    generation: Generation
    names: TokenNames | None
    envelope: dict[str, Any]
    _writers: dict[int, LegacyWriter] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _prompt_logprobs: dict[int, list[LogprobsAt | None]] = field(default_factory=dict)  # a stream tells them once
    _held: dict[int, list[Held]] = field(default_factory=dict)  # pieces that wait for them

    async def whole(self) -> Completion:
        outputs = await self.generation.collect()
        choices = [
            self._choice(index, output, choice)
            for index, output in enumerate(outputs)
            for choice in sorted(output.outputs, key=lambda choice: choice.index)
        ]
        return self._completion(choices, usage=self.generation.usage(), seed=self.generation.seed())

    async def chunks(self) -> AsyncGenerator[Completion | None, None]:
        async with aclosing(self.generation.outputs()) as moves:
            async for move in moves:
                if move is None:
                    yield None
                    continue
                for output, choice in self._ready(*move):
                    shaped = self._choice(move[0], output, choice)
                    if self._says_something(shaped):
                        yield self._chunk(shaped)
        if self.body.usage_at_end:
            yield self._completion([], usage=self.generation.usage())

    def _ready(self, index: int, output: RequestOutput) -> list[Held]:
        """The pieces of a prompt's choices to send now: an echo with log-probabilities waits until they are told."""
        held = self._held.pop(index, []) + [(output, choice) for choice in output.outputs]
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        waits = self.body.echo and self.body.logprobs is not None and index not in self._prompt_logprobs
        if waits and not output.finished:
            self._held[index] = held
            return []
        return held

    def _chunk(self, choice: CompletionChoice) -> Completion:
        usage: Usage | UnsetType | None = None if self.body.usage_at_end else UNSET
        if self.body.usage_always:
            usage = self.generation.usage()
        return self._completion([choice], usage=usage, seed=self.generation.seed() if choice.finish_reason else UNSET)

    def _completion(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(id=self.generation.id, object="text_completion", choices=choices, **self.envelope, **more)

    def _says_something(self, choice: CompletionChoice) -> bool:
        tokens = choice.token_ids is not UNSET or choice.logprobs is not None or self.body.usage_always
        return bool(choice.text or choice.finish_reason or tokens)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        """A choice, or the new part of it. The first part of each echoes the prompt where that is asked for."""
        index = prompt_index * self.generation.params.n + choice.index
        first = index not in self._begun
        self._begun.add(index)
        prompt = self.generation.prompts[prompt_index]
        shaped = CompletionChoice(
            index=index,
            text=(prompt.text or "") + choice.text if first and self.body.echo else choice.text,
            logprobs=self._logprobs(index, output, choice, echo=first and bool(self.body.echo)),
            finish_reason=None if choice.finish_reason is None else choice.finish_reason.value,
            stop_reason=choice.stop_reason,
        )
        if self.body.return_token_ids:
            shaped.token_ids = choice.token_ids
            shaped.prompt_token_ids = prompt.token_ids if first else UNSET
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
        prompt_lists = LegacyLogprobs()
        if echo:
            places = output.prompt_logprobs or self._prompt_logprobs.get(index // self.generation.params.n, [])
            ids = output.prompt_token_ids
            prompt_lists = writer.write(ids, cut(ids, places, self.body.logprobs))
        return joined(prompt_lists, writer.write(choice.token_ids, choice.logprobs or []))
