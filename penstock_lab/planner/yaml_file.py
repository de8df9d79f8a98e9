"""Read hardware and placements from YAML files, by name or path. Unknown fields are refused; numbers have bounds."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from penstock import InvalidRequestError, ModelLoadError
from penstock.errors import fail, invalid, one_line, shown
from penstock.spec.config_reader import read_text, read_yaml

MAX_BYTES = 2**60
Found = TypeVar("Found")


def names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(option: str, text: str, path: Path, read: Callable[[Any], Found], advice: str) -> Found:
    """Apply `read` to a YAML file. text: what the user gave for the option, for error messages.

    Raises:
        InvalidRequestError: there is no such file (the message ends with the advice), it is not YAML, or `read`
            refuses it.
    """
    try:
        path.stat()
    except (OSError, ValueError):  # a name may be too long, or contain a NUL
        raise invalid(option, f"there is no {shown(text)}; {advice}") from None
    try:
        return read(read_yaml(read_text(path), str(path)))
    except ModelLoadError as error:
        message = f"{option}: {one_line(error)}"
    except InvalidRequestError as error:
        message = f"{option}: {text!r}: {error}"
    raise InvalidRequestError(message, param=option)


def record(found: Any, kind: type, where: str) -> dict[str, Any]:
    """Check that a value is a mapping whose keys are fields of a dataclass, including all fields without a default."""
    allowed = {item.name: item for item in fields(kind)}
    if not isinstance(found, Mapping):
        raise InvalidRequestError(f"{where} must be a mapping of {', '.join(allowed)}")
    if unknown := [str(key) for key in found if key not in allowed]:
        raise InvalidRequestError(f"{where} has an unknown field {', '.join(unknown)}; known are {', '.join(allowed)}")
    needed = [name for name, item in allowed.items() if item.default is item.default_factory is MISSING]
    if missing := [name for name in needed if name not in found]:
        raise InvalidRequestError(f"{where} lacks {', '.join(missing)}")
    return dict(found)


def number(name: str, value: Any, low: float, high: float) -> float:
    """Check that a number lies in low..high. YAML reads a number without a point, such as 1e12, as text."""
    try:
        found = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or not low <= found <= high:  # comparisons with NaN are false
        raise fail(name, value, f"a number from {low:g} to {high:g}")
    return found


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Check that a whole number, which may be written as 64e9, lies in low..high."""
    found = value if type(value) is int else number(name, value, low, high)
    if int(found) != found or not low <= found <= high:
        raise fail(name, value, f"a whole number from {low} to {high}")
    return int(found)
