"""Every command and program of README.md runs as it stands there (the port aside)."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import support_matrix
from tests.families.case import all_cases

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(console|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line[2:] for kind, text in BLOCKS if kind == "console" for line in text.splitlines() if line[:2] == "$ "]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
BIN = Path(sys.executable).parent


def run(command: str) -> subprocess.CompletedProcess:
    environment = {"PATH": f"{BIN}:/usr/bin:/bin"}
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100, env=environment)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The README's server, on a free port."""
    (command,) = [line for line in COMMANDS if line.endswith("&")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    words = command.removesuffix("&").replace("8000", str(number)).split()
    server = subprocess.Popen([str(BIN / words[0]), *words[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(f"http://127.0.0.1:{number}/health")
        yield number
    finally:
        server.terminate()
        server.wait()


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not become healthy")


def test_there_is_something_to_run():
    assert len(COMMANDS) >= 3
    assert len(PROGRAMS) >= 3


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.endswith("&")])
def test_command(command, port):
    done = run(command.replace("8000", str(port)))
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).strip()  # `convert` reports on stderr, like every progress line
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, port):
    done = subprocess.run(
        [sys.executable, "-c", program.replace("8000", str(port))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target


def test_the_support_matrix_is_that_of_the_tests():
    """Guards against a cell by hand, and against a family that is missing: the table has exactly the architectures and
    cells that the tests define, and says of each that it passed when `make matrix` wrote it."""
    assert support_matrix.written() == support_matrix.table(support_matrix.defined(), all_cases())
