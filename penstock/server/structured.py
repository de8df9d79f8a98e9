"""The form of an answer in request bodies: OpenAI's `response_format`, `text.format` of /v1/responses, and vLLM's
`structured_outputs` with its older spellings `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from penstock.errors import InvalidRequestError, NotSupportedError, check_bool, check_str, fail, shown
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.structured_outputs import FIELD, StructuredOutputsParams
from penstock.server.context import ServerContext

FORMAT, TEXT = "response_format", "text"
SCHEMA_KEYS = ("name", "description", "schema", "strict")
KINDS = ("text", "json_object", "json_schema")
GUIDED = ("json", "regex", "choice", "grammar")  # forms that vLLM once had as fields of their own
MAX_NAME, MAX_DESCRIPTION = 64, 4096  # characters


def form_of(body: Any) -> StructuredOutputsParams | None:
    """Return the form that a body asks for; None: any text.

    Raises:
        InvalidRequestError: the form is malformed, or given in two fields; `param` is the field.
    """
    forms = {name: form for name, value in _given(body) if (form := _read(name, value)) is not None}
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidRequestError(f"{second}: not allowed with {first}, which gives a form too", param=second)
    return next(iter(forms.values()), None)


def _given(body: Any) -> list[tuple[str, Any]]:
    """Return the fields about the form that a body has, with their values."""
    return [(name, value) for name in READERS if (value := getattr(body, name, None)) is not None]


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    with naming(name):
        return READERS[name](value)


async def check_form(context: ServerContext, body: Any, params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field, for a form that the model cannot follow."""
    if params.structured_outputs is not None:
        with naming(_given(body)[-1][0]):  # a field before it only says that the form is free
            await context.client.check_form(params.structured_outputs)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Turn errors about the form into errors about the field in which the body gives it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != FIELD or field == FIELD:
            raise
        _, _, reason = error.message.partition(": ")
        raise InvalidRequestError(f"{field}: {reason}", param=field, code=error.code) from None


def _of_text(value: Any) -> StructuredOutputsParams | None:
    """Return the form from the field `text` of /v1/responses; None for {} and for a format of type text."""
    if not isinstance(value, Mapping):
        raise fail(TEXT, value, 'an object like {"format": {"type": "text"}}')
    if value.get("verbosity") is not None:
        raise NotSupportedError("text.verbosity: not supported; this is not built yet", param=TEXT)
    _check_keys(TEXT, value, ("format", "verbosity"))
    wanted = value.get("format")
    return None if wanted is None else _of_format(TEXT, wanted, lambda given: given)


def _of_format(field: str, value: Any, schema_of: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, Mapping):
        raise fail(field, value, 'an object like {"type": "json_object"}')
    kind = value.get("type")
    if kind == "structural_tag":
        raise NotSupportedError(f"{field}: the type structural_tag is not supported; it is not built yet", param=field)
    if kind not in KINDS:
        raise fail(field, kind, f"an object whose type is one of {', '.join(KINDS)}")
    if kind != "json_schema":
        _check_keys(field, value, ("type",))
        return None if kind == "text" else StructuredOutputsParams(json_object=True)
    return _of_schema(field, schema_of(value))


def _nested_schema(value: Mapping[str, Any]) -> Any:
    """Return the schema's description, which chat has in a separate field, and /v1/responses next to the type."""
    _check_keys(FORMAT, value, ("type", "json_schema"))
    return value.get("json_schema")


def _of_schema(field: str, value: Any) -> StructuredOutputsParams:
    """Return the form for a named schema. `strict` changes nothing: a schema is always followed or refused."""
    if not isinstance(value, Mapping) or value.get("schema") is None:
        raise fail(field, value, 'a format with a name and a schema: {"name": "answer", "schema": {...}}')
    _check_keys(field, value, ("type", *SCHEMA_KEYS))
    with naming(field):
        try:
            check_str(FIELD, value.get("name"), max_length=MAX_NAME, optional=True)
            check_str(FIELD, value.get("description"), max_length=MAX_DESCRIPTION, optional=True)
            if value.get("strict") is not None:
                check_bool(FIELD, value["strict"])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error.message} (of name, description or strict)", param=FIELD) from None
        return StructuredOutputsParams(json=value["schema"])


def _check_keys(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((str(key) for key in value if key not in known), None)
    if unknown is not None:
        raise InvalidRequestError(f"{field}.{shown(unknown)}: unknown key; known are {', '.join(known)}", param=field)


def _of_guided(kind: str, value: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams.of({kind: value})


# The fields in which a body may give the form, and how they are read.
READERS: dict[str, Callable[[Any], StructuredOutputsParams | None]] = {
    FORMAT: partial(_of_format, FORMAT, schema_of=_nested_schema),
    TEXT: _of_text,
    FIELD: StructuredOutputsParams.of,
    **{f"guided_{kind}": partial(_of_guided, kind) for kind in GUIDED},
}
