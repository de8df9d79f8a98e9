"""A native library that cannot be used is none, and the user is told why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.kernels.cpu
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu import library
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from tests.kernels.packed import levels


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for again, and again after the test."""
    library._find_library.cache_clear()
    yield
    library._find_library.cache_clear()


def refusal() -> str:
    """What a user reads who asks for the native kernels."""
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.from_options(kernels="cpu").resolve(load_model_config(resolve_model("demo")))
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library\n"])
def test_a_damaged_library_is_none(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Guards against a traceback of `penstock --version` where a build was cut short."""
    (tmp_path / "penstock_cpu.so").write_bytes(content)
    monkeypatch.setattr(penstock.kernels.cpu, "__path__", [str(tmp_path)])
    assert library.load_library() is None
    assert "cannot be used" in refusal()
    assert "\n" not in refusal()


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_library_of_another_version_is_told_as_such(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Guards against advice to install a compiler where an old build has stayed behind."""
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    assert library.load_library() is None
    assert "and 99 is needed; install the package again" in refusal()
    assert "compiler" not in refusal()


def test_no_library_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Guards against a refusal that does not say what is missing."""
    monkeypatch.setattr(penstock.kernels.cpu, "__path__", [str(tmp_path)])
    assert library.load_library() is None
    assert "not installed, because there was no C++ compiler" in refusal()
