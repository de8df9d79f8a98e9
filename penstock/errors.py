"""Every exception that Penstock raises on purpose, and the checks of single values that raise one of them.

    PenstockError
     +-- InvalidRequestError (also a ValueError)   a value that the caller gave is wrong; `param` names it
     |    +-- NotSupportedError                    a feature that is planned but not built
     +-- ModelLoadError                            a model directory cannot be served
     +-- EngineError
          +-- ExecutorLostError                    the processes that compute steps are gone; no step can follow
          +-- EngineDeadError                      the engine process died; the request may be sent again
          +-- EngineOverloadedError                the queue is full; retry after `retry_after_s`
          +-- RequestFailedError                   the computation of this request failed; others continue

User errors raise these, never `assert`. Nothing here knows about HTTP: `server` maps the classes to statuses.

Each check raises InvalidRequestError with the field's name, the value and what is allowed. Names and ranges are stated
where the fields are defined: in the frozen dataclasses that a user can fill in.
"""

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

Options = TypeVar("Options")

LOG_LEVELS = ("info", "warning", "error")
MAX_SHOWN = 80  # characters of a wrong value that an error shows
MAX_LISTED = 8  # most names that an error lists
MAX_NESTING = 128  # objects and lists of a JSON value that is read recursively

# The libraries that Penstock works without, and the extra of pyproject.toml that installs each.
EXTRAS = {"matplotlib": "plot", "opentelemetry": "otel", "ray": "ray", "torch": "torch", "transformers": "transformers"}


class PenstockError(Exception):
    """The base class of every error below."""


class InvalidRequestError(PenstockError, ValueError):
    """A value that the caller gave is wrong.

    Attributes:
        param: name of the offending field, as the caller spelt it, or None.
        code: a machine-readable name of the kind of mistake, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotSupportedError(InvalidRequestError):
    """A feature that is planned but not built; `code` is "not_implemented"."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="not_implemented")


class ModelLoadError(PenstockError):
    """A model directory cannot be served; the message names the file and the reason."""


class EngineError(PenstockError):
    """The engine could not do its work."""


class ExecutorLostError(EngineError):
    """No step can be computed any more: one of the processes that share a model ended, hangs or failed.

    Attributes:
        rank: rank of that process, if it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class EngineDeadError(EngineError):
    """The engine process died or did not start; nothing is wrong with the request."""


class EngineOverloadedError(EngineError):
    """The queue of waiting requests is full, or another limit does not allow the request now.

    Attributes:
        code: a machine-readable name of the limit.
        retry_after_s: seconds to wait before sending the request again.
    """

    code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(EngineError):
    """The computation of this request failed; the engine and the other requests continue."""


class _Short(reprlib.Repr):
    """repr() of the first few items only, so that an error message about megabytes does not take megabytes."""

    maxlevel = 3
    maxdict = maxlist = maxtuple = maxset = 5
    maxstring = maxother = MAX_SHOWN

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:  # repr() of a huge integer is slow, or refused by Python
            return f"an integer of {value.bit_length()} bits"
        return repr(value)


def shown(value: Any) -> str:
    """Format the value for an error message: short, and in constant time."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    text = _Short().repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def one_line(error: object, limit: int = 300) -> str:
    """Shorten the text of another library's error to one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]


def nearest(name: str, known: Iterable[str]) -> str:
    """Find the known name that is most similar to this one."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def hint(name: str, known: Iterable[str]) -> str:
    """Write a question that suggests the most similar known name; "" if none is similar."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (is {near[0]} meant?)" if near else ""


def listed(names: list[str], separator: str = ", ") -> str:
    """Join the first names for an error message, and say how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return separator.join(names[:MAX_LISTED]) + more


def invalid(param: str, problem: str, code: str | None = None) -> InvalidRequestError:
    """Make the error for a field. Its message begins with the field's name."""
    return InvalidRequestError(f"{param}: {problem}", param=param, code=code)


def unsupported(param: str, problem: str) -> NotSupportedError:
    """Make the error for a field that asks for what is not built. Its message begins with the field's name."""
    return NotSupportedError(f"{param}: {problem}", param=param)


def fail(name: str, value: Any, allowed: str) -> InvalidRequestError:
    """Make the error for a value that is out of range or of the wrong type."""
    return invalid(name, f"{shown(value)} is not allowed; it must be {allowed}")


def missing(what: str, library: str) -> str:
    """Say that something needs one of the libraries of EXTRAS, and how to install it."""
    return f'{what} needs {library}, which is not installed: pip install "penstock[{EXTRAS[library]}]"'


def check_installed(name: str, what: str, library: str) -> None:
    """Raise InvalidRequestError if a library of EXTRAS, which the value `what` of a field needs, is not installed."""
    from importlib.util import find_spec  # here, because most processes need none of them

    if find_spec(library) is None:
        raise invalid(name, missing(what, library))


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise fail(name, value, "true or false")


