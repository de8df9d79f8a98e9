"""run_server as a process sees it: one line when ready, draining, exit codes."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, InvalidRequestError, ModelLoadError
from penstock.server import serve
from penstock.server.options import ServerOptions
from penstock.server.serve import run_server
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, WAIT_S, app_client, get, running, send, stream, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import sys
    from penstock.server.options import ServerOptions
    from penstock.server.serve import run
    from tests.server.fakes import Behaviour, FakeEngineClient
    client = FakeEngineClient(Behaviour(text="x" * 30, delay_s=0.02))
    sys.exit(run(client, ServerOptions(port=0)))
"""


@contextlib.contextmanager
def process() -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server process, and its URL from the line it prints."""
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        found = re.fullmatch(r"penstock \S+ serving fake at (http://127\.0\.0\.1:\d+)  \(ready in \d+\.\d s\)\n", line)
        assert found, line or (started.stderr and started.stderr.read())
        try:
            yield started, found.group(1)
        finally:
            started.kill()


@pytest.mark.covers("C20", "F38")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains(number: signal.Signals) -> None:
    """Guards against a restart that cuts off the answers under way, and a code other than 0 for a clean end."""
    with process() as (started, url):
        with stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 99}) as r:
            lines = r.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(started.pid, number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        out, err = started.communicate(timeout=WAIT_S)
        assert (started.returncode, out) == (0, "")
        assert "POST /v1/completions 200" in err
        assert "Traceback" not in err


def test_draining_refuses_new_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a load balancer that keeps sending to a server that is about to end, and against a Ctrl-C after
    which nothing seems to happen."""
    caplog.set_level(logging.INFO, "penstock")
    fake = FakeEngineClient(Behaviour(text="x" * 400, hang_at=2))  # until its client leaves
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    with running(fake, dataclasses.replace(QUIET, drain_timeout_s=WAIT_S)) as server:
        with stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server._loop.call_soon_threadsafe(server._serving.stop)
            wait_until(lambda: get(f"{server.url}/health").status_code == 503)
            assert send(f"{server.url}/v1/completions", json=body).status_code == 503
            assert get(f"{server.url}/ready").status_code == 503
            assert get(f"{server.url}/live").status_code == 200
            assert get(f"{server.url}/status").json()["engine"]["state"] == "draining"
        server.join()
    assert server.exit_code == 0
    said = f"stopping: waiting up to {WAIT_S} s for 1 open requests; a second signal ends them at once"
    assert said in caplog.messages


