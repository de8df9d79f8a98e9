"""JSON answers, encoded by msgspec."""

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
