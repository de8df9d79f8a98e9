"""Two ways to talk to the application in tests: in process, and over real sockets from another thread.

Tests wait for events, never for a time that a busy machine may exceed: WAIT_S only ends a test that has gone wrong.
"""

import asyncio
import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvloop
from starlette.testclient import TestClient

from penstock.client.model_pool import ModelPool
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.server.serve import Serving, open_socket, open_unix_socket
from penstock_lab.prove.servers import QUICK
from tests.server.fakes import FakeEngineClient

QUIET = ServerOptions(port=0, access_log=False)
WAIT_S = 200
# A client that could speak TLS loads certificates first, for 0.07 s; these calls make a client each.
call = functools.partial(httpx.request, timeout=WAIT_S, **QUICK)
get = functools.partial(call, "GET")
send = functools.partial(call, "POST")
stream = functools.partial(httpx.stream, timeout=WAIT_S, **QUICK)


def app_client(client: FakeEngineClient | ModelPool | None = None, options: ServerOptions = QUIET) -> TestClient:
    """The application in this process; a failure inside shows as the 500 that a user would see."""
    app = create_app(client or FakeEngineClient(), options)
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


class RunningServer:
    """A server in a thread."""

    def __init__(self, client: FakeEngineClient | ModelPool, options: ServerOptions) -> None:
        self.client = client
        self.options = options
        self.exit_code: int | None = None
        self._sock = open_socket(options.host, 0) if options.uds is None else open_unix_socket(options.uds)
        self.port: int = 0 if options.uds is not None else self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the command runs it
            runner.run(self._serve())

    async def _serve(self) -> None:
        with self._sock:
            self._loop = asyncio.get_running_loop()
            models = self.client if isinstance(self.client, ModelPool) else ModelPool.of(self.client)
            self._serving = Serving(models, self.options, self._sock, time.monotonic())
            self._ready.set()
            self.exit_code = await self._serving.run()

    @property
    def kept(self) -> Any:
        """The server's kept calls; to be looked at, not used, from this thread."""
        return self._serving._app.state.context.kept

    @property
    def keys(self) -> Any:
        """The server's keys."""
        return self._serving._app.state.context.keys

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        wait_until(lambda: self._answers())

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return get(f"{self.url}/live").status_code == 200
        return False

    def stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._serving.stop)
        self.join()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def running(client: FakeEngineClient | ModelPool, options: ServerOptions = QUIET) -> Iterator[RunningServer]:
    server = RunningServer(client, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running_anywhere(client: FakeEngineClient, options: ServerOptions) -> Iterator[RunningServer]:
    """A server that the functions above cannot talk to, because it is on a Unix socket or speaks TLS."""
    server = RunningServer(client, options)
    server._thread.start()
    try:
        assert server._ready.wait(WAIT_S)
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def free_port() -> int:
    """Choose a port for a program that cannot choose one itself: below those that the system gives to everybody else,
    and one of this process's own."""
    first = 10_000 + os.getpid() * 16 % 20_000
    for port in range(first, first + 16):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"all ports from {first} to {first + 15} are in use")


def samples(text: str, model: str = "fake") -> dict[str, float]:
    """Read the metrics, without the label that all of them have."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    label = f'model_name="{model}"'
    assert all(label in name for name, _ in lines)
    return {
        name.replace(f"{label},", "").replace(f",{label}", "").replace(f"{{{label}}}", ""): float(value)
        for name, value in lines
    }
