"""A checkpoint in safetensors files, single or sharded: names and shapes from the headers, rows on request.

Rows are read, not mapped, because the pages of a map would count as this process's memory in addition to the packed
model. Files of torch.save have entries of the same kind (weights/pickled.py).

Packed weights have checksums, which are compared on request (`verify_files`, `penstock check --files`). The header's
metadata field `crc32` lists the CRC-32 of each tensor, in file order, and then the CRC-32 of the rest of the header.
CRC-32 is in the standard library and finds damage by disks and copies at 1.7 GiB/s on one core. It does not reveal a
deliberately hidden change; BLAKE2 would, at a fifth of that speed.
"""

import hashlib
import json
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from penstock.errors import ModelLoadError, one_line, shown
from penstock.kernels.coding import CodedRows
from penstock.kernels.tensors import NAMES, UINT8, Array, Buffers, empty
from penstock.spec.config_file import OTHER_KINDS
from penstock.spec.config_reader import read_json
from penstock.spec.gguf import find_parts, header_bytes, is_gguf, read_file
from penstock.weights.pickled import is_pickled, read_pickled

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MISTRAL = "consolidated.safetensors"  # Mistral's own format; if sharded, with .index.json
ADAPTER = "adapter_model.safetensors"  # a LoRA adapter, without its base model
BIN = "pytorch_model.bin"  # of torch.save (weights/pickled.py); if sharded, with .index.json
PICKLES = ("*.bin", "*.pt", "*.pth")
PACKED = "penstock.safetensors"  # weights as the native kernels read them; weights/packed.py
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # the format's name, numpy's
CODES = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}  # of coded weights (weights/quantized.py)
CODES |= {"F8_E4M3": "uint8", "F8_E5M2": "uint8", "F8_E8M0": "uint8"}  # their bytes
TYPES = {name: NAMES[known] for name, known in (FLOATS | CODES).items()}
LENGTH_BYTES = 8  # the header's length, stored before it
MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_NAME = 512  # characters in a tensor's name
SAMPLES = 16  # places in each file that a fingerprint reads
SAMPLE_BYTES = 4096
CHECKSUMS = "crc32"  # key of the header's metadata
CHUNK = 2**22  # bytes of a tensor summed at once
BUFFERS = Buffers()  # for rows that are read; whoever reads many of them clears it afterwards


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place where a tensor is stored."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in the format's spelling, for instance BF16
    offset: int  # position of its first byte in the file

    def slice(self, index: int) -> "TensorEntry":
        """Locate one of the tensors stacked along the first axis."""
        shape = self.shape[1:]
        return replace(self, shape=shape, offset=self.offset + index * num_bytes(shape, self.dtype))


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Count the bytes of a tensor. dtype: in the format's spelling."""
    return math.prod(shape) * TYPES[dtype].itemsize


