"""ProcessClient: an engine in a child process, watched over. What `AsyncLLM` and the server use; imports no torch.

    launch    one end of a socket pair goes to `python -m penstock.client.engine_process`, which alone imports torch
    talk      typed frames (client.frames), in both directions; the child's carry the epoch it was started with
    watch     the end of the connection is the child's death, noticed at once: open requests end with EngineDeadError,
              a new child starts under the next epoch. Too many deaths: state FAILED.
    leave     our own end closes the connection, and the child ends itself

The journal notes for every open request what a new engine would need to go on with it. Whatever goes wrong here, no
caller is left waiting: a request that cannot be handled ends alone, and a supervisor that ends fails all that are open.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec

from penstock.client import frames
from penstock.client.child import EngineChild
from penstock.client.engine_client import EngineState, EngineStatus, Prompt
from penstock.client.input_processor import InputProcessor, PreparedRequest
from penstock.client.journal import Journal
from penstock.client.open_request import OpenRequest
from penstock.client.output_processor import OutputProcessor
from penstock.errors import (
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    RequestFailedError,
)
from penstock.interface.messages import EngineOutput, EngineStats, ModelInfo
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer

LOGGER = logging.getLogger("penstock")
MAX_OPEN_CHOICES = 8192  # running and waiting; each choice of a request counts
MAX_RESTARTS, RESTART_WINDOW_S = 5, 60.0
MAX_FAILED_STARTS = 3  # in a row, however long each took: the model does not fit, say
BACK_OFF_S = 0.2  # before the second try to start, doubled before each further one
IDLE_STALL_S = 5.0  # an idle engine sends a heartbeat every half second
FIRST_STEP_STALL_S = 60.0  # while no step has been seen, nobody knows how long one takes
STALL_STEPS = 20
NUM_GAPS = 128  # silences remembered, to know how long a step takes
SLOW_PROMPT_CHARS = 20_000  # longer texts are tokenised in a thread, so that streams go on meanwhile
NOT_OURS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class ProcessClient:
    """Implements EngineClient. The child is launched by the constructor; the rest needs a running event loop.

    Args:
        options: EngineConfig.from_options' own, checked already.
        tokenizer: None takes prompts as ids and gives no text.
        seed: for requests without one.
    """

    def __init__(self, options: dict[str, Any], tokenizer: Tokenizer | None, *, seed: int = 0) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._seed = seed
        self._state = EngineState.STARTING
        self._draining = self._closing = False
        self._failure: PenstockError | None = None
        self._epoch = self._restarts = self._failed_starts = self._num_aborted = 0
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._info: ModelInfo | None = None
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor(tokenizer)
        self._journal = Journal()
        self._open: dict[str, OpenRequest] = {}  # by the user's request id
        self._owners: dict[str, OpenRequest] = {}  # by engine request id
        self._stats = EngineStats()
        self._last_heard: float | None = None
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled: asyncio.Event | None = None  # ready once, or never going to be
        self._supervisor: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._child = EngineChild()

    # --- what callers see ------------------------------------------------------------------------------------------

    @property
    def model_info(self) -> ModelInfo:
        if self._info is None:
            raise self._failure or EngineDeadError("the engine is not ready yet")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelLoadError("the model has no tokenizer.json")
        return self._tokenizer

    def status(self) -> EngineStatus:
        age = None if self._last_heard is None else time.monotonic() - self._last_heard
        serving = self._state is EngineState.READY and not self._closing
        return EngineStatus(
            state=EngineState.DRAINING if self._draining and serving else self._state,
            pid=self._child.pid,
            restarts=self._restarts,
            heartbeat_age_s=age,
            making_progress=serving and age is not None and age < self._stall_s(),
            stats=self._stats,
            journal_requests=self._journal.num_requests,
            journal_tokens=self._journal.num_tokens,
            num_aborted_total=self._num_aborted,
        )

    def _stall_s(self) -> float:
        """How long the engine may be silent: many times its longest step of late, once there has been one."""
        if not (self._stats.num_running or self._stats.num_waiting):
            return IDLE_STALL_S
        return max(IDLE_STALL_S, STALL_STEPS * max(self._gaps)) if self._gaps else FIRST_STEP_STALL_S

    async def attach(self) -> None:
        """Watch the child from this event loop. A second call does nothing.

        Raises:
            EngineError: it was shut down, or belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._closing:
            raise EngineDeadError("the engine was shut down")
        if self._loop is None:
            self._loop, self._settled = loop, asyncio.Event()
            self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        elif self._loop is not loop:
            raise EngineError("this engine belongs to the event loop that used it first; make a new one for each loop")

    async def wait_until_ready(self) -> ModelInfo:
        """Attach if need be, and wait for the first engine.

        Raises:
            ModelLoadError, InvalidRequestError: it cannot be built.
            EngineError: it died too often, was shut down, or belongs to another event loop.
        """
        await self.attach()
        if self._settled is not None:
            await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self.model_info

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        info = await self.wait_until_ready()
        self._check_serving()
        prepared = await self._prepare(prompt, params or SamplingParams(**info.default_sampling), request_id)
        opened = self._admit(prepared)
        try:
            self._submit(opened)
            finished = False
            while not finished:
                output = await opened.get()
                finished = output.finished
                yield output
        finally:
            self._leave(opened)

    def _check_serving(self) -> None:
        if self._failure is not None:
            raise self._failure
        state = self.status().state
        if state is not EngineState.READY or self._writer is None:
            raise EngineDeadError(f"the engine takes no requests: it is {state}")
        if len(self._owners) >= MAX_OPEN_CHOICES:
            raise EngineOverloadedError(f"{len(self._owners)} choices are being generated or wait already")

    async def _prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> PreparedRequest:
        inputs = self._inputs
        if inputs is None:
            raise EngineDeadError("the engine is not ready yet")
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > SLOW_PROMPT_CHARS:
            return await asyncio.to_thread(inputs.process, prompt, params, request_id)
        return inputs.process(prompt, params, request_id)

    def _admit(self, prepared: PreparedRequest) -> OpenRequest:
        """Make room for a request; the engine may have gone while its prompt was tokenised."""
        self._check_serving()
        if prepared.request_id in self._open:  # also one that has ended, until its reader has seen the end
            raise InvalidRequestError(f"request_id: {prepared.request_id!r} is in use", param="request_id")
        opened = self._open[prepared.request_id] = OpenRequest(prepared)
        return opened

    def _submit(self, opened: OpenRequest) -> None:
        self._outputs.add(opened.prepared)
        for engine_request in opened.prepared.engine_requests:
            self._owners[engine_request.request_id] = opened
            self._journal.open(engine_request)
            self._send(frames.AddRequest(engine_request))

    def _leave(self, opened: OpenRequest) -> None:
        """Its reader needs no more of a request: because it ended, or because the reader went away."""
        self._num_aborted += not opened.ended
        self._forget(opened)
        if self._open.get(opened.prepared.request_id) is opened:
            del self._open[opened.prepared.request_id]

    def _forget(self, opened: OpenRequest) -> None:
        """Nothing that still comes for it matters."""
        self._send_abort(self._outputs.abort(opened.prepared.request_id))
        for engine_request in opened.prepared.engine_requests:
            self._owners.pop(engine_request.request_id, None)
            self._journal.close(engine_request.request_id)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def shutdown(self) -> None:
        """End the engine. A second call, and one in another event loop, only waits for the process."""
        if not self._closing:
            self._closing = True
            self._fail(self._failure or EngineDeadError("the engine was shut down"))
            self._hang_up()
        if self._supervisor is not None and self._loop is asyncio.get_running_loop():
            with contextlib.suppress(Exception):  # it was logged when it was raised
                await self._supervisor
        await self._child.wait()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._child.hang_up()

    # --- the child's side ------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Serve one engine after the other until shut down or failed for good."""
        try:
            while not self._closing:
                await self._serve_child()
                code = await self._child.wait()
                if self._closing or self._failure is not None or not self._may_restart(code):
                    return
                await self._restart()
        except Exception as error:
            LOGGER.exception("the supervisor of the engine failed")
            self._fail(EngineDeadError(f"the engine's supervisor failed: {error!r}"))
            self._child.hang_up()

    def _may_restart(self, code: int) -> bool:
        """Take note of a death; False if there were too many."""
        self._failed_starts = 0 if self._state is EngineState.READY else self._failed_starts + 1
        self._state = EngineState.RECOVERING if self._info else EngineState.STARTING
        self._end_open(
            EngineDeadError(f"the engine process died (exit code {code}); send the request again in a moment")
        )
        LOGGER.warning("the engine process died (exit code %s); requests that were open have failed", code)
        self._stats = EngineStats()
        now = time.monotonic()
        self._deaths.append(now)
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._fail(EngineDeadError(f"the engine process died {self._failed_starts} times before it was ready"))
        elif len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < RESTART_WINDOW_S:
            self._fail(EngineDeadError(f"the engine process died {MAX_RESTARTS} times in {RESTART_WINDOW_S:.0f} s"))
        return self._failure is None

    async def _restart(self) -> None:
        if self._failed_starts:
            await asyncio.sleep(BACK_OFF_S * 2 ** (self._failed_starts - 1))
        if not self._closing:
            self._restarts += 1
            self._epoch += 1
            LOGGER.warning("starting the engine process again, for the %d. time", self._restarts)
            self._child = EngineChild()

    async def _serve_child(self) -> None:
        """Talk to the current child until the connection ends, or says what makes no sense."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._child.sock)
        self._send(frames.Start(self._epoch, self._options))
        try:
            while True:
                length = frames.body_length(await reader.readexactly(frames.HEADER_BYTES))
                self._take(frames.unpack_from_engine(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (EngineError, msgspec.DecodeError) as error:
            LOGGER.error("the engine process sends rubbish, so it is ended: %s", error)
        finally:
            self._writer.close()
            self._writer = None
            self._last_heard = None

    def _send(self, frame: frames.ToEngine) -> None:
        """Without waiting: requests are small, and the child always reads."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames.pack(frame))

    def _send_abort(self, engine_request_ids: list[str]) -> None:
        if engine_request_ids:
            self._send(frames.Abort(engine_request_ids))

    def _take(self, frame: frames.FromEngine) -> None:
        if frame.epoch != self._epoch:
            return
        self._note_time()
        match frame:
            case frames.Ready(info=info, stats=stats):
                self._stats = stats
                self._become_ready(info)
            case frames.Outputs(outputs=outputs, stats=stats):
                self._stats = stats
                self._deliver(outputs)
            case frames.Heartbeat(stats=stats):
                self._stats = stats
            case frames.Rejected(request_id=request_id, message=message, param=param, code=code):
                self._end(self._owners.get(request_id), InvalidRequestError(message, param=param, code=code))
            case frames.Failed(message=message, param=param, code=code, user_error=user_error):
                wrong_option = InvalidRequestError(message, param=param, code=code)
                self._fail(wrong_option if user_error else ModelLoadError(message))

    def _note_time(self) -> None:
        now = time.monotonic()
        if self._last_heard is not None and self._stats.num_running:
            self._gaps.append(now - self._last_heard)
        self._last_heard = now

    def _become_ready(self, info: ModelInfo) -> None:
        if self._inputs is None:
            self._inputs = InputProcessor(
                self._tokenizer, max_model_len=info.max_model_len, vocab_size=info.vocab_size, seed=self._seed
            )
        self._info = info
        self._state = EngineState.READY
        self._settle()

    def _deliver(self, outputs: Iterable[EngineOutput]) -> None:
        by_owner: dict[int, tuple[OpenRequest, list[EngineOutput]]] = {}
        for output in outputs:
            opened = self._owners.get(output.request_id)
            if opened is not None:
                by_owner.setdefault(id(opened), (opened, []))[1].append(output)
        for opened, mine in by_owner.values():
            try:
                self._deliver_to(opened, mine)
            except NOT_OURS:
                raise
            except BaseException as error:  # a panic of the tokenizer's library is no Exception
                LOGGER.exception("an output could not be turned into text")
                self._end(opened, RequestFailedError(f"its output could not be turned into text: {error!r}"))

    def _deliver_to(self, opened: OpenRequest, outputs: list[EngineOutput]) -> None:
        """One request's outputs of a step: into the journal, into text, to its reader."""
        for output in outputs:
            self._journal.note(output)
        processed = self._outputs.process(outputs)
        self._send_abort(processed.abort_ids)
        for engine_request_id in processed.abort_ids:
            self._journal.close(engine_request_id)
        for request_output in processed.outputs:
            opened.put(request_output)

    def _end(self, opened: OpenRequest | None, error: PenstockError) -> None:
        """A request ends with this error, unless it has ended."""
        if opened is not None and not opened.ended:
            opened.put(error)
            self._forget(opened)

    def _end_open(self, error: EngineDeadError) -> None:
        for opened in list(self._open.values()):
            self._end(opened, error)

    def _fail(self, error: PenstockError) -> None:
        """For good: nobody waits any longer."""
        self._failure = error
        self._state = EngineState.FAILED
        self._end_open(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
        self._settle()

    def _settle(self) -> None:
        if self._settled is not None:
            self._settled.set()
