"""Read a tokenizer.json so that a damaged file raises an error instead of ending the process."""

import base64
import contextlib
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.errors import ModelLoadError
from penstock.validation import shown

MAX_CHARSMAP = 2**24  # characters of base64; the largest in use have 400,000
PROBE = "a A1. \t\n\u00e9\ufb01\u2460\u4f60\U0001f642"  # letters, spaces, and characters that normalizers change
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def read_backend(folder: Path) -> Backend:
    """Read the tokenizer.json of a model directory.

    Raises:
        ModelLoadError: it is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(_missing_message(folder))
    text = read_text(path)
    try:
        _check_charsmaps(text)
        backend = Backend.from_str(text)
        with contextlib.suppress(Exception):  # an unknown word, for instance: an error of the text, not of the file
            backend.encode(PROBE)  # a table with entries that point outside it panics here
    except BaseException as error:  # the library raises plain Exceptions; its panics are not Exceptions, only named so
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelLoadError(f"{path}: is not a valid tokenizer: {error}") from error
        raise
    return backend


def _check_charsmaps(text: str) -> None:
    """Raise ValueError for a `Precompiled` normalizer with a damaged table, because the library panics on it.

    Checked: base64, size, the announced length, UTF-8. Not checked: entries that point outside the table, which panic
    on the first text that reaches them (PROBE or a later one), and the running time of regular expressions.
    """
    if not re.search(r"precompiled_charsmap|\\u00[4-7]", text):  # letters may be escaped
        return

    def visit(pairs: list[tuple[str, Any]]) -> None:  # gets every duplicate key, as the library does
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str) and not _is_charsmap(value):
                raise ValueError(f"precompiled_charsmap = {shown(value)} is damaged")

    json.loads(text, object_pairs_hook=visit)


def _is_charsmap(text: str) -> bool:
    """Return whether the base64 text is a length of four bytes, a table of that length in units of 4, and UTF-8."""
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
    """Return the text of a file; raise ModelLoadError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
