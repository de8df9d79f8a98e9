"""Read a tokenizer.json so that a damaged file raises an error instead of ending the process."""

import base64
import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidRequestError, ModelLoadError, one_line, shown

LOGGER = logging.getLogger("penstock")
MAX_BYTES = 2**28  # of a file; the largest files in use have 35 MB
SLOW_CHARS = 2**25  # a longer file takes so long to load that it is logged
MAX_GROWTH = 1000  # factor by which a text may become longer; files in use make it at most three times as long
MAX_CHARSMAP = 2**24  # characters of base64; the largest maps in use have 400,000
PROBE = "a A1. \t\n\u00e9\ufb01\u2460\u4f60\U0001f642"  # letters, spaces, and characters that normalizers change
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def read_backend(folder: Path) -> Backend:
    """Read the tokenizer.json of a model directory.

    Raises:
        ModelLoadError: the file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(_missing_message(folder))
    text = _read_announced(path)
    try:
        _check_charsmaps(text)
        backend = Backend.from_str(text)
        _check_growth("normalizer", backend.normalizer)
        _check_growth("decoder", backend.decoder)
        with contextlib.suppress(Exception):  # an error of the text, not of the file: an unknown word, for instance
            backend.encode(PROBE)  # panics if the table has entries that point outside it
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ModelLoadError(f"{path}: is not a valid tokenizer: {one_line(error)}") from error
        raise
    return backend


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of the library, which is not a subclass of Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def library_errors(param: str, what: str) -> Iterator[None]:
    """Turn the library's errors (plain Exceptions and panics) into an InvalidRequestError that names `param`."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or is_panic(error):
            message = f"{param}: {what} with the model's tokenizer: {one_line(error)}"
            raise InvalidRequestError(message, param=param) from error
        raise


def _read_announced(path: Path) -> str:
    text = read_text(path)
    if len(text) > SLOW_CHARS:
        LOGGER.warning("loading %s: %d MB, which may take a while", path, len(text) // 10**6)
    return text


def _check_growth(what: str, component: Any) -> None:
    """Raise ValueError if the replacements together may make a text more than MAX_GROWTH times as long.

    A decoder must not have a regular expression either, because it runs in the serving process for every token.
    """
    if component is None:
        return
    growth = 1.0
    for step in _steps(json.loads(component.__getstate__())):
        pattern, content = step.get("pattern"), step.get("content")
        if isinstance(pattern, dict) and isinstance(content, str):
            if what == "decoder" and "Regex" in pattern:
                raise ValueError(f"decoder: a replacement by a regular expression, {shown(pattern)}, is not supported")
            shortest = len(pattern.get("String", "")) or 1
            growth *= max(1.0, (len(content) + ("Regex" in pattern)) / shortest)
    if growth > MAX_GROWTH:
        raise ValueError(f"{what}: its replacements make a text up to {growth:.0e} times as long")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a component, at any depth."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _steps(item)


def _check_charsmaps(text: str) -> None:
    """Raise ValueError for a `Precompiled` normalizer with a damaged table, because the library panics on it.

    Checked: base64, size, the announced length, UTF-8. Not checked: the running time of regular expressions, and
    entries that point outside the table, which panic on the first text that reaches them (PROBE or a later text).
    """
    if not re.search(r"precompiled_charsmap|\\u00[4-7]", text):  # the letters of the key may be escaped
        return

    def visit(pairs: list[tuple[str, Any]]) -> None:  # gets every duplicate key, as the library does
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str) and not _is_charsmap(value):
                raise ValueError(f"precompiled_charsmap = {shown(value)} is damaged")

    json.loads(text, object_pairs_hook=visit)


def _is_charsmap(text: str) -> bool:
    """Return whether a base64 text holds a length (4 bytes, a multiple of 4), a table of that length, and UTF-8."""
    if len(text) > MAX_CHARSMAP:
        return False
    try:
        content = base64.b64decode(text, validate=True)
        length = int.from_bytes(content[:4], "little")
        content[4 + length :].decode("utf-8")
    except ValueError:
        return False
    return length % 4 == 0 and 4 <= length <= len(content) - 4


def _missing_message(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such directory"
    others = [name for name in OTHER_FORMATS if (folder / name).is_file()]
    if not others:
        return f"{folder}: tokenizer.json is missing"
    return (
        f"{folder}: tokenizer.json is missing; found only {', '.join(others)}. Convert it once with Transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def read_text(path: Path) -> str:
    """Return the text of a file; raise ModelLoadError if it is too large or cannot be read as UTF-8."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
