"""Runs the application under uvicorn: listens, prints a line when ready, drains on a signal, returns an exit code.

    0   ended by SIGTERM or SIGINT after draining
    1   could not listen
    70  the engine failed and cannot be restarted

In every case, the caller's engine client has been shut down on return.
"""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from penstock import __version__
from penstock.client.engine_client import EngineClient, EngineState
from penstock.errors import EngineDeadError, InvalidRequestError, ModelLoadError, PenstockError
from penstock.server import systemd
from penstock.server.acceptor import Acceptor
from penstock.server.app import create_app
from penstock.server.log import log_to_stderr, print_last
from penstock.server.options import DEFAULT_KWARGS, ServerOptions
from penstock.server.protocol import GuardedProtocol
from penstock.server.resumption import resume
from penstock.tokenizer.chat_template import check_variables

OPEN_TO_ALL = "no API key is set, so anyone who can reach %s may use the API (--api-key or --api-key-file sets one)"
EXIT_OK = 0
EXIT_CANNOT_LISTEN = 1
EXIT_ENGINE_FAILED = 70
WATCH_INTERVAL_S = 0.02  # seconds between checks of whether the engine is ready or has failed
CLOSE_TIMEOUT_S = 3  # seconds that clients have to read the end of their answers
BACKLOG = 2048
LOGGER = logging.getLogger("penstock")


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise OSError if the address is taken or unknown, UnicodeError for a bad name."""
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


async def run_server(client: EngineClient, options: ServerOptions) -> int:
    """Serve until a signal or the engine's failure; return the process's exit code.

    Args:
        client: may still be starting; /health answers 503 until it is ready.

    Raises InvalidRequestError or ModelLoadError if one of them kept the engine from starting.
    """
    started_at = time.monotonic() if options.started_at is None else options.started_at
    try:
        sock = open_socket(options.host, options.port)
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        print(f"penstock: cannot listen on {options.host}:{options.port}: {reason}", file=sys.stderr)
        await client.shutdown()
        return EXIT_CANNOT_LISTEN
    with sock:
        try:
            serving = Serving(client, options, sock, started_at)
        except PenstockError:  # the journal cannot be used
            await client.shutdown()
            raise
        return await serving.run()


def run(client: EngineClient, options: ServerOptions) -> int:
    """Run `run_server` in a new event loop, uvloop's except on Windows."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run_server(client, options))


