"""Packed weights in a file: written once by `penstock convert`, mapped by every process that loads them.

The file is in the safetensors format and takes the place of a checkpoint in a model directory. It holds the tensors
that PackedLinear.state() returns, named `layer.values` for instance, and the parameters of all other layers in the type
in which they are computed. An embedding that reads its rows from the LM head is not written a second time. Each tensor
begins at a multiple of ALIGNMENT bytes; tensors named FILLER.. fill the gaps. A process that loads the file reads the
header and maps the rest: nothing is copied, and processes share the pages. The header has checksums of the data
(weights/safetensors.py), which are compared only on request, because that reads every byte.

A model packed for several ranks has their parts one after the other, with names such as `rank.1.layer.values`.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from penstock.config import NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError, invalid
from penstock.kernels.coding import Coding
from penstock.kernels.cpu.library import best_level, why_missing
from penstock.kernels.ops import Ops
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import (
    ALIGNMENT,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    INT16,
    INT32,
    UINT8,
    Array,
    Tensor,
    array_type,
    as_array,
)
from penstock.layers.factory import Runs
from penstock.layers.weights import Embedding, LMHead, WeightLayer
from penstock.weights.safetensors import (
    LENGTH_BYTES,
    PACKED,
    TensorEntry,
    pack_header,
    read_entries,
    read_metadata,
    with_checksums,
)

FORMAT = "penstock-packed"
FORMAT_VERSION = "2"  # increases with every change of the layout in native/abi.h
DTYPES = ("bfloat16", "float32")
FILLER = "_filler."
CODES = {  # the names in the safetensors format
    UINT8: "U8", INT8: "I8", INT16: "I16", INT32: "I32", FLOAT32: "F32", BFLOAT16: "BF16", FLOAT16: "F16"
}  # fmt: skip
TYPES = {code: dtype for dtype, code in CODES.items()}
NAME_BYTES = 256  # header bytes reserved per tensor, for its name, type, shape and offsets
TENSORS_PER_PIECE = 5  # at most, fillers included
TENSORS_PER_CODED_PIECE = 16


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """The metadata of a file of packed weights."""

    dtype: str  # type of the activations and of weights that are not quantised
    scheme: Scheme | None  # scheme of the quantised weights; None: all weights have the dtype
    split: str = ""  # the name of how ranks split the model; empty for one process
    runs: Mapping[str, Runs] = field(default_factory=dict)  # how coded weights are coded, by `rank.R.` and their name

    def __str__(self) -> str:
        split = f", for ranks ({self.split})" if self.split else ""
        if self.runs:
            return f"{self.dtype}, {', '.join(coding.name for coding in self.codings)}{split}"
        if self.scheme is None:
            return f"{self.dtype}, not quantised{split}"
        groups = f" in groups of {self.scheme.group_size}" if self.scheme.group_size else ""
        return f"{self.dtype}, {self.scheme.name}{groups}{split}"

    @property
    def codings(self) -> tuple[Coding, ...]:
        """The different codings of the weights."""
        found = (coding for runs in self.runs.values() for _, coding in runs if coding is not None)
        return tuple(dict.fromkeys(found))

    def metadata(self) -> dict[str, str]:
        """Format the metadata as the header holds it."""
        values: dict[str, Any] = {"split": self.split or None}
        if self.runs:
            codings = (None, *self.codings)
            places = {name: [(rows, codings.index(item)) for rows, item in runs] for name, runs in self.runs.items()}
            values["codings"] = json.dumps([asdict(coding) for coding in self.codings])
            values["runs"] = json.dumps(places)
        if self.scheme is not None:
            values |= {"quantization": self.scheme.name, "group_size": self.scheme.group_size}
        known = {name: str(value) for name, value in values.items() if value is not None}
        return {"format": FORMAT, "version": FORMAT_VERSION, "dtype": self.dtype} | known


def check_split(directory: Path, wanted: str) -> None:
    """Check that the packed weights of a directory, if it has any, are split as these ranks need.

    wanted: the name of the split (PackedInfo.split).

    Raises:
        InvalidRequestError: they are split differently.
    """
    file = find_packed(directory)
    if file is not None and (held := read_info(file).split) != wanted:
        name = "tensor_parallel_size"
        held, wanted = (f"ranks ({item})" if item else "one process" for item in (held, wanted))
        message = f"{name}: the directory's weights are packed for {held}, not for {wanted}; convert the checkpoint "
        raise InvalidRequestError(f"{message}with the options that you serve it with", param=name)


def find_packed(directory: Path) -> Path | None:
    file = directory / PACKED
    return file if file.is_file() else None


def read_info(file: Path) -> PackedInfo:
    """Read the metadata of packed weights. Raise ModelLoadError if they are damaged or have another version."""
    metadata = read_metadata(file)
    if metadata.get("format") != FORMAT:
        raise ModelLoadError(f"{file}: holds no packed weights")
    if metadata.get("version") != FORMAT_VERSION:
        raise ModelLoadError(
            f"{file}: its format is version {metadata.get('version')!s:.20}; this Penstock reads version "
            f"{FORMAT_VERSION}. Convert the checkpoint again"
        )
    size = metadata.get("group_size")
    try:
        scheme = Scheme.parse(metadata.get("quantization"), None if size is None else int(size))
        if metadata["dtype"] in DTYPES:
            return PackedInfo(metadata["dtype"], scheme, metadata.get("split", ""), _read_runs(metadata))
    except (LookupError, ValueError, TypeError, OverflowError, AttributeError, AssertionError, RecursionError):
        pass
    raise ModelLoadError(f"{file}: its metadata is damaged")


def _read_runs(metadata: Mapping[str, str]) -> dict[str, Runs]:
    """Return what PackedInfo.metadata wrote. Raise any of several exceptions if it is damaged."""
    found = json.loads(metadata.get("codings", "[]"))
    codings = (None, *(Coding(**{**item, "levels": tuple(item["levels"])}) for item in found))
    runs = json.loads(metadata.get("runs", "{}"))
    return {name: tuple((int(rows), codings[at]) for rows, at in items) for name, items in runs.items()}


def fit(numerics: NumericsConfig, directory: Path) -> tuple[NumericsConfig, dict[str, str]]:
    """Set the options that were left open to fit a packed directory. Return them, with a reason for each.

    Without packed weights, or with load_format "dummy", the options are returned unchanged.

    Raises:
        InvalidRequestError: an option contradicts the contents of the directory, or there are no native kernels.
    """
    file = find_packed(directory) if numerics.load_format == "auto" else None
    if file is None:
        return numerics, {}
    if best_level() is None:
        raise invalid("kernels", f"the directory's packed weights need the native kernels; {why_missing()}")
    info = read_info(file)
    scheme = _asked_scheme(numerics, info)
    kernels = "cpu" if numerics.kernels == "auto" else numerics.kernels
    dtype = info.dtype if numerics.dtype == "auto" else numerics.dtype
    check_fit(info, kernels, dtype, scheme)
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "quantization": scheme and scheme.name,
        "quantization_group_size": scheme and scheme.group_size,
    }
    reasons = {
        name: f"{value}: the directory holds packed weights ({info})"
        for name, value in chosen.items()
        if value is not None and getattr(numerics, name) in (None, "auto")
    }
    return replace(numerics, **chosen), reasons


def check_fit(info: PackedInfo, kernels: str, dtype: str, scheme: Scheme | None) -> None:
    """Check that packed weights can be used with these kernels, this dtype and this scheme.

    A different scheme is accepted if it stores weights in the same way: int8 weights serve int8, int8-x2 and int8-x3.

    Raises:
        InvalidRequestError: they cannot; `param` names the option.
    """
    if kernels != "cpu":
        raise invalid(
            "kernels", f"{kernels!r} cannot read packed weights; use cpu, or the checkpoint they were made from"
        )
    if dtype != info.dtype:
        raise _unfit("dtype", dtype, info)
    held = info.scheme
    if (scheme and scheme.weight_bits) != (held and held.weight_bits):
        raise _unfit("quantization", scheme and scheme.name, info)
    if (scheme and scheme.group_size) != (held and held.group_size):
        raise _unfit("quantization_group_size", scheme and scheme.group_size, info)


def _asked_scheme(numerics: NumericsConfig, info: PackedInfo) -> Scheme | None:
    """Complete the scheme that the options name from the directory's scheme."""
    held, group_size = info.scheme, numerics.quantization_group_size
    name = numerics.quantization or (held.name if held else None)
    if (name or "").startswith("int4"):
        return Scheme.parse(name, group_size or (held.group_size if held else None))
    if group_size is not None:
        raise _unfit("quantization_group_size", group_size, info)
    return Scheme.parse(name)


