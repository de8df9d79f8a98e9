"""ServerOptions: the one table of the HTTP server's options, checked when they are made. Engine options are in config.

A field states its default, the values it allows and, if it is a flag of `penstock serve`, its help text.
"""

import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import (
    LOG_LEVELS,
    Interval,
    check_options,
    check_str,
    fail,
    invalid,
    option,
    string_tuple,
)
from penstock.interface.files import open_regular
from penstock.server.keys import read_key_file
from penstock.tokenizer.answer_formats import format_of, parser_names
from penstock.tokenizer.template_variables import check_template_kwargs

MIB = 1 << 20
SECONDS = Interval(0.0, 86400.0, low_open=True)
DEFAULT_KWARGS = "default_chat_template_kwargs"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as written in the Host header
METRICS_NAMES = ("penstock", "vllm")
MAX_SOCKET_PATH = 107  # bytes, as the system limits it


def _names(name: str, value: Any) -> tuple[str, ...]:
    return string_tuple(name, value, max_items=64, max_length=1024)


def _some_names(name: str, value: Any) -> tuple[str, ...]:
    names = _names(name, value)
    if not names:
        raise fail(name, names, "null or at least one name")
    return names


def _key(name: str, value: Any) -> str:
    check_str(name, value)
    if not (value.isascii() and value.isprintable()):
        raise invalid(name, "only printable ASCII characters can be sent in a header")
    return str(value)


def _parser(name: str, value: Any) -> str:
    check_str(name, value)
    if value not in ("auto", "none") and format_of(name, "", value) is None:
        names = ", ".join(("auto", "none", *parser_names(name)))
        raise fail(name, value, f"{names}, or a file (.toml or .py) with a parser of your own")
    return str(value)


def _key_file(name: str, value: Any) -> str:

    check_str(name, value)
    read_key_file(Path(value))
    return str(value)


def _directory(name: str, value: Any) -> str:
    check_str(name, value)
    if not os.path.isdir(value):
        raise fail(name, value, "an existing directory")
    return os.path.realpath(str(value))


def _root_path(name: str, value: Any) -> str:
    check_str(name, value)
    if not value.startswith("/") or value.endswith("/") or not value.isascii() or not value.isprintable():
        raise fail(name, value, "a path like /llm: with a slash before, and none after it")
    return str(value)


