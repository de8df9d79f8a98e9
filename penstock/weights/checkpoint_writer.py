"""Writing a checkpoint: safetensors files as Transformers names them, with an index where there are several.

Tensors are read while they are written, a piece at a time, so a model of any size passes through little memory.
"""

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch

from penstock.kernels.ops import RowSource
from penstock.weights.destination import Destination
from penstock.weights.rows import PIECE_BYTES
from penstock.weights.safetensors import INDEX, ITEM_BYTES, LENGTH_BYTES, SINGLE, num_bytes

ALIGNMENT = 8  # of a header's end
Progress = Callable[[int, int], None]  # called with the tensors that are done, and all there are


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written.

    Attributes:
        dtype: in the format's spelling.
        parts: make the rows when their turn comes; what each gives follows the one before.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Callable[[], RowSource], ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


def write_checkpoint(
    directory: Destination, tensors: Sequence[Outgoing], max_shard_size: int, progress: Progress
) -> int:
    """Write all tensors, into as many files as needed for none to exceed that size. Returns the bytes of the tensors.

    A tensor that is larger has a file of its own.
    """
    shards = _shards(tensors, max_shard_size)
    names = _file_names(len(shards))
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with directory.file(name) as stream:
            _write_header(stream, shard)
            for tensor in shard:
                progress(done, len(tensors))
                _write_tensor(stream, tensor)
                done += 1
    total = sum(tensor.num_bytes for tensor in tensors)
    if len(shards) > 1:
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        with directory.file(INDEX) as stream:
            stream.write(json.dumps(index, indent=2).encode() + b"\n")
    return total


def _shards(tensors: Iterable[Outgoing], max_shard_size: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = []
    room = -1
    for tensor in tensors:
        if tensor.num_bytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    # Types of more bytes first: so each tensor begins at a multiple of its own.
    return [sorted(shard, key=lambda tensor: -ITEM_BYTES[tensor.dtype]) for shard in shards]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    stem, suffix = SINGLE.split(".")
    return [f"{stem}-{index + 1:05}-of-{count:05}.{suffix}" for index in range(count)]


def _write_header(stream: BinaryIO, tensors: Iterable[Outgoing]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    stream.write(struct.pack("<Q", len(text)) + text)


def _write_tensor(stream: BinaryIO, tensor: Outgoing) -> None:
    for part in tensor.parts:
        rows = part()
        step = max(1, PIECE_BYTES * rows.shape[0] // num_bytes(rows.shape, tensor.dtype))
        for start in range(0, rows.shape[0], step):
            piece = rows.read(start, min(start + step, rows.shape[0]))
            stream.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
