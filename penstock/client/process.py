"""ProcessClient: requests to one or several engines in child processes. It imports no torch.

Fleet keeps the children running and gives them the requests of OpenRequests (client/fleet.py), so no stream ends with
the process that computes it. A request that cannot be handled ends alone. From the socket, an output comes by
`received`, OpenRequests.add and Choice.add into the mailbox of its request, where its reader waits.
"""

import asyncio
import itertools
import logging
import os
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.client import frames
from penstock.client.adapters import Adapter
from penstock.client.admission import Admission, AdmissionLimits
from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.engine_handle import MAX_REPLICAS, EnginePlan
from penstock.client.fleet import DEATHS_BEFORE_TRIAL, Fleet
from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequest, OpenRequests, Wait, request_of
from penstock.client.records import RecordOptions, SavedRecord
from penstock.client.text import FORMS_AT_ONCE, IsolatedTokenizer
from penstock.client.turns import Turns
from penstock.errors import (
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    RequestFailedError,
    check_int,
    invalid,
)
from penstock.interface.kv_transfer import KVTransferOptions
from penstock.interface.messages import EngineOutput, EngineStats, LoRARequest, ModelInfo
from penstock.interface.outputs import PrefixUse, RequestOutput
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.interface.timeline import IntervalKind
from penstock.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.client.kv_transfer import KVBlocks, KVTransfer

LOGGER = logging.getLogger("penstock")
MAX_UNREAD = 16384  # tokens and log-probabilities of a stream that may wait for its reader


