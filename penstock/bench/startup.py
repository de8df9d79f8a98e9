"""Start-up times: `penstock --version`, and from process start to /health 200 with the demo model.

python -m penstock.bench.startup
"""

import contextlib
import statistics
import subprocess
import sys
import time
import urllib.request

REPEATS = 5
TIMEOUT_S = 60.0


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
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""
        url = next((word for word in line.split() if word.startswith("http://")), None)
        while url is not None and time.perf_counter() - started < TIMEOUT_S:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return time.perf_counter() - started
            time.sleep(0.005)
        raise TimeoutError(f"the server did not become healthy; its first line was {line!r}")
    finally:
        server.terminate()
        server.wait()
        if server.stdout:
            server.stdout.close()


def main() -> int:
    for name, measure in (("penstock --version", time_version), ("serve demo until /health is 200", time_health)):
        times = [measure() for _ in range(REPEATS)]
        print(f"{name}: median {statistics.median(times):.3f} s, best {min(times):.3f} s of {REPEATS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
