"""The engine process: builds an engine, then serves it to one client.

client/engine_handle.py starts it through ranks/child_main.py, with one end of a socket pair.

    reader thread: frames -> inbox; when the connection ends, the process exits at once, whatever it is doing,
                   so that no engine outlives its client
    main thread:   handle the frames in the inbox, compute a step, send its outputs; while idle, a heartbeat each second
    heartbeats:    every half second while a build or a step computes or reads files (Outbox). So silence means that a
                   process is stopped or in a deadlock, however long its steps take: a long prompt takes minutes
    forms:         threads that compile the forms that answers must have, so that streams go on meanwhile
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.client import frames
from penstock.client.recorder import Recorder, describe
from penstock.client.records import Ring
from penstock.engine.engine import Engine
from penstock.errors import ExecutorLostError, InvalidRequestError, ModelLoadError, PenstockError, invalid
from penstock.interface.messages import EngineRequest, EngineStats
from penstock.interface.plugins import install_time_limit
from penstock.ranks.child_main import EXIT_CLIENT_GONE
from penstock.ranks.children import Effort

if TYPE_CHECKING:
    from penstock.assembly import BuiltEngine
    from penstock.tokenizer.grammars import Grammars

HEARTBEAT_S = 0.5
FORMS_AT_ONCE = 2  # as many as the client checks, so that one that takes long does not hold up the others
SWITCH_S = (
    5e-4  # after which a thread that computes lets the step go on, whose native code runs without the interpreter
)
IDLE_HEARTBEATS = 2  # an idle engine sends one heartbeat in the time of so many
HEARTBEATS_TO_CHECK = 2
STDERR = 2
EXIT_CANNOT_START = 2
EXIT_INVALID_FRAME = 3
EXIT_NO_MEMORY = 4
EXIT_RANK_LOST = 5


class ClientGoneError(Exception):
    """The client's end of the socket is closed."""


class Outbox:
    """Sends frames over a socket, and heartbeats from a thread while `working`. Thread-safe."""

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        self.epoch = epoch
        self._sock = sock
        self._lock = threading.Lock()  # frames must not mix
        self._stats = EngineStats()  # of the newest frame that has stats
        self._working_since: float | None = None
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, frame: frames.FromEngine) -> None:
        """Send a frame. Raise ClientGoneError if the client is gone."""
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self._stats = frame.stats
        packed = frames.pack(frame)
        try:
            with self._lock:
                self._sock.sendall(packed)
        except ConnectionError as error:
            raise ClientGoneError from error

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Send heartbeats while the block runs, as long as this process computes or reads."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
            self._thread.start()
        assert self._working_since is None, "a step computes alone"
        self._working_since = time.monotonic()
        self._begun.set()
        try:
            yield
        finally:
            self._working_since = None
            self._begun.clear()

    def _beat(self) -> None:
        seen = Effort.so_far()
        while True:
            self._begun.wait()
            time.sleep(HEARTBEAT_S)
            since, now = self._working_since, Effort.so_far()
            if since is None or not now.exceeds(seen):
                continue
            seen = now
            # If the client is gone, the reader thread ends this process.
            with contextlib.suppress(ClientGoneError, OSError):
                self.send(frames.Heartbeat(self.epoch, self._stats, working_s=time.monotonic() - since))


@dataclass(eq=False, slots=True)
class _Compiling:
    """A request that waits for its form. It comes back through the inbox once `compiled` is done."""

    request: EngineRequest
    compiled: "Future[None]"


