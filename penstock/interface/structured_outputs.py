"""StructuredOutputsParams: the form that an answer must have, with vLLM's names. It needs no grammar library.

The form is kept as text; tokenizer/grammars.py says which tokens it allows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import MAX_NESTING, InvalidRequestError, fail, invalid, is_deeper, one_line, shown

FIELD = "structured_outputs"
WHITESPACE = r"[ \n\r\t]{1,40}"  # between JSON tokens; limited, because a model may repeat whitespace for ever
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Further fields of vLLM's, with the value that means the same as leaving them out.
NEUTRAL = {"disable_fallback": False, "disable_additional_properties": False}
MAX_FORM_CHARS = 2**19  # of a schema, an expression, a grammar, or all choices together
MAX_CHOICES = 2**15
MAX_PATTERN_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of the whole answer. Exactly one of the first six attributes is given.

    Attributes:
        json: a JSON value that this JSON schema allows; given as a mapping or as text, and kept as text.
        regex: a text that this regular expression matches as a whole.
        choice: one of these texts.
        grammar: a text of this context-free grammar, in Lark's notation as llguidance reads it.
        json_object: True for any JSON object.
        structural_tag: a text in which forms begin at marks (tokenizer/grammars.py), as a mapping or as text.
        disable_any_whitespace: no spaces or line breaks between the tokens of JSON.
        whitespace_pattern: regular expression for what may stand between the tokens of JSON.

    Raises:
        InvalidRequestError: not exactly one form is given, or it has the wrong type or size; `param` is
            "structured_outputs". Whether the form can be followed is checked when it is compiled.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _fail("json_object", self.json_object, "true, or left out")
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise invalid(FIELD, f"exactly one of {', '.join(FORMS)} is needed; {found}")
        self._set("json_object", self.json_object or None)
        for name in ("json", "structural_tag"):
            self._set(name, _json_text(name, getattr(self, name)))
        self._set("choice", _choices(self.choice))
        for name in ("json", "regex", "grammar"):
            _check_text(name, getattr(self, name), MAX_FORM_CHARS)
        self._check_whitespace(given[0])

    def _check_whitespace(self, form: str) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise _fail("disable_any_whitespace", self.disable_any_whitespace, "true or false")
        _check_text("whitespace_pattern", self.whitespace_pattern, MAX_PATTERN_CHARS)
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and form not in ("json", "json_object"):
                raise InvalidRequestError(f"{FIELD}.{name}: only allowed with json or json_object", param=FIELD)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            message = (
                f"{FIELD}.whitespace_pattern: not allowed with disable_any_whitespace, which leaves out all whitespace"
            )
            raise InvalidRequestError(message, param=FIELD)

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """Read the parameters from a JSON object, as users write it.

        Raises:
            InvalidRequestError: it has unknown keys or wrong values.
        """
        if isinstance(value, cls):
            return value
        names = cls.__dataclass_fields__
        if not isinstance(value, Mapping):
            raise fail(FIELD, value, 'an object like {"json": {"type": "object"}}')
        value = {key: item for key, item in value.items() if key not in NEUTRAL or item is not NEUTRAL[key]}
        unknown = next((str(key) for key in value if key not in names), None)
        if unknown is not None:
            message = f"{FIELD}.{shown(unknown)}: unknown key; known are {', '.join(names)}"
            raise InvalidRequestError(message, param=FIELD)
        return cls(**{key: item for key, item in value.items() if item is not None})

    @property
    def key(self) -> tuple[Any, ...]:
        """A key: forms with equal keys allow the same texts."""
        whitespace = (self.disable_any_whitespace, self.whitespace_pattern)
        forms = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        return (*forms, *whitespace)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _fail(name: str, value: Any, allowed: str) -> InvalidRequestError:
    error = fail(f"{FIELD}.{name}", value, allowed)
    return InvalidRequestError(error.message, param=FIELD)


def _check_text(name: str, value: Any, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value or len(value) > limit:
        raise _fail(name, value, f"a text of 1 to {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{FIELD}.{name}: contains a lone surrogate", param=FIELD) from None


def _choices(value: Any) -> tuple[str, ...] | None:
    """Drop repeated choices, and keep the order."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not 1 <= len(value) <= MAX_CHOICES:
        raise _fail("choice", value, f"a list of 1 to {MAX_CHOICES} texts")
    for item in value:
        _check_text("choice", item, MAX_FORM_CHARS)
    if sum(map(len, value)) > MAX_FORM_CHARS:
        raise _fail("choice", value, f"at most {MAX_FORM_CHARS} characters in all")
    return tuple(dict.fromkeys(value))


def _json_text(name: str, value: Any) -> str | None:
    """Write a schema or a tag, given as a mapping or as JSON, as text. Key order is kept: answers follow it."""
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(name, value, MAX_FORM_CHARS)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _fail(name, value, f"the JSON text of an object ({one_line(error)})") from None
    if not isinstance(value, dict | bool if name == "json" else dict):
        raise _fail(name, value, "an object")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _fail(name, value, f"made of plain JSON values ({one_line(error)})") from None
    if len(text) <= MAX_FORM_CHARS and is_deeper(value):
        message = f"{FIELD}.{name}: it is nested more than {MAX_NESTING} deep, which is the limit"
        raise InvalidRequestError(message, param=FIELD)
    return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
