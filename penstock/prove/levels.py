"""What a server holds at one moment, seen from outside: requests, blocks, open files, memory."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import httpx

from penstock.prove.servers import CLIENT_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Level:
    """What must come back to what it was.

    Attributes:
        open_files: of both processes.
    """

    engine_pid: int | None
    restarts: int
    open_requests: int
    used_blocks: int
    open_files: int

    def problem(self, before: "Level", *, same_engine: bool = True) -> str | None:
        """Return what is not as before."""
        if same_engine and (self.engine_pid, self.restarts) != (before.engine_pid, before.restarts):
            return f"the engine died ({self.restarts - before.restarts} restarts)"
        for name in ("open_requests", "used_blocks", "open_files"):
            if getattr(self, name) > getattr(before, name):
                return f"{name}: {getattr(self, name)} instead of {getattr(before, name)}"
        return None


def level_of(http: httpx.Client, server_pid: int) -> Level:
    """Return a server's level; its /status has most of it."""
    status = http.get("/status").json()
    engine, blocks = status["engine"], status["kv_blocks"]
    return Level(
        engine_pid=engine["pid"],
        restarts=engine["restarts"],
        open_requests=status["running"] + status["waiting"] + status["journal"]["requests"],
        used_blocks=blocks["total"] - blocks["free"] - blocks["pinned"],
        open_files=open_files(server_pid) + open_files(engine["pid"]),
    )


def quick_client(url: str, key: str, timeout_s: float = CLIENT_TIMEOUT_S) -> httpx.Client:
    """Return an HTTP client that has the key, opens a connection for each request, and loads no certificates first."""
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, verify=False, trust_env=False)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 where the system has no /proc."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def open_files(pid: int | None) -> int:
    """Return the number of open files of a process; 0 where the system has no /proc."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