class EngineServer:
    """Serves one engine to one client.

    Args:
        inbox: bodies of frames, and requests whose forms have been compiled.
        forms: compiles the forms of answers, in a thread; None: the engine does it.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        inbox: "queue.SimpleQueue[bytes | _Compiling]",
        recorder: Recorder | None = None,
        forms: "Grammars | None" = None,
    ) -> None:
        self.engine = engine
        self.recorder = recorder
        self._forms = forms
        self._form_thread: ThreadPoolExecutor | None = None
        self._compiling: dict[str, _Compiling] = {}  # by request id
        self.outbox = outbox
        self.inbox = inbox
        self._num_idle = 0  # heartbeats since the last step
        self._num_invalid_frames = 0

    def run(self) -> None:
        """Serve until the reader thread ends the process."""
        while True:
            was_idle = not self.engine.has_work
            self._take_frames(IDLE_HEARTBEATS * HEARTBEAT_S if was_idle else 0.0)
            if self.engine.has_work:
                if was_idle:  # the client should know of the work before a first, perhaps long, step
                    self.outbox.send(frames.Heartbeat(self.outbox.epoch, self._stats()))
                with self.outbox.working():
                    outputs = self.engine.step()
                self._num_idle = 0
                for part in frames.in_parts(outputs):
                    self.outbox.send(frames.Outputs(self.outbox.epoch, part, self._stats()))
            else:
                self._num_idle += 1
                if self._num_idle == HEARTBEATS_TO_CHECK:  # once per idle period, when it delays no request
                    self.engine.check_integrity()
                self.outbox.send(frames.Heartbeat(self.outbox.epoch, self._stats()))

    def _stats(self) -> EngineStats:
        return replace(self.engine.stats(), num_invalid_frames_total=self._num_invalid_frames)

    def _take_frames(self, wait_s: float) -> None:
        """Handle every frame that has arrived; wait up to wait_s for a first one."""
        try:
            body = self.inbox.get(timeout=wait_s) if wait_s else self.inbox.get_nowait()
            while True:
                self._handle(body)
                body = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, item: "bytes | _Compiling") -> None:
        """Handle a frame. An invalid one is dropped and counted, because it must not affect other requests."""
        if isinstance(item, _Compiling):
            self._form_compiled(item)
            return
        try:
            frame = frames.unpack_to_engine(item)
            if isinstance(frame, frames.Start):
                raise frames.InvalidFrameError("a second Start frame")
        except frames.InvalidFrameError as error:
            self._drop(item, error)
            return
        match frame:
            case frames.AddRequest(request):
                form = request.params.structured_outputs
                if form is None or self._forms is None or self._forms.knows(form):
                    self._add(request)
                else:
                    self._form_thread = self._form_thread or ThreadPoolExecutor(FORMS_AT_ONCE, "forms")
                    waiting = _Compiling(request, self._form_thread.submit(self._forms.check, form))
                    self._compiling[request.request_id] = waiting
                    waiting.compiled.add_done_callback(lambda _: self.inbox.put(waiting))
            case frames.Abort(request_ids):
                for request_id in request_ids:
                    self._compiling.pop(request_id, None)
                    self.engine.abort(request_id)
            case frames.Pin(name, request):
                try:
                    self.engine.pin(name, request.prompt_token_ids, request.cache_salt, request.adapter)
                except InvalidRequestError as error:
                    self._reject(request.request_id, error)
            case frames.Unpin(name):
                self.engine.unpin(name)
            case frames.LoadAdapter(adapter_id, path, sha256):
                try:
                    with self.outbox.working():
                        info = self.engine.add_adapter(adapter_id, path, sha256)
                except InvalidRequestError as error:
                    self._reject(adapter_id, error)
                except ModelLoadError as error:
                    self._reject(adapter_id, invalid("lora_path", str(error)))
                else:
                    self.outbox.send(frames.AdapterLoaded(self.outbox.epoch, info))
            case frames.UnloadAdapter(adapter_id):
                self.engine.remove_adapter(adapter_id)

    def _add(self, request: EngineRequest) -> None:
        try:
            self.engine.add_request(request)
        except InvalidRequestError as error:
            self._reject(request.request_id, error)

    def _form_compiled(self, waiting: _Compiling) -> None:
        """Add a request whose form is compiled, unless it was aborted meanwhile; its id may have another owner now."""
        request = waiting.request
        if self._compiling.get(request.request_id) is not waiting:
            return
        del self._compiling[request.request_id]
        try:
            waiting.compiled.result()
        except InvalidRequestError as error:
            self._reject(request.request_id, error)
        else:
            self._add(request)

    def _reject(self, request_id: str, error: InvalidRequestError) -> None:
        self.outbox.send(frames.Rejected(self.outbox.epoch, request_id, error.message, error.param, error.code))

    def _drop(self, body: bytes, error: frames.InvalidFrameError) -> None:
        """Count an invalid frame. If it was meant to add a request, reject that: its client waits for it."""
        self._num_invalid_frames += 1
        if self._num_invalid_frames.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a flood must not fill the log
            message = f"engine process: dropped {self._num_invalid_frames} invalid frames so far; the last: {error}"
            print(message, file=sys.stderr, flush=True)
        request_id = frames.request_id_in(body)
        if request_id is not None:
            self.outbox.send(
                frames.Rejected(self.outbox.epoch, request_id, f"the engine cannot read it: {error}", None, None)
            )


def _read(sock: socket.socket, inbox: "queue.SimpleQueue[bytes | _Compiling]") -> None:
    """Put frames into the inbox (reader thread); exit the process with the client, even in the middle of a step."""
    code = EXIT_CLIENT_GONE
    try:
        while (body := frames.receive(sock)) is not None:
            inbox.put(body)
    except frames.InvalidFrameError as error:  # it is unknown where the next frame begins
        print(f"engine process: {error}", file=sys.stderr, flush=True)
        code = EXIT_INVALID_FRAME
    finally:
        os._exit(code)


def _start(sock: socket.socket, inbox: "queue.SimpleQueue[bytes | _Compiling]") -> EngineServer | None:
    """Build the engine that the first frame asks for; if it cannot be built, send the reason and return None."""
    body = inbox.get()
    first = frames.unpack_to_engine(body) if isinstance(body, bytes) else None
    if not isinstance(first, frames.Start):
        raise PenstockError("the first frame is not Start")
    outbox = Outbox(sock, first.epoch)
    try:
        with outbox.working():
            from penstock.assembly import build_engine  # not at the top, so that the reader thread runs meanwhile
            from penstock.config import EngineConfig

            config = EngineConfig.from_options(**first.options)
            built = build_engine(
                config, takes_over=first.takes_over, num_engines=first.num_engines, number=first.number
            )
    except PenstockError as error:
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        user_error = isinstance(error, InvalidRequestError)
        outbox.send(frames.Failed(first.epoch, str(error), param, code, user_error))
        return None
    recorder = None if first.ring is None else _record(built, first.ring, first.epoch)
    outbox.send(frames.Ready(first.epoch, built.info, built.engine.stats(), built.cache_bytes))
    return EngineServer(built.engine, outbox, inbox, recorder, built.forms)


def _record(built: "BuiltEngine", ring: int, epoch: int) -> Recorder:
    """Record everything that the engine computes, in the ring of this descriptor."""
    recorder = Recorder(Ring(ring), describe(built.engine, built.config, built.info), epoch, built.engine.adapters)
    built.engine.observe(recorder)
    return recorder


def main(argv: list[str]) -> int:
    """Serve on the inherited socket whose file descriptor is argv[0]. Return only if the engine cannot be built."""
    install_time_limit()
    sys.setswitchinterval(SWITCH_S)
    sock = socket.socket(fileno=int(argv[0]))
    inbox: queue.SimpleQueue[bytes | _Compiling] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, inbox), name="frames", daemon=True).start()
    server: EngineServer | None = None
    try:
        server = _start(sock, inbox)
        if server is not None:
            server.run()
    except ClientGoneError:  # the reader thread sees it too, and is perhaps about to end this process
        return EXIT_CLIENT_GONE
    except MemoryError:
        os.write(STDERR, b"penstock: the engine process has no memory left\n")
        return EXIT_NO_MEMORY
    except ExecutorLostError as error:
        print(f"engine process: {error}", file=sys.stderr, flush=True)
        if server is not None and server.recorder is not None:
            server.recorder.engine_failed(str(error))
        return EXIT_RANK_LOST
    except Exception as error:
        if server is not None and server.recorder is not None:
            server.recorder.engine_failed("".join(traceback.format_exception(error)))
        raise
    return EXIT_CANNOT_START
