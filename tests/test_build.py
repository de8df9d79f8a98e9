"""What a built engine says of itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.build import build_engine
from penstock.config import EngineConfig
from penstock.kernels.cpu.library import LEVEL_VARIABLE, LEVELS
from tests.kernels.packed import levels
from tests.runner.test_with_engine import LLAMA


def fingerprint(directory: Path, **options: Any) -> str:
    config = EngineConfig.from_options(model=str(directory), load_format="dummy", threads=1, **options)
    return build_engine(config).info.system_fingerprint


@pytest.mark.skipif(not levels(), reason="no native library")
def test_the_fingerprint_names_what_can_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against answers of different bits under one fingerprint: backend, level, type, scheme and group size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = {
        fingerprint(tmp_path, kernels=kernels, dtype=dtype, quantization=quantization)
        for kernels in ("reference", "cpu")
        for dtype in ("bfloat16", "float32")
        for quantization in (None, "int8", "int4")
    }
    words.add(fingerprint(tmp_path, kernels="cpu", dtype="bfloat16", quantization="int4", quantization_group_size=32))
    assert len(words) == 13
    best = fingerprint(tmp_path, kernels="cpu", dtype="bfloat16")
    assert best in words
    assert LEVELS[levels()[-1]] in best
    monkeypatch.setenv(LEVEL_VARIABLE, "portable")
    assert "portable" in fingerprint(tmp_path, kernels="cpu", dtype="bfloat16")
