"""Imports a module from a file that a test has written, as a user's program would import his own."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.models import registry
from penstock.models.registry import ARCHITECTURES


@contextmanager
def imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the file registers is forgotten again."""
    for name in ("LlamaForCausalLM", "MistralForCausalLM"):
        registry.versions(name)  # or their modules would register for this test only
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    before = dict(ARCHITECTURES)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    try:
        spec.loader.exec_module(module)
        yield
    finally:
        ARCHITECTURES.clear()
        ARCHITECTURES.update(before)