class Checkpoint:
    """All tensors of a model directory, in one file or several."""

    def __init__(self, directory: Path, files: list[Path] | None = None) -> None:
        """Read the headers. files: of the directory; None finds them.

        Raises:
            ModelLoadError: there are no safetensors files; a shard is missing or outside the directory; a tensor is in
                two shards or in none; a header is damaged; or the weights are packed.
        """
        self.files = files or find_files(directory)
        if self.files[0].name == PACKED:
            raise ModelLoadError(f"{directory}: its weights are packed; they can only be served, with the cpu kernels")
        self.entries: dict[str, TensorEntry] = {}
        for file in self.files:
            for name, entry in read_entries(file).items():
                if name in self.entries:
                    first = self.entries[name].file.name
                    raise ModelLoadError(f"{directory}: {name} is in two files, {first} and {file.name}")
                self.entries[name] = entry

    def rows(self, name: str, index: int | None = None) -> "FileRows | CodedRows":
        """Read a tensor, or the slice `index` of a stacked one. Raise ModelLoadError if it does not hold floats."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise ModelLoadError(f"{entry.file.name}: {name} is {entry.dtype}; supported are {', '.join(FLOATS)}")
        return FileRows(name, entry if index is None else entry.slice(index))


@dataclass(frozen=True, slots=True)
class FileRows:
    """A tensor in a file as a kernels.ops.RowSource: rows of its first axis, in the type in which they are stored."""

    name: str
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, start: int, stop: int) -> Array:
        """Read rows start .. stop-1. Raise ModelLoadError if the file cannot be read or has become shorter."""
        rows = BUFFERS.empty((stop - start, *self.shape[1:]), TYPES[self.entry.dtype])
        buffer = rows.reshape(-1).view(UINT8).data
        try:
            with self.entry.file.open("rb", buffering=0) as stream:
                stream.seek(self.entry.offset + start * num_bytes(self.shape[1:], self.entry.dtype))
                while buffer:
                    count = stream.readinto(buffer)
                    if not count:
                        raise ModelLoadError(f"{self.entry.file}: {self.name} is cut short")
                    buffer = buffer[count:]
        except OSError as error:
            raise ModelLoadError(f"{self.entry.file}: {self.name} cannot be read: {error}") from None
        return rows

    def read_columns(self, start: int, stop: int, begin: int, end: int) -> Array:
        """Read only begin .. end-1 of the second axis of rows start .. stop-1. Raises the same errors as `read`."""
        columns: Array = empty((stop - start, end - begin, *self.shape[2:]), TYPES[self.entry.dtype])
        element = columns.itemsize * math.prod(self.shape[2:])
        try:
            with self.entry.file.open("rb", buffering=0) as stream:
                for row, buffer in enumerate(columns.reshape(len(columns), -1).view(UINT8), start):
                    at = self.entry.offset + (row * self.shape[1] + begin) * element
                    if os.preadv(stream.fileno(), [buffer.data], at) < len(buffer):
                        raise ModelLoadError(f"{self.entry.file}: {self.name} is cut short")
        except OSError as error:
            raise ModelLoadError(f"{self.entry.file}: {self.name} cannot be read: {error}") from None
        return columns


def find_files(directory: Path) -> list[Path]:
    """Find the weight files, sorted by name: packed files, or else those of Transformers, or else Mistral's.

    Raises:
        ModelLoadError: there are no weight files, or an index does not fit its shards.
    """
    if is_gguf(directory):
        return find_parts(directory)
    if (directory / PACKED).is_file():
        return [directory / PACKED]
    for single, index in ((SINGLE, INDEX), (MISTRAL, f"{MISTRAL}.index.json"), (BIN, f"{BIN}.index.json")):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return _shards(directory / index)
    originals = sorted(directory.glob("consolidated.*.pth"))
    if len(originals) == 1:
        return originals
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{directory}: {pickles[0]} is not read, only {BIN}, alone or with its index, and one consolidated.00.pth; "
            f"parts for several processes, and other names, have to be saved again as safetensors"
        )
    if (directory / ADAPTER).is_file():
        raise ModelLoadError(f"{directory}: {ADAPTER} makes it {OTHER_KINDS['adapter_config.json']}")
    raise ModelLoadError(f"{directory}: no weights; it must hold {SINGLE}, or {INDEX} and its shards")


def fingerprint(directory: Path) -> str:
    """Hash a directory's weights, the same on every machine, without reading them all.

    It covers each file's name, size, header (names, shapes, offsets) and 16 evenly spread samples of 4 KiB. It
    distinguishes checkpoints, but does not reveal a byte deliberately changed between the samples.
    """
    digest = hashlib.sha256()
    for file in find_files(directory):
        header = header_bytes(file) if is_gguf(file) else b"" if is_pickled(file) else read_header(file)
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
    """List the files that an index names: plain names in its directory, each with the tensors listed for it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map = {shown(weight_map)} must map tensors to files")
    for name in weight_map:
        _check_name(index, name)
    for name in weight_map.values():
        plain = isinstance(name, str) and name == os.path.basename(name) and "\\" not in name
        suffix = ".bin" if index.name.startswith(BIN) else ".safetensors"
        if not plain or not name.endswith(suffix):
            raise ModelLoadError(f"{index}: {shown(name)} must be the plain name of a {suffix} file")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not os.path.isfile(file):  # unlike Path.is_file, returns False for a name that is too long
            raise ModelLoadError(
                f"{index.parent}: shard {one_line(file.name, 100)} is missing, though {index.name} names it"
            )
    held = {file.name: read_entries(file) for file in files}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise ModelLoadError(f"{index.parent}: {tensor} is not in {name}, though {index.name} says so")
    return files


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Read every tensor's entry in a file, by name. Raise ModelLoadError if it is not well-formed."""
    if is_pickled(file):
        pickled = read_pickled(file)
        for name in pickled:
            _check_name(file, name)
        return {name: TensorEntry(file, shape, dtype, at) for name, (dtype, shape, at) in pickled.items()}
    text = read_header(file)
    header = parse_header(file, text)
    try:
        safe_open(file, framework="np")  # checks sizes and offsets; reads no tensor
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: not a sound safetensors file: {one_line(error)}") from None
    entries = {}
    for name, item in header.items():
        if name != "__metadata__":
            _check_name(file, name)
            offset = LENGTH_BYTES + len(text) + item["data_offsets"][0]
            entries[name] = TensorEntry(file, tuple(item["shape"]), str(item["dtype"]), offset)
    return entries


