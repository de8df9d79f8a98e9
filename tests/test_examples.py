"""Every script of examples/ runs as it stands there, and shows what it says."""

import runpy
import sys
from collections.abc import Iterator

import pytest

from tests.pages import ROOT, serving

FILES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {  # what the output of a script has to hold
    "batch_jsonl": '"id": 3, "prompt": "The dog"',
    "chat": "3 + 4 = 7",
    "generate": "'The dog' -> ",
    "logits_processor": "forbidden: ",
    "logprobs": "rank 1",
    "low_level_engine": "step 20: abort endless: True",
    "openai_client": "3 + 4 = 7",
    "prefix_cache": "  0 of ",
    "quantize_and_convert": "packed, ",
    "seeds_and_sampling": "the same tokens in a batch: True",
    "stream": "One day: ",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a server of the demo model."""
    with serving() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_example(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "examples" / f"{name}.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 40
    if name == "openai_client":
        monkeypatch.setenv("PENSTOCK_URL", request.getfixturevalue("url"))
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out


def test_a_batch_of_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the half of batch_jsonl.py that the terminal does not show."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "One day", "n": 1}\n\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["batch_jsonl.py", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")])
    runpy.run_path(str(ROOT / "examples" / "batch_jsonl.py"), run_name="__main__")
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8").startswith('{"prompt": "One day", "n": 1, "text": ')
