"""Rewriting of a model's checkpoint in another form (matching.FORMS), with every bit unchanged.

Pieces are joined or split, experts stacked or unstacked, matrices transposed, tensors renamed. A tied tensor is written
only if the checkpoint also holds it; tensors that hold no values of the model (the table's `ignore`) are left out.
Tensors are read piece by piece while they are written, so a model of any size needs little memory.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import UINT8
from penstock.models.config_json import load_model_config
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.destination import Destination
from penstock.weights.hub import resolve_model
from penstock.weights.matching import FORMS
from penstock.weights.packed import find_packed, read_info
from penstock.weights.rows import PIECE_BYTES, read_rows, tensor_rows
from penstock.weights.safetensors import INDEX, ITEM_BYTES, SINGLE, Checkpoint, num_bytes, pack_header
from penstock.weights.sources import CheckpointSource, read_table

ALIGNMENT = 8  # a header ends at a multiple of this many bytes
Progress = Callable[[int, int], None]  # called with the number of finished tensors and the total


class Rewritten(NamedTuple):
    """The bytes of all tensors of a new checkpoint, and the tensors left out because of `ignore`."""

    num_bytes: int
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written."""

    name: str
    dtype: str  # in the format's spelling
    shape: tuple[int, ...]
    parts: tuple[Callable[[], RowSource], ...]  # called one after the other while writing; together they have all rows

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


def rewrite_model(
    model: str, destination: Path, form: str, max_shard_size: int, progress: Progress = lambda done, total: None
) -> Rewritten:
    """Write a model's checkpoint in one of the FORMS, with everything else that its directory needs.

    Raises:
        InvalidRequestError: the source is packed, or the destination is not empty or has too little space.
        ModelLoadError: the checkpoint does not fit its architecture or the form.
    """
    directory = resolve_model(model)
    _refuse_packed(directory)
    model_config = load_model_config(directory)
    table = read_table(model_config)
    source = CheckpointSource(Checkpoint(directory), table, table.parameters(model_config))
    tensors = outgoing(source, form)
    with Destination(destination) as made:
        made.require(sum(tensor.num_bytes for tensor in tensors))
        num_bytes = write_checkpoint(made, tensors, max_shard_size, progress)
        made.copy_companions(directory)
    return Rewritten(num_bytes, source.match.ignored)


def outgoing(source: CheckpointSource, form: str) -> list[Outgoing]:
    """Return a checkpoint's tensors in another form. Raise ModelLoadError if pieces to be joined differ in type."""
    tensors: dict[str, Outgoing] = {}
    for name, held in source.match.layouts.items():
        parameter = source.parameters[name]
        layout = FORMS[form](parameter)
        for tensor, shape in layout.sources.items():
            rows = partial(_rows, parameter, source, layout, tensor)
            dtype = source.dtype(tensor) if layout == held else _dtype(parameter, source, held)
            earlier = tensors.get(tensor, Outgoing(tensor, dtype, shape, ()))  # holds the experts before this one
            if earlier.dtype != dtype:
                raise _mixed(tensor, {earlier.dtype, dtype})
            tensors[tensor] = Outgoing(tensor, dtype, shape, (*earlier.parts, rows))
    return list(tensors.values())


def _rows(parameter: Parameter, source: CheckpointSource, layout: Layout, tensor: str) -> RowSource:
    if layout == source.match.layouts[parameter.name]:
        return source.find(tensor, layout.index)  # unchanged
    return tensor_rows(layout, source.stored(parameter))[tensor]


def _dtype(parameter: Parameter, source: CheckpointSource, held: Layout) -> str:
    """Return the common type of all pieces of a parameter."""
    types = {source.dtype(name) for name in held.sources}
    if len(types) > 1:
        raise _mixed(parameter.name, types)
    return types.pop()


def _mixed(name: str, types: set[str]) -> ModelLoadError:
    return ModelLoadError(f"convert: {name} has pieces of different types ({', '.join(sorted(types))})")


def _refuse_packed(directory: Path) -> None:
    file = find_packed(directory)
    if file is None:
        return
    info = read_info(file)
    reason = f"rounded to {info.dtype}" if info.scheme is None else f"quantised to {info.scheme.name}"
    raise InvalidRequestError(
        f"src: {str(directory)!r} holds packed weights, {reason} and laid out for the native kernels, from which the "
        f"checkpoint cannot be restored bit by bit. Give the checkpoint they were made from",
        param="src",
    )


def write_checkpoint(
    directory: Destination, tensors: Sequence[Outgoing], max_shard_size: int, progress: Progress
) -> int:
    """Write all tensors, and an index if there are several files. Return the bytes of the tensors.

    max_shard_size: maximum number of bytes per file; a larger tensor gets a file of its own.
    """
    shards, done = _shards(tensors, max_shard_size), itertools.count()
    stem, suffix, count = *SINGLE.split("."), len(shards)
    names = [f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)] if count > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        with directory.file(name) as stream:
            _write_header(stream, shard)
            for tensor in shard:
                progress(next(done), len(tensors))
                _write_tensor(stream, tensor)
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
    # Wider types first, so that each tensor begins at a multiple of its item size.
    return [sorted(shard, key=lambda tensor: -ITEM_BYTES[tensor.dtype]) for shard in shards]


def _write_header(stream: BinaryIO, tensors: Iterable[Outgoing]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    stream.write(pack_header(header, ALIGNMENT))


def _write_tensor(stream: BinaryIO, tensor: Outgoing) -> None:
    for part in tensor.parts:
        rows = part()
        step = max(1, PIECE_BYTES * rows.shape[0] // num_bytes(rows.shape, tensor.dtype))
        for start in range(0, rows.shape[0], step):
            piece = np.ascontiguousarray(read_rows(rows, start, min(start + step, rows.shape[0])))
            stream.write(piece.reshape(-1).view(UINT8).data)
