"""ServerOptions: the options of the HTTP server, checked when constructed. Engine options are elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import (
    LOG_LEVELS,
    InvalidRequestError,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_str,
    fail,
    string_tuple,
)
from penstock.server.keys import read_key_file
from penstock.tokenizer.answer_formats import TOOL_FORMATS
from penstock.tokenizer.answers import REASONING_PARSERS
from penstock.tokenizer.chat_template import check_template_kwargs

MIB = 1 << 20
DEFAULT_KWARGS = "default_chat_template_kwargs"
TOOL_CALL_PARSERS = ("auto", "none", *TOOL_FORMATS)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as written in the Host header
LOOPBACK_ADDRESSES = ("localhost", "127.0.0.1", "::1")  # as written for --host


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens and what it refuses.

    Attributes:
        port: 0 lets the system choose a port, which the start-up line prints.
        api_key: if given, every route but /health, /ping, /live and /ready requires it.
        api_key_file: more keys, with names and limits (server/keys.py); read again on SIGHUP.
        cache_salt_by_key: requests find only the public pins and the cached prefixes of requests with the same key.
        served_model_names: the names that requests may use; with None it is the model as the user named it. Answers
            to requests without a name carry the first.
        max_body_bytes: a longer request body is refused with 413.
        max_inflight_body_bytes: for the bodies of all open requests together; a request beyond it is refused with 503.
            The first 64 KiB of each body are not counted, so that a few large ones cannot keep the small ones out.
        max_choices: upper bound of prompts times n in one call.
        max_parallel_tokenizations: how many long texts are tokenised at the same time; more have to wait.
        receive_timeout_s: how long a client may take to send its headers, and then again its body.
        keep_alive_s: a stream that has been silent for this long sends a comment.
        stall_timeout_s: a client is disconnected if it reads nothing of its stream for this long, or has not read its
            complete answer by then.
        request_timeout_s: how long a call may take from its first byte to its last; None: no limit.
        drain_timeout_s: how long open requests may continue after SIGTERM.
        allowed_hosts: names that the Host header may have. None: any name, unless the server listens on loopback and
            has no key. Then only the names of loopback are allowed, because otherwise a web page could reach the server
            under a host name of its own.
        allowed_origins: web origins whose pages may call the API; none by default.
        access_log: write one line per request to the logger `penstock.access`.
        log_level: level of the log on standard error, if the process has not configured logging: info, warning, error.
        tool_call_parser: how the model writes tool calls: hermes, llama3_json or mistral. auto chooses by the chat
            template; none leaves calls in the text.
        reasoning_parser: qwen3 takes the text between <think> and </think> out of an answer; deepseek_r1 does so even
            if no <think> comes first; auto is qwen3 if the chat template contains </think>; none leaves it in the text.
        default_chat_template_kwargs: further variables of the chat template; a request's chat_template_kwargs override
            them one by one.
        journal: a file that records background responses and resumable streams, so that they survive a kill of the
            server.
        max_kept_bytes: of memory for stored responses and resumable streams; those that ended first make room.
        resume_grace_s: how long a resumable stream waits for its client, and is kept after its end.
        response_retention_s: how long a stored response may be fetched.
        otlp_traces_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP, like http://host:4318/v1/traces) that
            gets a trace of each call; None: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT from the environment, if it is set.
        started_at: time.monotonic() when the process began, for the "ready in" of the start-up line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_key_file: str | None = None
    cache_salt_by_key: bool = False
    served_model_names: tuple[str, ...] | None = None
    max_body_bytes: int = 8 * MIB
    max_inflight_body_bytes: int = 64 * MIB
    max_choices: int = 256
    max_parallel_tokenizations: int = 2
    receive_timeout_s: float = 30.0
    keep_alive_s: float = 5.0
    stall_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = True
    log_level: str = "info"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    journal: str | None = None
    max_kept_bytes: int = 256 * MIB
    resume_grace_s: float = 60.0
    response_retention_s: float = 86400.0
    started_at: float | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_str("host", self.host)
        check_int("port", self.port, 0, 65535)
        self._check_names()
        check_int("max_body_bytes", self.max_body_bytes, 1, 2**40)
        check_int("max_inflight_body_bytes", self.max_inflight_body_bytes, 0, 2**50)
        check_int("max_choices", self.max_choices, 1, 65536)
        check_int("max_parallel_tokenizations", self.max_parallel_tokenizations, 1, 256)
        check_str("journal", self.journal, optional=True)
        check_str("otlp_traces_endpoint", self.otlp_traces_endpoint, optional=True)
        check_int("max_kept_bytes", self.max_kept_bytes, 0, 2**50)
        for name in ("resume_grace_s", "response_retention_s"):
            check_float(name, getattr(self, name), 0.0, 1e9, low_open=True)
        for name in ("receive_timeout_s", "keep_alive_s", "stall_timeout_s"):
            check_float(name, getattr(self, name), 0.0, 86400.0, low_open=True)
        if self.request_timeout_s is not None:
            check_float("request_timeout_s", self.request_timeout_s, 0.0, 86400.0, low_open=True)
        check_float("drain_timeout_s", self.drain_timeout_s, 0.0, 86400.0)
        check_bool("access_log", self.access_log)
        check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, ("auto", "none", *REASONING_PARSERS))
        if self.default_chat_template_kwargs is not None:
            check_template_kwargs(self.default_chat_template_kwargs, DEFAULT_KWARGS)
        check_choice("log_level", self.log_level, LOG_LEVELS)

    def hosts(self) -> tuple[str, ...] | None:
        """Return the names that the Host header may have; None for any."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return LOOPBACK if not self.has_key and self.host in LOOPBACK_ADDRESSES else None

    @property
    def has_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    @property
    def is_open_to_all(self) -> bool:
        """Return whether other machines may use the API without a key."""
        return not self.has_key and self.host not in LOOPBACK_ADDRESSES

    def _check_names(self) -> None:
        check_str("api_key_file", self.api_key_file, optional=True)
        if self.api_key_file is not None:
            read_key_file(Path(self.api_key_file))
        check_bool("cache_salt_by_key", self.cache_salt_by_key)
        if self.cache_salt_by_key and self.api_key_file is None:
            raise fail("cache_salt_by_key", True, "false: only an api_key_file has keys to tell apart")
        check_str("api_key", self.api_key, optional=True)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequestError(
                "api_key: only printable ASCII characters can be sent in a header", param="api_key"
            )
        for name in ("served_model_names", "allowed_hosts", "allowed_origins"):
            values = getattr(self, name)
            if values is not None:
                string_tuple(name, values, max_items=64, max_length=1024)
        if self.served_model_names is not None and not self.served_model_names:
            raise fail("served_model_names", self.served_model_names, "null or at least one name")
