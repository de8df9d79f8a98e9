"""Engines for programs without an event loop, used one step at a time: in this process, or in another one.

    add_request -> InputProcessor -> the engine, and the table of open requests -> RequestOutputs, returned by `step`

StepClient has what both share: outputs and errors that `step` has yet to return. InProcessClient calls the engine;
ChildClient uses a ProcessClient, whose event loop runs in a thread of its own, so that its streams outlive the engine.
`LLM` uses either, and the offline benchmark the first.

HeldSignals keeps the handlers of signals from running in the middle of a change of state. Python runs a handler between
any two instructions of the main thread. What it raises (KeyboardInterrupt of Ctrl-C, the TimeoutError of a program's
alarm) would leave a step half done, or pass for an error of the model.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which take 50 microseconds per step
import asyncio
import inspect
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from penstock.client.adapters import Adapter
from penstock.client.engine_client import EngineStatus
from penstock.client.input_processor import InputProcessor, Prompt, PromptRequest
from penstock.client.open_requests import OpenRequest, OpenRequests, request_of
from penstock.client.prefixes import Pin
from penstock.client.process import ProcessClient, warn_of_dropped, when_dropped
from penstock.engine.engine import Engine
from penstock.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotSupportedError,
    PenstockError,
    RequestFailedError,
    check_int,
)
from penstock.interface.messages import EngineOutput, LoRARequest, ModelInfo
from penstock.interface.outputs import CompletionOutput, FinishReason, PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[int, FrameType | None], Any]
SIGNALS = [int(number) for number in sorted(signal.valid_signals())]
NO_FORMS = "structured_outputs: a form needs a tokenizer, and this engine has none"
SHUT_DOWN = "the engine was shut down"
MAX_STEPS = 2**20  # in one call


class StepClient(ABC):
    """A client of one engine, or of several that share the requests. Without a tokenizer it takes prompts as ids and
    gives no text.

    Attributes:
        model_info: the model of the engine.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._ended: str | None = None  # why the engine cannot be used any more
        self._made: list[RequestOutput] = []  # not returned by `step` yet
        self._failures: dict[
            Exception, str | None
        ] = {}  # not raised by `step` yet, with the request that each one ended

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def num_open(self) -> int:
        """The number of open requests."""

    @abstractmethod
    def new_request_id(self) -> str:
        """Make an id that no open request has."""

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> str:
        """Queue a request and return its id (a new one for None). Without params the model's own defaults apply.

        priority: lower comes first, with scheduling_policy = "priority".

        Raises:
            InvalidRequestError: prompt or parameters are wrong, or the id is in use.
            EngineDeadError: there is no engine any more.
        """
        return self.open(PromptRequest.of(prompt, params, request_id, priority=priority)).request_id

    @abstractmethod
    def open(self, request: PromptRequest) -> OpenRequest:
        """Do what `add_request` does, and return the request's entry."""

    def has_unfinished_requests(self) -> bool:
        """Check whether a request is open, or `step` has something to return for one."""
        return bool(self.num_open or self._made or any(self._failures.values()))

    def step(self, num_steps: int = 1) -> list[RequestOutput]:
        """Compute one step, or up to num_steps while there is work, each like a call of its own. With an engine in
        another process, wait for outputs instead, as often.

        Return, step by step, an output for each request with new tokens; finished ones have finished=True. A request
        that ends, or that another thread aborts meanwhile, takes no part in the following steps. It ends with its error
        if its computation failed, or if engines died because of it.

        If the handler of a signal raises between two steps, the next call returns what these have made. An error of the
        engine is raised once the outputs of earlier steps were returned.

        Raises:
            EngineDeadError: the engine was shut down, or died too often. All requests have ended.
            EngineOverloadedError, InvalidRequestError: the engine has refused a request, which has ended.
        """
        check_int("num_steps", num_steps, 1, MAX_STEPS)
        self._check_usable()
        for _ in range(num_steps):
            if self._failures or not self._advance():
                break
        if self._failures and not self._made:
            failure = next(iter(self._failures))
            del self._failures[failure]
            raise failure
        made, self._made = self._made, []
        return made

    @abstractmethod
    def _advance(self) -> bool:
        """Add the outputs of one step to `_made` and its errors to `_failures`. Return whether there is more to do."""

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """End a request without another output. Return False if it is not open."""

    def discard(self, request_ids: Collection[str]) -> None:
        """Abort requests of the calling thread, and drop what `step` has yet to return or raise for them."""
        with HeldSignals():
            for request_id in request_ids:
                self.abort(request_id)
            if not request_ids:  # another thread may be taking what was made
                return
            self._made = [output for output in self._made if output.request_id not in request_ids]
            self._failures = {error: name for error, name in self._failures.items() if name not in request_ids}

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(self._ended)

    @abstractmethod
    def load_adapter(self, source: LoRARequest) -> str:
        """Load a LoRA adapter, unless it is loaded with this content, and return the id by which requests name it.

        Raises:
            InvalidRequestError: its files are wrong, or there is no room for it beside those that open requests use.
            EngineDeadError: there is no engine any more.
        """

    @abstractmethod
    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache; see EngineClient.pin_prefix.

        Raises:
            InvalidRequestError: it cannot be pinned, or other requests are running, whose outputs would be lost.
            RequestFailedError: its computation failed.
            EngineDeadError: there is no engine any more.
        """

    @abstractmethod
    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like any other. Return False if no pin has this name."""

    @abstractmethod
    def pinned_prefixes(self) -> list[PrefixUse]:
        """List the pinned prefixes, oldest first."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free the model, or end its process. A second call does nothing."""


