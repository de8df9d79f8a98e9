"""Runs one call and delivers its outputs, as one answer or as server-sent events. Knows no answer format.

A call is one `generate` per prompt. Their outputs are merged and counted, and all are aborted when the client
disconnects. Nothing runs ahead of the consumer: a prompt's next output is requested when its last one has been taken,
so at most one event is held here while the client does not read.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.client.adapters import name_of
from penstock.client.input_processor import PromptRequest
from penstock.errors import EngineOverloadedError, InvalidRequestError, PenstockError, RequestFailedError
from penstock.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import FIELD
from penstock.server.api_errors import ApiError, ClientGoneError, from_exception, unavailable, until_disconnect
from penstock.server.context import ServerContext
from penstock.server.openai_responses import Seed, Usage
from penstock.server.timelines import CallTimeline, RequestLog

Indexed = tuple[int, RequestOutput]  # a prompt's index, and an output of it
Events = AsyncGenerator[msgspec.Struct | bytes | None, None]  # bytes are sent as they are; None: send a keep-alive
T = TypeVar("T")

MIN_TIMEOUT_S = 1e-3  # time left that is given to the engine for a call whose time is over
BAD_WORDS = "bad_words"  # in whose name the sampler refuses a row whose masks leave no token
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_END = msgspec.UNSET


@dataclass(slots=True)
class Generation:
    """One call to the engine client and its running totals.

    Attributes:
        id: the answer's id; never the caller's X-Request-Id.
        on_output: called with a prompt's index and each output of that prompt.
        is_patient: whether the call waits and tries again when the queue is full.
        num_reasoning_tokens: set by the code that formats the answer.
        at_once: how many prompts the engine has at a time; None: all.
        only_prompt: whether the one token of each answer, for which the engine computes the prompt, is left out.
    """

    context: ServerContext
    id: str
    prompts: Sequence[PromptRequest]
    params: SamplingParams
    log: RequestLog
    on_output: Callable[[int, RequestOutput], None] | None = None
    is_patient: bool = False
    num_reasoning_tokens: int = 0
    at_once: int | None = None
    only_prompt: bool = False
    timeline: CallTimeline = field(init=False)
    _latest: list[RequestOutput | None] = field(init=False)  # per prompt

    def __post_init__(self) -> None:
        self._latest = [None] * len(self.prompts)
        self.log.count(prompt=sum(len(prompt.token_ids) for prompt in self.prompts))
        self.timeline = CallTimeline(self.context.timelines, self.id, self.log, self.context.own_names()[0])
        self.timeline.num_choices = len(self.prompts) * self.params.n
        self.timeline.begin(time.monotonic())
        if self.log.adapter is not None:
            self.context.metrics.adapter_requests.labels(name_of(self.log.adapter)).inc()

    async def outputs(self) -> AsyncGenerator[Indexed | None, None]:
        """Yield each output as it comes, and None after each silent keep-alive interval. Closing it aborts the call."""
        streams = [self._generate(index) for index in range(len(self.prompts))]
        try:
            async with aclosing(merged(streams, self._silence_s, self.at_once)) as outputs:
                async for item in outputs:
                    self._check_deadline()
                    if item is not None:
                        _raise_failure(item[1])
                        item = (item[0], _without_answer(item[1])) if self.only_prompt else item
                        self._note(*item)
                        if self.on_output is not None:
                            self.on_output(*item)
                    yield item
        finally:
            self.timeline.computed()
        self.context.model_metrics.request.observe(self.log.age_s())

    def _silence_s(self) -> float:
        """Compute the seconds to wait for an output before a keep-alive is sent."""
        keep_alive_s, limit = self.context.options.keep_alive_s, self._limit_s
        return keep_alive_s if limit is None else max(0.0, min(keep_alive_s, limit - self.log.age_s()))

    @property
    def _limit_s(self) -> float | None:
        """The seconds that the call may take: the server's limit or its own, whichever is shorter; None: no limit."""
        limits = (self.context.options.request_timeout_s, self.log.timeout_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _check_deadline(self) -> None:
        limit = self._limit_s
        if limit is not None and self.log.age_s() >= limit:
            raise ApiError(504, f"The answer was not complete within {limit:g} s.", code="request_timeout")

    async def collect(self) -> list[RequestOutput]:
        """Wait for the final output of each prompt, and return them in order."""
        async with aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                pass
        final = [output for output in self._latest if output is not None]
        if len(final) != len(self.prompts):
            raise RequestFailedError("the engine ended a request without an answer")
        return final

    def usage(self) -> Usage:
        log = self.log
        return Usage(
            prompt_tokens=log.num_prompt_tokens,
            completion_tokens=log.num_completion_tokens,
            total_tokens=log.num_prompt_tokens + log.num_completion_tokens,
            prompt_tokens_details={"cached_tokens": log.num_cached_tokens},
            completion_tokens_details=self._details(),
        )

    def _details(self) -> dict[str, int] | UnsetType:
        known = [output for output in self._latest if output is not None]
        accepted = sum(output.num_accepted_tokens for output in known)
        rejected = sum(output.num_rejected_tokens for output in known)
        reasoning = self.num_reasoning_tokens
        if not accepted and not rejected and not reasoning:
            return UNSET
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
            "reasoning_tokens": reasoning,
        }

    def seed(self) -> Seed:
        """Find the seed that reproduces the answer: one number, or one per prompt for a list of prompts."""
        seeds = [None if output is None else output.seed for output in self._latest]
        return seeds[0] if len(seeds) == 1 else seeds

    async def _generate(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        request = replace(
            self.prompts[index],
            params=self.prompts[index].params or self.params,
            request_id=f"{self.id}-{index}",
            flow=self.log.flow or self.id,
            priority=self.log.priority,
            adapter=self.log.adapter,
        )
        if index and self.log.flow is not None:
            await self.context.begin(self.log)
        self.context.arrived(self.log)
        while True:
            outputs = self.context.client.generate(replace(request, timeout=self._time_left_s()))
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                return
            except EngineOverloadedError as error:  # raised only before the first output
                if not self.is_patient:
                    raise
                await asyncio.sleep(error.retry_after_s)

    def _time_left_s(self) -> float | None:
        """Compute in how many seconds the answer is due; None if the engine does not schedule by deadlines."""
        limit = self._limit_s
        if limit is None or self.context.known_info().scheduling_policy != "deadline":
            return None
        return max(MIN_TIMEOUT_S, limit - self.log.age_s())

    def _note(self, index: int, output: RequestOutput) -> None:
        before = self._latest[index]
        self._latest[index] = output
        self.timeline.follow(index, output)
        self.log.num_cached_tokens += output.num_cached_tokens - (0 if before is None else before.num_cached_tokens)
        for choice in output.outputs:
            self.log.count(completion=len(choice.token_ids))
            if choice.finish_reason is not None:
                self.context.model_metrics.outcomes.labels(choice.finish_reason.value).inc()


def _raise_failure(output: RequestOutput) -> None:
    """Raise the error that ends the whole call if one choice failed or was aborted."""
    reasons = {choice.finish_reason for choice in output.outputs}
    if output.error is not None or FinishReason.ERROR in reasons:
        error = output.error or "the computation of this request failed"
        field = error.partition(":")[0]
        if field in (FIELD, BAD_WORDS):  # no token satisfies what the request asks for
            raise InvalidRequestError(error, param=field, code="unsatisfiable")
        raise RequestFailedError(error)
    if FinishReason.ABORT in reasons:
        raise unavailable("the request was aborted by the server")


def _without_answer(output: RequestOutput) -> RequestOutput:
    """Drop the tokens of an output's choices; those that have ended, ended because there were to be none."""
    choices = [
        CompletionOutput(choice.index, "", [], finish_reason=FinishReason.LENGTH if choice.finished else None)
        for choice in output.outputs
    ]
    return replace(output, outputs=choices)


async def merged(
    streams: Sequence[AsyncIterator[RequestOutput]], idle_s: Callable[[], float], at_once: int | None = None
) -> AsyncGenerator[Indexed | None, None]:
    """Yield the outputs of all streams as they come, and None after idle_s() of silence. The first error ends them all.

    At most `at_once` streams run at the same time; None means all of them.
    """
    pending: dict[asyncio.Task[RequestOutput | None], int] = {}
    ready: asyncio.Queue[asyncio.Task[RequestOutput | None]] = asyncio.Queue()  # `asyncio.wait` would look at all tasks
    waiting = iter(enumerate(streams))

    def begin(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        task = _next_of(stream)
        pending[task] = index
        task.add_done_callback(ready.put_nowait)

    try:
        for following in islice(waiting, at_once):
            begin(*following)
            await asyncio.sleep(0)  # start one prompt at a time, so that other requests can run in between
        while pending:
            try:
                async with asyncio.timeout(idle_s()):
                    done = [await ready.get()]
            except TimeoutError:
                yield None
                continue
            done += [ready.get_nowait() for _ in range(ready.qsize())]
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                output = task.result()
                if output is not None:
                    yield index, output
                    begin(index, streams[index])
                elif (more := next(waiting, None)) is not None:
                    begin(*more)
                    await asyncio.sleep(0)  # as above, because many may end with the same step
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            if isinstance(stream, AsyncGenerator):  # otherwise it stays open until garbage collection
                await stream.aclose()


def _next_of(stream: AsyncIterator[RequestOutput]) -> "asyncio.Task[RequestOutput | None]":
    async def following() -> RequestOutput | None:
        return await anext(stream, None)

    return asyncio.create_task(following())


def sse_data(body: bytes) -> bytes:
    """Format one server-sent event. Encoded JSON has no line breaks, so it fits on one `data:` line."""
    return b"data: " + body + b"\n\n"


class EventStream(Response):
    """A response that streams events, or lines of JSON, and cancels their source when the client disconnects.

    The first event is awaited before the status line is sent, so a request that fails at once gets its real status.
    If the first event is a keep-alive, the status is 200, and a later failure is sent as an event.
    """

    def __init__(
        self, events: Events, *, stall_timeout_s: float, done: bytes = DONE, media: bytes = EVENT_STREAM
    ) -> None:
        super().__init__()
        self._events = events
        self._stall_timeout_s = stall_timeout_s
        self._done = done
        self._media = media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(scope, send))

    async def _run(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            event = await anext(events, _END)
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", self._media), *STREAM_HEADERS],
                }
            )
            encode = msgspec.json.Encoder().encode
            try:
                while event is not _END:
                    if not isinstance(event, bytes):
                        event = KEEP_ALIVE if event is None else sse_data(encode(event))
                    await self._send(send, event)
                    event = await anext(events, _END)
            except (PenstockError, ApiError) as exc:
                await self._send(send, from_exception(exc).noted(scope).event)
            else:
                await self._send(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        """Send one piece. The HTTP server makes this wait while the client does not read."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientGoneError("the client stopped reading") from None
