"""Runs one call: a `generate` for each of its prompts, merged, counted, and aborted together. Knows no JSON.

Nothing runs ahead of the consumer: the next output of a prompt is asked for when its last one has been taken.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from penstock.errors import RequestFailedError
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.interface.sampling_params import RequestOutputKind, SamplingParams
from penstock.server.api_errors import unavailable
from penstock.server.context import ServerContext
from penstock.server.openai_responses import PromptTokensDetails, Seed, Usage
from penstock.server.prompts import EncodedPrompt
from penstock.server.request_log import RequestLog

Indexed = tuple[int, RequestOutput]  # the prompt's index, and what moved


@dataclass(slots=True)
class Generation:
    """One call to the engine client and its running totals.

    Attributes:
        id: our own; the X-Request-Id of the caller never gets here.
        seeds: the seed used for each prompt, once it is known.
    """

    context: ServerContext
    id: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    log: RequestLog
    seeds: list[int | None] = field(init=False)
    _cached: list[int] = field(init=False)
    _last_token_at: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seeds = [None] * len(self.prompts)
        self._cached = [0] * len(self.prompts)
        self.log.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)

    async def outputs(self) -> AsyncGenerator[Indexed | None, None]:
        """Every output as it comes; None when nothing came for the keep-alive interval. Closing it aborts all."""
        streams = [self._generate(index) for index in range(len(self.prompts))]
        async with aclosing(merged(streams, self.context.options.keep_alive_s)) as moves:
            async for move in moves:
                if move is not None:
                    self._note(*move)
                yield move
        self.context.metrics.request.observe(self.log.age_s())

    async def collect(self) -> list[RequestOutput]:
        """The final output of each prompt, in order."""
        final: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as moves:
            async for move in moves:
                if move is not None:
                    final[move[0]] = move[1]
        if len(final) != len(self.prompts):
            raise RequestFailedError("the engine ended a request without an answer")
        return [final[index] for index in range(len(self.prompts))]

    def usage(self) -> Usage:
        """The tokens so far."""
        log = self.log
        return Usage(
            prompt_tokens=log.num_prompt_tokens,
            completion_tokens=log.num_completion_tokens,
            total_tokens=log.num_prompt_tokens + log.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=log.num_cached_tokens),
        )

    def seed(self) -> Seed:
        """The seed that repeats the answer: one number, or one for each prompt of a list."""
        return self.seeds[0] if len(self.seeds) == 1 else list(self.seeds)

    def _generate(self, index: int) -> AsyncIterator[RequestOutput]:
        prompt = {"prompt_token_ids": self.prompts[index].token_ids}
        return self.context.client.generate(prompt, self.params, f"{self.id}-{index}")

    def _note(self, index: int, output: RequestOutput) -> None:
        raise_failure(output)
        self.seeds[index] = output.seed
        self._cached[index] = output.num_cached_tokens
        self.log.num_cached_tokens = sum(self._cached)
        for choice in output.outputs:
            self._note_choice((index, choice.index), choice)

    def _note_choice(self, key: tuple[int, int], choice: CompletionOutput) -> None:
        metrics = self.context.metrics
        self.log.num_completion_tokens += len(choice.token_ids)
        if self.params.output_kind is RequestOutputKind.DELTA and choice.token_ids:
            self._note_time(key, len(choice.token_ids))
        if choice.finish_reason is not None:
            metrics.outcomes.labels(choice.finish_reason.value).inc()

    def _note_time(self, key: tuple[int, int], num_tokens: int) -> None:
        now = time.monotonic()
        if not self._last_token_at:
            self.context.metrics.first_token.observe(self.log.age_s())
        if key in self._last_token_at:
            self.context.metrics.inter_token.observe((now - self._last_token_at[key]) / num_tokens)
        self._last_token_at[key] = now


def raise_failure(output: RequestOutput) -> None:
    """A choice that did not end by itself ends the whole call."""
    reasons = {choice.finish_reason for choice in output.outputs}
    if output.error is not None or FinishReason.ERROR in reasons:
        raise RequestFailedError(output.error or "the computation of this request failed")
    if FinishReason.ABORT in reasons:
        raise unavailable("the request was aborted by the server")


async def merged(
    streams: Sequence[AsyncIterator[RequestOutput]], idle_s: float
) -> AsyncGenerator[Indexed | None, None]:
    """The outputs of all streams as they come; None after idle_s of silence. The first error ends all of them."""
    pending: dict[asyncio.Task[RequestOutput | None], int] = {}
    try:
        for index, stream in enumerate(streams):
            pending[_step(stream)] = index
            await asyncio.sleep(0)  # one prompt is taken up at a time, and others come in between
        while pending:
            done, _ = await asyncio.wait(pending, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                output = task.result()
                if output is not None:
                    yield index, output
                    pending[_step(streams[index])] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await _close(stream)


def _step(stream: AsyncIterator[RequestOutput]) -> "asyncio.Task[RequestOutput | None]":
    async def step() -> RequestOutput | None:
        return await anext(stream, None)

    return asyncio.create_task(step())


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    """Leave the stream now; an async generator would otherwise wait for the garbage collector."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
