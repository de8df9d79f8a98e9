"""The web page: its files in `static/`, and the settings that its form offers. Nothing is built: browsers load modules.

The files are open to all, because a browser asks for them before its user has entered a key; everything that they show
comes from routes that ask for one. The libraries in `static/vendor` are as their authors published them (vendor.json).
"""

import asyncio
import hashlib
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import Interval
from penstock.interface.sampling_params import TYPES, SamplingParams, fields_of
from penstock.server.api_errors import not_found
from penstock.server.context import context_of, json_response

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".woff2": "font/woff2"}
FILES = frozenset(
    file.relative_to(STATIC).as_posix() for file in STATIC.rglob("*") if file.suffix in MEDIA_TYPES
)  # what may be asked for: nothing else in the folder, and nothing outside it
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in FILES)})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
ONE_ANSWER = {"n", "prompt_logprobs", "use_beam_search", "length_penalty", "early_stopping"}  # the page shows one


async def page_file(request: Request) -> Response:
    """Answer with a file of the page, or with 304 if the browser has it."""
    name = request.path_params.get("file", INDEX)
    asked = request.scope["raw_path"].decode("latin-1")
    if "file" in request.path_params and name not in FILES:
        raise not_found("The page has no such file.", "unknown_url")
    if name == INDEX and not asked.endswith("/"):  # the value of --root-path, below which the page's own paths are
        return Response(status_code=307, headers={"Location": asked.rpartition("/")[2] + "/"})
    content, tag = await asyncio.to_thread(_read, name)
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    if name == INDEX:
        headers["Content-Security-Policy"] = POLICY
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES.get(Path(name).suffix, "text/html"), headers=headers)


@cache
def _read(name: str) -> tuple[bytes, str]:
    content = (STATIC / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


async def settings(request: Request) -> Response:
    """Answer with the parameters of a chat request, each with its meaning and the value it has if it is not given."""
    info = context_of(request).named(request.query_params.get("model")).info_if_loaded()
    own = {"max_tokens": None, **({} if info is None else info.default_sampling)}
    shown = [item for item in fields(SamplingParams) if item.name in fields_of("chat") and item.metadata["help"]]
    return json_response({"data": [_setting(item, own) for item in shown if item.name not in ONE_ANSWER]})


def _setting(item: Field[Any], own: dict[str, Any]) -> dict[str, Any]:
    allowed, kinds = item.metadata["allowed"], set(get_args(TYPES[item.name])) or {TYPES[item.name]}
    found = {"name": item.name, "help": item.metadata["help"], "default": own.get(item.name, item.default)}
    if isinstance(allowed, Interval):
        found |= {"low": allowed.low, "high": allowed.high}
    elif isinstance(allowed, range):
        found |= {"low": allowed.start, "high": allowed.stop - 1}
    simple = {bool: "flag", int: "integer", float: "number", str: "texts"}
    matching = [name for kind, name in simple.items() if kind in kinds]
    return {**found, "kind": matching[0] if len(matching) == 1 else "json"}
