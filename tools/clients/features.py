"""Run one client's example in that client's own environment: `python features.py FILE URL`, with the standard library.

FILE has a function for each feature of the client, which takes a Server and raises if the answer is wrong. One line of
JSON per function is printed: the feature, and null or the error.
"""

import importlib.util
import json
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

FEATURES = ("chat", "stream", "tools", "structured", "embeddings", "logprobs", "agent")
QUESTION = "What is 3 + 4?"
MODEL = "demo"
KEY = "sk-x"
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Server:
    """The address of the server, which other APIs use with and without /v1."""

    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def check(answer: Any, wanted: str = "7") -> None:
    """Raise ValueError unless the answer has the text."""
    if wanted not in str(answer):
        raise ValueError(f"no {wanted} in the answer {str(answer)[:200]!r}")


def check_vectors(vectors: Any, count: int) -> None:
    """Raise ValueError unless there are as many vectors, which differ."""
    found = {tuple(vector) for vector in vectors}
    if len(found) != count or len({len(vector) for vector in found}) != 1:
        raise ValueError(f"{len(found)} different vectors instead of {count}")


def main(path: str, url: str) -> None:
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["example"] = example  # dataclasses and pydantic look a class's module up there
    spec.loader.exec_module(example)
    for name in FEATURES:
        if (run := getattr(example, name, None)) is None:
            continue
        start, error = time.monotonic(), None
        try:
            run(Server(url))
        except Exception as exception:
            traceback.print_exc()
            error = f"{type(exception).__name__}: {' '.join(str(exception).split())}"[:500]
        print(json.dumps({"feature": name, "error": error, "s": round(time.monotonic() - start, 2)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
