"""ProcessClient: requests to an engine in a child process. The base of `AsyncLLM`; imports no torch.

The supervisor keeps the child running (client/supervisor.py), OpenRequests holds what is asked of it, and Recovery
gives it to the engine, or to the next one where the engine died: no stream ends with the process that computes it. A
request that cannot be handled ends alone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.client import frames
from penstock.client.admission import Admission, AdmissionLimits
from penstock.client.engine_client import EngineState, EngineStatus, Prompt
from penstock.client.input_processor import InputProcessor, PreparedRequest, resumed
from penstock.client.open_requests import OpenRequest, OpenRequests, token_by_token
from penstock.client.records import RecordKeeper, RecordOptions, SavedRecord
from penstock.client.recovery import DEATHS_BEFORE_TRIAL, Recovery
from penstock.client.supervisor import EngineSupervisor
from penstock.errors import (
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    RequestFailedError,
)
from penstock.interface.messages import EngineOutput, ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.tokenizer import Tokenizer

LOGGER = logging.getLogger("penstock")
NOT_OURS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class ProcessClient:
    """Implements EngineClient and EngineListener. The constructor starts the child; all else needs an event loop.

    Args:
        options: for EngineConfig.from_options, checked already.
        seed: of the engine, for requests without one.
        limits: of what may wait.
        standby: keep a second engine process ready to take over.
        record: what the flight recorder keeps.
        follows_forms: the tokenizer is the one in the model's directory, by which the engine follows forms of answers.
    """

    def __init__(
        self,
        options: dict[str, Any],
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        limits: AdmissionLimits | None = None,
        standby: bool = False,
        record: RecordOptions | None = None,
        follows_forms: bool = True,
    ) -> None:
        self._follows_forms = follows_forms
        self._tokenizer = tokenizer
        self._seed = seed
        self._inputs: InputProcessor | None = None  # made when the model is known
        self._requests = OpenRequests(tokenizer)
        self._admission = Admission(limits or AdmissionLimits(), self._requests)
        self._recovery = Recovery(self._requests, lambda frame: self._supervisor.child.send(frame))
        self._records = RecordKeeper(record or RecordOptions())
        self._supervisor = EngineSupervisor(options, self, self._records.descriptor, standby=standby)
        self._fingerprint: str | None = None  # of the engine that computed the tokens so far
        self._watch: asyncio.Task[None] | None = None
        self._draining = False
        self._checking = asyncio.Semaphore(1)
        self._num_aborted = 0
        self._last_outputs_at = 0.0  # on the clock of timelines

    @property
    def model_info(self) -> ModelInfo:
        if self._supervisor.model_info is None:
            raise self._supervisor.failure or EngineDeadError("the engine is not ready yet")
        return self._supervisor.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelLoadError("the model has no tokenizer.json")
        return self._tokenizer

    def status(self) -> EngineStatus:
        engine = self._supervisor
        return EngineStatus(
            state=self._state,
            pid=engine.child.pid,
            restarts=engine.restarts,
            heartbeat_age_s=engine.liveness.age_s,
            making_progress=engine.state is EngineState.READY and engine.liveness.making_progress,
            stats=engine.liveness.stats,
            journal_requests=self._requests.num_running,
            journal_tokens=self._requests.num_tokens,
            num_aborted_total=self._num_aborted,
            planned_memory={} if engine.model_info is None else engine.model_info.memory,
            peak_memory_bytes=engine.child.peak_memory_bytes(),
            standby=engine.standby_status(),
        )

    @property
    def _state(self) -> EngineState:
        state = self._supervisor.state
        return EngineState.DRAINING if self._draining and state is EngineState.READY else state

    async def attach(self) -> None:
        """Watch the child from this event loop. Raise EngineError if it was shut down, or belongs to another one."""
        loop = asyncio.get_running_loop()
        if self._watch is None:
            if self._supervisor.failure is not None:
                raise self._supervisor.failure
            self._watch = loop.create_task(self._supervisor.run(), name="engine supervisor")
        elif self._watch.get_loop() is not loop:
            raise EngineError("this engine belongs to the event loop that used it first; make a new one for each loop")

    async def start(self) -> ModelInfo:
        """Wait until the engine is ready; optional, since `generate` does so too.

        Raises:
            ModelLoadError, InvalidRequestError: it cannot be built.
            EngineError: it died too often, was shut down, or belongs to another event loop.
        """
        await self.attach()
        await self._supervisor.settled.wait()
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        return self.model_info

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        self._check_serving()
        self._admission.check(flow, num_arriving=num_arriving)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        flow: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_token_ids: Sequence[list[int]] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs. See EngineClient.generate for what it raises.

        Leaving the loop aborts the request as soon as nothing refers to the stream any more; a program that keeps it
        in a variable closes it itself (`contextlib.aclosing`).
        """
        request = await self.open(
            prompt,
            params,
            request_id,
            flow=flow,
            priority=priority,
            timeout=timeout,
            output_token_ids=output_token_ids,
        )
        try:
            finished = False
            while not finished:
                output = await self.next_output(request)
                finished = output.finished
                yield output
        finally:  # the request has finished, or its reader has left
            self.close(request)

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        *,
        flow: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        output_token_ids: Sequence[list[int]] = (),
    ) -> OpenRequest:
        """Check a request and give it to the engine. Its reader calls `next_output` up to the end, and then `close`.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError: as EngineClient.generate.
        """
        await self.start()
        self.check_admission(flow)
        form = getattr(params, "structured_outputs", None)
        if form is not None:
            await self.check_form(form)
        process = partial(self._input_processor().process, prompt, params, request_id, flow, priority, timeout)
        return self._admit(resumed(await self._prepare(prompt, params, process), output_token_ids))

    async def check_form(self, form: StructuredOutputsParams) -> None:
        check = getattr(self._tokenizer, "check_form", None)
        if check is None or not self._follows_forms:
            message = "structured_outputs: they need the tokenizer in the model's own directory, which the engine reads"
            raise InvalidRequestError(message, param="structured_outputs")
        info = self.model_info
        async with self._checking:  # the others may wait for one, but not for its thread
            await asyncio.to_thread(check, form, info.vocab_size, info.eos_token_ids)

    def _admit(self, prepared: PreparedRequest) -> OpenRequest:
        self._check_serving()  # the engine may have failed while the prompt was tokenised
        patience_s = self._admission.admit(prepared)
        request = self._requests.open(prepared)
        request.patience_s = patience_s
        self._recovery.submit([engine_request.request_id for engine_request in prepared.engine_requests])
        return request

    async def pin_prefix(self, prompt: Prompt, name: str | None = None) -> PrefixUse:
        await self.start()
        self.check_admission()
        ids, salt = await asyncio.to_thread(self._input_processor().read_prefix, prompt)
        pin = self._requests.prefixes.pin(name, ids, salt, self.model_info.block_size)
        if pin.is_computed:
            return replace(pin.use)
        try:
            self._recovery.pin(pin)
            request = self._admit(pin.prepared())
            try:
                await self.next_output(request)
            finally:
                self.close(request)
        except BaseException:
            self.unpin_prefix(pin.name)
            raise
        if self._requests.prefixes.get(pin.name) is not pin:
            raise InvalidRequestError(f"name: {pin.name!r} was unpinned while it was computed", param="name")
        pin.is_computed = True
        return replace(pin.use)

    def unpin_prefix(self, name: str) -> bool:
        pin = self._requests.prefixes.get(name)
        if pin is not None:
            self._requests.prefixes.unpin(name)
            self._recovery.unpin(pin)
        return pin is not None

    def pinned_prefixes(self) -> list[PrefixUse]:
        return self._requests.prefixes.pinned()

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        return self._requests.prefixes.most_used(count)

    async def next_output(self, request: OpenRequest) -> RequestOutput:
        """Wait for the next output of an open request. Raise the error that ended it."""
        output = await (request.mailbox.get() if request.patience_s is None else self._first(request))
        request.patience_s = None
        self._recovery.resume_if_read(request)
        return output

    def close(self, request: OpenRequest) -> None:
        """End an open request, which may still run; its id is free from now on."""
        self._num_aborted += not request.mailbox.ended
        self._recovery.abort(self._requests.close(request))

    def _check_serving(self) -> None:
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        if self._draining:
            raise EngineDeadError("the engine takes no requests: it is draining")

    async def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, process: Callable[[], PreparedRequest]
    ) -> PreparedRequest:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        others = getattr(params, "bad_words", None) or getattr(params, "dry_multiplier", None)
        if isinstance(text, str) or others:  # texts to tokenise: streams go on meanwhile
            return await asyncio.to_thread(process)
        return process()

    async def _first(self, request: OpenRequest) -> RequestOutput:
        """Return a request's first output; refuse it if its patience ends, unless an engine has died meanwhile."""
        restarts = self._supervisor.restarts
        try:
            async with asyncio.timeout(request.patience_s):
                return await request.mailbox.get()
        except TimeoutError:
            if restarts == self._supervisor.restarts and self._supervisor.state is EngineState.READY:
                message = f"no token came within the {request.patience_s:g} s that a request may wait; try again later"
                raise EngineOverloadedError(message) from None
        return await request.mailbox.get()

    def _input_processor(self) -> InputProcessor:
        if self._inputs is None:
            self._inputs = InputProcessor(self._tokenizer, self.model_info, seed=self._seed)
        return self._inputs

    def assign_seed(self) -> int:
        return self._input_processor().assign_seed()

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while len(self._requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def shutdown(self) -> None:
        """End the engine. A second call only waits for the process."""
        self._supervisor.stop()
        if self._watch is not None and self._watch.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._watch])
        await self._supervisor.wait()
        await asyncio.to_thread(self._records.close)

    async def record(self) -> SavedRecord:
        return await asyncio.wrap_future(self._records.save())

    # --- what the supervisor calls ---------------------------------------------------------------------------------

    def engine_ready(self, info: ModelInfo) -> None:
        """Give it what is open. Where the model's files have changed since, that cannot go on with the same bits."""
        if self._fingerprint not in (None, info.system_fingerprint):
            change = f"{self._fingerprint} became {info.system_fingerprint}"
            self.engine_failed(EngineDeadError(f"the new engine computes otherwise: {change}"))
        if self._fingerprint != info.system_fingerprint:
            self._fingerprint, self._inputs = info.system_fingerprint, None
        self._admission.engine_ready(info.max_num_seqs, has_priorities=info.scheduling_policy == "priority")
        self._recovery.engine_ready()

    def engine_lost(self) -> bool:
        self._records.engine_died(self._supervisor.last_death)
        to_blame = self._recovery.engine_lost(self._last_outputs_at)
        request = None if to_blame is None else self._requests.owner(to_blame)
        if request is not None:
            times = DEATHS_BEFORE_TRIAL + 1
            message = f"the engine process died each of the {times} times that it computed this request, at last alone"
            self._end(request, RequestFailedError(message))
        return request is not None

    def recovered(self) -> bool:
        return self._recovery.recovered

    def engine_failed(self, error: EngineDeadError) -> None:
        for request in self._requests:
            self._end(request, error)

    def received(self, frame: frames.Outputs | frames.Rejected) -> None:
        if isinstance(frame, frames.Outputs):
            self._last_outputs_at = time.monotonic()
            self._admission.note(frame.outputs, frame.stats)
            self._deliver(frame.outputs)
            return
        request = self._requests.owner(frame.request_id)
        if request is not None:
            self._end(request, frame.as_error())
        elif (pin := self._requests.prefixes.computed_by(frame.request_id)) is not None:
            LOGGER.error("the prefix %s is not pinned any more: %s", pin.name, frame.message)
            self.unpin_prefix(pin.name)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            self._records.request_failed(failed.request_id)
        for request, its_outputs in self._requests.by_request(outputs).items():
            try:
                self._take(request, its_outputs)
            except NOT_OURS:
                raise
            except BaseException as error:  # a panic in the tokenizer's library is not an Exception
                LOGGER.exception("request %s: its output could not be turned into text", request.prepared.request_id)
                self._end(request, RequestFailedError(f"its output could not be turned into text: {error!r}"))
        self._recovery.received([o.request_id for o in outputs if o.new_token_ids or o.finish_reason is not None])

    def _take(self, request: OpenRequest, outputs: Sequence[EngineOutput]) -> None:
        """Hand a request's outputs of a step to its reader; a step of several tokens gives several outputs."""
        steps = [outputs]
        if any(len(output.new_token_ids) > 1 for output in outputs):
            steps = [[output] for output in token_by_token(outputs)]
        for step in steps:
            output, abort_ids = self._requests.take(request, step)
            self._recovery.abort(abort_ids)
            if output is not None:
                request.mailbox.put(output)
                self._recovery.pause_if_unread(request)

    def _end(self, request: OpenRequest, error: PenstockError) -> None:
        """End a request with this error, unless it has ended."""
        if not request.mailbox.ended:
            request.mailbox.put(error)
            self._recovery.abort(self._requests.cancel(request))
