"""API keys with names, limits and rights. A key file is TOML and looks like this:

    [alice]                          # the name, shown in the log and in /metrics; the key is never shown
    key = "sk-..."                   # at least 16 characters
    max_concurrent_requests = 8      # the limits are optional
    requests_per_minute = 600
    tokens_per_minute = 100_000      # tokens of prompts and answers, counted when a request ends
    priority = 5                     # requests may ask for a higher number (less urgent), but not for a lower one
    max_choices = 4                  # prompts times n in one call
    max_tokens = 2048                # in one answer
    admin = false                    # true: may pin prefixes and see which are used

A limit per minute is a token bucket that holds one minute's worth and fills steadily. This module knows no HTTP.
"""

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.errors import EngineOverloadedError, InvalidRequestError
from penstock.interface.sampling_params import SamplingParams

MIN_KEY_LENGTH = 16
MAX_FILE_BYTES = 1 << 20
SOME = 1e-3  # fraction of a token or request that must be in a bucket before anything is let through
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
Limit = Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None


class KeyRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""

    key: str
    max_concurrent_requests: Limit = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_choices: Limit = None
    max_tokens: Limit = None
    admin: bool = False
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None


class Bucket:
    """A limit per minute. It starts full and may be overdrawn; then it lets nothing out until it is above zero."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    def wait_s(self, amount: float = 0.0) -> float:
        """Compute the seconds until the bucket is above zero and holds `amount`; 0.0 if it does now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        missing = max(amount, SOME) - self._level
        return missing * 60 / self.per_minute if missing > SOME * 1e-3 else 0.0

    def spend(self, amount: float) -> None:
        self._level -= amount


