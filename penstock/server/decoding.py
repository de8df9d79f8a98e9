"""From bytes to a request body, or to an error that names the field. Knows no field but by name."""

from typing import TypeVar

import msgspec

from penstock.errors import InvalidRequestError
from penstock.server.openai_requests import ROLES, Strict

Body = TypeVar("Body", bound=Strict)
MAX_PARSED = 200  # characters of each end of msgspec's message that are looked at; it may repeat a name of megabytes
UNKNOWN = "Object contains unknown field `"
MISSING = "Object missing required field `"
NESTED = ("stream_options", "messages[")  # where an unknown field can be, but for the body itself


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; anything else is an InvalidRequestError that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise _invalid_field(str(exc)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"the body is not valid JSON: {exc}", code="invalid_json") from None


def _invalid_field(message: str) -> InvalidRequestError:
    """Turn "Expected `int`, got `str` - at `$.n`" into an error about n."""
    if len(message) > 2 * MAX_PARSED:
        message = f"{message[:MAX_PARSED]}...{message[-MAX_PARSED:]}"
    what, path = _split(message)
    code, field = "invalid_type", ""
    for start, name in ((UNKNOWN, "unknown_field"), (MISSING, "missing_field")):
        if what.startswith(start):
            code, field = name, what[len(start) :].removesuffix("`")
    if path.endswith("role") and what.startswith("Invalid enum value"):
        what += f"; it must be one of {', '.join(ROLES)}"
    param = ".".join(part for part in (path, field) if part) or None
    text = what[0].lower() + what[1:]
    return InvalidRequestError(f"{param}: {text}" if param else f"the body: {text}", param=param, code=code)


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and where. The name of an unknown field is the caller's, and may look like a place."""
    for mark in (" - at `key` in `$", " - at `$"):
        what, found, path = message.rpartition(mark)
        path = path.removeprefix(".").removesuffix("`")
        if found and (not what.startswith(UNKNOWN) or path.startswith(NESTED)):
            return what, path
    return message, ""
