"""Start child processes: engines, text processes, ranks. Each dies with the process that started it (child_main.py)."""

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_started: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()
_starters: dict[int, ThreadPoolExecutor] = {}  # by process id, because a forked process needs a thread of its own


def spawn(module: str, words: Sequence[str], *, inherited: Sequence[int], stdout: int) -> "subprocess.Popen[bytes]":
    """Run `module.main(words)` in a new process. Raise OSError if it cannot be started.

    Args:
        inherited: file descriptors that the process inherits.
        stdout: where its standard output goes, because this process's own belongs to the user's program.
    """
    # -P keeps the current directory off the path, so that the child does not import a queue.py from there.
    command = [sys.executable, "-P", "-m", "penstock.parallel.child_main", str(os.getpid()), module, *words]

    def run() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, env=_environment()
        )

    process = _starter().submit(run).result()
    _started.add(process)
    return process


def children() -> list[int]:
    """Return the ids of the processes that were started here and are not known to have ended."""
    return [process.pid for process in list(_started) if process.returncode is None]


def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts processes and lives as long as this process. Children die with the thread that
    started them, and a user's thread may end early."""
    return _starters.setdefault(os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="starter of processes"))


def _environment() -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH set if the package is not installed (in a checkout)."""
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}
