"""EngineChild: the engine process as a thing to start, to talk to and to end. It knows no frame and no request."""

import asyncio
import os
import socket
import subprocess
import sys
import time

EXIT_WAIT_S = 5.0  # for the process to end by itself once the connection is closed
STDERR = 2  # what the engine prints goes where our own messages go; our standard output is the user's
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class EngineChild:
    """A running engine process and our end of its connection.

    Raises OSError where no process can be started.
    """

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # -P keeps the current directory off the path: a queue.py lying there must not become the engine's.
        command = [sys.executable, "-P", "-m", "penstock.client.engine_process", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=STDERR, env=_environment()
            )
        except OSError:
            self.sock.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int | None:
        """None once it has ended."""
        return self._process.pid if self._process.poll() is None else None

    def hang_up(self) -> None:
        """Close our end. The process ends itself then, even in the middle of a step."""
        self.sock.close()

    async def wait(self) -> int:
        """Its exit code; after EXIT_WAIT_S it is killed."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(0.005)
        return code


def _environment() -> dict[str, str]:
    """Ours, and the way to this very package where Python would not find it by itself (a checkout, not installed)."""
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}
