"""Read the header of a GGUF file: its metadata, and where its tensors are. No torch, no numpy.

A GGUF file (versions 2 and 3, little-endian) holds a whole model: configuration, tokenizer and weights. It is read here
as a stranger's file: every length, count, offset and type is compared with the size of the file before anything is
allocated for it, and each error is one line. A model may be split into files with names such as
model-00001-of-00003.gguf, of which the first has the metadata.

    bytes             content
    4, 4, 8, 8        "GGUF", version, number of tensors, number of metadata keys
    each key          name, type, value; a string is its length and its UTF-8; an array its type, its count, its items
    each tensor       name, number of dimensions, dimensions (fastest first), type, offset from the start of the data
    data              from the next multiple of general.alignment on, as each tensor does
"""

import array
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from penstock.errors import ModelLoadError, listed, one_line, shown

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIRST_BYTES, MAX_HEADER = 2**23, 2**29  # of a header: read at first; the limit. The largest in use have 20 MB
MAX_NAME = 512  # characters in the name of a key or a tensor
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
MAX_FILES = 999
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Types of tensors by number: name, elements of a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}
UNSUPPORTED_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
BLOCKS = {name: (elements, size) for name, elements, size in TYPES.values()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Place and type of a stored tensor.

    Attributes:
        shape: sizes of its dimensions, the slowest first.
        offset: position of its first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str  # the name in TYPES
    offset: int


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings, decoded only when it is iterated, because some have 500,000."""

    where: str
    data: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Raise ModelLoadError for a string that is not UTF-8."""
        at, data = 0, self.data
        try:
            for _ in range(self.count):
                start = at + 8
                at = start + int.from_bytes(data[at:start], "little")
                yield data[start:at].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.where}: a string is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of one file."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    num_bytes: int  # of the header


def is_gguf(path: Path) -> bool:
    """Return whether a model's place is a GGUF file rather than a directory."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata of a model and all its tensors, from its only file or the first of several.

    Raises:
        ModelLoadError: a file is missing or damaged, or does not belong to the others.
    """
    files = find_parts(path)
    heads = [read_file(file) for file in files]
    tensors: dict[str, GGUFTensor] = {}
    for number, (file, head) in enumerate(zip(files, heads, strict=True)):
        if len(files) > 1 and (head.metadata.get("split.no"), head.metadata.get("split.count")) != (number, len(files)):
            raise ModelLoadError(f"{file}: it does not say that it is part {number + 1} of {len(files)} (split.no)")
        if repeated := head.tensors.keys() & tensors.keys():
            raise ModelLoadError(f"{file}: {listed(sorted(repeated))}: already in another part")
        tensors |= head.tensors
    expected = heads[0].metadata.get("split.tensors.count", len(tensors)) if len(files) > 1 else len(tensors)
    if expected != len(tensors):
        raise ModelLoadError(f"{path}: its parts hold {len(tensors)} tensors; split.tensors.count says {expected}")
    return heads[0].metadata, tensors


