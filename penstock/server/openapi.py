"""/openapi.json and /docs: the routes with the first sentences of their handlers, and the bodies that they decode.

Both are made from the application's table of routes and from the structs of bodies and answers, so they cannot promise
what the server does not read. The page is plain HTML without scripts. Neither says anything about this server.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from html import escape
from inspect import getdoc
from typing import Any

import msgspec
from starlette.routing import Route

from penstock import __version__
from penstock.interface.sampling_params import SamplingParams
from penstock.server.openai_responses import Completion

REF = "#/components/schemas/"
ADDRESSED = re.compile(r"^Handle [A-Z]+ \S+?[:,;]? ")  # how the docstrings of some handlers begin
ERROR = {
    "type": "object",
    "description": "OpenAI's error object, which every status above 399 has.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #8885;padding:.2rem .6rem .2rem 0;"
    "text-align:left;vertical-align:top}code{font-size:.95em}summary{cursor:pointer}details{margin:.4rem 0 1rem}"
)

POLICY = f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'"


def describe(
    routes: Sequence[Route], bodies: Mapping[Any, tuple[type, type | None]], root_path: str = ""
) -> dict[str, Any]:
    """Make the OpenAPI document of the routes.

    Args:
        bodies: handler -> the struct of the body that it reads, and of the choices in its answer, if it has some.
    """
    kinds = [kind for kind, _ in bodies.values()]
    answers = [None if choice is None else _answer(choice) for _, choice in bodies.values()]
    schemas, components = msgspec.json.schema_components([*kinds, *filter(None, answers)], ref_template=REF + "{name}")
    of_body, of_answer = dict(zip(bodies, schemas, strict=False)), iter(schemas[len(kinds) :])
    of_handler = {handler: next(of_answer) for handler, answer in zip(bodies, answers, strict=True) if answer}
    _explain(components)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        handler, path = getattr(route.endpoint, "func", route.endpoint), route.path.replace(":path}", "}")
        operation = _operation(path, handler, of_body.get(handler), of_handler.get(handler, {}))
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _answer(choice: type) -> type:
    """Make the struct of an answer with choices of this kind."""
    members: list[Any] = []
    for item in msgspec.structs.fields(Completion):
        kind = list[choice] if item.name == "choices" else item.type  # type: ignore[valid-type]  # known at run time
        members.append((item.name, kind) if item.required else (item.name, kind, item.default))
    return msgspec.defstruct(f"{choice.__name__.removesuffix('Choice')}Answer", members, kw_only=True)


def _explain(components: dict[str, dict[str, Any]]) -> None:
    """Add the help texts of SamplingParams to the fields of bodies that have its names."""
    texts = {item.name: item.metadata["help"] for item in fields(SamplingParams) if item.metadata["help"]}
    for name, schema in components.items():
        if name.endswith("Request"):
            for field, described in schema["properties"].items():
                if field in texts:
                    described["description"] = texts[field]


def _operation(path: str, handler: Any, body: Any, answer: Any) -> dict[str, Any]:
    text = ADDRESSED.sub("", " ".join((getdoc(handler) or "").split("\n\n")[0].split()))
    found: dict[str, Any] = {
        "summary": text[:1].upper() + text[1:],
        "operationId": f"{handler.__name__}{re.sub(r'[^a-z0-9]+', '_', path).rstrip('_')}",
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": f"{REF}Error"}}},
            },
        },
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        text_type = {"type": "string"}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text_type} for name in names]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def page(document: dict[str, Any]) -> str:
    """Write the document as HTML."""
    return "".join(
        (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>Penstock API</title><style>{STYLE}</style>",
            f"<h1>Penstock {document['info']['version']}: the HTTP API</h1>",
            "<p>The same as a document for programs: <a href=openapi.json>openapi.json</a>.</p>",
            *(
                _shown(f"{method.upper()} {path}", operation, document["components"]["schemas"])
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            ),
        )
    )


def _shown(title: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = f"<h2><code>{escape(title)}</code></h2><p>{escape(operation['summary'])}</p>"
    if "requestBody" not in operation:
        return text
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].removeprefix(REF)
    needed = schemas[name].get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in needed else ''}<td>{escape(_type(schema))}"
        f"<td>{escape(schema.get('description', ''))}"
        for field, schema in schemas[name]["properties"].items()
    )
    return f"{text}<details open><summary>Body</summary><table><tr><th>Field<th>Type<th>{rows}</table></details>"


def _type(schema: dict[str, Any]) -> str:
    """Name the type of a field; null, which every field allows, is left out."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
    if "enum" in schema:
        return ", ".join(str(one) for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    return f"{kind} of {_type(schema['items'])}" if kind == "array" and schema.get("items") else kind
