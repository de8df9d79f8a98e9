"""The service manager's side: readiness, reload, watchdog and stop as datagrams, and the unit file."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server import serve
from tests.server.harness import WAIT_S

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from penstock.server.options import ServerOptions
from penstock.server.serve import run
from tests.server.fakes import FakeEngineClient
sys.exit(run(FakeEngineClient(), ServerOptions(port=0, api_key_file=sys.argv[1])))
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket that systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(WAIT_S)
        yield sock


def test_the_whole_life_is_told(manager: socket.socket, tmp_path: Path) -> None:
    """Guards against a unit that never becomes active, is killed by its watchdog, or does not finish its reload."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkey = "sk-0123456789abcdef"\n')
    environment = os.environ | {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "400000"}
    program = [sys.executable, "-c", PROGRAM, str(keys)]
    with subprocess.Popen(program, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            seen = [heard(manager)]
            while seen.count("WATCHDOG=1") < 3:
                seen.append(heard(manager))
            assert [state for state in seen if state != "WATCHDOG=1"] == ["READY=1"]
            for number, expected in ((signal.SIGHUP, ["RELOADING=1", "READY=1"]), (signal.SIGTERM, ["STOPPING=1"])):
                os.kill(process.pid, number)
                states = (state for state in iter(lambda: heard(manager), None) if state != "WATCHDOG=1")
                assert [next(states) for _ in expected] == expected
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def heard(manager: socket.socket) -> str:
    """The first line of the next datagram."""
    return manager.recv(4096).decode().partition("\n")[0]


def test_an_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name that begins with @, which containers are given."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0penstock-{os.getpid()}")
        sock.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@penstock-{os.getpid()}")
        serve.notify_reloading()
        assert sock.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "relative", "@gone"])
def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Guards against a server that dies because nobody listens."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    serve.notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [("", "", None), ("0", "", None), ("4000000", "", 2.0), ("4000000", "1", None), ("x", "", None)],
)
def test_watchdog_interval(monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, expected: float | None) -> None:
    """Guards against answering another process's watchdog, and against coming too late for one's own."""
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert serve.watchdog_interval_s() == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_file_is_right(tmp_path: Path) -> None:
    """Guards against a misspelt setting, which systemd ignores, and a flag that the command does not have."""
    text = (ROOT / "deploy" / "penstock.service").read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart=")).split()[1:]
    known = subprocess.run([sys.executable, "-m", "penstock", "serve", "--help"], capture_output=True, text=True)
    assert all(word in known.stdout for word in command if word.startswith("--"))
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", sys.executable))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
