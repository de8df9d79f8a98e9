"""InProcessClient: text in, text out, with an engine in this process. `LLM` and the offline benchmark use it.

add_request -> InputProcessor -> Engine.step -> OpenRequests -> RequestOutputs
"""

from collections import deque
from dataclasses import replace

from penstock import validation as check
from penstock.client.engine_client import Prompt
from penstock.client.input_processor import InputProcessor
from penstock.client.open_requests import OpenRequests
from penstock.client.prefixes import Pin
from penstock.engine.engine import Engine
from penstock.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from penstock.interface.messages import ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.grammars import Grammars
from penstock.tokenizer.tokenizer import Tokenizer

NO_FORMS = "structured_outputs: a form needs a tokenizer, and this engine has none"
MAX_STEPS = 2**20  # in one call


class InProcessClient:
    """A client of an engine in this process. Without a tokenizer it takes prompts as ids and gives no text."""

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
        self._closed = False
        self._stepping = False
        self._failure: Exception | None = None  # from a call of several steps, raised by the next call
        self._aborted: deque[str] = deque()  # during a step, to be handled after it

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> str:
        """Queue a request and return its id (a new one for None). Without params the model's own defaults apply.

        priority: lower comes first, with scheduling_policy = "priority".

        Raises:
            InvalidRequestError: prompt or parameters are wrong, or the id is in use.
            EngineDeadError: the engine was shut down.
        """
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        form = getattr(params, "structured_outputs", None)
        if form is not None:
            if self._forms is None:
                raise InvalidRequestError(NO_FORMS, param="structured_outputs")
            self._forms.check(form)
        prepared = self._inputs.process(prompt, params, request_id, "", priority)  # one user, so one flow, in order
        self._requests.open(prepared)
        try:
            for engine_request in prepared.engine_requests:
                self.engine.add_request(engine_request)
        except BaseException:
            self.abort(prepared.request_id)
            raise
        return prepared.request_id

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to do."""
        return self.engine.has_work

    def step(self, num_steps: int = 1) -> list[RequestOutput]:
        """Compute one step, or up to num_steps while there is work, each like a call of its own.

        Return, step by step, an output for each request with new tokens; finished ones have finished=True. A request
        that ends, or that another thread aborts meanwhile, takes no part in the following steps.
        """
        check.check_int("num_steps", num_steps, 1, MAX_STEPS)
        made: list[RequestOutput] = []
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._stepping = True
        try:
            for _ in range(num_steps):
                made += self._step()
                self._abort_all()
                if not self.engine.has_work:
                    break
        except Exception as error:
            if not made:
                raise
            self._failure = error  # raised after the outputs of earlier steps were returned
        finally:
            self._stepping = False
            self._abort_all()
        return made

    def _abort_all(self) -> None:
        while self._aborted:
            self._abort(self._aborted.popleft())

    def _step(self) -> list[RequestOutput]:
        made = []
        for request, outputs in self._requests.by_request(self.engine.step()).items():
            try:
                output, abort_ids = self._requests.take(request, outputs)
            except InvalidRequestError as error:  # the tokenizer's library refuses its tokens; it fails alone
                output, abort_ids = request.failed(str(error)), self._requests.cancel(request)
            for engine_request_id in abort_ids:
                self.engine.abort(engine_request_id)
            if output is not None:
                made.append(output)
                if output.finished:
                    self._requests.close(request)
        return made

    def abort(self, request_id: str) -> bool:
        """End a request without another output. Return False if it is not open.

        If a step is being computed, by another thread or by the caller, the request ends after it.
        """
        if self._stepping:
            self._aborted.append(request_id)
            return self._requests.get(request_id) is not None
        return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return False
        for engine_request_id in self._requests.close(request):
            self.engine.abort(engine_request_id)
        return True

    def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        """Compute the whole blocks of a prompt and keep them in the cache; see EngineClient.pin_prefix.

        Raises:
            InvalidRequestError: it cannot be pinned, or other requests are running, whose outputs would be lost.
            RequestFailedError: its computation failed.
            EngineDeadError: the engine was shut down.
        """
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if self.has_unfinished_requests():
            raise InvalidRequestError("requests are under way; finish or abort them first")
        ids, salt = self._inputs.read_prefix(prompt)
        pin = self._requests.prefixes.pin(name, ids, salt, self.model_info.block_size)
        if not pin.is_computed:
            try:
                self.engine.pin(pin.name, pin.request.prompt_token_ids, salt)
                self._compute(pin)
            except BaseException:
                self.unpin_prefix(pin.name)
                raise
        return replace(pin.use)

    def _compute(self, pin: Pin) -> None:
        prepared = pin.prepared()
        self._requests.open(prepared)
        try:
            self.engine.add_request(pin.request)
            while self.has_unfinished_requests():
                for output in self.step():
                    if output.error is not None:
                        raise RequestFailedError(output.error)
        finally:
            self.abort(prepared.request_id)
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
        self._closed = True
        self.engine.shutdown()
