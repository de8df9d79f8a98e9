"""ProcessClient: an engine in a child process, watched over. What `AsyncLLM` and the server use; imports no torch.

    launch    one end of a socket pair goes to `python -m penstock.engine_process`, which alone imports torch
    talk      typed frames (client.frames), in both directions; the child's carry the epoch it was started with
    watch     the end of the connection is the child's death, noticed at once: open requests end with EngineDeadError,
              a new child starts under the next epoch. Too many deaths in a short time: state FAILED.
    leave     our own end closes the connection, and the child ends itself

The journal notes for every open request what a new engine would need to go on with it.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from penstock.client import frames
from penstock.client.engine_client import EngineState, EngineStatus, Prompt
from penstock.client.input_processor import InputProcessor, PreparedRequest
from penstock.client.journal import Journal
from penstock.client.output_processor import OutputProcessor
from penstock.engine.messages import EngineOutput, EngineStats, ModelInfo
from penstock.errors import (
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    PenstockError,
    RequestFailedError,
)
from penstock.outputs import RequestOutput
from penstock.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer

MAX_OPEN_REQUESTS = 4096
MAX_RESTARTS, RESTART_WINDOW_S = 5, 60.0
IDLE_STALL_S = 5.0  # an idle engine sends a heartbeat every half second
BUSY_STALL_S = 60.0  # one step may take long, but not so long
EXIT_WAIT_S = 5.0
SLOW_PROMPT_CHARS = 20_000  # longer texts are tokenised in a thread, so that streams go on meanwhile


class _Child:
    """A running engine process and our end of the connection."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [sys.executable, "-m", "penstock.engine_process", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=_child_env(),
            )

    async def wait(self) -> int:
        """Its exit code, after at most EXIT_WAIT_S and a kill."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := self.process.poll()) is None:
            if time.monotonic() > deadline:
                self.process.kill()
            await asyncio.sleep(0.005)
        return code


def _child_env() -> dict[str, str]:
    """Our environment, with this very package first on the path: also where it was not installed."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if not known else f"{root}{os.pathsep}{known}"}