@pytest.mark.parametrize(("host", "api_key", "is_warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False)])
def test_a_server_for_everybody_says_so(
    host: str, api_key: str | None, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a machine whose model anyone on the network can use, without a word to its owner."""
    with running(FakeEngineClient(), dataclasses.replace(QUIET, host=host, api_key=api_key)):
        pass
    warning = (
        "no API key is set, so anyone who can reach 0.0.0.0 may use the API (--api-key or --api-key-file sets one)"
    )
    assert (warning in caplog.messages) == is_warned


def test_a_server_for_this_machine_alone_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a warning at every start with the defaults."""
    with running(FakeEngineClient()):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_being_tokenised_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drain that ends the server, and with it the tokenizer, while a request that was accepted before
    the signal is being tokenised: it got 500."""
    fake, began, go_on = FakeEngineClient(), threading.Event(), threading.Event()
    encode, answers = fake.tokenizer.encode, []

    def encode_slowly(text: str, **options: bool) -> list[int]:
        began.set()
        assert go_on.wait(WAIT_S)
        return encode(text, **options)

    monkeypatch.setattr(fake.tokenizer, "encode", encode_slowly)
    with running(fake, dataclasses.replace(QUIET, drain_timeout_s=WAIT_S)) as server:
        body = {"prompt": "a" * 400, "max_tokens": 2}
        asking = threading.Thread(target=lambda: answers.append(send(f"{server.url}/v1/completions", json=body)))
        asking.start()
        assert began.wait(WAIT_S)
        server._loop.call_soon_threadsafe(server._serving.stop)
        wait_until(lambda: get(f"{server.url}/health").status_code == 503)
        for _ in range(5):  # time for a drain that does not wait
            assert get(f"{server.url}/live").status_code == 200
        assert fake.state is EngineState.READY
        go_on.set()
        asking.join()
        server.join()
    assert [answer.status_code for answer in answers] == [200]
    assert server.exit_code == 0


def test_health_follows_the_engine() -> None:
    """Guards against a /health that says 200 while the engine makes no progress, or before the engine is ready."""
    fake = FakeEngineClient()
    fake.state = EngineState.STARTING
    with running(fake) as server:
        assert get(f"{server.url}/health").status_code == 503
        fake.state = EngineState.READY
        assert get(f"{server.url}/health").status_code == 200
        fake.making_progress = False
        assert get(f"{server.url}/health").json()["status"] == "stuck"
        fake.making_progress, fake.state = True, EngineState.RECOVERING
        assert get(f"{server.url}/health").json()["status"] == "recovering"
        fake.state = EngineState.READY
    assert server.exit_code == 0


def test_failed_engine_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a server that keeps running without an engine, so that no supervisor restarts it."""
    fake = FakeEngineClient()
    fake.state = EngineState.STARTING
    with running(fake) as server:
        fake.state = EngineState.FAILED
        server.join()
    assert server.exit_code == 70
    assert capsys.readouterr().err == "penstock: the engine is failed\n"


@pytest.mark.parametrize("failure", [ModelLoadError("config.json: no such file"), InvalidRequestError("dtype: no")])
def test_engine_that_cannot_be_built(failure: Exception) -> None:
    """Guards against a start-up mistake that is reported in another way than by every other command; and against a
    request at that moment being blamed for it."""
    fake = FakeEngineClient()
    fake.state, fake.start_failure = EngineState.FAILED, failure
    with pytest.raises(type(failure), match=str(failure)):
        asyncio.run(run_server(fake, QUIET))
    for path, status in (("/v1/models", 503), ("/health", 503), ("/live", 200)):
        assert app_client(fake).get(path).status_code == status


def test_client_is_attached() -> None:
    """Guards against waiting for an engine that is not watched: the command makes its client outside of the loop."""
    fake = FakeEngineClient()
    with running(fake):
        assert fake.attached


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback, and an engine left running, when the port is taken."""
    fake = FakeEngineClient()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert asyncio.run(run_server(fake, ServerOptions(port=port))) == 1
    assert capsys.readouterr().err == f"penstock: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert fake.state is EngineState.FAILED


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 300, "256.1.1.1"])
def test_unknown_host(capsys: pytest.CaptureFixture[str], host: str) -> None:
    """Guards against a traceback for a host name that does not exist, or cannot."""
    assert asyncio.run(run_server(FakeEngineClient(), ServerOptions(host=host))) == 1
    assert f"cannot listen on {host}" in capsys.readouterr().err


class DyingClient(FakeEngineClient):
    """Its open requests end with the engine."""

    async def shutdown(self) -> None:
        self.behaviour.failure, self.behaviour.fail_at = EngineDeadError("the engine was shut down"), -1
        await super().shutdown()

    async def _wait(self, step: int) -> None:
        if self.state is EngineState.FAILED and self.behaviour.failure is not None:
            raise self.behaviour.failure
        await super()._wait(step)


def test_second_signal_ends_the_drain() -> None:
    """Guards against a Ctrl-C that does nothing while a stream that never ends is waited for."""
    fake = DyingClient(Behaviour(text="x" * 400, delay_s=0.05))
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    with running(fake) as server:
        with stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(2):
                server._loop.call_soon_threadsafe(server._serving.stop)
            assert "engine_unavailable" in [line for line in lines if line][-1]
        server.join()
    assert server.exit_code == 0


def test_streams_left_after_the_drain_get_an_error() -> None:
    """Guards against a stream that just breaks off when the drain takes too long."""
    fake = DyingClient(Behaviour(text="x" * 400, delay_s=0.05))
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    with running(fake, dataclasses.replace(QUIET, drain_timeout_s=0.1)) as server:
        with stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stopper = threading.Thread(target=server.stop)
            stopper.start()
            assert "engine_unavailable" in [line for line in lines if line][-1]
        stopper.join()
    assert server.exit_code == 0


def test_nobody_has_to_read_the_ready_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a broken standard output that ends the watcher of the engine, after which no failure is seen."""

    def broken(*words: object, file: object = None, flush: bool = False) -> None:
        if file is None:
            raise BrokenPipeError

    monkeypatch.setattr(serve, "print", broken, raising=False)
    fake = FakeEngineClient()
    with running(fake, QUIET) as server:
        assert get(f"{server.url}/health").status_code == 200
        fake.state = EngineState.FAILED
        server.join()
    assert server.exit_code == serve.EXIT_ENGINE_FAILED