def _unfit(name: str, value: object, info: PackedInfo) -> InvalidRequestError:
    message = (
        f"{name}: {value!r} does not match the directory's packed weights ({info}); convert the checkpoint with it"
    )
    return InvalidRequestError(message, param=name)


def restore_packed(
    file: Path,
    ops: Ops,
    scheme: Scheme | None,
    layers: Mapping[str, WeightLayer],
    *,
    part: str = "",
    is_whole: bool = True,
    heads: Mapping[str, tuple[str, LMHead]],
) -> None:
    """Map a file of packed weights and give every layer of a model, by its full name, its tensors in that memory.

    part: the prefix of the names of the wanted tensors; those of other ranks are not read.
    is_whole: False if the file also holds other layers of this part, which are not read.
    heads: the LM head, with its name, from which an embedding reads its rows if the file does not hold them twice.

    Raises:
        ModelLoadError: the file is damaged, or holds another model.
        InvalidRequestError: the file was packed for another backend, type or scheme.
    """
    check_fit(read_info(file), ops.name, str(array_type(ops.dtype)), scheme)
    by_layer: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in read_entries(file).items():
        if name.startswith(part) and not name.startswith(FILLER):
            prefix, _, tensor = name.removeprefix(part).rpartition(".")
            by_layer.setdefault(prefix, {})[tensor] = entry
    try:
        with file.open("rb") as stream:  # private and writable, because torch requires that; nothing writes to it
            memory = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be mapped: {error}") from None
    shared = {name: heads[name] for name in set(layers) & set(heads) - set(by_layer)}
    own = {name: layer for name, layer in layers.items() if name not in shared} | dict(shared.values())
    differing = set(own) - set(by_layer) if not is_whole else set(own) ^ set(by_layer)
    if differing:
        raise ModelLoadError(f"{file}: does not match config.json in {min(differing)}")
    for prefix, layer in own.items():
        try:
            layer.restore({name: _mapped(memory, entry) for name, entry in by_layer[prefix].items()})
        except ValueError as error:
            raise ModelLoadError(f"{file}: {prefix} does not match config.json: {error}") from None
    for name, (_, head) in shared.items():
        cast(Embedding, layers[name]).share(head.packed[0])


