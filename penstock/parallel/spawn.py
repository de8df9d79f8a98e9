"""Starts child processes: engines, what tokenises, ranks. Each dies with the one that started it (child_main.py)."""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_started: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()
_elsewhere: "list[weakref.WeakMethod[Callable[[], float]]]" = []
_starters: dict[int, ThreadPoolExecutor] = {}  # by process id: a process that was forked needs a thread of its own


def spawn(module: str, words: Sequence[str], *, inherited: Sequence[int], stdout: int) -> "subprocess.Popen[bytes]":
    """Run `module.main(words)` in a new process. Raise OSError if none can be started.

    Args:
        inherited: file descriptors that the process shares.
        stdout: where its standard output goes; that belongs to the user's program.
    """
    # -P keeps the current directory off the path: a queue.py there must not become the child's.
    command = [sys.executable, "-P", "-m", "penstock.parallel.child_main", str(os.getpid()), module, *words]

    def run() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, env=_environment()
        )

    process = _starter().submit(run).result()
    _started.add(process)
    return process


def count_effort(effort_s: Callable[[], float]) -> None:
    """Have children_cpu_s add what processes on other machines have taken, as long as the method's object lives."""
    _elsewhere.append(weakref.WeakMethod(effort_s))


def children_cpu_s() -> float:
    """Return the seconds of processor time that the processes started here, and still running, have taken."""
    ticks = 0
    for process in list(_started):
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    elsewhere = [effort_s() for item in _elsewhere if (effort_s := item()) is not None]
    return ticks / os.sysconf("SC_CLK_TCK") + sum(elsewhere)


def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts processes, and lives as long as this one: they die with the thread that started
    them, and a user's may end early."""
    return _starters.setdefault(os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="starter of processes"))


def _environment() -> dict[str, str]:
    """Return our environment, with PYTHONPATH set where the package is not installed (a checkout)."""
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}