def _is_loopback(host: str) -> bool:
    """Check that a host name or address, however it is written, is reached from this machine only."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, ValueError):  # unknown; listening will say so
        return False


def _socket_path(name: str, value: Any) -> str:
    check_str(name, value)
    if len(str(value).encode(errors="replace")) > MAX_SOCKET_PATH:
        raise fail(name, value, f"a path of at most {MAX_SOCKET_PATH} bytes")
    return str(value)


def _template_kwargs(name: str, value: Any) -> Mapping[str, Any]:

    check_template_kwargs(value, name)
    return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the server: its addresses and limits. A field with a help text is a flag of `penstock serve`.

    Attributes:
        api_key: if given, every route but those of OPEN_PATHS (server/middleware.py) requires it.
        api_key_file: more keys, with names and limits (server/keys.py).
        cache_salt_by_key: requests find only the public pins and the cached prefixes of requests with the same key.
        served_model_names: with None it is the model as the user named it. Answers to requests without a name carry the
            first.
        allowed_hosts: None: any name, unless the server listens on loopback and has no key. Then only the names of
            loopback are allowed, because otherwise a web page could reach the server under a host name of its own.
        tool_call_parser, reasoning_parser: a name in tokenizer/answer_formats.toml, a file with a format of the user's,
            auto to choose by the chat template, or none to leave everything in the text.
        ssl_certfile, ssl_keyfile: PEM files, read again on SIGHUP; the key may be in the file of the certificate.
        uds: path of a socket that every user of the machine may connect to, as to a port of loopback; the permissions
            of its directory can forbid that.
        root_path: requests are served below this path too, for a proxy that leaves the prefix in the path.
        timeout_keep_alive: a connection without a request is closed after this many seconds. A proxy that keeps
            connections must close them first, or it sends requests into closed ones: nginx and Caddy keep them for
            60 and 120 s unless they are told otherwise, and balancers of cloud providers for 60 s.
        require_key: refuse to start without a key if other machines may connect.
        request_timeout_s: how long a call may take from its first byte to its last; None: no limit.
        otlp_traces_endpoint: URL (OTLP over HTTP, like http://host:4318/v1/traces); None:
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT from the environment, if it is set.
        allowed_lora_path: administrators may load and unload adapters while the server runs, from directories below
            this one. None: nobody may.
        max_body_bytes: a longer request body is refused with 413.
        max_inflight_body_bytes: for the bodies of all open requests together; a request beyond it is refused with 503.
            The first 64 KiB of each body are not counted, so that a few large ones cannot keep the small ones out.
        max_choices: upper bound of prompts times n in one call.
        max_parallel_tokenizations: how many long texts are tokenised at the same time; more have to wait.
        receive_timeout_s: how long a client may take to send its headers, and then again its body.
        keep_alive_s: a stream that has been silent for this long sends a comment.
        stall_timeout_s: a client is disconnected if it reads nothing of its stream for this long, or has not read its
            complete answer by then.
        access_log: write one line per request to the logger `penstock.access`.
        log_level: of the log on standard error, if the process has not configured logging.
        max_kept_bytes: of memory for stored responses and resumable streams; those that ended first make room.
        resume_grace_s: how long a resumable stream waits for its client, and is kept after its end.
        response_retention_s: how long a stored response may be fetched.
        started_at: time.monotonic() when the process began, for the "ready in" of the start-up line.
    """

    host: str = option("127.0.0.1", str, "address to listen on (default: 127.0.0.1)")
    port: int = option(8000, range(65536), "port to listen on; 0 takes a free one (default: 8000)")
    uds: str | None = option(
        None, _socket_path, "listen on a Unix socket at this path, instead of a port (default: none)", metavar="PATH"
    )
    ssl_certfile: str | None = option(
        None, str, "PEM file of a certificate: serve HTTPS (read again on SIGHUP; default: HTTP)", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, str, "PEM file of the certificate's key (default: in --ssl-certfile)", metavar="FILE"
    )
    root_path: str = option(
        "", _root_path, "path under which a proxy offers the server, like /llm (default: none)", metavar="PATH"
    )
    timeout_keep_alive: float = option(
        125.0, SECONDS, "seconds after which an idle connection is closed (default: 125)", metavar="S"
    )
    api_key: str | None = option(
        None,
        _key,
        "key that every request must carry (better as $PENSTOCK_API_KEY, which other users cannot see)",
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None,
        _key_file,
        "TOML file of named keys with limits; read again on SIGHUP (see the page on serving)",
        metavar="FILE",
    )
    require_key: bool = option(
        False, bool, "do not listen on an address that other machines can reach without a key (default: warn)"
    )
    cache_salt_by_key: bool | None = option(
        None,
        bool,
        "keys share no cached prefixes, so that no client can tell what another has sent (default: with api_key_file)",
    )
    served_model_names: tuple[str, ...] | None = option(
        None, _some_names, "name of the model in requests (default: MODEL; repeatable)", metavar="NAME"
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        _names,
        "name that the Host header may have (repeatable; default: any; on loopback without a key: localhost)",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (), _names, "web origin, like https://app.example, whose pages may call the API (repeatable)", metavar="ORIGIN"
    )
    tool_call_parser: str = option(
        "auto",
        _parser,
        "how the model writes tool calls: hermes, qwen3_coder, ... (see the page on tools), none, a file with your own "
        "format, or auto: as the chat template shows (default)",
        metavar="NAME",
        aliases=("--tool-parser",),
    )
    reasoning_parser: str = option(
        "auto",
        _parser,
        "how the model separates reasoning from the answer: qwen3, deepseek_r1, ..., none, a file, or auto (as above)",
        metavar="NAME",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        _template_kwargs,
        'variables of the chat template, like {"enable_thinking": false}; requests may override each of them',
        metavar="JSON",
    )
    unknown_fields: str = option(
        "warn",
        ("warn", "refuse"),
        "a field of a request that a known client sends and that cannot change the text: warn ignores it, names it in "
        "the answer's header X-Ignored-Fields and logs it once; other unknown fields are refused (default: warn)",
    )
    journal: str | None = option(
        None,
        str,
        "file that stores background responses and resumable streams, so that they survive a kill",
        metavar="FILE",
    )
    allowed_lora_path: str | None = option(
        None,
        _directory,
        "directory of the adapters that POST /v1/load_lora_adapter may load (default: none; needs --enable-lora)",
        metavar="DIR",
    )
    drain_timeout_s: float = option(
        30.0, Interval(0.0, 86400.0), "seconds that open requests may go on after SIGTERM (default: 30)", metavar="S"
    )
    request_timeout_s: float | None = option(
        None,
        SECONDS,
        "seconds from a request's first byte to the end of its answer; later, it gets 504 (default: no limit)",
        metavar="S",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        str,
        "OpenTelemetry collector that gets a trace of each request (needs penstock[otel]; default: none)",
        metavar="URL",
    )
    metrics_names: str = option(
        "penstock",
        METRICS_NAMES,
        "names of the metrics at /metrics: penstock (default), or vllm, for dashboards made for vLLM",
        metavar="{" + ",".join(METRICS_NAMES) + "}",
    )
    max_body_bytes: int = option(8 * MIB, range(1, 2**40 + 1))
    max_inflight_body_bytes: int = option(64 * MIB, range(2**50 + 1))
    max_choices: int = option(256, range(1, 65537))
    max_parallel_tokenizations: int = option(2, range(1, 257))
    receive_timeout_s: float = option(30.0, SECONDS)
    keep_alive_s: float = option(5.0, SECONDS)
    stall_timeout_s: float = option(60.0, SECONDS)
    access_log: bool = option(True, bool)
    log_level: str = option("info", LOG_LEVELS)
    max_kept_bytes: int = option(256 * MIB, range(2**50 + 1))
    resume_grace_s: float = option(60.0, Interval(0.0, 1e9, low_open=True))
    response_retention_s: float = option(86400.0, Interval(0.0, 1e9, low_open=True))
    started_at: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.cache_salt_by_key and self.api_key_file is None:
            raise fail("cache_salt_by_key", True, "false: only an api_key_file has keys to tell apart")
        if self.cache_salt_by_key is None:
            object.__setattr__(self, "cache_salt_by_key", self.api_key_file is not None)
        if self.require_key and self.is_open_to_all:
            raise fail("require_key", True, f"false: there is no key, and {self.host} may be reached from elsewhere")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise fail("ssl_keyfile", self.ssl_keyfile, "left out: there is no ssl_certfile")

    def hosts(self) -> tuple[str, ...] | None:
        """List the names that the Host header may have; None for any."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        is_loopback = self.uds is None and _is_loopback(self.host)  # no browser connects to a Unix socket
        own = f"[{self.host}]" if ":" in self.host else self.host
        return tuple({*LOOPBACK, own.lower()}) if not self.has_key and is_loopback else None

    @property
    def has_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    @property
    def is_open_to_all(self) -> bool:
        """True if other machines may use the API without a key."""
        return not self.has_key and self.uds is None and not _is_loopback(self.host)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the context of HTTPS; None for HTTP. Raise InvalidRequestError if a file cannot be used."""
        if self.ssl_certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        self.load_certificate(context)
        return context

    def load_certificate(self, context: ssl.SSLContext) -> None:
        """Read the certificate and its key for new connections. Raise InvalidRequestError if they cannot be used."""
        assert self.ssl_certfile is not None
        try:
            for file in filter(None, (self.ssl_certfile, self.ssl_keyfile)):
                os.close(open_regular(file, os.O_RDONLY))  # OpenSSL would wait for somebody who writes to a FIFO
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
        except OSError as error:  # ssl.SSLError is one; with a password of its own, the key cannot be read
            files = " and ".join(file for file in (self.ssl_certfile, self.ssl_keyfile) if file)
            message = f"{files} cannot be used: {getattr(error, 'strerror', None) or error}"
            raise invalid("ssl_certfile", message) from None
