"""A checkpoint of safetensors files, single or sharded: names and shapes at once, rows when they are asked for.

Rows are read, not mapped: the pages of a map would count as this process's memory beside the packed model. Needs no
torch until a row is read. Pickled checkpoints are refused, because reading one runs code from it.
"""

import hashlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from penstock.errors import ModelLoadError
from penstock.validation import shown

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MISTRAL = "consolidated.safetensors"  # Mistral's own format; with .index.json, where there are several
PACKED = "penstock.safetensors"  # weights as the native kernels read them; weights/packed_file.py
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # the format's name, torch's
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LENGTH_BYTES = 8  # before the header: how long it is
MAX_HEADER = 100_000_000  # bytes, the format's own limit
SAMPLES = 16  # places in each file that a fingerprint reads
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is and what it looks like. `dtype` is in the format's spelling, BF16 for instance."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int  # of its first byte in the file

    @property
    def num_bytes(self) -> int:
        """Of a tensor of floats."""
        return num_bytes(self.shape, self.dtype)

    def slice(self, index: int) -> "TensorEntry":
        """One of the tensors that are stacked along the first axis."""
        part = replace(self, shape=self.shape[1:])
        return replace(part, offset=self.offset + index * part.num_bytes)


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Of a tensor of floats; dtype in the format's spelling."""
    return math.prod(shape) * ITEM_BYTES[dtype]


class Checkpoint:
    """All tensors of a model directory, by name.

    Attributes:
        entries: every tensor in any of the files.
    """

    def __init__(self, directory: Path) -> None:
        """Read the headers.

        Raises:
            ModelLoadError: no safetensors, a shard that is missing or outside the directory, a tensor that is in two
                shards or in none, a damaged header; or the weights are packed.
        """
        self.files = find_files(directory)
        if self.files[0].name == PACKED:
            raise ModelLoadError(f"{directory}: its weights are packed; they can only be served, with the cpu kernels")
        self.entries: dict[str, TensorEntry] = {}
        for file in self.files:
            for name, entry in read_entries(file).items():
                if name in self.entries:
                    first = self.entries[name].file.name
                    raise ModelLoadError(f"{directory}: {name} is in two files, {first} and {file.name}")
                self.entries[name] = entry

    def rows(self, name: str, index: int | None = None) -> "FileRows":
        """One tensor, or the one at `index` of those that it stacks, to be read piece by piece.

        Raises:
            ModelLoadError: it is no float type.
        """
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise ModelLoadError(f"{entry.file.name}: {name} is {entry.dtype}; supported are {', '.join(FLOATS)}")
        return FileRows(name, entry if index is None else entry.slice(index))


@dataclass(frozen=True, slots=True)
class FileRows:
    """A tensor in a file, as a kernels.ops.RowSource: rows of its first axis, in the type they are stored in."""

    name: str
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, start: int, stop: int) -> "Tensor":
        """Rows start .. stop-1.

        Raises:
            ModelLoadError: the file cannot be read, or no longer holds them.
        """
        import torch

        from penstock.weights.rows import empty_rows

        rows = empty_rows((stop - start, *self.shape[1:]), getattr(torch, FLOATS[self.entry.dtype]))
        row_bytes = math.prod(self.shape[1:]) * rows.itemsize
        self._fill(rows.view(-1).view(torch.uint8).numpy().data, self.entry.offset + start * row_bytes)
        return rows

    def _fill(self, buffer: memoryview, offset: int) -> None:
        try:
            with self.entry.file.open("rb", buffering=0) as stream:
                stream.seek(offset)
                while buffer:
                    count = stream.readinto(buffer)
                    if not count:
                        raise ModelLoadError(f"{self.entry.file}: {self.name} is cut short")
                    buffer = buffer[count:]
        except OSError as error:
            raise ModelLoadError(f"{self.entry.file}: {self.name} cannot be read: {error}") from None


def find_files(directory: Path) -> list[Path]:
    """The weight files of a model directory, sorted by name: packed ones, else those with Transformers' names."""
    if (directory / PACKED).is_file():
        return [directory / PACKED]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return _shards(directory / INDEX)
    if (directory / MISTRAL).is_file():
        return [directory / MISTRAL]
    if (directory / f"{MISTRAL}.index.json").is_file():
        return _shards(directory / f"{MISTRAL}.index.json")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{directory}: {pickles[0]} is a pickle, and reading a pickle runs code from it; only safetensors are "
            f"read. Convert it with Transformers' save_pretrained"
        )
    raise ModelLoadError(f"{directory}: no weights; it must hold {SINGLE}, or {INDEX} and its shards")


def fingerprint(directory: Path) -> str:
    """A short word for these weights, the same on every machine, without reading them all.

    A hash of each file's name, size, header (names, shapes, offsets) and 16 samples of 4 KiB spread evenly over it.
    It tells checkpoints apart; it does not protect against somebody who changes a byte between the samples on purpose.
    """
    digest = hashlib.sha256()
    for file in find_files(directory):
        header = read_header(file)
        try:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode() + header)
            with file.open("rb") as stream:
                for index in range(SAMPLES):
                    stream.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
        except OSError as error:
            raise ModelLoadError(f"{file}: cannot be read: {error}") from None
    return digest.hexdigest()[:32]


def _shards(index: Path) -> list[Path]:
    """The files an index names. Each must be there, hold the tensors it is said to hold, and be in the directory."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map = {shown(weight_map)} must map tensors to files")
    for name in weight_map.values():
        plain = isinstance(name, str) and name == os.path.basename(name) and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: {shown(name)} must be the plain name of a .safetensors file")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{index.parent}: shard {file.name} is missing, though {index.name} names it")
    held = {file.name: read_entries(file) for file in files}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise ModelLoadError(f"{index.parent}: {tensor} is not in {name}, though {index.name} says so")
    return files


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file, by name.

    Raises:
        ModelLoadError: the file cannot be read, or is no sound safetensors file.
    """
    text = read_header(file)
    header = _parse(file, lambda: json.loads(text, object_pairs_hook=_unique))
    try:
        safe_open(file, framework="np")  # checks sizes and offsets; reads no tensor
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: not a sound safetensors file: {error}") from None
    entries = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(item, dict) or not {"shape", "dtype", "data_offsets"} <= set(item):
            raise ModelLoadError(f"{file}: the header's entry for {shown(name)} is damaged")
        offset = LENGTH_BYTES + len(text) + item["data_offsets"][0]
        entries[name] = TensorEntry(file, tuple(item["shape"]), str(item["dtype"]), offset)
    return entries


def read_metadata(file: Path) -> dict[str, Any]:
    """What a file says of itself."""
    metadata = _parse(file, lambda: json.loads(read_header(file))).get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ; readers of the format disagree which of two equal ones counts."""
    if len(result := dict(pairs)) == len(pairs):
        return result
    name = Counter(key for key, _ in pairs).most_common(1)[0][0]
    raise ValueError(f"{shown(name)} stands there twice")


def read_header(file: Path) -> bytes:
    """The JSON at the beginning of a safetensors file, after its length in 8 bytes."""
    try:
        with file.open("rb") as stream:
            start = stream.read(LENGTH_BYTES)
            length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else 0
            if not 2 <= length <= MAX_HEADER or length + LENGTH_BYTES > file.stat().st_size:
                raise ModelLoadError(f"{file}: not a safetensors file, or cut short")
            return stream.read(length)
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    return _parse(file, lambda: json.loads(file.read_bytes()))


def _parse(file: Path, load: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = load()
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must hold an object")
    return value
