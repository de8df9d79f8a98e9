"""The engine process: build an engine, then serve it. client/child.py starts it through parallel/child_main.py, with
one end of a socket pair.

    reader thread: frames -> inbox; when the connection ends, the process exits at once, whatever it is doing,
                   so that no engine outlives its client
    main thread:   take the frames in the inbox, compute a step, send its outputs
    heartbeats:    client/outbox.py; while the engine is idle, the main thread sends them itself
"""

import os
import queue
import socket
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.client import frames
from penstock.client.outbox import HEARTBEAT_S, ClientGoneError, Outbox
from penstock.client.pending_forms import PendingForms
from penstock.client.recorder import Recorder, describe
from penstock.client.ring import Ring
from penstock.engine.engine import Engine
from penstock.errors import ExecutorLostError, InvalidRequestError, PenstockError
from penstock.interface.messages import EngineStats
from penstock.parallel.child_main import EXIT_CLIENT_GONE
from penstock.plugins import time_limit

if TYPE_CHECKING:
    from penstock.assembly import BuiltEngine
    from penstock.tokenizer.grammars import Grammars

HEARTBEATS_TO_CHECK = 4
STDERR = 2
EXIT_CANNOT_START = 2
EXIT_INVALID_FRAME = 3
EXIT_NO_MEMORY = 4
EXIT_RANK_LOST = 5


class EngineServer:
    """Serves one engine to one client."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        inbox: "queue.SimpleQueue[bytes]",
        recorder: Recorder | None = None,
        forms: "Grammars | None" = None,
    ) -> None:
        self.engine = engine
        self.pending = PendingForms(forms)
        self.recorder = recorder
        self.outbox = outbox
        self.inbox = inbox
        self._num_idle = 0  # heartbeats since the last step
        self._num_invalid_frames = 0

    def run(self) -> None:
        """Serve until the reader thread ends the process."""
        while True:
            was_idle = not self.engine.has_work
            self._take_frames(HEARTBEAT_S if was_idle else 0.0)
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

    def _handle(self, body: bytes) -> None:
        """Handle a frame. An invalid one is dropped and counted, because it must not affect other requests."""
        try:
            frame = frames.unpack_to_engine(body)
            if isinstance(frame, frames.Start):
                raise frames.InvalidFrameError("a second Start frame")
        except frames.InvalidFrameError as error:
            self._drop(body, error)
            return
        match frame:
            case frames.AddRequest(request):
                try:
                    if self.pending.holds(request, body, self.inbox.put):
                        return
                    self.engine.add_request(request)
                except InvalidRequestError as error:
                    self._reject(request.request_id, error)
            case frames.Abort(request_ids):
                for request_id in request_ids:
                    self.pending.drop(request_id)
                    self.engine.abort(request_id)
            case frames.Pin(name, request_id, token_ids, cache_salt):
                try:
                    self.engine.pin(name, token_ids, cache_salt)
                except InvalidRequestError as error:
                    self._reject(request_id, error)
            case frames.Unpin(name):
                self.engine.unpin(name)

    def _reject(self, request_id: str, error: InvalidRequestError) -> None:
        self.outbox.send(frames.Rejected(self.outbox.epoch, request_id, error.message, error.param, error.code))

    def _drop(self, body: bytes, error: frames.InvalidFrameError) -> None:
        """Count an invalid frame. If it was meant to add a request, reject that, so that nobody waits for it."""
        self._num_invalid_frames += 1
        if self._num_invalid_frames.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a flood must not fill the log
            message = f"engine process: dropped {self._num_invalid_frames} invalid frames so far; the last: {error}"
            print(message, file=sys.stderr, flush=True)
        request_id = frames.request_id_in(body)
        if request_id is not None:
            self.outbox.send(
                frames.Rejected(self.outbox.epoch, request_id, f"the engine cannot read it: {error}", None, None)
            )


def _read(sock: socket.socket, inbox: "queue.SimpleQueue[bytes]") -> None:
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


def _start(sock: socket.socket, inbox: "queue.SimpleQueue[bytes]") -> EngineServer | None:
    """Build the engine that the first frame asks for; if it cannot be built, send the reason and return None."""
    first = frames.unpack_to_engine(inbox.get())
    if not isinstance(first, frames.Start):
        raise PenstockError("the first frame is not Start")
    outbox = Outbox(sock, first.epoch)
    try:
        with outbox.working():
            from penstock.assembly import build_engine  # not at the top, so that the reader thread runs meanwhile
            from penstock.config import EngineConfig

            config = EngineConfig.from_options(**first.options)
            built = build_engine(config, takes_over=first.takes_over, num_engines=first.num_engines)
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
    recorder = Recorder(Ring(ring), describe(built.engine, built.config, built.info), epoch)
    built.engine.observe(recorder)
    return recorder


def main(argv: list[str]) -> int:
    """Serve on the inherited socket whose file descriptor is argv[0]. Return only if the engine cannot be built."""
    time_limit.install()
    sock = socket.socket(fileno=int(argv[0]))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
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