def _check_name(file: Path, name: str) -> None:
    """Raise ModelLoadError for a tensor name that is too long or not printable."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise ModelLoadError(f"{file}: {shown(name)} cannot be the name of a tensor")


def read_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata in a file's header. Raise ModelLoadError if the header cannot be read."""
    metadata = parse_header(file, read_header(file)).get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def read_header(file: Path) -> bytes:
    """Read the JSON text at the beginning of a file. Raise ModelLoadError if it cannot be read or is cut short."""
    try:
        with file.open("rb") as stream:
            start = stream.read(LENGTH_BYTES)
            length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else 0
            if not 2 <= length <= MAX_HEADER or length + LENGTH_BYTES > file.stat().st_size:
                raise ModelLoadError(f"{file}: not a safetensors file, or cut short")
            return stream.read(length)
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from None


def pack_header(header: Mapping[str, Any], alignment: int) -> bytes:
    """Pack the beginning of a file, padded with spaces to a multiple of `alignment` bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text


def parse_header(file: Path, text: bytes) -> dict[str, Any]:
    """Parse a header's JSON object. Raise ModelLoadError if the text is not one, or repeats a key."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: its header cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: its header must hold an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, refusing duplicate keys, because readers of the format disagree about which one counts."""
    if len(result := dict(pairs)) == len(pairs):
        return result
    name = Counter(key for key, _ in pairs).most_common(1)[0][0]
    raise ValueError(f"duplicate key {shown(name)}")


def with_checksums(header: Mapping[str, Any], sums: Sequence[int]) -> dict[str, Any]:
    """Add the checksums of its tensors, given in file order, and the header's own checksum to a file's header."""
    words = [f"{value:08x}" for value in (*sums, _header_sum(header))]
    return {**header, "__metadata__": {**header["__metadata__"], CHECKSUMS: " ".join(words)}}


def verify_checksums(directory: Path) -> str:
    """Compare every weight file of a directory with its checksums. Return a short description of the result.

    Raises:
        ModelLoadError: a tensor or the header differs from what was written, or a file is malformed.
    """
    files = find_files(directory)
    counts = [(file, _verify_file(file)) for file in files]
    without = [file.name for file, count in counts if count is None]
    if without:
        return f"{', '.join(without[:3])}: no checksums in it, only its structure is verified"
    return f"{sum(count or 0 for _, count in counts)} tensors have the checksums that were written with them"


def _verify_file(file: Path) -> int | None:
    """Compare one file. Return the number of its tensors, or None if it has no checksums."""
    if is_gguf(file) or is_pickled(file):
        read_file(file) if is_gguf(file) else read_entries(file)  # raises if the structure is malformed
        return None
    read_entries(file)  # raises if the structure is malformed
    text = read_header(file)
    header = parse_header(file, text)
    metadata = header.get("__metadata__") or {}
    if CHECKSUMS not in metadata:
        return None
    try:
        *sums, own = [int(word, 16) for word in str(metadata[CHECKSUMS]).split()]
    except ValueError:
        raise ModelLoadError(f"{file}: its checksums are damaged; convert the checkpoint again") from None
    plain = {name: value for name, value in metadata.items() if name != CHECKSUMS}
    entries = {name: item for name, item in header.items() if name != "__metadata__"}
    if own != _header_sum({**entries, "__metadata__": plain}) or len(sums) != len(entries):
        raise ModelLoadError(f"{file}: its header is damaged; convert the checkpoint again")
    start = LENGTH_BYTES + len(text)
    places = sorted((item["data_offsets"], name) for name, item in entries.items())
    try:
        with file.open("rb", buffering=0) as stream:
            for (place, name), expected in zip(places, sums, strict=True):
                stream.seek(start + place[0])
                if _sum_of(stream, place[1] - place[0]) != expected:
                    raise ModelLoadError(
                        f"{file}: {name} is damaged: its checksum differs; convert the checkpoint again"
                    )
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror or error}") from None
    return len(sums)


def _sum_of(stream: Any, length: int) -> int:
    """Compute the checksum of the next `length` bytes; -1 if the file ends before that."""
    value, left = 0, length
    while left and (chunk := stream.read(min(CHUNK, left))):
        value, left = zlib.crc32(chunk, value), left - len(chunk)
    return value if not left else -1


def _header_sum(header: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())
