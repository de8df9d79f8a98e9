"""Start child processes: engines, text processes, ranks. Each dies with the process that started it (child_main.py)."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

Process = subprocess.Popen[bytes]
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_started: weakref.WeakSet[Process] = weakref.WeakSet()
_starters: dict[int, "_Starter"] = {}  # by process id, because a forked process needs a thread of its own


def spawn(module: str, words: Sequence[str], *, inherited: Sequence[int], stdout: int) -> Process:
    """Run `module.main(words)` in a new process. Raise OSError if it cannot be started.

    Args:
        inherited: file descriptors that the process inherits.
        stdout: where its standard output goes, because this process's own belongs to the user's program.
    """
    # -P keeps the current directory off the path, so that the child does not import a queue.py from there.
    command = [sys.executable, "-P", "-m", "penstock.parallel.child_main", str(os.getpid()), module, *words]

    def run() -> Process:
        return subprocess.Popen(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, env=_environment()
        )

    process = _starter().start_process(run)
    _started.add(process)
    return process


def children() -> list[int]:
    """Return the ids of the processes that were started here and are not known to have ended."""
    return [process.pid for process in list(_started) if process.returncode is None]


class _Starter:
    """A thread that starts processes and lives as long as this process.

    Children die with the thread that started them, and a user's thread may end early. An executor's thread would end
    before the functions of `atexit` run, and these may still use an engine, or take a while.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Process], Future[Process]]] = SimpleQueue()
        threading.Thread(target=self._run, name="starter of processes", daemon=True).start()

    def start_process(self, run: Callable[[], Process]) -> Process:
        """Return what run() returns in the thread, or raise what it raises."""
        result: Future[Process] = Future()
        self._waiting.put((run, result))
        return result.result()

    def _run(self) -> None:
        while True:
            run, result = self._waiting.get()
            try:
                result.set_result(run())
            except Exception as error:
                result.set_exception(error)
            del run, result  # or the process would count as one of `children` until the next one starts


def _starter() -> _Starter:
    starter = _starters.get(os.getpid())
    return _starters.setdefault(os.getpid(), _Starter()) if starter is None else starter


def _environment() -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH set if the package is not installed (in a checkout)."""
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}