def find_parts(path: Path) -> list[Path]:
    """Return the files of a model, given its only file or the first of several.

    Raises:
        ModelLoadError: it is not the first one, or another one is missing.
    """
    count = read_file(path).metadata.get("split.count", 1)
    if count in (0, 1):
        return [path]
    name = SPLIT_NAME.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count <= MAX_FILES or name is None or int(name[3]) != count:
        raise ModelLoadError(f"{path}: split.count = {shown(count)} does not match its name, NAME-00001-of-0000N.gguf")
    files = [path.with_name(f"{name[1]}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(1, count + 1)]
    if path != files[0]:
        raise ModelLoadError(f"{path}: is not the first part of the model; give {files[0].name}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{path}: {listed(missing)}: missing, though it is a part of the model")
    return files


def read_file(path: Path) -> GGUFFile:
    """Read the header of a file. Raise ModelLoadError if it is damaged, or holds what is not supported."""
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
        state = path.stat()
        return _read_file(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None


@lru_cache(maxsize=2)  # configuration, weights and tokenizer are read one after the other
def _read_file(path: Path, size: int, changed: int) -> GGUFFile:
    """Read the beginning of the file, and more only if the header is longer. changed: part of the cache's key."""
    with path.open("rb") as stream:
        for limit in (FIRST_BYTES, MAX_HEADER):
            stream.seek(0)
            try:
                return _Header(path, stream.read(limit), size).read()
            except _TooShortError:
                if limit >= size:
                    raise ModelLoadError(f"{path}: is cut short, or damaged") from None
    raise ModelLoadError(f"{path}: its header has more than {MAX_HEADER} bytes, or is damaged")


def header_bytes(path: Path) -> bytes:
    """Return the header of a file, for a fingerprint."""
    with path.open("rb") as stream:
        return stream.read(read_file(path).num_bytes)


class _TooShortError(Exception):
    """The header goes on after the bytes that were read."""


class _Header:
    """Reads a header from its first byte on. Nothing is allocated before its bytes are known to be there."""

    FORMATS: ClassVar = {code: struct.Struct(f"<{code}") for code in SCALARS.values()}

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0

    def read(self) -> GGUFFile:
        data = self._data
        if data[:4] != MAGIC:
            raise self._fail("not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            kind = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise self._fail(f"version {version}{kind} is not supported; supported are {VERSIONS[0]} and {VERSIONS[1]}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._name()
            if name in metadata:
                raise self._fail(f"the key {name} is there twice")
            metadata[name] = self._value(name, self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        return GGUFFile(metadata, self._placed(metadata, found), self._at)

    def _fail(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {one_line(message)}")

    def _take(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self._at
        if count > len(self._data) - start:
            raise _TooShortError
        self._at = start + count
        return start

    def _scalar(self, code: str) -> Any:
        form = self.FORMATS[code]
        return form.unpack_from(self._data, self._take(form.size))[0]

    def _text(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._fail("a string is not UTF-8") from None

    def _name(self) -> str:
        name = self._text()
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise self._fail(f"{shown(name)} cannot be a name")
        return name

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            value = self._scalar(self._code(name, kind))
            return _decimal(value) if SCALARS[kind] == "f" else value
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == STRING:
            return self._strings(name, count)
        code = self._code(name, kind)
        length = count * self.FORMATS[code].size
        start = self._take(length)
        if code == "?":
            return [byte != 0 for byte in self._data[start : start + length]]
        return array.array(code, self._data[start : start + length])

    def _code(self, name: str, kind: int) -> str:
        if kind not in SCALARS:
            raise self._fail(f"{name}: values of type {kind} are not supported")
        return SCALARS[kind]

    def _strings(self, name: str, count: int) -> Strings:
        start, data, end = self._at, self._data, len(self._data)
        at = start
        if 8 * count > end - start:
            raise _TooShortError
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > end:
                raise _TooShortError
        self._at = at
        return Strings(f"{self._path}: {name}", data[start:at], count)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Read name, shape, type and offset of one tensor."""
        name, dimensions = self._name(), self._scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._fail(f"{name} has {dimensions} dimensions; allowed are 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in TYPES:
            known = UNSUPPORTED_TYPES.get(kind, f"of type {kind}")
            raise self._fail(f"{name} is {known}, which is not supported; supported are {', '.join(BLOCKS)}")
        return name, shape, TYPES[kind][0], offset

    def _placed(
        self, metadata: dict[str, Any], found: list[tuple[str, tuple[int, ...], str, int]]
    ) -> dict[str, GGUFTensor]:
        """Return the tensors by name. Raise ModelLoadError if one is outside the data, or overlaps with another."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._fail(f"general.alignment = {shown(alignment)} must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        places = []
        for name, shape, dtype, offset in found:
            elements, size = BLOCKS[dtype]
            if name in tensors:
                raise self._fail(f"the tensor {name} is there twice")
            if not all(shape) or shape[-1] % elements:
                raise self._fail(f"{name}: a {dtype} tensor cannot have the shape {list(shape)}")
            if offset % alignment:
                raise self._fail(f"{name} begins at {offset}, which is not a multiple of {alignment}")
            length = prod(shape) // elements * size
            if offset + length > self._size - start:
                raise self._fail(f"{name} ends after the end of the file, which is cut short or damaged")
            places.append((offset, offset + length, name))
            tensors[name] = GGUFTensor(self._path, shape, dtype, start + offset)
        for (_, end, one), (begin, _, other) in pairwise(sorted(places)):
            if begin < end:
                raise self._fail(f"{one} and {other} overlap")
        return tensors


def _decimal(value: float) -> float:
    """Return the shortest decimal number that a float32 stands for: 1e-06, not 9.999999974752427e-07."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.unpack("f", struct.pack("f", float(text)))[0] == value), value)


def read_floats(tensor: GGUFTensor, limit: int) -> list[float]:
    """Return the values of a small float32 tensor. Raise ModelLoadError for another one, or a longer one."""
    count = prod(tensor.shape)
    if tensor.dtype != "F32" or count > limit:
        raise ModelLoadError(f"{tensor.file}: a table of {count} values of {tensor.dtype} must be F32, of {limit}")
    with tensor.file.open("rb") as stream:
        data = os.pread(stream.fileno(), 4 * count, tensor.offset)
    if len(data) < 4 * count:
        raise ModelLoadError(f"{tensor.file}: is cut short")
    return array.array("f", data).tolist()
