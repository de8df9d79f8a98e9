"""Reads a tokenizer.json so that a damaged one is an error and not the end of the process."""

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
PROBE = "a A1. \t\n\u00e9\ufb01\u2460\u4f60\U0001f642"  # letters, spaces, and what normalizers change
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
    _check_charsmaps(path, text)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # a malformed file: the library raises nothing narrower
        raise ModelLoadError(f"{path}: is no tokenizer: {error}") from error
    except BaseException as error:
        raise _from_panic(path, error) from None
    try:
        with contextlib.suppress(Exception):  # an unknown word, for instance: an error of the text, not of the file
            backend.encode(PROBE)  # a table with entries outside of it panics only now
    except BaseException as error:
        raise _from_panic(path, error) from None
    return backend


def _from_panic(path: Path, error: BaseException) -> BaseException:
    """Return the library's panic, which is no Exception and known only by its name, as an error; others unchanged."""
    return ModelLoadError(f"{path}: is no tokenizer: {error}") if type(error).__name__ == "PanicException" else error


def _check_charsmaps(path: Path, text: str) -> None:
    """Refuse a `Precompiled` normalizer with a damaged table, because the library panics on it.

    Checked: base64, size, the announced length, UTF-8. Not checked: entries that point outside the table, which panic
    on the first text that reaches them (PROBE or a later one), and the running time of regular expressions.
    """
    if not re.search(r"precompiled_charsmap|\\u00[4-7]", text):  # letters may be escaped
        return

    def visit(pairs: list[tuple[str, Any]]) -> None:  # sees every duplicate key, as the library does
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str) and not _is_charsmap(value):
                raise ModelLoadError(f"{path}: is no tokenizer: precompiled_charsmap = {shown(value)} is damaged")

    try:
        json.loads(text, object_pairs_hook=visit)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is no tokenizer: {error}") from error


def _is_charsmap(text: str) -> bool:
    """Check for four bytes of length, a table of that length in units of 4, then its texts."""
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
        return f"{folder}: there is no such directory"
    others = [name for name in OTHER_FORMATS if (folder / name).is_file()]
    if not others:
        return f"{folder}: tokenizer.json is missing, and so the model's vocabulary"
    return (
        f"{folder}: tokenizer.json is missing; there is only {', '.join(others)}. Convert it once with Transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
