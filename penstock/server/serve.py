"""Runs the application under uvicorn: listen, say when ready, drain on a signal, and end with a meaningful code.

    0   ended by SIGTERM or SIGINT after draining
    1   could not listen
    70  the engine failed for good

The engine client is the caller's; it is shut down here because nothing can be served without it afterwards.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from penstock import __version__
from penstock.client.engine_client import EngineClient, EngineState
from penstock.errors import EngineDeadError, InvalidRequestError, ModelLoadError, PenstockError
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.server.protocol import guarded_protocol

EXIT_OK = 0
EXIT_CANNOT_LISTEN = 1
EXIT_ENGINE_FAILED = 70
WATCH_INTERVAL_S = 0.02  # how soon a ready, or failed, engine is noticed
CLOSE_TIMEOUT_S = 3  # for connections to take the end of their answers
BACKLOG = 2048
LOGGER = logging.getLogger("penstock")


def open_socket(host: str, port: int) -> socket.socket:
    """A listening address; OSError (UnicodeError for a name that is none) where it is taken or does not exist."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def run_server(client: EngineClient, options: ServerOptions, sock: socket.socket | None = None) -> int:
    """Serve until a signal or the engine's end; the exit code of the process.

    Args:
        client: may still be starting; /health is 503 until it is ready. It has been shut down on return.
        sock: from `open_socket`, where the caller wanted to know before it started an engine.

    Raises InvalidRequestError or ModelLoadError where the engine never came up for such a reason.
    """
    started_at = time.monotonic() if options.started_at is None else options.started_at
    try:
        listening = sock or open_socket(options.host, options.port)
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        print(f"penstock: cannot listen on {options.host}:{options.port}: {reason}", file=sys.stderr)
        await client.shutdown()
        return EXIT_CANNOT_LISTEN
    with listening:
        return await Serving(client, options, listening, started_at).run()


def run(client: EngineClient, options: ServerOptions, sock: socket.socket | None = None) -> int:
    """`run_server` in an event loop of its own: uvloop's where there is one."""
    loop_factory = None if sys.platform == "win32" else _uvloop()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run_server(client, options, sock))


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """One run of the server."""

    def __init__(self, client: EngineClient, options: ServerOptions, sock: socket.socket, started_at: float) -> None:
        self._client = client
        self._options = options
        self._sock = sock
        self._started_at = started_at
        self._app = create_app(client, options)
        self._server = _Server(self._config())
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = EXIT_OK
        self._failure: PenstockError | None = None

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http=guarded_protocol(self._options.receive_timeout_s, self._options.stall_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )

    async def run(self) -> int:
        _log_to_stderr()
        with self._signals():
            await self._client.attach()
            watcher = asyncio.create_task(self._watch_engine())
            stopper = asyncio.create_task(self._stop_when_asked())
            try:
                await self._server.serve(sockets=[self._sock])
            finally:
                watcher.cancel()
                stopper.cancel()
                await asyncio.gather(watcher, stopper, return_exceptions=True)
                await self._client.shutdown()
        if isinstance(self._failure, InvalidRequestError | ModelLoadError):
            raise self._failure
        if self._failure is not None:
            print(f"penstock: {self._failure}", file=sys.stderr)
        return self._exit_code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain; a second one stops waiting. Only the main thread can listen to them."""
        loop = asyncio.get_running_loop()
        caught: list[signal.Signals] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.stop)
                caught.append(number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin to drain, or, called again, end the drain."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _watch_engine(self) -> None:
        """Say once that it is ready; end the server when the engine has failed for good."""
        announced = False
        while not self._stop.is_set():  # ending it on request is no failure
            state = self._client.status().state
            if state is EngineState.FAILED:
                return self._engine_failed()
            if state is EngineState.READY and not announced:
                self._announce()
                announced = True
            await asyncio.sleep(WATCH_INTERVAL_S if not announced else 10 * WATCH_INTERVAL_S)

    def _engine_failed(self) -> None:
        self._failure = self._reason()
        self._exit_code = EXIT_ENGINE_FAILED
        self._server.should_exit = True

    def _reason(self) -> PenstockError:
        """What the client says of it: an engine that was never ready has no model, but a reason why."""
        try:
            return EngineDeadError(f"the engine of {self._client.model_info.model} died too often")
        except PenstockError as exc:
            return exc

    def _announce(self) -> None:
        for option, reason in self._client.model_info.choices_made.items():
            LOGGER.info("%s = %s", option, reason)
        name = self._app.state.context.model_names()[0]
        seconds = time.monotonic() - self._started_at
        print(f"penstock {__version__} serving {name} at {self._url()}  (ready in {seconds:.1f} s)", flush=True)

    def _url(self) -> str:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self._sock.getsockname()[1]}"

    async def _stop_when_asked(self) -> None:
        """Refuse new requests, let the open ones end, then end the engine, which ends those that are left."""
        await self._stop.wait()
        self._app.state.context.draining = True
        drain = asyncio.create_task(self._client.drain(self._options.drain_timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)
        try:
            await self._client.shutdown()
        finally:
            self._server.should_exit = True


def _log_to_stderr() -> None:
    """Log lines go to stderr, unless the process has set up logging already."""
    if LOGGER.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
