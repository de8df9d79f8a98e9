"""Tiny checkpoints with coded weights, in memory: random codes in several formats, and their decoded twins as files.

A directory with floats becomes a coded one by a file `coded.json`: which coding each tensor has, by a part of its name.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.kernels.coding import CodedRows, Coding
from penstock.kernels.ops import TensorRows
from penstock.kernels.tensors import FLOAT32, NAMES, Array
from penstock.weights import sources
from penstock.weights.safetensors import Checkpoint, FileRows

PLACES = "coded.json"  # beside a checkpoint: part of a tensor's name -> name of a coding
CODINGS = {
    coding.name: coding
    for coding in (
        Coding("Q4_0", 4, zero=8),
        Coding("Q4_1", 4, mins=True),
        Coding("Q8_0", 8, zero=128),
        Coding("Q4_K", 4, 32, 256, steps=True, mins=True, step_mins=True),
        Coding("Q6_K", 6, 16, 256, zero=32, steps=True),
        Coding("K64", 4, 16, 64, zero=8, steps=True),
        Coding("AWQ", 4, 32, 32, mins=True, scale_dtype="bfloat16"),
        Coding("GPTQ with an order", 4, 32, 32, mins=True, order=True),
        Coding("table", 4, 32, 32, levels=tuple(np.linspace(-1, 1, 16) ** 3), scale_dtype="float32"),
        Coding("rows", 8, block=None, zero=128, column_scales=True, scale_dtype="float32"),
    )
}


def random_parts(coding: Coding, shape: tuple[int, ...], seed: int, deviation: float) -> dict[str, Array]:
    """Parts of a weight whose values have about this standard deviation."""
    generator, parts = np.random.default_rng(seed), {}
    largest = max(map(abs, coding.levels)) if coding.levels else 2**coding.bits / 2
    unit = 2 * deviation / largest
    for name, (size, dtype) in coding.parts(shape).items():
        if name == "codes":
            value = generator.integers(0, len(coding.levels) or 2**coding.bits, size)
        elif name in ("steps", "step_mins"):
            value = generator.integers(1, 8, size)
        elif name == "order":
            value = generator.permutation(size[0])
        elif name == "mins":
            value = -unit * largest * generator.uniform(0.5, 1.5, size) * (1 if coding.zero == 0 else 0)
            value /= 4 if coding.step_mins else 1
        else:
            value = unit * generator.uniform(0.5, 1.5, size) / (4 if coding.steps and name == "scales" else 1)
        parts[name] = np.asarray(value).astype(NAMES[dtype])
    return parts


def coded_rows(coding: Coding, shape: tuple[int, ...], seed: int = 0, deviation: float = 0.1) -> CodedRows:
    """A random coded weight."""
    parts = random_parts(coding, shape, seed, deviation)
    return CodedRows(coding, {name: TensorRows(part) for name, part in parts.items()})


class CodedCheckpoint(Checkpoint):
    """A checkpoint some of whose tensors have random codes instead of their values."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        places = json.loads((directory / PLACES).read_text(encoding="utf-8"))
        self._codings = {
            name: CODINGS[next(coding for part, coding in places.items() if part in name)]
            for name, entry in self.entries.items()
            if len(entry.shape) > 1 and any(part in name for part in places)
        }

    def rows(self, name: str, index: int | None = None) -> Any:
        if name not in self._codings:
            return super().rows(name, index)
        entry = self.entries[name]
        shape = entry.shape if index is None else entry.shape[1:]
        seed = zlib.crc32(f"{name} {index}".encode())
        return coded_rows(self._codings[name], shape, seed, 1.5 * shape[-1] ** -0.5)


def open_checkpoint(directory: Path, _: object) -> Checkpoint:
    return CodedCheckpoint(directory) if (directory / PLACES).exists() else Checkpoint(directory)


@pytest.fixture
def coded_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories with a coded.json are coded checkpoints."""
    monkeypatch.setattr(sources, "open_checkpoint", open_checkpoint)


def code(directory: Path, places: dict[str, str]) -> tuple[Path, Path]:
    """Make a directory a coded checkpoint, and write its twin with the decoded values. Return both."""
    (directory / PLACES).write_text(json.dumps(places), encoding="utf-8")
    twin = directory.with_name(f"{directory.name}-decoded")
    shutil.copytree(directory, twin, ignore=shutil.ignore_patterns(PLACES, "*.safetensors"))
    checkpoint = CodedCheckpoint(directory)
    values = {name: checkpoint.rows(name).read(0, entry.shape[0]) for name, entry in checkpoint.entries.items()}
    decoded = {name: np.ascontiguousarray(value.astype(FLOAT32)) for name, value in values.items()}
    save_file(decoded, twin / "model.safetensors")
    assert all(isinstance(checkpoint.rows(name), CodedRows | FileRows) for name in values)
    return directory, twin