class Serving:
    """One run of the server. `stop` may be called from the event loop's thread at any time."""

    def __init__(self, client: EngineClient, options: ServerOptions, sock: socket.socket, started_at: float) -> None:
        self._client = client
        self._options = options
        self._sock = sock
        self._started_at = started_at
        self._app = create_app(client, options)
        self._server = uvicorn.Server(self._config())
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: PenstockError | None = None

    def _config(self) -> uvicorn.Config:
        options = self._options
        protocol = partial(
            GuardedProtocol, receive_timeout_s=options.receive_timeout_s, stall_timeout_s=options.stall_timeout_s
        )
        return uvicorn.Config(
            self._app,
            http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )

    async def run(self) -> int:
        log_to_stderr(self._options.log_level)
        if self._options.is_open_to_all:
            LOGGER.warning(OPEN_TO_ALL, self._options.host)
        with self._signals():
            await self._client.attach()
            kept = self._app.state.context.kept
            kept.start()
            watcher = asyncio.create_task(self._watch_engine())
            stopper = asyncio.create_task(self._stop_on_request())
            try:
                await self._serve()
            finally:
                watcher.cancel()
                stopper.cancel()
                await asyncio.gather(watcher, stopper, return_exceptions=True)
                await kept.close()
                await self._client.shutdown()
                if self._app.state.tracing is not None:
                    await asyncio.to_thread(self._app.state.tracing.close)
        if isinstance(self._failure, InvalidRequestError | ModelLoadError):
            raise self._failure
        if self._failure is None:
            return EXIT_OK
        print_last(f"penstock: {self._failure}")
        return EXIT_ENGINE_FAILED

    async def _serve(self) -> None:
        """Run uvicorn's server step by step, because its `serve` would install signal handlers that do not drain."""
        server, config = self._server, self._server.config
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[])
        own = {"config": config, "server_state": server.server_state, "app_state": server.lifespan.state}
        acceptor = Acceptor(self._sock, partial(config.http_protocol_class, **own))
        acceptor.start()
        await server.main_loop()
        if not self._hurry.is_set():
            await acceptor.linger()
        acceptor.close()
        await server.shutdown(sockets=[self._sock])

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain on SIGTERM or SIGINT, end the drain on a second one, and read the key file again on SIGHUP.

        Works in the main thread only.
        """
        loop = asyncio.get_running_loop()
        caught: list[signal.Signals] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.stop)
                caught.append(number)
        if self._options.api_key_file is not None:  # otherwise SIGHUP ends the process, as when its terminal closes
            with contextlib.suppress(AttributeError, ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(signal.SIGHUP, self.reload)
                caught.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Start draining; a second call ends the drain."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    def reload(self) -> None:
        """Read the key file again. A file with an error changes nothing, and the log says why."""
        systemd.notify_reloading()
        try:
            number = self._app.state.context.keys.reload()
        except InvalidRequestError as exc:
            LOGGER.error("the API keys stay as they were: %s", exc)
        else:
            LOGGER.info("%s: %d API keys read", self._options.api_key_file, number)
        systemd.notify("READY=1")

    async def _watch_engine(self) -> None:
        """Announce that the engine is ready for the first time; stop the server when the engine has failed.

        Also tell systemd's watchdog that this event loop is alive. A stuck engine is left to the supervisor.
        """
        announced, watchdog_s, told_at = False, systemd.watchdog_interval_s(), -math.inf
        while not self._stop.is_set():  # after a signal, the end of the engine is not a failure
            state = self._client.status().state
            if state is EngineState.FAILED:
                self._failure = self._reason()
                self._server.should_exit = True
                return
            if state is EngineState.READY and not announced:
                try:
                    self._check_variables()
                except InvalidRequestError as error:
                    self._failure = error
                    self._server.should_exit = True
                    return
                resume(self._app.state.context)
                self._announce()
                announced = True
            if watchdog_s is not None and time.monotonic() - told_at >= watchdog_s:
                told_at = time.monotonic()
                systemd.notify("WATCHDOG=1")
            await asyncio.sleep(WATCH_INTERVAL_S if not announced else 10 * WATCH_INTERVAL_S)

    def _check_variables(self) -> None:
        """Raise InvalidRequestError for a default variable that the model's chat template does not read."""
        if self._options.default_chat_template_kwargs:
            template = self._app.state.context.tokenizer().chat_template
            check_variables(template, self._options.default_chat_template_kwargs, DEFAULT_KWARGS)

    def _reason(self) -> PenstockError:
        """Return why the engine failed. If it was never ready, reading its model_info raises the reason."""
        try:
            return EngineDeadError(
                f"the engine of {self._client.model_info.model} cannot be restarted; the log says why"
            )
        except PenstockError as exc:
            return exc

    def _announce(self) -> None:
        for option, reason in self._client.model_info.choices_made.items():
            LOGGER.info("%s = %s", option, reason)
        name = self._app.state.context.model_names()[0]
        seconds = time.monotonic() - self._started_at
        print(f"penstock {__version__} serving {name} at {self._url()}  (ready in {seconds:.1f} s)", flush=True)
        systemd.notify(f"READY=1\nSTATUS=serving {name} at {self._url()}")

    def _url(self) -> str:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self._sock.getsockname()[1]}"

    async def _stop_on_request(self) -> None:
        """Refuse new requests, wait for the open ones, then shut down the engine, which fails those still open."""
        await self._stop.wait()
        num_open = self._client.status().journal_requests + self._app.state.context.num_arriving
        limit = f"up to {self._options.drain_timeout_s:g} s"
        LOGGER.info("stopping: waiting %s for %d open requests; a second signal ends them at once", limit, num_open)
        self._app.state.context.draining = True
        systemd.notify("STOPPING=1\nSTATUS=waiting for open requests")
        await self._app.state.context.kept.suspend()
        drain = asyncio.create_task(self._drain())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)
        try:
            await self._client.shutdown()
        finally:
            self._server.should_exit = True

    async def _drain(self) -> None:
        """Wait until the requests that have arrived are with the engine or refused, and then for the open ones."""
        context, deadline = self._app.state.context, time.monotonic() + self._options.drain_timeout_s
        while context.num_arriving and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._client.drain(max(0.0, deadline - time.monotonic()))
