"""Two ways to talk to the application in tests: in process, and over real sockets from another thread."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import uvloop
from starlette.testclient import TestClient

from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.server.serve import Serving, open_socket
from tests.server.fakes import FakeEngineClient

QUIET = ServerOptions(port=0, access_log=False)


def app_client(client: FakeEngineClient | None = None, options: ServerOptions = QUIET) -> TestClient:
    """The application in this process; a failure inside shows as the 500 that a user would see."""
    return TestClient(create_app(client or FakeEngineClient(), options), raise_server_exceptions=False)


class RunningServer:
    """A server in a thread."""

    def __init__(self, client: FakeEngineClient, options: ServerOptions) -> None:
        self.client = client
        self.options = options
        self.exit_code: int | None = None
        self._sock = open_socket(options.host, 0)
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the command runs it
            runner.run(self._serve())

    async def _serve(self) -> None:
        with self._sock:
            self._loop = asyncio.get_running_loop()
            self._serving = Serving(self.client, self.options, self._sock, time.monotonic())
            self._ready.set()
            self.exit_code = await self._serving.run()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(15)
        wait_until(lambda: self._answers())

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/live").status_code == 200
        return False

    def stop(self, timeout_s: float = 20) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._serving.stop)
        self.join(timeout_s)

    def join(self, timeout_s: float = 20) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def running(client: FakeEngineClient, options: ServerOptions = QUIET) -> Iterator[RunningServer]:
    server = RunningServer(client, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 15) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