class Account:
    """A key's name, its limits and their use. An account outlives a reload of the file if its name is still there."""

    def __init__(self, name: str, rules: KeyRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.num_open = 0
        self._clock = clock
        self.apply(rules)

    def apply(self, rules: KeyRules) -> None:
        """Apply new rules. The use of a limit that does not change is kept."""
        before: KeyRules | None = getattr(self, "rules", None)
        self.rules = rules
        if before is None or before.requests_per_minute != rules.requests_per_minute:
            self._requests = _bucket(rules.requests_per_minute, self._clock)
        if before is None or before.tokens_per_minute != rules.tokens_per_minute:
            self._tokens = _bucket(rules.tokens_per_minute, self._clock)

    def enter(self) -> None:
        """Begin a request; `leave` ends it. Raise EngineOverloadedError if a limit does not allow it now."""
        rules = self.rules
        if rules.max_concurrent_requests is not None and self.num_open >= rules.max_concurrent_requests:
            raise self._exceeded(f"max_concurrent_requests = {rules.max_concurrent_requests}", 1.0)
        if self._tokens is not None and (wait_s := self._tokens.wait_s()):
            raise self._exceeded(f"tokens_per_minute = {rules.tokens_per_minute}", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise self._exceeded(f"requests_per_minute = {rules.requests_per_minute}", wait_s)
            self._requests.spend(1)
        self.num_open += 1

    def leave(self, num_tokens: int) -> None:
        """End a request that used `num_tokens` tokens."""
        self.num_open -= 1
        if self._tokens is not None:
            self._tokens.spend(num_tokens)

    def limited(self, params: SamplingParams, num_prompts: int) -> SamplingParams:
        """Fit the parameters of a call to the key: without max_tokens they get the key's.

        Raises:
            InvalidRequestError: the call asks for more choices or tokens than the key allows.
        """
        limits, asked = self.rules, num_prompts * params.n
        if limits.max_choices is not None and asked > limits.max_choices:
            message = f"n: {asked} choices in a call; the key {self.name} may ask for at most {limits.max_choices}"
            raise InvalidRequestError(message, param="n", code="key_limit_exceeded")
        if limits.max_tokens is None:
            return params
        if params.max_tokens is None:
            return replace(params, max_tokens=limits.max_tokens)
        if params.max_tokens > limits.max_tokens:
            message = (
                f"max_tokens: {params.max_tokens} is too large; the key {self.name} may ask for {limits.max_tokens}"
            )
            raise InvalidRequestError(message, param="max_tokens", code="key_limit_exceeded")
        return params

    def allowed_priority(self, asked: int | None) -> int:
        """Choose the priority of a call: the one it asks for, or the key's if it asks for none or a more urgent one."""
        own = self.rules.priority
        if own is None:
            return asked or 0
        return own if asked is None else max(asked, own)

    def _exceeded(self, limit: str, retry_after_s: float) -> EngineOverloadedError:
        return EngineOverloadedError(f"the key {self.name} has reached {limit}", retry_after_s=retry_after_s)


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


class KeyRing:
    """All keys of a server.

    Args:
        api_key: an administrator's key without limits and without a name, or None.
        file: path of a key file, or None.

    Raises:
        InvalidRequestError: the file cannot be read or has an error; the message names the file and the line.
    """

    def __init__(self, api_key: str | None, file: str | None) -> None:
        self._file = None if file is None else Path(file)
        self._own = {} if api_key is None else {_digest(api_key): Account("", KeyRules(api_key, admin=True))}
        self._accounts: dict[bytes, Account] = {}
        self.reload()

    def __bool__(self) -> bool:
        """True if a key is required."""
        return bool(self._own) or self._file is not None

    def reload(self) -> int:
        """Read the file again and return the number of its keys. On an error nothing changes."""
        if self._file is None:
            return 0
        found = read_key_file(self._file)
        before = {account.name: account for account in self._accounts.values()}
        accounts = {}
        for name, rules in found.items():
            account = before.get(name) or Account(name, rules)
            account.apply(rules)
            accounts[_digest(rules.key)] = account
        self._accounts = accounts
        return len(accounts)

    def find(self, key: bytes) -> Account | None:
        """Find the owner of a key. The time that this takes depends only on the number of keys."""
        digest, found = hashlib.sha256(key).digest(), None
        for known, account in [*self._own.items(), *self._accounts.items()]:
            if hmac.compare_digest(digest, known):
                found = account
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_key_file(file: Path) -> dict[str, KeyRules]:
    """Read the rules of each name. Raise InvalidRequestError with file and line if something is wrong."""
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise _wrong(f"{file}: it is larger than {MAX_FILE_BYTES} bytes")
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # its message has line and column
        raise _wrong(f"{file}: {error}") from None
    found: dict[str, KeyRules] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        problem, field = _problem(name, table)
        if problem is None:
            found[name] = msgspec.convert(table, KeyRules)
            other = owners.setdefault(found[name].key, name)
            problem, field = (None, "") if other == name else (f"[{name}] has the key of [{other}]", "key")
        if problem is not None:
            raise _wrong(f"{file}: {problem} (at line {_line_of(text, name, field)})")
    if not found:
        raise _wrong(f'{file}: it has no key; add a table like [alice] with key = "..."')
    return found


def _problem(name: str, table: Any) -> tuple[str | None, str]:
    """Find what is wrong with a table, and the field concerned. The text never contains the key itself."""
    if not NAME.fullmatch(name):
        return f"{name!r:.80} is not a name; use letters, digits and _ . @ -", ""
    if not isinstance(table, dict):
        return f'{name} is not a table; write [name], and below it key = "..."', ""
    try:
        rules = msgspec.convert(table, KeyRules)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        unknown = re.search(r"unknown field `(.*)`", what)
        field = unknown[1] if unknown else path.rstrip("`")
        return f"[{name}] {field + ': ' if path else ''}{what}", field
    if len(rules.key) < MIN_KEY_LENGTH or not (rules.key.isascii() and rules.key.isprintable()) or " " in rules.key:
        return f"[{name}] key: it must have at least {MIN_KEY_LENGTH} printable ASCII characters and no space", "key"
    return None, ""


def _line_of(text: str, name: str, field: str) -> int:
    """Find the line number of a field of a table, or of the table's header."""
    head = re.compile(
        r"\s*\[\s*[\"']?" + re.escape(name) + r"[\"']?\s*\]|\s*[\"']?" + re.escape(name) + r"[\"']?\s*[.=]"
    )
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if start == 0 and head.match(line):
            start = number
        elif start and line.lstrip().startswith("["):
            break
        if start and field and re.match(rf"\s*[\"']?{re.escape(field)}[\"']?\s*=", line):
            return number
    return max(start, 1)


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"api_key_file: {message}", param="api_key_file")
