"""Prompts in files of JSON or plain text, and a progress bar on a terminal that shows how many are done."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequestError, fail, invalid

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")  # of a prompt that is a mapping
STDIN = "-"
MAX_BYTES = 2**28  # of a file of prompts, which is read as a whole; a device or a pipe may have no end
JSON_BEGINNINGS = ("[", "{", '"')
JSON_SUFFIXES = (".json", ".jsonl")
HINT = 'what begins with [, { or " is read as JSON, one value per line or one array; anything else as a prompt per line'

Written = str | Mapping[str, Any]


def read_prompts(name: str | Path) -> list[Written]:
    """Read the prompts of a file; "-" is standard input.

    Three forms are read: JSON lines, one JSON array, and plain text with one prompt per line. A prompt in JSON is a
    string, or an object with `prompt` or `prompt_token_ids`. Blank lines are skipped.

    Raises:
        InvalidRequestError: the file cannot be read, or contains something else; the message names the place.
    """
    if not isinstance(name, str | Path):
        raise fail("prompts", name, "the name of a file")
    text = read_text(name)
    is_json = Path(name).suffix in JSON_SUFFIXES or text.lstrip().startswith(JSON_BEGINNINGS)
    if not is_json:
        return [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    place = "standard input" if str(name) == STDIN else str(name)
    return list(_array(place, text) if text.lstrip().startswith("[") else _lines(place, text))


def read_text(name: str | Path) -> str:
    """Read the text of a file without a byte order mark; "-" is standard input.

    Raises:
        InvalidRequestError: it cannot be read, is not UTF-8, or has more than MAX_BYTES.
    """
    try:
        with nullcontext(sys.stdin.buffer) if str(name) == STDIN else open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB; divide it, or use `penstock run-batch`")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        if str(name) == STDIN:
            raise InvalidRequestError(f"cannot read standard input: {error}") from error
        raise invalid("prompts", f"cannot read {str(name)!r}: {error}") from error


def _array(place: str, text: str) -> Iterator[Written]:
    for number, value in enumerate(_parsed(place, text), 1):
        yield _prompt(f"{place}, item {number}", value)


def _lines(file: str, text: str) -> Iterator[Written]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also cut inside JSON strings
        if line.strip():
            place = f"{file}, line {number}"
            yield _prompt(place, _parsed(place, line))


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("prompts", f"{place} is not JSON: {error}; {HINT}") from error


def _prompt(place: str, value: Any) -> Written:
    if isinstance(value, dict) and value and set(value) <= set(PROMPT_KEYS):
        text, ids = value.get("prompt"), value.get("prompt_token_ids")
        is_one = isinstance(text, str) if ids is None else isinstance(ids, list) and text is None
        if not is_one or not (text or ids):
            raise invalid(
                "prompts", f"{place} needs either prompt (a text) or prompt_token_ids (a list of ids), not empty"
            )
        return value
    if not isinstance(value, str):
        raise invalid(
            "prompts", f"{place} must be a string or an object with prompt or prompt_token_ids, and nothing else"
        )
    if not value:
        raise invalid("prompts", f"{place} is an empty string")
    return value


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal; yield the function `advance(count)`."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def check_text(text: str) -> None:
    """Raise InvalidRequestError for an empty prompt."""
    if not text:
        raise fail("prompt", text, "a text of at least one character")