@dataclass(slots=True, eq=False)
class _Open:
    """A request somebody waits for."""

    prepared: PreparedRequest
    queue: "asyncio.Queue[RequestOutput | PenstockError]" = field(default_factory=asyncio.Queue)


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
        self._epoch = 0
        self._restarts = 0
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._info: ModelInfo | None = None
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor(tokenizer)
        self._journal = Journal()
        self._open: dict[str, _Open] = {}  # by the user's request id
        self._owners: dict[str, str] = {}  # engine request id -> the user's
        self._stats = EngineStats()
        self._last_heard: float | None = None
        self._num_aborted = 0
        self._failure: PenstockError | None = None
        self._closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None
        self._child = _Child()

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
        stall = BUSY_STALL_S if self._open else IDLE_STALL_S
        serving = self._state in (EngineState.READY, EngineState.DRAINING)
        return EngineStatus(
            state=self._state,
            pid=self._child.process.pid if self._child.process.poll() is None else None,
            restarts=self._restarts,
            heartbeat_age_s=age,
            making_progress=serving and age is not None and age < stall,
            stats=self._stats,
            journal_requests=self._journal.num_requests,
            journal_tokens=self._journal.num_tokens,
            num_aborted_total=self._num_aborted,
        )

    async def attach(self) -> None:
        """Watch the child from this event loop. A second call does nothing."""
        if self._supervisor is None:
            self._ready = asyncio.Event()
            self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_until_ready(self) -> ModelInfo:
        """Attach if need be, and wait for the first engine.

        Raises:
            ModelLoadError, InvalidRequestError: it cannot be built.
            EngineDeadError: it died too often.
        """
        await self.attach()
        if self._ready is not None:
            await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self.model_info

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        info = await self.wait_until_ready()
        if self._state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self._state}")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            raise EngineOverloadedError(f"{MAX_OPEN_REQUESTS} requests are open already")
        prepared = await self._prepare(prompt, params or SamplingParams(**info.default_sampling), request_id)
        opened = self._submit(prepared)
        try:
            while True:
                item = await opened.queue.get()
                if isinstance(item, PenstockError):
                    raise item
                if item.error is not None:
                    raise RequestFailedError(item.error)
                yield item
                if item.finished:
                    return
        finally:
            self._leave(prepared)

    async def _prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> PreparedRequest:
        inputs = self._inputs
        if inputs is None:
            raise EngineDeadError("the engine is not ready yet")
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
        if isinstance(text, str) and len(text) > SLOW_PROMPT_CHARS:
            return await asyncio.to_thread(inputs.process, prompt, params, request_id)
        return inputs.process(prompt, params, request_id)

    def _submit(self, prepared: PreparedRequest) -> _Open:
        self._outputs.add(prepared)
        opened = self._open[prepared.request_id] = _Open(prepared)
        for engine_request in prepared.engine_requests:
            self._owners[engine_request.request_id] = prepared.request_id
            self._journal.open(engine_request)
            self._send(frames.AddRequest(engine_request))
        return opened

    def _leave(self, prepared: PreparedRequest) -> None:
        """The caller needs no more of a request: because it ended, or because the caller went away."""
        if self._open.pop(prepared.request_id, None) is None:
            return
        running = self._outputs.abort(prepared.request_id)
        if running:
            self._num_aborted += 1
            self._send(frames.Abort(running))
        for engine_request in prepared.engine_requests:
            self._owners.pop(engine_request.request_id, None)
            self._journal.close(engine_request.request_id)

    async def drain(self, timeout_s: float) -> None:
        self._state = EngineState.DRAINING if self._state is EngineState.READY else self._state
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def shutdown(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._send(frames.Shutdown())
        self._fail_open(EngineDeadError("the engine was shut down"))
        if self._supervisor is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._supervisor), EXIT_WAIT_S)
            self._supervisor.cancel()
        self._child.sock.close()
        await self._child.wait()
        self._state = EngineState.FAILED if self._failure else EngineState.DRAINING

    # --- the child's side ------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Until shut down or failed for good: serve one child after the other."""
        while True:
            await self._serve_child()
            code = await self._child.wait()
            if self._closing or self._failure is not None:
                break
            death = EngineDeadError(f"the engine process died (exit code {code}); send the request again")
            self._state = EngineState.RECOVERING if self._info else EngineState.STARTING
            self._fail_open(death)
            if self._dies_too_often():
                self._fail(EngineDeadError(f"the engine process died {MAX_RESTARTS} times in {RESTART_WINDOW_S:.0f} s"))
                break
            self._restarts += 1
            self._epoch += 1
            self._child = _Child()

    def _dies_too_often(self) -> bool:
        now = time.monotonic()
        self._deaths.append(now)
        return len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < RESTART_WINDOW_S

    async def _serve_child(self) -> None:
        """Talk to the current child until the connection ends."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._child.sock)
        self._send(frames.Start(self._epoch, self._options))
        try:
            while True:
                length = frames.body_length(await reader.readexactly(frames.HEADER_BYTES))
                self._take(frames.unpack_from_engine(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, EngineError):
            return
        finally:
            self._writer.close()
            self._writer = None
            self._last_heard = None

    def _send(self, frame: frames.ToEngine) -> None:
        """Without waiting: requests are small, and the child always reads."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames.pack(frame))

    def _take(self, frame: frames.FromEngine) -> None:
        if frame.epoch != self._epoch:
            return
        self._last_heard = time.monotonic()
        match frame:
            case frames.Ready(info=info):
                self._become_ready(info)
            case frames.Outputs(outputs=outputs, stats=stats):
                self._stats = stats
                self._deliver(outputs)
            case frames.Heartbeat(stats=stats):
                self._stats = stats
            case frames.Rejected():
                self._reject(frame)
            case frames.Failed():
                wrong_option = InvalidRequestError(frame.message, param=frame.param, code=frame.code)
                self._fail(wrong_option if frame.user_error else ModelLoadError(frame.message))

    def _become_ready(self, info: ModelInfo) -> None:
        if self._inputs is None:
            self._inputs = InputProcessor(
                self._tokenizer, max_model_len=info.max_model_len, vocab_size=info.vocab_size, seed=self._seed
            )
        self._info = info
        self._state = EngineState.READY
        if self._ready is not None:
            self._ready.set()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self._journal.note(output)
        processed = self._outputs.process(outputs)
        if processed.abort_ids:
            self._send(frames.Abort(processed.abort_ids))
            for engine_request_id in processed.abort_ids:
                self._journal.close(engine_request_id)
        for request_output in processed.outputs:
            opened = self._open.get(request_output.request_id)
            if opened is not None:
                opened.queue.put_nowait(request_output)

    def _reject(self, frame: frames.Rejected) -> None:
        opened = self._open.get(self._owners.get(frame.request_id, ""))
        if opened is not None:
            opened.queue.put_nowait(InvalidRequestError(frame.message, param=frame.param, code=frame.code))

    def _fail_open(self, error: EngineDeadError) -> None:
        """Every open request ends with this error."""
        self._outputs.finish_all(str(error))
        self._journal.clear()
        self._stats = EngineStats()
        for opened in self._open.values():
            opened.queue.put_nowait(error)

    def _fail(self, error: PenstockError) -> None:
        """For good."""
        self._failure = error
        self._state = EngineState.FAILED
        if self._ready is not None:
            self._ready.set()
