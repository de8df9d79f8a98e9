"""InProcessClient: text in, text out, with an engine in this process. `LLM` and the offline benchmark use it.

add_request -> InputProcessor -> Engine.step -> OpenRequests -> RequestOutputs
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.client.engine_client import Prompt
from penstock.client.held_signals import HeldSignals
from penstock.client.input_processor import InputProcessor, PreparedRequest
from penstock.client.open_requests import OpenRequest, OpenRequests
from penstock.client.prefixes import Pin
from penstock.engine.engine import Engine
from penstock.errors import EngineDeadError, InvalidRequestError, RequestFailedError, check_int
from penstock.interface.messages import EngineOutput, ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.tokenizer import Tokenizer

NO_FORMS = "structured_outputs: a form needs a tokenizer, and this engine has none"
MAX_STEPS = 2**20  # in one call


class InProcessClient:
    """A client of an engine in this process. Without a tokenizer it takes prompts as ids and gives no text.

    Signals wait until a step, or another change of state, is complete (client/held_signals.py). So a handler may raise
    whatever it wants: the exception reaches the caller, and the client works as before.
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
        self.engine = engine
        self.model_info = model_info
        self.tokenizer = tokenizer
        self._inputs = InputProcessor(tokenizer, model_info, seed=seed)
        self._requests = OpenRequests(tokenizer)
        self._forms = forms
        self._ended: str | None = None  # why the engine cannot be used any more
        self._busy = threading.Lock()  # held while the engine is used
        self._made: list[RequestOutput] = []  # not returned yet
        self._failure: Exception | None = None  # from a call of several steps, raised by the next call
        self._to_abort: deque[str] = deque()

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> str:
        """Queue a request and return its id (a new one for None). Without params the model's own defaults apply.

        priority: lower comes first, with scheduling_policy = "priority".

        Raises:
            InvalidRequestError: prompt or parameters are wrong, or the id is in use.
            EngineDeadError: the engine was shut down.
        """
        return self.open(request_id, prompt, params, priority).prepared.request_id

    def open(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> OpenRequest:
        """Do what `add_request` does, and return the request's entry."""
        self._check_open()
        form = getattr(params, "structured_outputs", None)
        if form is not None:
            if self._forms is None:
                raise InvalidRequestError(NO_FORMS, param="structured_outputs")
            self._forms.check(form)
        request_id = self.new_request_id() if request_id is None else request_id
        return self._open(self._inputs.process(prompt, params, request_id, "", priority))  # one flow, so in order

    def _open(self, prepared: PreparedRequest) -> OpenRequest:
        with self._using_engine():
            request = self._requests.open(prepared)
            try:
                for engine_request in prepared.engine_requests:
                    self.engine.add_request(engine_request)
            except BaseException:
                self._end(request)
                raise
        return request

    def new_request_id(self) -> str:
        """Return an id that no open request has."""
        return self._requests.new_id()

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return len(self._requests)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is open, or `step` has outputs to return."""
        return bool(self.num_open or self._made)

    def step(self, num_steps: int = 1) -> list[RequestOutput]:
        """Compute one step, or up to num_steps while there is work, each like a call of its own.

        Return, step by step, an output for each request with new tokens; finished ones have finished=True. A request
        that ends, or that another thread aborts meanwhile, takes no part in the following steps.

        If the handler of a signal raises between two steps, the next call returns what these have made.
        """
        check_int("num_steps", num_steps, 1, MAX_STEPS)
        self._check_open()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        for _ in range(num_steps):
            self._step()
            if self._failure is not None or not self.engine.has_work:
                break
        made, self._made = self._made, []
        return made

    def _step(self) -> None:
        with self._using_engine():
            try:
                self._made += self._taken(self.engine.step())
                while self.engine.has_work and not self.num_open:
                    self.engine.step()  # saves blocks to the store, for which no caller would take a step
            except Exception as error:
                if not self._made:
                    raise
                self._failure = error  # raised after the outputs of earlier steps were returned
            except BaseException as error:  # a second Ctrl-C: the model may be half-way through anything
                self._ended = f"a step was broken off ({type(error).__name__}); make another LLM"
                raise

    def _taken(self, outputs: list[EngineOutput]) -> list[RequestOutput]:
        made = []
        for request, its_outputs in self._requests.by_request(outputs).items():
            output, abort_ids = self._requests.take_or_fail(request, its_outputs)
            for engine_request_id in abort_ids:
                self.engine.abort(engine_request_id)
            if output is not None:
                made.append(output)
                if output.finished:
                    self._requests.close(request)
        return made

    def abort(self, request_id: str) -> bool:
        """End a request without another output. Return False if it is not open.

        If the engine is in use, by another thread or by the caller, as in a step, the request ends after that.
        """
        is_open = self._requests.get(request_id) is not None
        with HeldSignals():
            self._to_abort.append(request_id)
            self._abort_all()
        return is_open

    def discard(self, request_ids: Collection[str]) -> None:
        """Abort requests of the calling thread, and drop their outputs that `step` has yet to return."""
        with HeldSignals():
            for request_id in request_ids:
                self.abort(request_id)
            if not request_ids:  # another thread may be taking what was made
                return
            self._made = [output for output in self._made if output.request_id not in request_ids]

    @contextmanager
    def _using_engine(self) -> Iterator[None]:
        """Hold signals and `_busy`. At the end, do what `abort` was called for meanwhile."""
        with HeldSignals():
            try:
                with self._busy:
                    yield
            finally:
                self._abort_all()

    def _abort_all(self) -> None:
        """Do what `abort` was called for, unless the engine is in use: its user does it then."""
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

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(self._ended)

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache; see EngineClient.pin_prefix.

        Raises:
            InvalidRequestError: it cannot be pinned, or other requests are running, whose outputs would be lost.
            RequestFailedError: its computation failed.
            EngineDeadError: the engine was shut down.
        """
        self._check_open()
        if self.has_unfinished_requests():
            raise InvalidRequestError("requests are under way; finish or abort them first")
        ids, salt = self._inputs.read_prefix(prompt)
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
        prepared = pin.prepared()
        try:
            self._open(prepared)
            while self.has_unfinished_requests():
                for output in self.step():
                    if output.error is not None:
                        raise RequestFailedError(output.error)
        finally:
            self.discard([prepared.request_id])
        pin.is_computed = True

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like any other. Return False if no pin has this name."""
        self.engine.unpin(name)
        return self._requests.prefixes.unpin(name)

    def pinned_prefixes(self) -> list[PrefixUse]:
        """Return the pinned prefixes, oldest first."""
        return self._requests.prefixes.pinned()

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        """Return the prefixes found most often in the cache, pinned or not."""
        return self._requests.prefixes.most_used(count)

    def shutdown(self) -> None:
        """Free the model. A second call does nothing."""
        self._ended = self._ended or "the engine was shut down"
        self.engine.shutdown()
