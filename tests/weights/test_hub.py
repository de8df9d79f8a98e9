"""Finding a model's files."""

import builtins
import importlib
from pathlib import Path
from typing import Any

import pytest

from penstock.demo import MODEL_DIR
from penstock.errors import ModelLoadError
from penstock.weights.hub import resolve_model


def test_demo_and_directories(tmp_path: Path) -> None:
    """Guards against a directory that is looked up on the hub."""
    assert resolve_model("demo") == MODEL_DIR
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "~/missing-model", "a/b/c", "plain"])
def test_what_is_neither_is_refused(name: str) -> None:
    """Guards against a mistyped path that goes to the network."""
    with pytest.raises(ModelLoadError, match="there is no directory"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """Guards against a path to the weights themselves."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_hub_names_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an ImportError where a word of advice is wanted."""
    original = builtins.__import__

    def no_hub(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", no_hub)
    with pytest.raises(ModelLoadError, match=r"penstock\[hub\]"):
        resolve_model("owner/model")


def test_the_hub_is_asked_for_weights_and_never_for_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against fetching pickles or Python files; and what the hub answers becomes one clear error."""
    hub = importlib.import_module("huggingface_hub")
    asked: list[Any] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert resolve_model("owner/model") == tmp_path
    assert asked[0][0] == "owner/model"
    assert not any(pattern.endswith(("bin", "pt", "py", "*")) for pattern in asked[0][1])

    def offline(name: str, *, allow_patterns: list[str]) -> str:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"no route to the hub$"):  # in one line
        resolve_model("owner/model")