def check_str(name: str, value: Any, *, max_length: int = 4096, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value or len(value) > max_length:
        raise fail(name, value, f"a string of 1 to {max_length} characters")


def check_unicode(text: str, *, param: str = "prompt") -> None:
    """Raise InvalidRequestError for a text with a lone surrogate, which cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            param, f"contains a lone surrogate (\\u{ord(text[error.start]):x}) at character {error.start}"
        ) from error


def check_int(name: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    """Check for an integer in low..high, both allowed. A bool is not an integer here."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise fail(name, value, f"an integer from {low} to {high}" + (", or null" if optional else ""))


def check_ids(name: str, ids: Sequence[Any], limit: int) -> None:
    """Check for token ids from 0 to limit - 1. Most lists are long and valid, so the whole list is checked first."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < limit)):
        return
    for token_id in ids:
        check_int(name, token_id, 0, limit - 1)


def check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    """Check for a finite number in low..high, both allowed; with `low_open` it must be greater than low."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (low_open and value == low):  # NaN compares false with everything
        raise fail(name, value, f"a number {'above' if low_open else 'from'} {low:g} to {high:g}")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    is_bool = isinstance(value, bool) and not any(isinstance(item, bool) for item in allowed)  # True == 1
    if is_bool or isinstance(value, float | list | dict) or value not in allowed:
        optional = ", or left out" if None in allowed else ""
        raise fail(name, value, f"one of {', '.join(str(item) for item in allowed if item is not None)}{optional}")


def list_of(name: str, value: Any, *, max_items: int) -> list[Any]:
    """Check for at most max_items in a list or tuple, and make it a list; None is empty. Items are not checked."""
    if value is not None and (not isinstance(value, list | tuple) or len(value) > max_items):
        raise fail(name, value, f"a list of at most {max_items} items")
    return list(value or ())


def string_tuple(name: str, value: Any, *, max_items: int, max_length: int) -> tuple[str, ...]:
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or len(items) > max_items:
        raise fail(name, value, f"a string or a list of at most {max_items} strings")
    for item in items:
        check_str(name, item, max_length=max_length)
    return tuple(str(item) for item in items)


def int_tuple(name: str, value: Any, *, low: int, high: int, max_items: int) -> tuple[int, ...]:
    items = list_of(name, value, max_items=max_items)
    for item in items:
        check_int(name, item, low, high)
    return tuple(items)


def is_deeper(value: Any, limit: int = MAX_NESTING) -> bool:
    """Check whether objects and lists are nested more than `limit` deep, level by level, without recursion."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [item for node in level if isinstance(node, dict | list) for item in _items(node)]
        if not level:
            return False
    return True


def _items(node: dict[str, Any] | list[Any]) -> Sequence[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def check_nesting(name: str, value: Any) -> None:
    """Check that a JSON value can be read recursively."""
    if is_deeper(value):
        raise invalid(name, f"nested more than {MAX_NESTING} deep, which is the limit")


class Interval(NamedTuple):
    """The numbers from low to high that a field allows, both included; with `low_open`, low itself is not allowed."""

    low: float
    high: float
    low_open: bool = False


POSITIVE = Interval(0.0, 1e6, low_open=True)


def option(default: Any, allowed: Any, help: str = "", *, optional: bool = False, **metadata: Any) -> Any:
    """Define a dataclass field that a user can set. It is stated once: checks, flags and bodies follow from it.

    Args:
        default: None means "chosen later", and is then an allowed value.
        allowed: a range of integers, an Interval of numbers, a tuple of choices, the type bool, str or dict, or a
            function of the field's name and value that returns the value to keep or raises InvalidRequestError.
        help: the help text of the command line, where a field without one has no flag. "(default: ...)" is appended to
            the help of an engine option unless the default is None.
        optional: whether None is allowed, which is so if it is the default.
        metadata: more about the field, for the code that reads it; `words`: texts that its flag takes besides numbers.
    """
    metadata |= {"allowed": allowed, "help": help, "optional": optional or default is None}
    return field(default=default, metadata=metadata)


def pop_options(kind: type[Options], options: dict[str, Any]) -> Options:
    """Remove the fields of a dataclass from options, and return the dataclass made of them."""
    names = [item.name for item in fields(kind) if item.name in options]  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: options.pop(name) for name in names})


def check_options(config: Any) -> None:
    """Check every field of a dataclass against the values it allows, and keep each in its normal form."""
    kind: Any = type(config)
    for name, default, allowed, optional in _options_of(kind):
        value = getattr(config, name)
        if value is default:  # is allowed, and has its normal form
            continue
        kept = _checked(name, value, allowed, optional=optional)
        if kept is not value:
            object.__setattr__(config, name, kept)


@cache
def _options_of(kind: type) -> list[tuple[str, Any, Any, bool]]:
    found = [item for item in fields(kind) if "allowed" in item.metadata]
    return [(item.name, item.default, item.metadata["allowed"], item.metadata["optional"]) for item in found]


def _checked(name: str, value: Any, allowed: Any, *, optional: bool) -> Any:
    """Put an allowed value into its normal form. Raise InvalidRequestError for another one."""
    if isinstance(allowed, range) and allowed.step == 1:
        check_int(name, value, allowed.start, allowed.stop - 1, optional=optional)
    elif isinstance(allowed, range):
        if type(value) is not int or value not in allowed:
            raise fail(name, value, f"a multiple of {allowed.step} up to {allowed[-1]}")
    elif isinstance(allowed, Interval):
        if value is not None or not optional:
            check_float(name, value, allowed.low, allowed.high, low_open=allowed.low_open)
            return float(value)  # a numpy number becomes a plain one
    elif isinstance(allowed, tuple):
        check_choice(name, value, allowed)
    elif allowed is bool:
        check_bool(name, value)
    elif allowed is dict:
        if not isinstance(value, dict):
            raise fail(name, value, "an object")
    elif allowed is str:
        check_str(name, value, optional=optional)
    else:
        return allowed(name, value)
    return value
