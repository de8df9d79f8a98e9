"""The state of a server at one moment, seen from outside: requests, blocks, open files, memory."""

import contextlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from penstock_lab.prove.servers import CLIENT_TIMEOUT_S, QUICK


@dataclass(frozen=True, slots=True)
class Level:
    """The quantities that must return to their former values.

    Attributes:
        open_files: a description of each file descriptor of both processes, if the system has /proc.
    """

    engine_pid: int | None
    restarts: int
    open_requests: int
    used_blocks: int
    open_files: tuple[str, ...]

    def problem(self, before: "Level", *, same_engine: bool = True) -> str | None:
        """Describe what has changed from `before`; None if nothing has."""
        if same_engine and (self.engine_pid, self.restarts) != (before.engine_pid, before.restarts):
            return f"the engine died ({self.restarts - before.restarts} restarts)"
        for name in ("open_requests", "used_blocks"):
            if getattr(self, name) > getattr(before, name):
                return f"{name}: {getattr(self, name)} instead of {getattr(before, name)}"
        if len(self.open_files) > len(before.open_files):
            new = ", ".join(Counter(self.open_files) - Counter(before.open_files))
            return f"open files: {len(self.open_files)} instead of {len(before.open_files)}; new are {new}"
        return None


def level_of(http: httpx.Client, server_pid: int) -> Level:
    """Read a server's level, most of it from /status."""
    with http.stream("GET", "/status") as answer:
        connection = answer.extensions["network_stream"].get_extra_info("socket").dup()
        status = json.loads(answer.read())
    with connection:
        connection.recv(1)  # wait until the server has closed its end, which would count as an open file
    engine, blocks = status["engine"], status["kv_blocks"]
    return Level(
        engine_pid=engine["pid"],
        restarts=engine["restarts"],
        open_requests=status["running"] + status["waiting"] + status["journal"]["requests"],
        used_blocks=blocks["total"] - blocks["free"] - blocks["pinned"],
        open_files=(*open_files("server", server_pid), *open_files("engine", engine["pid"])),
    )


def quick_client(url: str, key: str, timeout_s: float = CLIENT_TIMEOUT_S) -> httpx.Client:
    """Make an HTTP client that has the key, opens a connection for each request, and loads no certificates."""
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, **QUICK)


def memory_bytes(pid: int) -> int:
    """Read the resident memory of a process; 0 if the system has no /proc."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def open_files(process: str, pid: int | None) -> list[str]:
    """Describe each file descriptor of a process, with its name; empty if there is no /proc."""
    found = []
    with contextlib.suppress(OSError):
        connections = _tcp_connections(pid)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                link = os.readlink(descriptor)
                found.append(f"{process}'s {connections.get(link, link)}")
    return found


def _tcp_connections(pid: int | None) -> dict[str, str]:
    """Map the name in /proc/PID/fd of each TCP socket to the two ports that it connects."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = {row[9]: [int(end.rpartition(":")[2], 16) for end in row[1:3]] for row in rows}
    return {f"socket:[{inode}]": f"TCP socket, port {ours} to {theirs}" for inode, (ours, theirs) in ports.items()}