def _mapped(memory: mmap.mmap, entry: TensorEntry) -> Array:
    """View an array in the mapped memory; the array keeps the map alive."""
    dtype, count = TYPES.get(entry.dtype), math.prod(entry.shape)
    if dtype is None or entry.offset % ALIGNMENT or not count:
        raise ValueError(f"a tensor of {entry.dtype} {list(entry.shape)} that begins at byte {entry.offset}")
    return np.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)


class PackedWriter:
    """Writes a file of packed weights, tensor by tensor; the header is written last, into space reserved for it."""

    def __init__(self, stream: BinaryIO, info: PackedInfo, num_layers: int) -> None:
        """Reserve space for the header. num_layers: the largest number of calls to `write`."""
        self._stream = stream
        self._header: dict[str, Any] = {"__metadata__": info.metadata()}
        num_tensors = TENSORS_PER_PIECE * num_layers + TENSORS_PER_CODED_PIECE * sum(map(len, info.runs.values()))
        room = LENGTH_BYTES + NAME_BYTES * (2 + num_tensors) + 2 * len(json.dumps(self._header))
        self._start = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end = 0  # end of the tensors written so far, in bytes from _start
        self._sums: list[int] = []  # their checksums
        stream.seek(self._start)

    def write(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one layer."""
        for part, tensor in tensors.items():
            if gap := -self._end % ALIGNMENT:
                self._add(f"{FILLER}{prefix}.{part}", np.zeros(gap, dtype=UINT8))
            self._add(f"{prefix}.{part}", as_array(tensor))

    def finish(self) -> int:
        """Write the header and wait until everything is on disk. Return the size of the file in bytes."""
        header = pack_header(with_checksums(self._header, self._sums), self._start)
        if len(header) > self._start:
            raise ValueError("more tensors than the reserved header has room for")
        self._stream.seek(0)
        self._stream.write(header)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._start + self._end

    def _add(self, name: str, array: Array) -> None:
        content = np.ascontiguousarray(array).reshape(-1).view(UINT8).data
        begin, self._end = self._end, self._end + content.nbytes
        entry = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, self._end]}
        self._header[name] = entry
        self._sums.append(zlib.crc32(content))
        self._stream.write(content)
