"""A Hugging Face hub on this machine, with the routes that huggingface_hub uses for models.

GET /api/models/OWNER/NAME[?blobs=true]         what the repository is, and its files
GET /api/models/OWNER/NAME/revision/main        the same
GET /api/models/OWNER/NAME/tree/COMMIT          its files
HEAD, GET /OWNER/NAME/resolve/COMMIT/FILE       a file, or a part of it
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

SMALL = 2**20  # bytes; the hub keeps larger files by the SHA-256 of their content
COMMIT = "c0ffee" + "0" * 34
CHUNK = 2**14


@dataclass
class FakeHub:
    """The repositories, what is refused, and what was asked for.

    Attributes:
        repositories: folder of the files of each OWNER/NAME.
        token: the only token that is accepted; None accepts everybody.
        gated: repositories whose conditions the account has not accepted.
        break_after: the connection of a large file breaks after so many bytes, `breaks` times.
        served: (path, first byte) of every file that was sent.
    """

    repositories: dict[str, Path]
    token: str | None = None
    gated: tuple[str, ...] = ()
    break_after: int = 0
    breaks: int = 0
    served: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def files(self, name: str) -> dict[str, bytes]:
        folder = self.repositories[name]
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry(name: str, content: bytes) -> dict[str, Any]:
    """Describe a file as both lists do."""
    digest, size = hashlib.sha256(content).hexdigest(), len(content)
    git = hashlib.sha1(content).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": name, "rfilename": name, "size": size, "oid": git, "blobId": git}
    if size > SMALL:
        found["lfs"] = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 134}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[FakeHub]

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main|/tree/\w+)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        name = (listing or file or [None, ""])[1]
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.hub.token is not None and given and given != self.hub.token:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif name not in self.hub.repositories or (self.hub.token is not None and not given):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif name in self.hub.gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif listing:
            entries = [entry(*item) for item in self.hub.files(name).items()]
            about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": entries, "tags": [], "private": False}
            self._send(json.dumps(entries if "/tree/" in path else about).encode(), "application/json")
        elif (content := self.hub.files(name).get(file[2])) is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            self._send_file(file[2], content)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, content: bytes) -> None:
        known = entry(name, content)
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{known["lfs"]["oid"] if "lfs" in known else known["oid"]}"')
        self.send_header("Content-Length", str(len(content) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.served.append((name, begin))
        body = content[begin:]
        if "lfs" in known and self.hub.breaks:
            self.hub.breaks -= 1
            body, self.close_connection = body[: self.hub.break_after], True
        with suppress(OSError):  # the client has gone away
            for start in range(0, len(body), CHUNK):
                self.wfile.write(body[start : start + CHUNK])


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    """Serve these repositories on a free port."""
    hub = FakeHub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ItsHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
