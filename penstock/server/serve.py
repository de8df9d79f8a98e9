"""Runs the application under uvicorn: listens, prints a line when ready, drains on a signal, returns an exit code.

    0   ended by SIGTERM or SIGINT after draining
    1   could not listen
    70  the engine failed and cannot be restarted

In every case, the caller's engine client has been shut down on return. Below `Serving` is what a process that serves
needs of its surroundings: accepting connections, systemd's readiness protocol, and a log that never blocks.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import queue
import resource
import select
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import cast

import uvicorn

from penstock import __version__
from penstock.client.engine_client import EngineClient, EngineState
from penstock.client.model_pool import ModelPool
from penstock.client.turns import Turns
from penstock.errors import EngineDeadError, InvalidRequestError, ModelLoadError, PenstockError
from penstock.server.app import create_app
from penstock.server.options import DEFAULT_KWARGS, ServerOptions
from penstock.server.protocol import GuardedProtocol
from penstock.server.resumption import resume
from penstock.tokenizer.tokenizer import check_variables

SWITCH_S = 5e-4  # after which a thread that computes lets the event loop go on
OPEN_TO_ALL = "no API key is set, so anyone who can reach %s may use the API (--api-key or --api-key-file sets one)"
EXIT_OK = 0
EXIT_CANNOT_LISTEN = 1
EXIT_ENGINE_FAILED = 70
WATCH_INTERVAL_S = 0.02  # seconds between checks of whether the engine is ready
IDLE_WATCH_INTERVAL_S = 1.0  # and then, of whether it has failed
CLOSE_TIMEOUT_S = 3  # seconds that clients have to read the end of their answers
BACKLOG = 2048
LOGGER = logging.getLogger("penstock")


def open_unix_socket(path: str) -> socket.socket:
    """Open a listening Unix socket, and replace one that a stopped server left. Raise OSError if that fails."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o666)  # as with a port of loopback; the permissions of the directory may exclude users
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _is_left_over(path: str) -> bool:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raise OSError if the address is taken or unknown, UnicodeError for a bad name."""
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


async def run_server(models: ModelPool | EngineClient, options: ServerOptions) -> int:
    """Serve until a signal or the engine's failure; return the process's exit code.

    Args:
        models: or the client of the only one, which may still be starting; /health answers 503 until it is ready.

    Raises InvalidRequestError or ModelLoadError if one of them kept the engine from starting.
    """
    started_at = time.monotonic() if options.started_at is None else options.started_at
    pool = models if isinstance(models, ModelPool) else ModelPool.of(models)
    try:
        sock = open_socket(options.host, options.port) if options.uds is None else open_unix_socket(options.uds)
    except (OSError, UnicodeError) as exc:
        reason, address = getattr(exc, "strerror", None) or exc, options.uds or f"{options.host}:{options.port}"
        print(f"penstock: cannot listen on {address}: {reason}", file=sys.stderr)
        await pool.shutdown()
        return EXIT_CANNOT_LISTEN
    with sock:
        try:
            serving = Serving(pool, options, sock, started_at)
        except PenstockError:  # the journal or the certificate cannot be used
            await pool.shutdown()
            raise
        return await serving.run()


def run(models: ModelPool | EngineClient, options: ServerOptions) -> int:
    """Run `run_server` in a new event loop, uvloop's except on Windows."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    gc.freeze()  # what is imported stays: the collector would hold the event loop for 0.1 s whenever it looked at it
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run_server(models, options))


