"""The server's log on standard error, when nobody reads it."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.server.serve import MAX_LINES, BackgroundLog
from tests.server.harness import WAIT_S, get, stream, wait_until

ROOT = Path(__file__).parents[2]
PIPE_BYTES = 4096
PROGRAM = """
import sys
from penstock.server.options import ServerOptions
from penstock.server.serve import run
from tests.server.fakes import Behaviour, FakeEngineClient
sys.exit(run(FakeEngineClient(Behaviour(text="Hello")), ServerOptions(port=0)))
"""


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("penstock", logging.INFO, __file__, 1, text, None, None)


def test_lines_that_nobody_reads_are_counted() -> None:
    """Guards against a log that blocks its caller once the pipe is full, and against lines that are missing without a
    word."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writes, b"\n".rjust(PIPE_BYTES))  # so that nothing else finds room
    log = BackgroundLog(writes)
    num_lines = MAX_LINES + 9
    for number in range(num_lines):
        log.handle(record(f"line {number}"))
        if number == 0:
            wait_until(log._waiting.empty)  # its thread has taken the line, and waits for the reader
    with open(reads) as reader:
        reader.readline()
        first = [reader.readline() for _ in range(MAX_LINES // 2)]  # now there is room in the queue
        log.handle(record("the last"))
        lines = []
        while not lines or not lines[-1].endswith("the last\n"):
            lines.append(reader.readline())
    kept = [line.split()[-1] for line in first + lines[:-2]]
    assert kept == [str(number) for number in range(MAX_LINES + 1)]
    assert lines[-2] == f"log lines dropped here, because standard error was not read: {num_lines - len(kept)}\n"
    os.close(writes)


def test_a_server_goes_on_when_its_log_is_not_read() -> None:
    """Guards against `penstock serve 2>&1 | a program that stalls`: once the pipe was full, every stream stood still,
    and SIGTERM had no effect."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    program = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=writes, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[5]
            for _ in range(2 * PIPE_BYTES // 80):  # each leaves a line of about 80 characters or more
                assert get(f"{url}/v1/models").status_code == 200
            with stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
                assert "data: [DONE]" in list(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            os.close(reads)
            os.close(writes)
