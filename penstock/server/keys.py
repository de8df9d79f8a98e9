"""API keys with names, limits and rights. A key file is TOML and looks like this:

    [alice]                          # the name, shown in the log and in /metrics; the key is never shown
    key = "sk-..."                   # at least 16 characters
    max_concurrent_requests = 8      # the limits are optional
    requests_per_minute = 600
    tokens_per_minute = 100_000      # tokens of prompts and answers; a call reserves all that it may use
    priority = 5                     # default 0; requests may ask for a higher number (less urgent), not a lower one
    max_choices = 4                  # prompts times n in one call
    max_tokens = 2048                # in one answer
    admin = false                    # true: may pin prefixes and see which are used

A limit per minute is a token bucket that holds one minute's worth and fills steadily (server/accounts.py). This module
knows no HTTP.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidRequestError, invalid
from penstock.interface.files import open_regular
from penstock.server.accounts import Account, KeyRules

MIN_KEY_LENGTH = 16
MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class KeyRing:
    """All keys of a server.

    Args:
        api_key: an administrator's key without limits and without a name, or None.
        file: path of a key file, or None.
        on_use: called with the name of a key and what it used, as Account.on_use is.

    Attributes:
        unnamed: the account of the administrator's key, and of every request if the server has no keys.

    Raises:
        InvalidRequestError: the file cannot be read or has an error; the message names the file and the line.
    """

    def __init__(
        self, api_key: str | None, file: str | None, on_use: Callable[[str, str, int], None] | None = None
    ) -> None:
        self._file = None if file is None else Path(file)
        self._on_use = on_use
        self.unnamed = Account("", KeyRules(api_key or "", admin=True))
        self._own = {} if api_key is None else {_digest(api_key): self.unnamed}
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
            account = before.get(name) or self._account(name, rules)
            account.apply(rules)
            accounts[_digest(rules.key)] = account
        self._accounts = accounts
        return len(accounts)

    def _account(self, name: str, rules: KeyRules) -> Account:
        account = Account(name, rules)
        if self._on_use is not None:
            account.on_use = partial(self._on_use, name)
        return account

    def named(self, name: str) -> Account:
        """Find the account of a name. A name that is no longer in the file has an account without limits."""
        found = (account for account in [self.unnamed, *self._accounts.values()] if account.name == name)
        return next(found, None) or self._account(name, KeyRules(""))

    def find(self, key: bytes) -> Account | None:
        """Find the owner of a key. The time that this takes depends only on the number of keys."""
        if not self:
            return self.unnamed
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
        with open(file, "rb", opener=open_regular) as opened:
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
    return invalid("api_key_file", message)
