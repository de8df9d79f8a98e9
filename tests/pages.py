"""The pages that users read (README.md and docs/), and what tests and `make readme` run of them.

A ``console`` block holds commands, each on a line that begins with ``$ ``, and their output; a ``python`` block is a
program, unless its first line names the file that it is (as in docs/adding_a_model.md, whose files have a test of their
own). A block below ``<!-- not run: reason -->`` is left alone.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
SERVE = "penstock serve demo --port 8000 &"  # the one server that commands and programs of a page may use
URL = "http://127.0.0.1:8000"
NOT_RUN = re.compile(r"^<!-- not run: .+? -->\n```.*?^```\n", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(?!# \w+\.py\n)(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    """Return the page's path below the repository's root."""
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Return the commands of a page that are run, in order."""
    blocks = CONSOLE.findall(NOT_RUN.sub("", page.read_text(encoding="utf-8")))
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def programs(page: Path) -> list[str]:
    """Return the Python programs of a page, in order."""
    return PYTHON.findall(NOT_RUN.sub("", page.read_text(encoding="utf-8")))


def environment(home: Path) -> dict[str, str]:
    """Return the variables of an activated environment: nothing is read from or written to the tester's own home."""
    return {"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "100", "HOME": str(home)}


def run(command: str, home: Path, at: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a shell command as a user with that home would, in the folder `at`, which is home if it is not given."""
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=at or home, env=environment(home), check=False
    )


def start_server(port: int, home: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the pages' server on that port, 0 for a free one; return it when it is ready, and the line that it printed.

    Raises:
        AssertionError: it ended instead.
    """
    words = SERVE.removesuffix("&").replace("8000", str(port)).split()
    command = [str(BIN / words[0]), *words[1:]]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(home)
    )
    assert server.stdout is not None
    line = server.stdout.readline().rstrip()
    if not line:
        stop(server)
        raise AssertionError(f"the server ended: exit code {server.returncode}")
    return server, line


@contextmanager
def serving() -> Iterator[int]:
    """Serve on a free port, which is yielded: the server's own choice, which nobody else can take first."""
    with tempfile.TemporaryDirectory() as home:
        server, line = start_server(0, Path(home))
        try:
            yield int(line.partition("http://127.0.0.1:")[2].split()[0])
        finally:
            stop(server)


def stop(server: subprocess.Popen[str]) -> None:
    """End the server and wait for it."""
    server.terminate()
    server.wait()
    if server.stdout is not None:
        server.stdout.close()