class Serving:
    """One run of the server. `stop` may be called from the event loop's thread at any time."""

    def __init__(self, models: ModelPool, options: ServerOptions, sock: socket.socket, started_at: float) -> None:
        self._models = models
        self._options = options
        self._sock = sock
        self._started_at = started_at
        self._ssl = options.ssl_context()
        self._app = create_app(models, options)
        self._server = uvicorn.Server(self._config())
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit = asyncio.Event()
        self._failure: PenstockError | None = None

    def _config(self) -> uvicorn.Config:
        options = self._options
        limits = {"receive_timeout_s": options.receive_timeout_s, "stall_timeout_s": options.stall_timeout_s}
        protocol = partial(GuardedProtocol, parsing=Turns(1), **limits)
        return uvicorn.Config(
            self._app,
            http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # middleware.py adds it: uvicorn's main_loop, which does not run, would have to renew it
            timeout_keep_alive=options.timeout_keep_alive,  # type: ignore[arg-type]  # a timer's seconds
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )

    async def run(self) -> int:
        log_to_stderr(self._options.log_level)
        if self._options.is_open_to_all:
            LOGGER.warning(OPEN_TO_ALL, self._options.host)
        with self._signals():
            await self._models.attach()
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
                await self._models.shutdown()
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
        connections = cast(Collection[GuardedProtocol], server.server_state.connections)
        acceptor = Acceptor(self._sock, partial(config.http_protocol_class, **own), self._ssl, connections)
        acceptor.start()
        await self._exit.wait()  # uvicorn's main_loop would wake ten times a second
        if not self._hurry.is_set():
            await acceptor.linger()
        acceptor.close()
        if self._options.uds is not None:
            with suppress(OSError):
                os.unlink(self._options.uds)
        await server.shutdown(sockets=[self._sock])

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain on SIGTERM or SIGINT, end the drain on a second one, and read keys and certificates again on SIGHUP.

        Works in the main thread only.
        """
        loop = asyncio.get_running_loop()
        caught: list[signal.Signals] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.stop)
                caught.append(number)
        # without files to read again, SIGHUP ends the process, as when its terminal closes
        if self._options.api_key_file is not None or self._ssl is not None:
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
        """Read the key file and the certificate again. A file with an error changes nothing, and the log says why."""
        notify_reloading()
        if self._options.api_key_file is not None:
            try:
                number = self._app.state.context.keys.reload()
            except InvalidRequestError as exc:
                LOGGER.error("the API keys stay as they were: %s", exc)
            else:
                LOGGER.info("%s: %d API keys read", self._options.api_key_file, number)
        if self._ssl is not None:
            try:
                self._options.ssl_context()  # a certificate without its key would leave the context without either
                self._options.load_certificate(self._ssl)
            except InvalidRequestError as exc:
                LOGGER.error("the certificate stays as it was: %s", exc)
            else:
                LOGGER.info("%s: certificate read", self._options.ssl_certfile)
        notify("READY=1")

    async def _watch_engine(self) -> None:
        """Announce that the server is ready; stop it when its only model has failed, or one that it starts with.

        Also tell systemd's watchdog that this event loop is alive. A stuck engine is left to the supervisor.
        """
        announced, watchdog_s, notified_at = False, watchdog_interval_s(), -math.inf
        while not self._stop.is_set():  # after a signal, the end of the engine is not a failure
            state = self._models.state
            if state is EngineState.FAILED:
                self._failure = self._reason()
                self._exit.set()
                return
            if state is EngineState.READY and not announced:
                try:
                    self._check_variables()
                except InvalidRequestError as error:
                    self._failure = error
                    self._exit.set()
                    return
                resume(self._app.state.context)
                self._announce()
                announced = True
            if watchdog_s is not None and time.monotonic() - notified_at >= watchdog_s:
                notified_at = time.monotonic()
                notify("WATCHDOG=1")
            await asyncio.sleep(min(IDLE_WATCH_INTERVAL_S, watchdog_s or math.inf) if announced else WATCH_INTERVAL_S)

    def _check_variables(self) -> None:
        """Raise InvalidRequestError for a default variable that the chat template of a loaded model does not read."""
        given = self._options.default_chat_template_kwargs
        for context in self._app.state.context.all if given else ():
            if given and context.model.loaded is not None:
                check_variables(context.tokenizer().chat_template, given, DEFAULT_KWARGS)

    def _reason(self) -> PenstockError:
        """Find the reason why a model failed. If it was never ready, reading its model_info raises the reason."""
        failed = next(model for model in self._models if model.state is EngineState.FAILED)
        if failed.error is not None:
            return failed.error
        try:
            return EngineDeadError(
                f"the engine of {failed.client.model_info.model} cannot be restarted; the log says why"
            )
        except PenstockError as exc:
            return exc

    def _announce(self) -> None:
        contexts = self._app.state.context.all
        if contexts[0].model.name is None:
            for option, reason in contexts[0].known_info().choices_made.items():
                LOGGER.info("%s = %s", option, reason)
        name = ", ".join(context.model_names()[0] for context in contexts)
        seconds = time.monotonic() - self._started_at
        with suppress(OSError):  # nobody reads standard output, and nothing depends on it
            print(f"penstock {__version__} serving {name} at {self._url()}  (ready in {seconds:.1f} s)", flush=True)
        notify(f"READY=1\nSTATUS=serving {name} at {self._url()}")

    def _url(self) -> str:
        if self._options.uds is not None:
            return f"unix:{self._options.uds}"
        scheme = "http" if self._ssl is None else "https"
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"{scheme}://{host}:{self._sock.getsockname()[1]}{self._options.root_path}"

    async def _stop_on_request(self) -> None:
        """Refuse new requests, wait for the open ones, then shut down the engine, which fails those still open."""
        await self._stop.wait()
        num_open = self._models.num_open + sum(one.arriving.total() for one in self._app.state.context.all)
        limit = f"up to {self._options.drain_timeout_s:g} s"
        LOGGER.info("stopping: waiting %s for %d open requests; a second signal ends them at once", limit, num_open)
        self._app.state.context.models.draining = True
        notify("STOPPING=1\nSTATUS=waiting for open requests")
        await self._app.state.context.kept.suspend()
        drain = asyncio.create_task(self._drain())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)
        try:
            await self._models.shutdown()
        finally:
            self._exit.set()

    async def _drain(self) -> None:
        """Wait until the requests that have arrived are with the engine or refused, and then for the open ones."""
        contexts, deadline = self._app.state.context.all, time.monotonic() + self._options.drain_timeout_s
        while any(context.arriving for context in contexts) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._models.drain(max(0.0, deadline - time.monotonic()))


# --- accepting connections --------------------------------------------------------------------------------------------


MAX_AT_ONCE = 16  # connections per turn of the event loop; streams continue in between
LINGER_S, MAX_LINGER_S = 0.2, 2.0  # time to accept more: after the last connection, and in all
RETRY_S = 0.2  # pause when the system has no file handle or memory left for another connection
RESERVED = 128  # file handles that no connection takes: for helper processes, files and engines
MAX_HANDLES = 2**20
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Gives each new connection of a listening, non-blocking socket to a new protocol, between `start` and `close`.

    It accepts up to MAX_AT_ONCE connections per turn of the event loop. libuv, and so uvloop, accepts one. With many
    open streams a turn takes some milliseconds, so at a few hundred new connections per second the rest would wait in
    the kernel, where nothing refuses them: a client that should get a 429 at once would be answered only after the
    clients before it have been served.

    The last RESERVED file handles are left to the work of requests. A connection that would take one of them gets the
    place of the one that has been without a request for the longest time.

    connections: those that are open, without which none is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None = None,
        connections: Collection[GuardedProtocol] = (),
    ) -> None:
        self._connections = connections
        self._most_handles = _raised_limit() - RESERVED
        self._sock = sock
        self._ssl = context
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._accepted_at = -math.inf

    def start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    async def linger(self) -> None:
        """Return when no connection has come for LINGER_S, and after MAX_LINGER_S at the latest.

        Closing the socket resets the connections that wait in the kernel, whose clients may have sent a request long
        ago. If they are accepted, they get an answer that says the server is stopping.
        """
        began = now = self._loop.time()
        while now < (until := min(max(began, self._accepted_at) + LINGER_S, began + MAX_LINGER_S)):
            await asyncio.sleep(until - now)
            now = self._loop.time()

    def close(self) -> None:
        """Stop accepting; the open connections continue."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in NO_RESOURCES:
                    self._pause(exc)
                    return
                continue  # this connection has already ended
            if connection.fileno() >= self._most_handles:
                self._close_idle()
            connection.setblocking(False)
            self._accepted_at = self._loop.time()
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _close_idle(self) -> None:
        idle = [(one.idle_since, one) for one in self._connections if one.idle_since is not None]
        if idle:
            min(idle, key=itemgetter(0))[1].transport.abort()

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._ssl)
        except OSError:  # the connection has ended meanwhile, or its client speaks no TLS
            connection.close()

    def _pause(self, exc: OSError) -> None:
        """Leave new connections to the kernel for RETRY_S, instead of failing again and again."""
        LOGGER.error("cannot accept a connection: %s; trying again in %g s", exc.strerror, RETRY_S)
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self.start)


