"""Read untrusted JSON and YAML files, and one object of them key by key. No torch.

Files are read within limits on size and nesting, so that a hostile one cannot exhaust memory or time. ConfigReader then
reads every key with its type and range, and lists the keys that were not read. It knows no keys and no models. Every
error is a ModelLoadError that names the file, the key, its value and what is allowed.
"""

import json
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import yaml

from penstock.errors import ModelLoadError, one_line, shown

MAX_SIZE = 2**31 - 1  # larger than any size in a config.json
MAX_BYTES = 2**27  # size limit of a JSON file; the largest, indexes of many shards, have a few million bytes
MAX_YAML = 2**20  # characters in a YAML file; tables and maps have a few thousand
MAX_DEPTH = 64  # nested brackets in YAML
MAX_TEXT = 500  # characters of names in an error message


def same(value: Any, expected: Any) -> bool:
    """Compare a value in a file with the expected one: 1 equals 1.0, but 0 is not false and true is not 1."""
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


class ConfigReader:
    """Reads one JSON object, which errors call `where`. A null key counts as absent if the read has a default.

    The default `...` means that the key must be present.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = one_line(where, MAX_TEXT)  # it may have names of the file in it
        self._values = values
        self._read: set[str] = set()

    def fail(self, key: str, allowed: str) -> ModelLoadError:
        """Make the error for a key that is missing or whose value is not allowed."""
        if key not in self._values:
            return ModelLoadError(f"{self.where}: {key} is missing; it must be {allowed}")
        return ModelLoadError(f"{self.where}: {key} = {shown(self._values[key])} is not allowed; it must be {allowed}")

    def has(self, key: str) -> bool:
        """Tell whether the key is present and not null, and mark it as read."""
        return self.raw(key) is not None

    def is_null(self, key: str) -> bool:
        """Tell whether the key is present and null, and mark it as read."""
        return key in self._values and self.raw(key) is None

    def raw(self, key: str) -> Any:
        """Get the value unchecked, or None if it is absent, and mark the key as read."""
        self._read.add(key)
        return self._values.get(key)

    def everything(self) -> dict[str, Any]:
        """Get all values unchecked, and mark all keys as read, for code that knows what it may leave unread."""
        self._read.update(self._values)
        return dict(self._values)

    def forget(self, keys: Collection[str]) -> None:
        """Mark keys as not read."""
        self._read.difference_update(keys)

    def integer(self, key: str, low: int, high: int, default: int | EllipsisType = ...) -> int:
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | EllipsisType = ...) -> float:
        """Read a number from low to high, both finite."""
        value = self._value_or(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # NaN compares false; an integer may be too large for a float
            raise self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Read a list of at least one number from low to high. The key must be present."""
        items = self.raw(key)
        if not isinstance(items, list) or not items:
            raise self.fail(key, f"a list of numbers from {low:g} to {high:g}")
        each = ConfigReader({str(index): item for index, item in enumerate(items)}, f"{self.where}: {key}")
        return tuple(each.number(str(index), low, high) for index in range(len(items)))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value_or(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | EllipsisType = ...) -> str:
        value = self._value_or(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.fail(key, "one of " + ", ".join(sorted(allowed)))
        return value

    def section(self, key: str) -> "ConfigReader | None":
        """Make a reader of a nested object; None if the key is absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def neutral(self, values: Mapping[str, Any]) -> None:
        """Raise ModelLoadError if a key has a value other than this neutral one, which would change the computation."""
        for key, value in values.items():
            if self.has(key) and not same(self.raw(key), value):
                raise self.fail(key, f"{json.dumps(value)}, or absent")

    def unread(self, harmless: Collection[str]) -> list[str]:
        """List the sorted keys that were not read, are not null or harmless and do not begin with an underscore."""
        ignored = {*self._read, *harmless, *(key for key, value in self._values.items() if value is None)}
        return sorted(key for key in self._values if key not in ignored and key[:1] != "_")

    def finish(self, harmless: Collection[str]) -> None:
        """Raise ModelLoadError if a key that is not harmless is still unread."""
        unknown = self.unread(harmless)
        if unknown:
            key = unknown[0]
            override: dict[str, Any] = dict.fromkeys(unknown)
            for section in reversed(self.where.split(": ")[1:]):
                override = {section: override}
            text = json.dumps(override)
            words = f"'{text}'" if len(text) <= MAX_TEXT else "with null as its value"
            raise ModelLoadError(
                f"{self.where}: {one_line(key)} = {shown(self._values[key])} is unknown, and it may change what the "
                f"model computes; if it does not, --hf-overrides {words} leaves it out. In a family of your own, read "
                f"it, or pass it to harmless()"
            )

    def _value_or(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        return default if value is None and default is not ... else value


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raise ModelLoadError if there is none."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path}: is not a file")  # reading a pipe would never end
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds {shown(value)}; it must be an object")
    return value


def read_text(file: Path) -> str:
    """Read a text file. Raise ModelLoadError if it cannot be read."""
    if file.exists() and not file.is_file():
        raise ModelLoadError(f"{file}: is not a file")  # reading a pipe would never end
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML, refusing duplicate keys. Raise ModelLoadError if it is not YAML, or a key is repeated."""
    if len(text) > MAX_YAML:
        raise ModelLoadError(f"{where}: has {len(text)} characters; at most {MAX_YAML} are allowed")
    try:
        _check_depth(text)
        return yaml.load(text, _UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ModelLoadError(f"{where}: not YAML: {place}{one_line(error.problem or error.context)}") from None
    except RecursionError:
        raise ModelLoadError(f"{where}: not YAML that can be read: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelLoadError(f"{where}: not YAML: {one_line(error)}") from None  # or a bad date, base64 value or key


def _check_depth(text: str) -> None:
    """Raise RecursionError for brackets nested too deeply, on which the scanner takes quadratic time."""
    depth = 0
    for char in text:
        depth = max(0, depth + (char in "[{") - (char in "]}"))
        if depth > MAX_DEPTH:
            raise RecursionError


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, but duplicate keys are refused instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("a key must be a word")
        names = Counter(key.value for key, _ in node.value)
        name, count = names.most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise yaml.YAMLError(f"duplicate key {shown(name)}")
        return super().construct_mapping(node, deep)
