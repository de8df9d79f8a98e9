"""Print every file that a chat completion over HTTP passes through: ``python tools/request_path.py``.

A file counts if one of its functions is called for the request. Values that are only constructed, and code that runs
while the engine starts, do not count. The engine's side is traced in this process, through ``LLM``, because its code is
the same. What is measured is the package that Python imports, which need not be the one of this checkout.
docs/request.md names the main files; the rest are their helpers.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # if no Penstock is installed, this checkout's
import penstock

PACKAGE = Path(penstock.__file__).parent
ENGINE_ROOMS = ("engine", "runner", "models", "layers", "kernels")
MODEL_ROOMS = ("models", "layers")
BODY = {"model": "demo", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 4, "stream": True}


@contextmanager
def traced() -> Iterator[list[str]]:
    """Yield the paths below penstock/ whose functions are called in the block, in the order of their first calls."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            found[str(Path(name).relative_to(PACKAGE))] = None

    paths: list[str] = []
    sys.setprofile(note)
    try:
        yield paths
    finally:
        sys.setprofile(None)
        paths += found


async def server_side() -> list[str]:
    """Return the files of the server process, from the ASGI call to the last chunk of the stream."""
    from penstock import AsyncLLM
    from penstock.server.app import create_app

    messages = iter([{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}])
    still_there = asyncio.Event()  # never set: the client does not disconnect

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await still_there.wait()
        return message or {}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise SystemExit(f"the request failed with status {message['status']}")

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    async with AsyncLLM(model="demo") as llm:
        app = create_app(llm.client)
        with traced() as paths:
            await app(scope, receive, send)
    return paths


def engine_side() -> list[str]:
    """Return the files of the engine process, from the moment when a request is added to the engine."""
    from penstock import LLM, SamplingParams

    with LLM(model="demo") as llm, traced() as paths:
        llm.generate("Once upon a time", SamplingParams(max_tokens=4))
    return ["client/engine_process.py", *(path for path in paths if path.split("/")[0] in ENGINE_ROOMS)]


def measure() -> dict[str, list[str]]:
    """Return the files by stage."""
    logging.getLogger("penstock.access").setLevel(logging.WARNING)
    server, engine = asyncio.run(server_side()), engine_side()
    first_layer = next(index for index, path in enumerate(engine) if path.split("/")[0] in MODEL_ROOMS)
    return {
        "server process": server,
        "engine process, before the first layer": engine[:first_layer],
        "engine process, the model and its sampler": engine[first_layer:],
    }


def main() -> None:
    stages = measure()
    print(f"{sum(map(len, stages.values()))} files of {PACKAGE.name}")
    for stage, paths in stages.items():
        print(f"{stage}: {len(paths)} files")
        for room, group in groupby(paths, key=lambda path: path.rpartition("/")[0]):
            print(f"  {room + '/':24} {' '.join(Path(path).stem for path in group)}")


if __name__ == "__main__":
    main()
