"""Real servers for the proofs: `penstock serve` in a separate process, and streams read from it over HTTP.

Also what proofs do to processes, and the side effects that they suppress.
"""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import httpx

from penstock import EngineError
from penstock_lab.prove.proof import Subject

CLIENT_TIMEOUT_S = 120.0
QUICK: dict[str, Any] = {"verify": False, "trust_env": False}  # otherwise each request loads certificates for 0.07 s
get = partial(httpx.get, timeout=CLIENT_TIMEOUT_S, verify=False, trust_env=False)
post = partial(httpx.post, timeout=CLIENT_TIMEOUT_S, verify=False, trust_env=False)
open_stream = partial(httpx.stream, timeout=CLIENT_TIMEOUT_S, verify=False, trust_env=False)


@dataclass(slots=True)
class Server:
    """A running `penstock serve`.

    Attributes:
        url: like http://127.0.0.1:40123
        process: the server process; the engine is its child.
        stderr: what the server has written to standard error.
    """

    url: str
    process: "subprocess.Popen[str]"
    stderr: IO[str]

    def log(self) -> str:
        """Read what the server has written to standard error."""
        self.stderr.seek(0)
        return self.stderr.read()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = get(f"{self.url}/status").json()
        return answer

    @property
    def engine_pid(self) -> int | None:
        """The process id of the engine; None while there is no engine."""
        pid: int | None = self.status()["engine"]["pid"]
        return pid


def command_line(subject: Subject, *flags: str, port: int = 0, program: Sequence[str] = ("penstock",)) -> list[str]:
    """Write the command line that starts `penstock serve`, or the module `program` in its place."""
    options = (_flag(name.replace("_", "-"), value) for name, value in subject.options.items())
    return [sys.executable, "-m", *program, "serve", subject.model, f"--port={port}", *options, *flags]


@contextmanager
def serve(subject: Subject, *flags: str, port: int = 0, program: Sequence[str] = ("penstock",)) -> Iterator[Server]:
    """Run `penstock serve` on loopback. Yield it when it is ready, and kill it at the end if it still runs.

    Args:
        flags: further flags, as on the command line.
        port: to listen on; 0 takes a free one.
        program: the module that serves, with arguments before the command.

    Raises:
        EngineError: the server did not start.
    """
    command = command_line(subject, *flags, port=port, program=program)
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            line = "" if process.stdout is None else process.stdout.readline()
            url = next((word for word in line.split() if word.startswith("http://")), "")
            server = Server(url, process, stderr)
            if not url:
                raise EngineError(f"the server did not start: {server.log()[-2000:]}")
            yield server
        finally:
            process.kill()


def _flag(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = json.dumps(value)
    return f"--{name}={value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"


def stream(url: str, body: dict[str, Any], *, path: str = "/v1/completions") -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer as they arrive, up to [DONE].

    Raises:
        httpx.HTTPError: the connection broke.
        EngineError: the answer is an error, or ended without [DONE].
    """
    with open_stream("POST", url + path, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise EngineError(f"{answer.status_code}: {answer.read().decode(errors='replace')[:500]}")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise EngineError(str(chunk["error"]))
                yield chunk
    raise EngineError("the stream ended without [DONE]")


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until `condition()` is true. Raise EngineError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise EngineError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(0.005)


def send_signal(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def no_log() -> Iterator[None]:
    """Keep the client's warnings of deaths, which are intended here, from the terminal."""
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def no_core_dumps() -> Iterator[None]:
    """Let processes that start meanwhile leave no core file, which would hold the whole model."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