class InProcessClient(StepClient):
    """A client of an engine in this process.

    Signals wait until a step, or another change of state, is complete. So a handler may raise whatever it wants: the
    exception reaches the caller, and the client works as before.

    Args:
        forms: compiles answer forms; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        model_info: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        forms: Grammars | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.engine = engine
        self._model_info = model_info
        self._inputs = InputProcessor(tokenizer, model_info, seed=seed)
        self._requests = OpenRequests()
        self._forms = forms
        self._busy = threading.Lock()  # held while the engine is used
        self._to_abort: deque[str] = deque()

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def new_request_id(self) -> str:
        return self._requests.new_id()

    def open(self, request: PromptRequest) -> OpenRequest:
        self._check_usable()
        form = getattr(request.params, "structured_outputs", None)
        if form is not None:
            if self._forms is None:
                raise InvalidRequestError(NO_FORMS, param="structured_outputs")
            self._forms.check(form)
        request_id = self.new_request_id() if request.request_id is None else request.request_id
        opened = self._inputs.process(replace(request, request_id=request_id, flow=""))  # one flow, so in order
        self._give(opened)
        return opened

    def _give(self, request: OpenRequest) -> None:
        with self._using_engine():
            self._requests.open(request)
            try:
                for engine_request in request.engine_requests:
                    self.engine.add_request(engine_request)
            except BaseException:
                self._end(request)
                raise

    def _advance(self) -> bool:
        with self._using_engine():
            try:
                self._add(self.engine.step())
                while self.engine.has_work and not self.num_open:
                    self.engine.step()  # saves blocks to the store, for which no caller would take a step
            except Exception as error:
                self._failures[error] = None  # the engine's own
            except BaseException as error:  # a second Ctrl-C: the model may be half-way through anything
                self._ended = f"a step was broken off ({type(error).__name__}); make another LLM"
                raise
        return self.engine.has_work

    def _add(self, outputs: list[EngineOutput]) -> None:
        for request, output, to_abort in self._requests.add(outputs):
            for engine_request_id in to_abort:
                self.engine.abort(engine_request_id)
            if output is not None:
                self._made.append(output)
                if output.finished:
                    self._requests.close(request)

    def abort(self, request_id: str) -> bool:
        """Do what StepClient.abort does. If the engine is in use, by another thread or by the caller, as in a step, the
        request ends after that."""
        is_open = self._requests.get(request_id) is not None
        with HeldSignals():
            self._to_abort.append(request_id)
            self._abort_all()
        return is_open

    @contextmanager
    def _using_engine(self) -> Iterator[None]:
        """Hold signals and `_busy`. At the end, do the aborts that were called for meanwhile."""
        with HeldSignals():
            try:
                with self._busy:
                    yield
            finally:
                self._abort_all()

    def _abort_all(self) -> None:
        """Do the aborts that were called for, unless the engine is in use: its user does them then."""
        while self._to_abort and self._busy.acquire(blocking=False):
            try:
                while self._to_abort:  # looked at again: another thread may have been faster
                    request = self._requests.get(self._to_abort.popleft())
                    if request is not None:
                        self._end(request)
            finally:
                self._busy.release()

    def _end(self, request: OpenRequest) -> None:
        for engine_request_id in self._requests.close(request):
            if self._ended is None:
                self.engine.abort(engine_request_id)

    def load_adapter(self, source: LoRARequest) -> str:
        self._check_usable()
        adapter = Adapter.read(source)
        with self._using_engine():
            if adapter.id not in [item.name for item in self.engine.adapters or ()]:
                self.engine.add_adapter(adapter.id, source.lora_path, adapter.sha256)
        return adapter.id

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        self._check_usable()
        if self.has_unfinished_requests():
            raise InvalidRequestError("requests are under way; finish or abort them first")
        request = PromptRequest.of(prompt)
        ids, salt = self._inputs.read_prompt(request), request.cache_salt
        pin = self._requests.prefixes.pin(name, ids, salt, self.model_info.block_size)
        if not pin.is_computed:
            try:
                with self._using_engine():
                    self.engine.pin(pin.name, pin.request.prompt_token_ids, salt)
                self._compute(pin)
            except BaseException:
                self.unpin_prefix(pin.name)
                raise
        return replace(pin.use)

    def _compute(self, pin: Pin) -> None:
        request = request_of(pin)
        try:
            self._give(request)
            while self.has_unfinished_requests():
                for output in self.step():
                    if output.error is not None:
                        raise RequestFailedError(output.error)
        finally:
            self.discard([request.request_id])
        pin.is_computed = True

    def unpin_prefix(self, name: str) -> bool:
        self.engine.unpin(name)
        return self._requests.prefixes.unpin(name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        return self._requests.prefixes.pinned()

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        return self._requests.prefixes.most_used(count)

    def shutdown(self) -> None:
        self._ended = self._ended or SHUT_DOWN
        self.engine.shutdown()


@dataclass(slots=True)
class _Stream:
    """An open request, and the task that waits for its next output."""

    request: OpenRequest
    next: "asyncio.Task[RequestOutput]"


class ChildClient(StepClient):
    """A client of an engine in another process. The constructor waits until the engine is ready.

    Args:
        make: makes the client, in the thread of its event loop.

    Raises:
        ModelLoadError, InvalidRequestError, EngineError: as for ProcessClient.start.
    """

    def __init__(self, make: Callable[[], ProcessClient], tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=[self._loop], name="engine client", daemon=True)
        self._thread.start()
        try:
            self._client = self._call(make)
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
        return self._call(self._client.status)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def new_request_id(self) -> str:
        return self._client.new_request_id()

    def open(self, request: PromptRequest) -> OpenRequest:
        return self._run(self._open, request)

    def _advance(self) -> bool:
        if self._streams:
            self._run(self._next_outputs)
        return bool(self._streams)

    def abort(self, request_id: str) -> bool:
        return self._ended is None and self._call(self._abort, request_id)

    def load_adapter(self, source: LoRARequest) -> str:
        return self._run(self._load_adapter, source)

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        return self._run(self._client.pin_prefix, PromptRequest.of(prompt), name)

    def unpin_prefix(self, name: str) -> bool:
        return self._call(self._client.unpin_prefix, name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        return self._call(self._client.pinned_prefixes)

    def shutdown(self) -> None:
        if self._ended is not None:
            return
        if not self._is_copy():  # the engine belongs to the process that made it
            self._run(self._shutdown)
        with HeldSignals():  # not ended before: after an interruption, a second call has to end the process
            self._ended = SHUT_DOWN
            self._finalizer.detach()
            if not self._is_copy():
                self._end_loop()

    # --- in the thread of the event loop ---------------------------------------------------------------------------

    async def _open(self, request: PromptRequest) -> OpenRequest:
        opened = await self._client.open(request)
        self._streams[opened.request_id] = _Stream(opened, self._next_of(opened))
        return opened

    async def _load_adapter(self, source: LoRARequest) -> str:
        """Load an adapter. If there is no place, the one that had its name makes way, or else the oldest."""
        client, adapter = self._client, await asyncio.to_thread(Adapter.read, source)
        names = {item.name: item.id for item in client.adapters()}
        if adapter.id not in names.values() and len(names) >= client.model_info.max_loras and names:
            await client.unload_adapter(adapter.name if adapter.name in names else next(iter(names)))
        return (await client.load_adapter(source, load_inplace=True)).id

    def _next_of(self, request: OpenRequest) -> "asyncio.Task[RequestOutput]":
        return self._loop.create_task(self._client.next_output(request))

    async def _next_outputs(self) -> None:
        """Wait until an output has arrived, or a request is aborted. Collect all outputs that are there."""
        if self._streams:  # another thread may have aborted the last one
            waiting = [stream.next for stream in self._streams.values()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for stream in list(self._streams.values()):
            if stream.next.done():
                self._collect(stream)

    def _collect(self, stream: _Stream) -> None:
        """Collect the output that has arrived, and begin to wait for the next one, unless it was the last."""
        request = stream.request
        try:
            output = stream.next.result()
        except RequestFailedError as error:
            ended = [CompletionOutput(n, "", [], finish_reason=FinishReason.ERROR) for n in range(request.params.n)]
            output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, ended, finished=True)
            output.error = str(error)
        except PenstockError as error:
            self._close(stream)
            self._failures[error] = request.request_id  # the engine's end is the same for all requests
            return
        self._made.append(output)
        if output.finished:
            self._close(stream)
        else:
            stream.next = self._next_of(request)

    def _close(self, stream: _Stream) -> None:
        stream.next.cancel()
        del self._streams[stream.request.request_id]
        self._client.close(stream.request)

    def _abort(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._close(stream)
        return stream is not None

    async def _shutdown(self) -> None:
        for request_id in list(self._streams):
            self._abort(request_id)
        await self._client.shutdown()

    # --- in the caller's thread ------------------------------------------------------------------------------------

    def _call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        async def call() -> T:
            return work(*args, **options)

        return self._run(call)

    def _run(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **options: P.kwargs) -> T:
        """Run a coroutine in the event loop and wait for its result. Ctrl-C ends the wait and cancels the coroutine."""
        if self._loop.is_closed():
            raise EngineDeadError(SHUT_DOWN)
        if self._is_copy():
            raise EngineDeadError("a process that was forked cannot use the engine of its parent; make one of its own")
        future: Future[T] | None = None
        # Signals arrive only in `get`. A handler that raises inside a method of the future could leave its lock taken,
        # and the thread of the event loop would then wait for ever.
        done: SimpleQueue[Future[T]] = SimpleQueue()
        try:
            with HeldSignals():
                future = asyncio.run_coroutine_threadsafe(work(*args, **options), self._loop)
                future.add_done_callback(done.put)
            done.get()
            with HeldSignals():
                return future.result()
        except BaseException:
            if future is not None:
                with HeldSignals():
                    future.cancel()
            raise

    def _is_copy(self) -> bool:
        """Check whether this is a copy in a forked process, where the thread of the event loop does not run."""
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


class HeldSignals:
    """A block in which the handlers of signals do not run. They run at its end, once each, and may raise then.

    A second Ctrl-C is not held, so that it can end a step that hangs. Handlers are called by the main thread
    only, so in other threads there is nothing to hold. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[int] = []
        self._is_holding = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_holding = True
        try:
            for number in SIGNALS:
                if callable(handler := _signal.getsignal(number)):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # of a handler that is not held yet
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, handler)
        finally:  # a handler that is back already may have raised; those that are not are called by `_note` from now on
            self._is_holding = False
            self._call_handlers()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal that is held, or call its handler."""
        is_repeated = number in self._arrived
        if not self._is_holding or (is_repeated and number == signal.SIGINT):
            self._arrived = [other for other in self._arrived if other != number]
            self._handlers[number](number, frame)
        elif not is_repeated:
            self._arrived.append(number)

    def _call_handlers(self) -> None:
        if self._arrived:
            number = self._arrived.pop(0)
            try:
                self._handlers[number](number, inspect.currentframe())
            finally:
                self._call_handlers()