def _raised_limit() -> int:
    """Raise the number of file handles that this process may have as far as it may. Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_HANDLES if hard == resource.RLIM_INFINITY else min(hard, MAX_HANDLES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_HANDLES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


# --- systemd ----------------------------------------------------------------------------------------------------------
# Its readiness protocol: datagrams to the socket named in the environment; nothing happens without systemd.
# https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html


def notify(state: str) -> None:
    """Send a state like "READY=1" to the socket in $NOTIFY_SOCKET, if it is set. Errors of the socket are ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect("\0" + address[1:] if address[0] == "@" else address)
        sock.send(state.encode())


def notify_reloading() -> None:
    """Report that a reload has begun; READY=1 ends it."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_interval_s() -> float | None:
    """Compute the interval at which to send WATCHDOG=1, half of $WATCHDOG_USEC; None if there is no watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 2e6 if usec.isdigit() and int(usec) and for_us else None


# --- the log ----------------------------------------------------------------------------------------------------------


STDERR = 2
MAX_LINES = 8192  # that wait to be written; those that come after them are dropped and counted
PATIENCE_S = 1.0  # how long the end of the process waits for a reader


class BackgroundLog(logging.Handler):
    """Writer of log records to a file descriptor, in a thread. Logging never blocks.

    A pipe without a reader, or a stopped terminal, must not hold up the event loop and with it every stream. It does
    not write through sys.stderr, whose lock a blocked thread would hold: Python could then not exit.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes | threading.Event] = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if not self._report_dropped() or not self._put(f"{line}\n".encode(errors="backslashreplace")):
            self._num_dropped += 1

    def flush(self) -> None:
        """Wait until everything so far has been written, or the reader has taken nothing for a while."""
        written = threading.Event()
        self.acquire()
        try:
            is_queued = self._report_dropped() and self._put(written)
        finally:
            self.release()
        if is_queued:
            written.wait(PATIENCE_S)

    def _report_dropped(self) -> bool:
        """Write how many lines are missing here, if any are. Return False if there is no room for that either."""
        note = f"log lines dropped here, because standard error was not read: {self._num_dropped}\n"
        if self._num_dropped and self._put(note.encode()):
            self._num_dropped = 0
        return not self._num_dropped

    def _put(self, item: bytes | threading.Event) -> bool:
        with suppress(queue.Full):
            self._waiting.put_nowait(item)
            return True
        return False

    def _write(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with suppress(OSError):  # the reader has gone, or the disk is full: there is no other place to say so
                while item:
                    item = item[os.write(self._descriptor, item) :]


def log_to_stderr(level: str) -> None:
    """Send log lines to standard error, unless the process has configured logging already.

    level: of Penstock's own lines; of other libraries only warnings and errors are logged.
    """
    root = logging.getLogger()
    if not LOGGER.handlers and not root.handlers:
        root.addHandler(BackgroundLog(STDERR))
        LOGGER.setLevel(level.upper())


def print_last(text: str) -> None:
    """Print a line to standard error after all log lines, unless writing there would block: the process has to end."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    if select.select([], [STDERR], [], PATIENCE_S)[1]:
        print(text, file=sys.stderr, flush=True)
