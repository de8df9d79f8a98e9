"""Prompts as callers give them: one by one, and in files of JSON or plain text. No model is needed here.

PromptRequest is what every client is asked for, by LLM, AsyncLLM and the HTTP server alike. The client's InputProcessor
tokenises and checks it, and makes an OpenRequest of it (client/open_requests.py). `progress` shows on a terminal how
many prompts are done.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequestError, check_str, check_unicode, fail
from penstock.interface.sampling_params import SamplingParams

# A string, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.
Prompt = str | list[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MAX_SALT_LENGTH = 1024
STDIN = "-"
MAX_BYTES = 2**28  # of a file of prompts, which is read as a whole; a device or a pipe may have no end
JSON_BEGINNINGS = ("[", "{", '"')
JSON_SUFFIXES = (".json", ".jsonl")
HINT = 'what begins with [, { or " is read as JSON, one value per line or one array; anything else as a prompt per line'

Written = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a call, and how it is to be answered.

    Attributes:
        token_ids: the prompt; empty if `text` is still to be tokenised.
        text: with ids, it is only repeated in the output.
        seed: replaces that of `params`.
        output_token_ids: tokens of an earlier computation of the request, one list per choice. They come first, and the
            engine continues after them, with the same seed.
        cache_salt: see EngineRequest.cache_salt.
        params: None takes the model's defaults.
        request_id: None makes one.
        flow: the engine is fair among flows, and all requests of one flow share one share of it. None: this request
            with all its choices.
        priority: lower comes first, with scheduling_policy = "priority"; with other policies it must be 0.
        timeout: seconds until the answer is due, with scheduling_policy = "deadline"; None with other policies. It
            orders requests, and ends none.
        param: the caller's name for the prompt, for errors.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    seed: int | None = None
    output_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    params: SamplingParams | None = None
    request_id: str | None = None
    flow: str | None = None
    priority: int = 0
    timeout: float | None = None
    param: str = "prompt"

    @classmethod
    def of(
        cls, prompt: Any, params: SamplingParams | Any = None, request_id: str | None = None, **more: Any
    ) -> "PromptRequest":
        """Return the request for a prompt in any of the forms of `Prompt`, or as an array of one axis.

        more: further fields.

        Raises:
            InvalidRequestError: it is none of these. Keys of a mapping that have no meaning must be None.
        """
        more |= {"params": params, "request_id": request_id}
        if isinstance(prompt, str):
            return cls(text=prompt, **more)
        if not isinstance(prompt, Mapping):
            return cls(_as_list("prompt", prompt), **more)
        unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown or not prompt:
            allowed = f"a mapping with {' or '.join(PROMPT_KEYS[:2])}, and perhaps {PROMPT_KEYS[2]}"
            raise fail("prompt", unknown[0] if unknown else {}, allowed)
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if text is not None and not isinstance(text, str):
            raise fail("prompt", text, "a text")
        if ids is None:
            return cls(text=text or "", cache_salt=salt, **more)
        name = "prompt_token_ids"
        return cls(_as_list(name, ids), text, cache_salt=salt, param=name, **more)


def _as_list(name: str, ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):  # an array of numpy or a tensor of torch
        ids = ids.tolist()
    if not isinstance(ids, list | tuple) or not ids:
        raise fail(name, ids, "a text, or a list of at least one token id")
    return list(ids)


def check_text(text: str) -> None:
    """Raise InvalidRequestError for an empty prompt."""
    if not text:
        raise fail("prompt", text, "a text of at least one character")


def check_salt(salt: Any) -> None:
    """Raise InvalidRequestError unless `salt` is a valid cache_salt or None."""
    check_str("cache_salt", salt, max_length=MAX_SALT_LENGTH, optional=True)
    if salt is not None:
        check_unicode(salt, param="cache_salt")


def check_num_tokens(param: str, num_tokens: int, max_model_len: int, *, is_pooled: bool = False) -> None:
    """Raise InvalidRequestError (code "context_length_exceeded") if a prompt does not fit the context.

    is_pooled: whether the context holds nothing else; otherwise it must leave room for an answer.
    """
    if is_pooled and num_tokens > max_model_len:
        what = f"{num_tokens} tokens exceed the context of {max_model_len}; truncate_prompt_tokens cuts them"
    elif not is_pooled and num_tokens >= max_model_len:
        what = f"{num_tokens} tokens are too many; the context of {max_model_len} tokens must hold the prompt and "
        what += "at least one token of the answer"
    else:
        return
    raise InvalidRequestError(f"{param}: {what}", param=param, code="context_length_exceeded")


def read_prompts(name: str | Path) -> list[Written]:
    """Return the prompts of a file; "-" is standard input.

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
    """Return the text of a file without a byte order mark; "-" is standard input.

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
        raise InvalidRequestError(f"prompts: cannot read {str(name)!r}: {error}", param="prompts") from error


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
        raise InvalidRequestError(f"prompts: {place} is not JSON: {error}; {HINT}", param="prompts") from error


def _prompt(place: str, value: Any) -> Written:
    if isinstance(value, dict) and value and set(value) <= set(PROMPT_KEYS):
        text, ids = value.get("prompt"), value.get("prompt_token_ids")
        is_one = isinstance(text, str) if ids is None else isinstance(ids, list) and text is None
        if not is_one or not (text or ids):
            message = f"prompts: {place} needs either prompt (a text) or prompt_token_ids (a list of ids), not empty"
            raise InvalidRequestError(message, param="prompts")
        return value
    if not isinstance(value, str):
        message = f"prompts: {place} must be a string or an object with prompt or prompt_token_ids, and nothing else"
        raise InvalidRequestError(message, param="prompts")
    if not value:
        raise InvalidRequestError(f"prompts: {place} is an empty string", param="prompts")
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
