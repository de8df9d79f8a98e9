"""The HTTP process stays light."""

import subprocess
import sys

PROGRAM = """
import sys
import penstock.server.app, penstock.server.serve
from penstock.server.app import create_app
from tests.server.fakes import FakeEngineClient
create_app(FakeEngineClient())
print(*sorted(name for name in sys.modules if "." not in name))
"""


def test_no_torch_and_no_transformers() -> None:
    """Guards against an import that costs every server start 1.3 s (torch) or 2.3 s (transformers), and memory."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "starlette" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "fastapi", "pydantic", "requests", "openai", "safetensors"}
