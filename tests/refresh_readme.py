"""Runs the console blocks of README.md and writes their real outputs below them: `make readme`."""

import re
import subprocess
from pathlib import Path

import httpx

from tests.test_readme import BIN, wait_until_healthy

README = Path(__file__).parent.parent / "README.md"
URL = "http://127.0.0.1:8000"


def refresh_block(match: re.Match[str]) -> str:
    """The block with the same commands and what they print today."""
    lines, servers = [], []
    try:
        for command in (line for line in match[1].splitlines() if line.startswith("$ ")):
            lines += [command, *output_of(command[2:], servers)]
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    return "```console\n" + "\n".join(lines) + "\n```"


def output_of(command: str, servers: list[subprocess.Popen[str]]) -> list[str]:
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "100"}
    if command.endswith("&"):
        words = command.removesuffix("&").split()
        server = subprocess.Popen([str(BIN / words[0]), *words[1:]], stdout=subprocess.PIPE, text=True, env=environment)
        servers.append(server)
        wait_until_healthy(f"{URL}/health")
        return [server.stdout.readline().rstrip()] if server.stdout else []
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True, env=environment)
    return [line.rstrip() for line in done.stdout.rstrip().splitlines()]


def main() -> None:
    try:
        httpx.get(URL)
    except httpx.TransportError:
        text = README.read_text(encoding="utf-8")
        README.write_text(re.sub(r"```console\n(.*?)```", refresh_block, text, flags=re.DOTALL), encoding="utf-8")
    else:
        raise SystemExit("something listens on port 8000, which the README's server needs")


if __name__ == "__main__":
    main()
