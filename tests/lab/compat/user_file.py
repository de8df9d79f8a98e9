"""Imports a module from a file that a test has written, as a user's program would import his own."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from penstock.models.registry import ARCHITECTURES


@contextmanager
def registry_as_before() -> Iterator[None]:
    """Forget afterwards what was registered inside."""
    before = {name: dict(item.versions) for name, item in ARCHITECTURES.items()}
    try:
        yield
    finally:
        for name in ARCHITECTURES.keys() - before.keys():
            del ARCHITECTURES[name]
        for name, versions in before.items():
            ARCHITECTURES[name].versions.clear()
            ARCHITECTURES[name].versions.update(versions)


def run_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the file under its own name for the length of the test."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


@contextmanager
def imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the file registers is forgotten again."""
    with registry_as_before():
        run_file(file, monkeypatch)
        yield
