"""Child processes of any kind (engines, text processes, ranks): start them, and see whether they make progress.

Each dies with the process that started it (child_main.py). Its Effort tells slow from stuck: a process that is stopped
or in a deadlock uses no processor time, reads nothing, and waits for neither a core nor a disk. A slow process does at
least one of these. All figures are read from /proc, so another process can see them.
"""

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

Process = subprocess.Popen[bytes]
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MIN_EFFORT_S = 0.005  # processor time that counts as progress; heartbeats alone take less
WAITING = ("R", "D")  # states in /proc: running or waiting for a core, waiting for a disk
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_elsewhere: "list[weakref.WeakMethod[Callable[[], float]]]" = []
_started: weakref.WeakSet[Process] = weakref.WeakSet()
_starters: dict[int, "_Starter"] = {}  # by process id, because a forked process needs a thread of its own


def spawn(module: str, words: Sequence[str], *, inherited: Sequence[int], stdout: int) -> Process:
    """Run `module.main(words)` in a new process. Raise OSError if it cannot be started.

    Args:
        inherited: file descriptors that the process inherits.
        stdout: where its standard output goes, because this process's own belongs to the user's program.
    """
    # -P keeps the current directory off the path, so that the child does not import a queue.py from there.
    command = [sys.executable, "-P", "-m", "penstock.ranks.child_main", str(os.getpid()), module, *words]

    def run() -> Process:
        return subprocess.Popen(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, env=_environment()
        )

    process = _starter().start_process(run)
    _started.add(process)
    return process


def spawn_connected(
    module: str, words: Sequence[str] = (), *, inherited: Sequence[int] = (), stdout: int
) -> tuple[socket.socket, Process]:
    """Run `module.main` as `spawn` does. Its first word is the descriptor of its end of a connection; return ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            number = theirs.fileno()
            return ours, spawn(module, [str(number), *words], inherited=[number, *inherited], stdout=stdout)
        except OSError:
            ours.close()
            raise


def children() -> list[int]:
    """List the ids of the processes that were started here and are not known to have ended."""
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
        """Call run() in the thread. Return its result, or raise what it raises."""
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
    """Copy this process's environment, with PYTHONPATH set if the package is not installed (in a checkout).

    Torch's threads sleep while they wait, as in the process of an engine (assembly/__init__.py).
    """
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return environment
    known = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}


@dataclass(frozen=True, slots=True)
class Effort:
    """The work that some processes have done so far.

    Attributes:
        cpu_s: seconds of processor time.
        reads: bytes read from disks, and page faults that needed a disk.
        is_waiting: whether at this moment one of the main threads runs, or waits for a core or a disk.
    """

    cpu_s: float
    reads: int
    is_waiting: bool = False

    @classmethod
    def of(cls, process_ids: Iterable[int]) -> "Effort":
        """Measure the effort of these processes together; processes that have ended are left out."""
        ticks = reads = 0
        is_waiting = False
        for process_id in process_ids:
            with suppress(OSError):
                files = Path(f"/proc/{process_id}")
                fields = (files / "stat").read_text().rpartition(")")[2].split()  # starts with field 3 of proc(5)
                is_waiting |= fields[0] in WAITING
                reads += int(fields[9])
                ticks += int(fields[11]) + int(fields[12])
                reads += _bytes_read(files / "io")
        return cls(ticks / TICKS_PER_S, reads, is_waiting)

    @classmethod
    def so_far(cls) -> "Effort":
        """Measure the effort of this process and of the processes that it has started, here and on other machines."""
        here = cls.of([os.getpid(), *children()])
        elsewhere = [cpu_s() for item in _elsewhere if (cpu_s := item()) is not None]
        return replace(here, cpu_s=here.cpu_s + sum(elsewhere))

    def exceeds(self, earlier: "Effort") -> bool:
        """Check for progress since `earlier`; if only the machine prevents it, that counts too."""
        return self.is_waiting or self.cpu_s - earlier.cpu_s > MIN_EFFORT_S or self.reads > earlier.reads


def count_elsewhere(cpu_s: Callable[[], float]) -> None:
    """Make `so_far` add this method's processor time of processes elsewhere, as long as the method's object lives."""
    _elsewhere.append(weakref.WeakMethod(cpu_s))


def _bytes_read(counters: Path) -> int:
    """Read the count of bytes read from disks; 0 if the system does not report it."""
    with suppress(OSError):
        lines = counters.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
    return 0
