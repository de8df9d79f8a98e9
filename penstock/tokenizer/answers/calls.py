"""Read a tool call that is a JSON object: {"name": "add", "arguments": {"a": 1}}."""

import json
from collections.abc import Container

from penstock.tokenizer.answers.reader import Kind, Reader, Steps

ARGUMENTS = ("arguments", "parameters")
KEYS = (*ARGUMENTS, "name", "id", "type")  # an object with any other key is not a call


class AnyName:
    """Contains every name. It is used where the markup alone shows that an object is a call."""

    def __contains__(self, name: object) -> bool:
        return True


def read_call(reader: Reader, names: Container[str]) -> Steps[bool]:
    """Read the object of a call, and deliver it. If the name precedes the arguments, these are delivered as they come.

    Args:
        names: the names of the functions that may be called.

    Returns:
        Whether it was a call. If so, the held text can be dropped; else it is not markup, or the rest of a broken call.
    """
    name: str | None = None
    arguments: str | None = None
    is_out = False
    if not (yield from reader.accept("{")):
        return False
    while True:
        key = yield from _key(reader)
        if key not in KEYS:
            return False
        if key in ARGUMENTS and not is_out and name is not None and (yield from reader.peek()) == "{":
            reader.begin_call(name)
            yield from reader.value()
            reader.hold()
            is_out = True
        else:
            value = yield from _value(reader)
            if value is None or (is_out and key in ("name", *ARGUMENTS)):
                return False
            if key in ARGUMENTS:
                arguments = value
            if key == "name":
                name = _text(value)
                if not name or name not in names:
                    return False
        yield from reader.space()
        if (yield from reader.accept("}")):
            break
        if not (yield from reader.accept(",")):
            return False
    if is_out:
        return True
    arguments = _as_object(arguments)
    if name is None or arguments is None:
        return False
    reader.begin_call(name, arguments)
    return True


def read_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Read an object without a name, and deliver it as the arguments of a call of `name`."""
    if (yield from reader.peek()) != "{":
        return False
    reader.begin_call(name)
    yield from reader.value()
    reader.hold()
    return True


def give_up(reader: Reader) -> None:
    """Deliver the held text as content, because it is not markup."""
    reader.begin(Kind.CONTENT)


def _key(reader: Reader) -> Steps[str | None]:
    """Read a key, its colon and the white space around them. Return the key; None if there is none."""
    yield from reader.space()
    start = len(reader.held)
    if not (yield from reader.string()):
        return None
    key = _text(reader.held[start:])
    yield from reader.space()
    if not (yield from reader.accept(":")):
        return None
    yield from reader.space()
    return key


def _value(reader: Reader) -> Steps[str | None]:
    """Read a value, which stays held. Return it; None if it is not JSON."""
    start = len(reader.held)
    if not (yield from reader.value()):
        return None
    value = reader.held[start:]
    return value if _parsed(value) is not _BROKEN else None


_BROKEN = object()


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return _BROKEN


def _text(value: str) -> str | None:
    parsed = _parsed(value)
    return parsed if isinstance(parsed, str) else None


def _as_object(value: str | None) -> str | None:
    """Return arguments as the JSON of an object; None if they are not an object. Some models leave out empty arguments,
    or write arguments as a string."""
    if value is None or value == "null":
        return "{}"
    if value.startswith('"'):
        value = _text(value) or ""
    return value if isinstance(_parsed(value), dict) else None
