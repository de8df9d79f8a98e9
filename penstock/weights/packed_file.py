"""Packed weights in a file: written once by `penstock convert`, mapped by everybody who loads them.

The file is in the safetensors format. Its tensors are what PackedLinear.state() gives, named `layer.values` for
instance, and the parameters of all other layers as they are computed with. Each begins at a multiple of ALIGNMENT
bytes; tensors named FILLER.. stand before one that would not. A process that loads it reads the header and maps the
rest: nothing is copied, and processes share the pages.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.ops import Ops
from penstock.layers.weights import WeightLayer
from penstock.quant.scheme import Scheme
from penstock.weights.packed_info import PackedInfo, check_fit, read_info
from penstock.weights.safetensors import LENGTH_BYTES, TensorEntry, read_entries

ALIGNMENT = 64
FILLER = "_filler."
CODES = {torch.uint8: "U8", torch.int16: "I16", torch.float32: "F32", torch.bfloat16: "BF16"}  # the format's names
TYPES = {code: dtype for dtype, code in CODES.items()}
NAME_BYTES = 256  # of the header, for a tensor: its name, type, shape and place
TENSORS_A_LAYER = 5  # at most, with the filler


class PackedFile:
    """A file of packed weights, mapped."""

    def __init__(self, file: Path, ops: Ops, scheme: Scheme | None) -> None:
        """Read the header and map the rest.

        Raises:
            ModelLoadError: the file is damaged.
            InvalidRequestError: it was packed for another backend, type or scheme.
        """
        check_fit(read_info(file), ops.name, str(ops.dtype).removeprefix("torch."), scheme)
        self._file = file
        self._entries = {name: entry for name, entry in read_entries(file).items() if not name.startswith(FILLER)}
        self._map = _map(file)

    def restore(self, layers: Mapping[str, WeightLayer]) -> None:
        """Give every layer of a model, by its full name, its weights, over the mapped memory.

        Raises:
            ModelLoadError: the file does not hold this model.
        """
        by_layer: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self._entries.items():
            prefix, _, part = name.rpartition(".")
            by_layer.setdefault(prefix, {})[part] = entry
        differing = set(layers) ^ set(by_layer)
        if differing:
            raise ModelLoadError(f"{self._file}: does not fit config.json in {min(differing)}")
        for prefix, layer in layers.items():
            self._restore_layer(prefix, layer, by_layer[prefix])

    def _restore_layer(self, prefix: str, layer: WeightLayer, entries: Mapping[str, TensorEntry]) -> None:
        try:
            layer.restore({part: self._tensor(entry) for part, entry in entries.items()})
        except ValueError as error:
            raise ModelLoadError(f"{self._file}: {prefix} does not fit config.json: {error}") from None

    def _tensor(self, entry: TensorEntry) -> Tensor:
        """One tensor over the map, which lives as long as it does."""
        dtype, count = TYPES.get(entry.dtype), math.prod(entry.shape)
        if dtype is None or entry.offset % ALIGNMENT or not count:
            raise ValueError(f"a tensor of {entry.dtype} {list(entry.shape)} that begins at byte {entry.offset}")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _map(file: Path) -> mmap.mmap:
    """The file in memory: private, because torch wants memory that could be written to, and nobody does."""
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be mapped: {error}") from None


class PackedWriter:
    """Writes a file of packed weights, tensor by tensor; the header comes last, into the room that was left for it."""

    def __init__(self, stream: BinaryIO, info: PackedInfo, num_layers: int) -> None:
        """num_layers: how many calls of `write` will come, at most."""
        self._stream = stream
        self._header: dict[str, object] = {"__metadata__": info.metadata()}
        room = LENGTH_BYTES + NAME_BYTES * (2 + TENSORS_A_LAYER * num_layers)
        self._start = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end = 0  # of what is written, counted from _start
        stream.seek(self._start)

    def write(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """The tensors of one layer."""
        for part, tensor in tensors.items():
            self._fill_up(prefix, part)
            self._add(f"{prefix}.{part}", CODES[tensor.dtype], list(tensor.shape), _bytes(tensor))

    def finish(self) -> None:
        """Write the header, and wait until everything is on the disk."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        room = self._start - LENGTH_BYTES
        if len(text) > room:
            raise ValueError("more tensors than room was left for")
        self._stream.seek(0)
        self._stream.write(struct.pack("<Q", room) + text.ljust(room))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _fill_up(self, prefix: str, part: str) -> None:
        count = -self._end % ALIGNMENT
        if count:
            self._add(f"{FILLER}{prefix}.{part}", "U8", [count], memoryview(bytes(count)))

    def _add(self, name: str, code: str, shape: list[int], content: memoryview) -> None:
        offsets = [self._end, self._end + content.nbytes]
        self._header[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        self._stream.write(content)
        self._end = offsets[1]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
