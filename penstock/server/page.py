"""The web page for chatting with the model and watching the engine.

It is one document, assembled from the files in static/, and loads nothing but this server's answers. Its content
security policy allows only its own script and style, by their hashes, so text that was parsed as markup could do
nothing.
"""

import asyncio
import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PARTS = re.compile(r"<(style|script)>(.*?)</\1>")  # in index.html; holds the names of the files to insert
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(request: Request) -> Response:
    """Answer with the web page."""
    html, policy = await asyncio.to_thread(_page)
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(html, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the document and its content security policy."""
    hashes: dict[str, str] = {}

    def put_in(found: re.Match[str]) -> str:
        kind, names = found.groups()
        text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names.split())
        text = f'"use strict";\n{text}' if kind == "script" else text
        hashes[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        return f"<{kind}>{text}</{kind}>"

    html = PARTS.sub(put_in, (STATIC / "index.html").read_text(encoding="utf-8"))
    return html, POLICY.format(**hashes)
