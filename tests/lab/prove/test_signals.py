"""A proof that is told to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_proof_that_is_told_to_end_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Guards against a proof that waits for its threads, and against servers and files that it leaves behind."""
    command = [sys.executable, "-m", "penstock", "prove", "--only", "tenants"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as process:
        try:
            while not any("serve" in line for line in _command_lines(tmp_path)):
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(10) == 128 + number
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read().startswith(b"tenants: 0 of ")
    assert _command_lines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _command_lines(folder: Path) -> list[str]:
    """List the command lines of all processes that name the folder."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text())
        except OSError:  # it has just ended
            continue
    return [line for line in lines if str(folder) in line]