class ProcessClient:
    """Implements EngineClient and EngineListener. The constructor starts a child; all other methods need an event
    loop.

    Args:
        options: for EngineConfig.from_options, already checked. Their seed also serves requests without one.
        limits: limits of the queue.
        standby: keep a second process of each engine ready to take over.
        record: what the flight recorder keeps.
        follows_forms: whether the tokenizer is that of the model's directory, which the engine uses for answer forms.
        engine_plan: starts the engines, each of which has the whole model; by default one child process.
        transfer: whether prompts are computed here for other servers, or elsewhere for this one.

    Raises:
        InvalidRequestError: there are too many engines, or the files of an adapter cannot be read.
    """

    def __init__(
        self,
        options: dict[str, Any],
        tokenizer: Tokenizer | None,
        *,
        limits: AdmissionLimits | None = None,
        standby: bool = False,
        record: RecordOptions | None = None,
        follows_forms: bool = True,
        engine_plan: EnginePlan | None = None,
        transfer: KVTransferOptions | None = None,
    ) -> None:
        engine_plan = engine_plan or EnginePlan()
        check_int("data_parallel_size", engine_plan.num_engines, 1, MAX_REPLICAS)
        self._follows_forms = follows_forms
        self._tokenizer = tokenizer
        self._seed: int = options.get("seed", 0)
        self._inputs: InputProcessor | None = None  # made when the model is known
        self._arrivals = itertools.count()
        self._requests = OpenRequests()
        for module in engine_plan.lora_modules:
            self._requests.adapters.add(Adapter.read(module))
        self._loading = asyncio.Lock()  # one change of the adapters at a time
        self._admission = Admission(limits or AdmissionLimits(), self._requests)
        start = frames.Start(-1, options, num_engines=engine_plan.num_engines)
        outputs_left, record = self._admission.outputs_left, record or RecordOptions()
        self._fleet = Fleet(start, self._requests, self, outputs_left, record, standby=standby, engine_plan=engine_plan)
        when_dropped(self, _dropped, self._fleet)
        if isinstance(tokenizer, IsolatedTokenizer):
            when_dropped(self, tokenizer.close)
        self._transfer = None if transfer is None or transfer.kv_role is None else _transfer_of(transfer)
        self._fingerprint: str | None = None  # of the model that self._inputs was made for
        self._draining = False
        self._checking = Turns(FORMS_AT_ONCE)
        self._num_aborted = 0

    @property
    def model_info(self) -> ModelInfo:
        if self._fleet.model_info is None:
            raise self._fleet.failure or EngineDeadError("the engine is not ready yet")
        return self._fleet.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelLoadError("the model has no tokenizer.json")
        return self._tokenizer

    @property
    def failure(self) -> PenstockError | None:
        """Why there will be no engine any more; None as long as there may be one."""
        return self._fleet.failure

    def status(self) -> EngineStatus:
        state = self._fleet.state
        return replace(
            self._fleet.status(),
            state=EngineState.DRAINING if self._draining and state is EngineState.READY else state,
            journal_requests=self._requests.num_running,
            journal_tokens=self._requests.num_tokens,
            unread_tokens=sum(request.mailbox.num_unread for request in self._requests),
            num_aborted_total=self._num_aborted,
            remote_prefill=None if self._transfer is None else self._transfer.status,
        )

    async def attach(self) -> None:
        """Watch the engines from this event loop. Raise EngineError if shut down, or used in another loop."""
        self._fleet.attach()

    async def start(self) -> ModelInfo:
        """Wait until every engine is ready. This is optional: `generate` does it too.

        Raises:
            ModelLoadError, InvalidRequestError: the engine cannot be built.
            EngineError: the engine died too often, was shut down, or belongs to another event loop.
        """
        await self.attach()
        await self._fleet.settled.wait()
        if self._fleet.failure is not None:
            raise self._fleet.failure
        return self.model_info

    def check_admission(self, flow: str | None = None, *, num_arriving: int = 0) -> None:
        self._check_serving()
        self._admission.check(flow, num_arriving=num_arriving)

    async def generate(self, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs. See EngineClient.generate for what it raises.

        Leaving the loop aborts the request as soon as nothing refers to the stream any more. A program that keeps the
        stream in a variable must close it (`contextlib.aclosing`).
        """
        opened = await self.open(request)
        try:
            finished = False
            while not finished:
                output = await self.next_output(opened)
                finished = output.finished
                yield output
        finally:  # the request has finished, or its reader has left
            self.close(opened)

    async def open(self, request: PromptRequest) -> OpenRequest:
        """Check a request and give it to the engine. Its reader calls `next_output` until the end, then `close`.

        Raises:
            InvalidRequestError, EngineDeadError, EngineOverloadedError: as for EngineClient.generate.
        """
        await self.start()
        self.check_admission(request.flow)
        params = request.params
        form = getattr(params, "structured_outputs", None)
        if form is not None:
            await self.check_form(form, request.flow)
        if request.request_id is None:
            request = replace(request, request_id=self.new_request_id())
        process = self._input_processor().process
        others = getattr(params, "bad_words", None) or getattr(params, "dry_multiplier", None)
        if not request.token_ids or others:  # texts to tokenise: streams go on meanwhile
            opened = await asyncio.to_thread(process, request)
        else:
            opened = process(request)
        if self._transfer is not None:
            await self._transfer.prefill(opened, self._requests.adapters.root_hash(request.adapter))
        return self._admit(opened)

    def new_request_id(self) -> str:
        return self._requests.new_id()

    @property
    def kv_blocks(self) -> "KVBlocks | None":
        return None if self._transfer is None else self._transfer.shared_blocks

    async def check_form(self, form: StructuredOutputsParams, flow: str | None = None) -> None:
        check = getattr(self._tokenizer, "check_form", None)
        if check is None or not self._follows_forms:
            raise invalid(
                "structured_outputs", "they need the tokenizer in the model's own directory, which the engine reads"
            )
        info = self.model_info
        async with self._checking.turn(flow):  # other forms wait here, and not in a thread
            await asyncio.to_thread(check, form, info.vocab_size, info.eos_token_ids)

    def _admit(self, request: OpenRequest) -> OpenRequest:
        self._check_serving()  # the engine may have failed while the prompt was tokenised
        if request.adapter is not None:
            self._requests.adapters.check(request.adapter)
        request.wait = self._admission.admit(request)
        self._requests.open(request)
        self._fleet.submit(request)
        return request

    async def pin_prefix(self, prompt: PromptRequest, name: str | None = None) -> PrefixUse:
        await self.start()
        self.check_admission()
        ids = await asyncio.to_thread(self._input_processor().read_prompt, prompt)
        pin = self._requests.prefixes.pin(name, ids, prompt.cache_salt, self.model_info.block_size, prompt.adapter)
        if pin.is_computed:
            return replace(pin.use)
        try:
            self._fleet.pin(pin)
            request = self._admit(request_of(pin))
            try:
                await self.next_output(request)
            finally:
                self.close(request)
        except BaseException:
            self.unpin_prefix(pin.name)
            raise
        if self._requests.prefixes.get(pin.name) is not pin:
            raise invalid("name", f"{pin.name!r} was unpinned while it was computed")
        pin.is_computed = True
        self._fleet.compute_everywhere(pin)
        return replace(pin.use)

    async def load_adapter(self, source: LoRARequest, *, load_inplace: bool = False) -> Adapter:
        await self.start()
        async with self._loading:
            self._check_serving()
            adapters, adapter = self._requests.adapters, await asyncio.to_thread(Adapter.read, source)
            if adapters.by_name.get(adapter.name, adapter).id != adapter.id and not load_inplace:
                message = (
                    f"the adapter {adapter.name!r} is loaded with other content; unload it first, or set load_inplace"
                )
                raise invalid("lora_name", message, "adapter_already_loaded")
            adapters.check_room(adapter, self.model_info.max_loras)
            try:
                await self._load_everywhere(adapter)
            except BaseException:
                if adapters.get(adapter.id) is None:
                    self._unload_everywhere(adapter)
                raise
            adapter = adapters.add(adapter)
            self._unload_unused()
            return adapter

    async def _load_everywhere(self, adapter: Adapter) -> None:
        """On return, and until the next await, every ready engine and standby has the adapter."""
        while True:
            handles = self._fleet.handles(ready=True)
            if not handles:
                raise EngineDeadError("no engine is ready to load an adapter; try again")
            waiting = [answer for handle in handles for answer in handle.load(adapter) if not answer.done()]
            if not waiting:
                return
            await asyncio.wait(waiting)
            for answer in waiting:
                adapter.info = answer.result()

    def _unload_everywhere(self, adapter: Adapter) -> None:
        for handle in self._fleet.handles(ready=False):
            handle.unload(adapter.id)

    async def unload_adapter(self, name: str) -> bool:
        async with self._loading:
            is_known = self._requests.adapters.forget(name) is not None
            self._unload_unused()
            return is_known

    def adapters(self) -> list[Adapter]:
        return list(self._requests.adapters.by_name.values())

    def _unload_unused(self) -> None:
        for adapter in self._requests.adapters.pop_unused({request.adapter for request in self._requests}):
            for pin in self._requests.prefixes:
                if pin.request.adapter == adapter.id:
                    self.unpin_prefix(pin.name)
            self._unload_everywhere(adapter)

    def unpin_prefix(self, name: str) -> bool:
        pin = self._requests.prefixes.get(name)
        if pin is not None:
            self._requests.prefixes.unpin(name)
            self._fleet.unpin(pin)
        return pin is not None

    def pinned_prefixes(self) -> list[PrefixUse]:
        return self._requests.prefixes.pinned()

    def most_used_prefixes(self, count: int) -> list[PrefixUse]:
        return self._requests.prefixes.most_used(count)

    async def next_output(self, request: OpenRequest) -> RequestOutput:
        """Wait for the next output of an open request. Raise the error that ended it."""
        output = await (request.mailbox.get() if request.wait is None else self._first(request, request.wait))
        request.wait = None
        self._resume_if_read(request)
        return output

    def close(self, request: OpenRequest) -> None:
        """End an open request, which may still run, and free its id."""
        self._num_aborted += not request.mailbox.ended
        self._fleet.abort(self._requests.close(request))
        if request.adapter is not None:
            self._unload_unused()

    def _check_serving(self) -> None:
        if self._fleet.failure is not None:
            raise self._fleet.failure
        if self._draining:
            raise EngineDeadError("the engine takes no requests: it is draining")

    async def _first(self, request: OpenRequest, wait: Wait) -> RequestOutput:
        """Wait for a request's first output. Refuse it if it waits too long, unless an engine died meanwhile."""
        restarts, began = self._fleet.restarts, time.monotonic()
        try:
            async with asyncio.timeout(wait.limit_s):
                output = await request.mailbox.get()
            if restarts == self._fleet.restarts:
                self._admission.note_wait(wait, time.monotonic() - began)
            return output
        except TimeoutError:
            if restarts == self._fleet.restarts and self._fleet.state is EngineState.READY:
                self._admission.note_wait(wait, wait.limit_s)
                message = f"no token came within the {wait.limit_s:g} s that a request may wait; try again later"
                raise EngineOverloadedError(message) from None
        return await request.mailbox.get()

    def _input_processor(self) -> InputProcessor:
        if self._inputs is None:
            self._inputs = InputProcessor(self._tokenizer, self.model_info, seed=self._seed, arrivals=self._arrivals)
        return self._inputs

    def assign_seed(self) -> int:
        return self._input_processor().assign_seed()

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while len(self._requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def sleep(self) -> None:
        """End the engines and the text processes until `wake_up`. No request may be open. On return, their memory is
        free; what is known of the model, pins and counters stay."""
        await self._fleet.sleep()
        if isinstance(self._tokenizer, IsolatedTokenizer):
            await asyncio.to_thread(self._tokenizer.sleep)

    async def wake_up(self) -> ModelInfo:
        """Start the engines and a text process again, and wait until they are ready. Raises what `start` raises."""
        self._fleet.wake_up()
        if isinstance(self._tokenizer, IsolatedTokenizer):
            await asyncio.to_thread(self._tokenizer.wake_up)
        return await self.start()

    async def shutdown(self) -> None:
        """End the engines and the text processes. A second call only waits for the engines' processes."""
        self._fleet.stop()
        if self._transfer is not None:
            await self._transfer.close()
        await self._fleet.wait()
        if isinstance(self._tokenizer, IsolatedTokenizer):
            self._tokenizer.close()

    def end(self) -> None:
        """End everything at once, and wait until it has ended; for use without an event loop."""
        self._fleet.end()
        if isinstance(self._tokenizer, IsolatedTokenizer):
            self._tokenizer.close()

    async def record(self, engine: int = 0) -> SavedRecord:
        check_int("engine", engine, 0, len(self._fleet) - 1)
        return await asyncio.wrap_future(self._fleet.records(engine).save())

    # --- what the fleet calls ---------------------------------------------------------------------------------------

    def engine_ready(self, index: int, num_rows: int, info: ModelInfo) -> None:
        if self._fingerprint != info.system_fingerprint:
            self._fingerprint, self._inputs = info.system_fingerprint, None
        if self._transfer is not None:
            self._transfer.use(info)
        by_priority = info.scheduling_policy == "priority"
        self._admission.engine_ready(num_rows, has_priorities=by_priority, engine=index)

    def engine_lost(self, index: int, num_rows: int, to_blame: OpenRequest | None) -> None:
        self._admission.engine_lost(num_rows, index)
        if to_blame is not None:
            times = DEATHS_BEFORE_TRIAL + 1
            message = (
                f"the engine process died each of the {times} times that it computed this request, the last time alone"
            )
            self._end(to_blame, RequestFailedError(message))

    def engine_failed(self, error: EngineDeadError) -> None:
        for request in self._requests:
            self._end(request, error)

    def received(self, index: int, outputs: Sequence[EngineOutput], stats: EngineStats) -> None:
        self._admission.note(outputs, stats, index)
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            self._fleet.records(index).request_failed(failed.request_id)
        for request, output, to_abort in self._requests.add(outputs, token_by_token=True):
            self._fleet.abort(to_abort)
            if output is not None:
                request.mailbox.put(output)
                self._pause_if_unread(request)

    def rejected(self, request_id: str, error: InvalidRequestError) -> None:
        request = self._requests.owner(request_id)
        adapters = self._requests.adapters
        if request is not None:
            adapter = adapters.get(request.adapter)
            self._end(request, (adapter and adapter.failure) or error)
        elif (pin := self._requests.prefixes.computed_by(request_id)) is not None:
            LOGGER.error("the prefix %s is no longer pinned: %s", pin.name, error.message)
            self.unpin_prefix(pin.name)
        elif (adapter := adapters.get(request_id)) is not None:
            LOGGER.error("the adapter %s is not served any more: %s", adapter.id, error.message)
            what = f"the engine died, and the adapter {adapter.name} could not be loaded again"
            adapter.failure = RequestFailedError(f"{what}: its files have changed, or are gone")
            adapters.forget(adapter.name)
            self._unload_unused()

    def _pause_if_unread(self, request: OpenRequest) -> None:
        """Take a request from its engine if its reader has left too much unread."""
        num_unread = request.mailbox.num_unread
        if num_unread <= MAX_UNREAD or request.mailbox.ended:
            return
        if not request.paused:
            what = f"its reader has left {num_unread} tokens and log-probabilities unread"
            LOGGER.info("request %s is paused: %s", request.request_id, what)
        request.paused = True
        ids = self._requests.running_of(request)
        self._requests.interrupted(ids, IntervalKind.PAUSED, time.monotonic())
        self._fleet.abort(ids)

    def _resume_if_read(self, request: OpenRequest) -> None:
        """Resume a paused request once its reader has read everything."""
        if request.paused and request.mailbox.num_unread == 0:
            request.paused = False
            self._fleet.submit(request)

    def _end(self, request: OpenRequest, error: PenstockError) -> None:
        """End a request with this error, unless it has ended."""
        if not request.mailbox.ended:
            request.mailbox.put(error)
            self._fleet.abort(self._requests.cancel(request))


def _transfer_of(options: KVTransferOptions) -> "KVTransfer":
    from penstock.client.kv_transfer import KVTransfer  # its HTTP client takes longer to load than a server to start

    return KVTransfer(options)


def _dropped(fleet: Fleet) -> None:
    if fleet.failure is None:
        fleet.abandon()
        warn_of_dropped()


def when_dropped(owner: object, end: Callable[..., object], *args: Any) -> "weakref.finalize[..., Any]":
    """Call end(*args) when the owner of a process is dropped.

    Not at the exit, where children end by themselves; nor in a forked copy, whose parent goes on using them.
    """
    pid = os.getpid()

    def dropped() -> None:
        if os.getpid() == pid:
            end(*args)

    finalizer = weakref.finalize(owner, dropped)
    finalizer.atexit = False
    return finalizer


def warn_of_dropped() -> None:
    """Warn of an engine that was dropped without shutdown(), as Python warns of a file that was not closed."""
    message = "an engine was dropped without shutdown(), and its process is ended now; use `with`, or call shutdown()"
    warnings.warn(message, ResourceWarning, stacklevel=2)
