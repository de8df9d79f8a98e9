"""Measure start-up: `penstock --version`, and `penstock serve demo` until /health answers 200.

python -m penstock.bench.startup
"""

import contextlib
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import IO, cast

REPEATS = 5
TIMEOUT_S = 60.0


@contextlib.contextmanager
def python_process(*arguments: str, stderr: int | None = None) -> Iterator[IO[str]]:
    """Run this Python in a new process, yield the process's standard output, and terminate it at the end."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield cast(IO[str], process.stdout)
        finally:
            process.terminate()


def time_version() -> float:
    """Return the seconds that `penstock --version` takes."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "penstock", "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_health() -> float:
    """Return the seconds from process start until /health answers 200.

    Raises:
        TimeoutError: it took longer than TIMEOUT_S.
    """
    started = time.perf_counter()
    with python_process("-m", "penstock", "serve", "demo", "--port", "0", stderr=subprocess.DEVNULL) as output:
        line = output.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        while url is not None and time.perf_counter() - started < TIMEOUT_S:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return time.perf_counter() - started
            time.sleep(0.005)
        raise TimeoutError(f"the server did not become healthy; the first line it printed was {line!r}")


def main() -> int:
    for name, measure in (("penstock --version", time_version), ("serve demo until /health is 200", time_health)):
        times = [measure() for _ in range(REPEATS)]
        print(f"{name}: median {statistics.median(times):.3f} s, best {min(times):.3f} s of {REPEATS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
