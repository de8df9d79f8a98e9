"""Bytes that are not proper HTTP: endless heads, ambiguous framing, odd request lines."""

from penstock_lab.prove.attacks.attack import COMPLETION, KEY, Attack, Call, Calls, Wire, head, post

CHUNKED = "Transfer-Encoding: chunked"
CLOSE = "Connection: close"
CLOSED = 0  # the connection may end without an answer, because more was sent than was read


def get(path: str, *lines: str, host: str = "localhost") -> bytes:
    return head(CLOSE, *lines, request=f"GET {path} HTTP/1.1", host=host)


HEADS: tuple[Attack, ...] = (
    Wire(
        "heads without end (CVE-2025-48956)",
        [
            get("/health", *["X: y"] * 10_000),
            get("/health", "X: " + "y" * 10_000_000),
            get("/health?" + "y" * 65_536),
            get("/" + "y" * 1_000_000),
            b"GET /health HTTP/1.1\r\n" + b"X" * 1_000_000,
            b"X" * 1_000_000,
        ],
        (431, 414, 400, CLOSED),
    ),
    Wire("trailers without end", [head(CHUNKED) + b"2\r\n{}\r\n0\r\n" + b"X-Filler: y\r\n" * 300_000],
         (431, 400, CLOSED)),
    Wire("a trailer that is a key", [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer "
        + KEY.encode() + b"\r\n\r\n"
    ], (401,)),
    Wire("a gigabyte announced", [head("Content-Length: 1000000000", CLOSE), head(f"Content-Length: {10**30}", CLOSE)],
         (413, 400)),
    Calls("a gigabyte in pieces", [Call(lambda: (b" " * 1_000_000 for _ in range(100)), (413,))]),
    Wire("garbage", [bytes(range(256)) * 100, b"\x16\x03\x01\x00\x05hello", b"\x00" * 10_000, b"\r\n" * 1000 + b"x",
                     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"], (400, CLOSED)),
    Wire("a protocol to change to", [get("/health", "Upgrade: websocket", "Connection: Upgrade"),
                                     get("/health", "Upgrade: h2c", "HTTP2-Settings: AA")], (200, 400)),
    Wire("ranges (CVE-2025-62727)", [get("/", "Range: bytes=" + ",".join(f"{i}-" for i in range(9000)))], (200, 431)),
)  # fmt: skip

SMUGGLING: tuple[Attack, ...] = (
    Wire(
        "framing that two readers read differently (CVE-2025-43859)",
        [
            head("Content-Length: 5", CHUNKED) + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            head(CHUNKED, "Content-Length: 5") + b"0\r\n\r\n",
            head("Content-Length: 2", "Content-Length: 3") + b"{}",
            head("Content-Length: 2, 2") + b"{}",
            head("Content-Length: -1"),
            head("Content-Length: +2") + b"{}",
            head("Content-Length: 0x2") + b"{}",
            head("Content-Length: 2 2") + b"{}",
            head("Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
            head("Transfer-Encoding: identity") + b"0\r\n\r\n",
            head("Transfer-Encoding: xchunked") + b"0\r\n\r\n",
            head("Transfer-Encoding : chunked") + b"0\r\n\r\n",
            head("Transfer-Encoding: chunked\r\n folded: x") + b"0\r\n\r\n",
            head("X: a\r\n b"),
            head("X: a\rb"),
            head("X: a\nY: b\x00"),
            head("X y: z"),
            head(": empty"),
            head("no colon"),
        ],
        (400,),
    ),
    Wire(
        "chunks that are none",
        [
            head(CHUNKED) + b"ZZ\r\n{}\r\n0\r\n\r\n",
            head(CHUNKED) + b"-1\r\n{}\r\n0\r\n\r\n",
            head(CHUNKED) + b"ffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
            head(CHUNKED) + b"2\r\n{}XX0\r\n\r\n",
            head(CHUNKED) + b"2 \x00\r\n{}\r\n0\r\n\r\n",
            head(CHUNKED) + b"2\n{}\n0\n\n",
        ],
        (400,),
    ),
    Wire("extensions of chunks without end", [head(CHUNKED) + b"2;" + b"x" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n"],
         (400, 431, CLOSED)),
    Wire(
        "no Host, two, or an older version's framing",
        [
            b"GET /health HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n",
            b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n",
        ],
    ),
    Wire("requests behind one that is refused", [
        head("Content-Length: -1") + post({**COMPLETION, "max_tokens": 1}, CLOSE),
        b"garbage\r\n\r\n" + post(COMPLETION, CLOSE),
    ]),
)  # fmt: skip

LINES: tuple[Attack, ...] = (
    Wire(
        "paths that are not there",
        [
            get(path)
            for path in ("//v1//models", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/models/", "/%00%ff%0d%0a",
                         "/v1/models/%ff%00", "/./metrics", "/health/../metrics", "/metrics/", "/METRICS")
        ],
        (404,),
    ),
    Wire(
        "request lines that are none",
        [
            head(CLOSE, request=line)
            for line in ("GET * HTTP/1.1", "OPTIONS * HTTP/1.1", "CONNECT a:1 HTTP/1.1", "GET /\xff HTTP/1.1",
                         "GET /health", "GET /health HTTP/0.9", "GET /health HTTP/1.11", "BREW /health HTTP/1.1",
                         "get /health HTTP/1.1", "GET http:// HTTP/1.1", "GET ?x HTTP/1.1")
        ],
        (400, 404, 405, CLOSED),
    ),
    Wire(
        "paths without the key, in other words (CVE-2026-48746)",
        [
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            for path, host in (
                ("/metrics?x=/health", "localhost"),
                ("/metrics#/health", "localhost"),
                ("http://localhost/metrics", "localhost"),
                ("http://elsewhere/health/../metrics", "localhost"),
                ("//metrics", "localhost"),
                ("//v1//models", "localhost"),
                ("/health/../metrics", "localhost"),
                ("/health%2f..%2fmetrics", "localhost"),
                ("/%68ealth/../metrics", "localhost"),
                ("/health;x=/metrics", "localhost"),
            )
        ],
        (401,),
    ),
    Wire(
        "hosts that a page could give this machine (DNS rebinding)",
        [
            get("/metrics", host=host)
            for host in ("a/health?x=", "localhost/health#", "evil.example", "127.0.0.1.evil.example", "x" * 5000,
                         "localhost:80@evil", "[::1]evil", "")
        ],
        (400, 403),
    ),
    Wire(
        "pages of another origin (Ollama GHSA-5jx5-hqx5-2vrj, CVE-2025-62593)",
        [
            post(COMPLETION, CLOSE, f"Origin: {origin}")
            for origin in ("http://evil.example", "null", "http://127.0.0.1:9", "")
        ]
        + [head(CLOSE, "Origin: http://evil.example", "Access-Control-Request-Method: POST",
                request="OPTIONS /v1/completions HTTP/1.1")],
        (403,),
    ),
    Wire(
        "ids that split a header or are long",
        [post(COMPLETION, CLOSE, f"X-Request-Id: {given}") for given in ("x" * 50_000, "\xe4", "a b", "%0d%0aX: y", "")]
        + [post(COMPLETION, CLOSE, "X-Request-Id: same", "X-Request-Id: other")],
        (200,),
    ),
)  # fmt: skip
