"""StepClient: an engine in another process, used one step at a time, for programs without an event loop.

It has the methods of InProcessClient and uses a ProcessClient, whose event loop runs in a thread of its own, so streams
outlive the engine. `LLM(engine_in_process=False)` uses it.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from penstock.client.engine_client import EngineStatus, Prompt
from penstock.client.held_signals import HeldSignals
from penstock.client.in_process import MAX_STEPS
from penstock.client.open_requests import OpenRequest
from penstock.client.process import ProcessClient, warn_of_dropped, when_dropped
from penstock.errors import EngineDeadError, NotSupportedError, PenstockError, RequestFailedError, check_int
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import CompletionOutput, FinishReason, PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Stream:
    """An open request, and the task that waits for its next output."""

    request: OpenRequest
    next: "asyncio.Task[RequestOutput]"


class StepClient:
    """A client of an engine in another process. The constructor waits until the engine is ready.

    Args:
        make: makes the client, in the thread of its event loop.

    Raises:
        ModelLoadError, InvalidRequestError, EngineError: as for ProcessClient.start.
    """

    def __init__(self, make: Callable[[], ProcessClient], tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._pid = os.getpid()
        self._made: list[RequestOutput] = []  # not returned by `step` yet
        self._failures: dict[PenstockError, str] = {}  # not raised by `step` yet, with the request that each one ended
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=[self._loop], name="engine client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_made, make)
        except BaseException:
            self._end_loop()
            raise
        self._finalizer = when_dropped(self, _dropped, self._loop, self._client, self._streams)
        try:
            self._run(self._client.start)
        except BaseException:
            self.shutdown()
            raise

    @property
    def engine(self) -> Any:
        """Raise NotSupportedError: the engine itself is in another process."""
        raise NotSupportedError("engine: it is in another process; use engine_in_process=True to reach it")

    @property
    def model_info(self) -> ModelInfo:
        return self._client.model_info

    def status(self) -> EngineStatus:
        """Return a snapshot of the process, its restarts, and the requests that run and wait."""
        return self._run(self._status)

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> str:
        """Queue a request and return its id (a new one for None). Without params the model's own defaults apply.

        priority: lower comes first, with scheduling_policy = "priority".

        Raises:
            InvalidRequestError: prompt or parameters are wrong, or the id is in use.
            EngineDeadError: there is no engine any more.
        """
        return self.open(request_id, prompt, params, priority).prepared.request_id

    def open(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> OpenRequest:
        """Do what `add_request` does, and return the request's entry."""
        return self._run(self._open, request_id, prompt, params, priority)

    def new_request_id(self) -> str:
        """Return an id that no open request has."""
        return self._client.new_request_id()

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return len(self._streams)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to wait for, or to return."""
        return bool(self._streams or self._made or self._failures)

    def step(self, num_steps: int = 1) -> list[RequestOutput]:
        """Wait for an output. Return one for each request that has one; finished ones have finished=True.

        num_steps: number of times to wait, unless no request is open any more.

        A request ends with its error if its computation failed, or if engines died because of it. What has arrived when
        an exception ends the wait, as Ctrl-C does, is returned by the next call.

        Raises:
            EngineDeadError: the engine died too often. All requests have ended. Earlier outputs are returned first.
            EngineOverloadedError, InvalidRequestError: the engine has refused a request, which has ended.
        """
        check_int("num_steps", num_steps, 1, MAX_STEPS)
        for _ in range(num_steps):
            if self._streams and not self._failures:
                self._run(self._step)
        if self._failures and not self._made:
            failure = next(iter(self._failures))
            del self._failures[failure]
            raise failure
        made, self._made = self._made, []
        return made

    def abort(self, request_id: str) -> bool:
        """End a request without another output. Return False if it is not open."""
        return not self._closed and self._run(self._abort, request_id)

    def discard(self, request_ids: Collection[str]) -> None:
        """Abort requests of the calling thread, and drop what `step` has yet to return or raise for them."""
        with HeldSignals():
            for request_id in request_ids:
                self.abort(request_id)
            if not request_ids:  # another thread may be taking what was made
                return
            self._made = [output for output in self._made if output.request_id not in request_ids]
            self._failures = {error: name for error, name in self._failures.items() if name not in request_ids}

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute a prefix and keep it in the cache. Raise the errors of ProcessClient.pin_prefix."""
        return self._run(self._client.pin_prefix, prompt, name)

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted. Return False if no pin has this name."""
        return self._run(self._unpin, name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        """Return the pinned prefixes, oldest first."""
        return self._run(self._pinned)

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        """Return the prefixes found most often in the cache, pinned or not."""
        return self._run(self._most_used, count)

    def shutdown(self) -> None:
        """End the engine process. A second call does nothing."""
        if self._closed:
            return
        if not self._is_copy():  # the engine belongs to the process that made it
            self._run(self._shutdown)
        with HeldSignals():  # not closed before: after an interruption, a second call has to end the process
            self._closed = True
            self._finalizer.detach()
            if not self._is_copy():
                self._end_loop()

    # --- in the thread of the event loop ---------------------------------------------------------------------------

    async def _open(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> OpenRequest:
        request = await self._client.open(prompt, params, request_id, priority=priority)
        self._streams[request.prepared.request_id] = _Stream(request, self._next_of(request))
        return request

    def _next_of(self, request: OpenRequest) -> "asyncio.Task[RequestOutput]":
        return self._loop.create_task(self._client.next_output(request))

    async def _step(self) -> None:
        """Wait until an output has arrived, or a request is aborted. Take all outputs that are there."""
        if self._streams:  # another thread may have aborted the last one
            waiting = [stream.next for stream in self._streams.values()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for stream in list(self._streams.values()):
            if stream.next.done():
                self._take(stream)

    def _take(self, stream: _Stream) -> None:
        """Take the output that has arrived, and begin to wait for the next one, unless it was the last."""
        try:
            output = stream.next.result()
        except RequestFailedError as error:
            output = _failed(stream.request, error)
        except PenstockError as error:
            self._close(stream)
            self._failures[error] = stream.request.prepared.request_id  # the engine's end is the same for all requests
            return
        self._made.append(output)
        if output.finished:
            self._close(stream)
        else:
            stream.next = self._next_of(stream.request)

    def _close(self, stream: _Stream) -> None:
        stream.next.cancel()
        del self._streams[stream.request.prepared.request_id]
        self._client.close(stream.request)

    async def _abort(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._close(stream)
        return stream is not None

    async def _unpin(self, name: str) -> bool:
        return self._client.unpin_prefix(name)

    async def _pinned(self) -> list[PrefixUse]:
        return self._client.pinned_prefixes()

    async def _most_used(self, count: int) -> list[PrefixUse]:
        return self._client.most_used_prefixes(count)

    async def _status(self) -> EngineStatus:
        return self._client.status()

    async def _shutdown(self) -> None:
        for request_id in list(self._streams):
            await self._abort(request_id)
        await self._client.shutdown()

    # --- in the caller's thread ------------------------------------------------------------------------------------

    def _run(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **options: P.kwargs) -> T:
        """Run a coroutine in the event loop and wait for its result. Ctrl-C ends the wait and cancels the coroutine."""
        if self._loop.is_closed():
            raise EngineDeadError("the engine was shut down")
        if self._is_copy():
            raise EngineDeadError("a process that was forked cannot use the engine of its parent; make one of its own")
        future: Future[T] | None = None
        try:
            with HeldSignals():
                future = asyncio.run_coroutine_threadsafe(work(*args, **options), self._loop)
            return future.result()
        except BaseException:
            if future is not None:
                future.cancel()
            raise

    def _is_copy(self) -> bool:
        """Return whether this is a copy in a forked process, where the thread of the event loop does not run."""
        return os.getpid() != self._pid

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _dropped(loop: asyncio.AbstractEventLoop, client: ProcessClient, streams: dict[str, _Stream]) -> None:
    """End the engine and the thread of a StepClient that was dropped without shutdown(); from any thread."""

    async def end() -> None:
        for stream in streams.values():
            stream.next.cancel()
            client.close(stream.request)
        await client.shutdown()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    warn_of_dropped()


async def _made(make: Callable[[], ProcessClient]) -> ProcessClient:
    return make()


def _failed(request: OpenRequest, error: RequestFailedError) -> RequestOutput:
    """Return the last output of a request whose computation failed."""
    prepared = request.prepared
    ended = [CompletionOutput(n, "", [], finish_reason=FinishReason.ERROR) for n in range(prepared.params.n)]
    return RequestOutput(
        prepared.request_id, prepared.prompt, prepared.prompt_token_ids, ended, finished=True, error=str(error)
    )
