"""Logits processors: functions in a user's own file that change the logits of the requests that name them.

    @penstock.register_logits_processor("only_even")
    def only_even(logits, args):                      # logits [1, V] float32, one row
        logits[:, 1::2] = float("-inf")
        return logits

    SamplingParams(logits_processors=("only_even",))              # or {"only_even": args}, in this order

A function with a third parameter also gets the token ids so far, prompt and answer. It runs on one row at a time,
before masks, bias, penalties and temperature; log-probabilities are those of the unchanged logits. It must keep no
state between calls, because then the answer to one request could depend on other requests. It gets copies, and a
failure (an exception, a wrong result, more than 2 seconds for a token) ends only the request of that row.

The engine of AsyncLLM and `penstock serve` is another process, which gets the file through the engine option `imports`.
"""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import InvalidRequestError, check_str

LogitsProcessor = TypeVar("LogitsProcessor", bound=Callable[..., Any])
MAX_NAME_LENGTH = 64
WITHOUT_IDS, WITH_IDS = 2, 3  # number of parameters

PROCESSORS: dict[str, Callable[..., Any]] = {}


def register_logits_processor(name: str) -> Callable[[LogitsProcessor], LogitsProcessor]:
    """Return a decorator that registers a function as the logits processor with this name.

    Raises:
        InvalidRequestError: another function has the name, or the parameters are neither (logits, args) nor (logits,
            args, token_ids).
    """
    check_str("name", name, max_length=MAX_NAME_LENGTH)

    def decorate(function: LogitsProcessor) -> LogitsProcessor:
        known = PROCESSORS.get(name)
        if known is not None and _place(known) != _place(function):
            raise InvalidRequestError(f"name: another logits processor {name!r} is registered already", param="name")
        if _num_parameters(function) not in (WITHOUT_IDS, WITH_IDS):
            message = f"name: the logits processor {name!r} must take (logits, args) or (logits, args, token_ids)"
            raise InvalidRequestError(message, param="name")
        PROCESSORS[name] = function
        return function

    return decorate


def takes_ids(function: Callable[..., Any]) -> bool:
    """Return whether the function takes the token ids."""
    return _num_parameters(function) == WITH_IDS


def check_registered(names: Iterable[str]) -> None:
    """Check that every name is registered.

    Raises:
        InvalidRequestError: a name is not; the message lists the registered ones.
    """
    unknown = next((name for name in names if name not in PROCESSORS), None)
    if unknown is not None:
        known = ", ".join(sorted(PROCESSORS)) or "none; the engine option `imports` names files that register some"
        message = f"logits_processors: {unknown!r} is not registered; there are {known}"
        raise InvalidRequestError(message, param="logits_processors")


def _num_parameters(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in kinds for item in inspect.signature(function).parameters.values())


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """Return file and name, which stay the same if a file runs twice, as a program and as an import."""
    code = getattr(function, "__code__", None)
    file = str(Path(code.co_filename).resolve()) if code is not None else ""
    return file, getattr(function, "__qualname__", repr(function))
