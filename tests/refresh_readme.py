"""Run the console blocks of README.md and docs/, and write their real outputs below them: `make readme`.

`python -m tests.refresh_readme PAGE ...` does so for these pages only.
"""

import re
import sys
import tempfile
from pathlib import Path

import httpx

from tests.pages import CONSOLE, NOT_RUN, PAGES, ROOT, SERVE, URL, run, start_server, stop

MAX_LINES = 40  # of an output; the rest is left out, with a line of three dots


def refreshed(page: str, home: Path, at: Path) -> str:
    """Return the text of a page with today's outputs of its commands, run in the folder `at`."""
    if not CONSOLE.search(NOT_RUN.sub("", page)):
        return page
    pieces, end = [], 0
    server, announced = start_server(8000, home) if f"$ {SERVE}" in page else (None, "")
    try:
        for left_alone in [*NOT_RUN.finditer(page), None]:
            start = left_alone.start() if left_alone else len(page)
            pieces.append(CONSOLE.sub(lambda match: refreshed_block(match, announced, home, at), page[end:start]))
            end = left_alone.end() if left_alone else start
            pieces.append(page[start:end])
    finally:
        if server is not None:
            stop(server)
    return "".join(pieces)


def refreshed_block(match: re.Match[str], announced: str, home: Path, at: Path) -> str:
    """Return the block with the same commands and what they print today."""
    lines = []
    for line in match[1].splitlines():
        if line.startswith("$ "):
            lines += [line, *output_of(line[2:], announced, home, at)]
    return "```console\n" + "\n".join(lines) + "\n```"


def output_of(command: str, announced: str, home: Path, at: Path) -> list[str]:
    """Return the lines that a command prints on standard output; `announced` is the one of the pages' server.

    Raises:
        SystemExit: the command fails.
    """
    if command == SERVE:
        return [announced]
    done = run(command, home, at)
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], "..."]


def main(pages: list[Path]) -> None:
    try:
        httpx.get(URL)
    except httpx.TransportError:
        with tempfile.TemporaryDirectory() as home:  # of all pages: docs/checking.md writes what docs/serving.md shows
            for page in pages:
                text = page.read_text(encoding="utf-8")
                at = ROOT if page.name == "request.md" else Path(tempfile.mkdtemp(dir=home))
                page.write_text(refreshed(text, Path(home), at), encoding="utf-8")
    else:
        raise SystemExit("port 8000, which the pages' server needs, is in use")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or PAGES)
