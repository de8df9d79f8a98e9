"""Ask a server on this machine for /health, at the address that its own options name. Exit code 0: it is healthy.

    python healthcheck.py [PID]        the process id of `penstock serve`; 1, the first of a container, if left out

The options come from the process's command line, environment and file, as the server read them, so that a changed port,
a Unix socket and HTTPS need no second place.
"""

import os
import socket
import ssl
import sys
from pathlib import Path

from penstock.cli.main import build_parser, dashed
from penstock.cli.options import given_fields
from penstock.server.options import ServerOptions

TIMEOUT_S = 8.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def options_of(pid: str) -> ServerOptions:
    for item in Path(f"/proc/{pid}/environ").read_text().split("\0"):
        name, _, value = item.partition("=")
        if name.startswith("PENSTOCK_"):
            os.environ[name] = value
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    words = dashed(words[words.index("serve") :])
    return ServerOptions(**given_fields(build_parser(words).parse_args(words), ServerOptions))


def connect(options: ServerOptions) -> socket.socket:
    if options.uds is not None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        sock.connect(options.uds)
    else:
        sock = socket.create_connection((EVERYWHERE.get(options.host, options.host), options.port), TIMEOUT_S)
    if options.ssl_certfile is None:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this machine, under another name
    return context.wrap_socket(sock)


def main() -> int:
    options = options_of(sys.argv[1] if len(sys.argv) > 1 else "1")
    with connect(options) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    print(answer.decode(errors="replace").replace("\r", ""))
    return 0 if answer.startswith(b"HTTP/1.1 200 ") else 1


if __name__ == "__main__":
    sys.exit(main())
