"""Another parameter table for the built-in architectures, for the length of one test."""

from pathlib import Path

import pytest

from penstock.models.registry import ARCHITECTURES, ModelVersion, find_model


def replace_tables(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Compute every architecture with Llama's class and the table in `file`."""
    source = find_model("LlamaForCausalLM").source
    for architecture in ARCHITECTURES.values():
        monkeypatch.setitem(architecture.versions, "default", ModelVersion(source, file))
