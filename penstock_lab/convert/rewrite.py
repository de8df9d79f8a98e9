"""Rewrite a model's checkpoint in another form (sources.FORMS) with every bit unchanged; and Destination, the directory
that a new model is written to.

Pieces are joined or split, experts stacked or unstacked, matrices transposed, tensors renamed. A tied tensor is written
only if the checkpoint also holds it; tensors that hold no values of the model (the table's `ignore`) are left out.
Tensors are read piece by piece while they are written, so a model of any size needs little memory.

Only the weights of a quantised checkpoint change: they are written as the values that they stand for, rounded to the
model's type, and without the quantization_config.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

from penstock.errors import InvalidRequestError, ModelLoadError, invalid
from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import UINT8, ArrayType
from penstock.models.config_json import load_model_config
from penstock.spec.config_file import CONFIG, read_config
from penstock.spec.gguf import is_gguf, read_file
from penstock.spec.gguf_config import config_of_gguf
from penstock.spec.param_table import Layout, Parameter
from penstock.tokenizer.gguf import PREFIX, gguf_backend
from penstock.tokenizer.hf import load_tokenizer
from penstock.weights.hub import resolve_model
from penstock.weights.packed import find_packed, read_info
from penstock.weights.rows import PIECE_BYTES, RoundedRows, read_rows, tensor_rows
from penstock.weights.safetensors import FLOATS, INDEX, SINGLE, TYPES, num_bytes, pack_header
from penstock.weights.sources import FORMS, CheckpointSource, open_checkpoint_source

COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
              "merges.txt", "tekken.json", "chat_template*", "*.jinja")  # fmt: skip
QUANTIZATION = "quantization_config"
UNFINISHED = ".unfinished"  # suffix of a file's name while it is written


class Destination:
    """A directory to fill in a `with` block, which becomes a model all at once, or stays as it was.

    Files have temporary names while they are written. When all of them are on disk, they are renamed in the order in
    which they were created; config.json comes last, after the other renames are on disk. So an interrupted run never
    looks complete, and a later run removes the files that a killed run has left. If the block fails, the files written
    are removed. The directory must not exist, or must be empty except for the unfinished files of a killed run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = False  # whether this object created the directory
        self._files: list[Path] = []  # the files written here, by their final names
        self._handle = -1

    def __enter__(self) -> "Destination":
        """Create and lock the directory. Raise InvalidRequestError if that fails, or the directory is not empty."""
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self._refused(f"cannot be made: {error.strerror or error}") from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Rename the files, or remove them after an error. Raise ModelLoadError if they cannot be written."""
        try:
            if error is None:
                self._rename_all()
        except BaseException as failure:
            error = failure
        if error is not None:
            self._remove()
        self._close()
        if isinstance(error, OSError):
            raise ModelLoadError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        if error is not None and kind is None:
            raise error

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Yield a new file to write; afterwards it is on disk under its temporary name."""
        file = self.path / name
        self._files.append(file)  # before it is created, so that it is removed after an interrupt at any moment
        try:
            stream = _unfinished(file).open("xb")
        except FileExistsError:  # another process created it
            self._files.remove(file)
            raise
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def copy(self, file: Path) -> None:
        """Copy a file into the directory. Raise ModelLoadError if it cannot be read."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ModelLoadError(f"{file}: cannot be read: {error.strerror or error}") from None
        with self.file(file.name) as stream:
            stream.write(content)

    def copy_companions(self, source: Path, *, decoded: bool = False) -> None:
        """Copy tokenizer, chat template, defaults and, last, config.json (made from params.json if it is missing).

        decoded: the weights are no longer quantised, so config.json must not say that they are.
        """
        if is_gguf(source):
            for name, contents in directory_of_gguf(source).items():
                with self.file(name) as stream:
                    stream.write(contents.encode() + b"\n")
            return
        for file in sorted({file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}):
            self.copy(file)
        if (source / CONFIG).exists() and not decoded:
            self.copy(source / CONFIG)
            return
        config = {key: value for key, value in read_config(source).items() if not decoded or key != QUANTIZATION}
        with self.file(CONFIG) as stream:
            stream.write(json.dumps(config, indent=2).encode() + b"\n")

    def require(self, num_bytes: int) -> None:
        """Raise InvalidRequestError if the disk has less than num_bytes free."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if num_bytes > free:
            raise self._refused(f"has {free / 2**20:,.1f} MiB free; the weights need {num_bytes / 2**20:,.1f} MiB")

    def _open(self) -> None:
        if self.path.is_symlink() and not self.path.exists():
            raise self._refused("is a dangling link; remove it, or give another directory")
        if not self.path.is_dir():
            self.path.mkdir(parents=True)
            self._made = True
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock()
        found = list(self.path.iterdir())
        if not all(file.name.endswith(UNFINISHED) and file.is_file() for file in found):
            raise self._refused("is not empty; give a new directory, or an empty one")
        for file in found:
            file.unlink()

    def _lock(self) -> None:
        """Lock out other processes until this one ends, if the file system supports locks."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused("is being filled by another process") from None
        except OSError:
            pass

    def _rename_all(self) -> None:
        *others, last = self._files
        for file in others:
            _unfinished(file).rename(file)
        os.fsync(self._handle)
        _unfinished(last).rename(last)
        os.fsync(self._handle)

    def _remove(self) -> None:
        """Remove only the files written here; config.json goes first, because it makes the directory a model."""
        for file in reversed(self._files):
            for name in (file, _unfinished(file)):
                with suppress(OSError):
                    name.unlink()
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _refused(self, reason: str) -> InvalidRequestError:
        return invalid("dst", f"{str(self.path)!r} {reason}")


def directory_of_gguf(source: Path) -> dict[str, str]:
    """Return the files that a model directory would have instead of the metadata of a GGUF file, config.json last."""
    config, generation = config_of_gguf(source)
    if f"{PREFIX}tokens" not in read_file(source).metadata:
        return {"generation_config.json": json.dumps(generation, indent=2), CONFIG: json.dumps(config, indent=2)}
    _, settings = gguf_backend(source)
    objects = {
        "tokenizer_config.json": {name: value for name, value in settings.items() if value is not None},
        "generation_config.json": generation,
        CONFIG: config,
    }
    texts = {name: json.dumps(contents, indent=2) for name, contents in objects.items()}
    return {"tokenizer.json": load_tokenizer(source).to_json(), **texts}


def _unfinished(file: Path) -> Path:
    return file.with_name(file.name + UNFINISHED)


CODES = {name: code for code, name in FLOATS.items()}  # numpy's name of a type -> the format's spelling
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
    model: str,
    destination: Path,
    form: str,
    max_shard_size: int,
    progress: Progress = lambda done, total: None,
    *,
    decoded: str | None = None,
) -> Rewritten:
    """Write a model's checkpoint in one of the FORMS, with everything else that its directory needs.

    decoded: the type of decoded values, in the format's spelling; None: the model's.

    Raises:
        InvalidRequestError: the source is packed, or the destination is not empty or has too little space.
        ModelLoadError: the checkpoint does not fit its architecture or the form.
    """
    directory = resolve_model(model)
    _refuse_packed(directory)
    model_config = load_model_config(directory)
    source = open_checkpoint_source(directory, model_config)
    tensors = outgoing(source, form, decoded or CODES[model_config.dtype])
    with Destination(destination) as made:
        made.require(sum(tensor.num_bytes for tensor in tensors))
        num_bytes = write_checkpoint(made, tensors, max_shard_size, progress)
        made.copy_companions(directory, decoded=source.is_coded)
    return Rewritten(num_bytes, source.match.ignored)


def outgoing(source: CheckpointSource, form: str, decoded: str = "BF16") -> list[Outgoing]:
    """List a checkpoint's tensors in another form. Raise ModelLoadError if pieces to be joined differ in type.

    decoded: the type of decoded values, in the format's spelling.
    """
    tensors: dict[str, Outgoing] = {}
    for name, held in source.match.layouts.items():
        parameter = source.parameters[name]
        layout = FORMS[form](parameter)
        for tensor, shape in layout.sources.items():
            dtype = source.dtype(tensor, decoded) if layout == held else _dtype(parameter, source, held, decoded)
            rows = partial(_rows, parameter, source, layout, tensor, TYPES[dtype])
            earlier = tensors.get(tensor, Outgoing(tensor, dtype, shape, ()))  # holds the experts before this one
            if earlier.dtype != dtype:
                raise _mixed(tensor, {earlier.dtype, dtype})
            tensors[tensor] = Outgoing(tensor, dtype, shape, (*earlier.parts, rows))
    return list(tensors.values())


def _rows(parameter: Parameter, source: CheckpointSource, layout: Layout, tensor: str, dtype: ArrayType) -> RowSource:
    if layout == source.match.layouts[parameter.name]:
        return RoundedRows(source.find(tensor, layout.index), dtype)  # unchanged, if it is not coded
    return RoundedRows(tensor_rows(layout, source.stored(parameter))[tensor], dtype)


def _dtype(parameter: Parameter, source: CheckpointSource, held: Layout, decoded: str) -> str:
    """Find the common type of all pieces of a parameter."""
    types = {source.dtype(name, decoded) for name in held.sources}
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
    raise invalid(
        "src",
        f"{str(directory)!r} holds packed weights, {reason} and laid out for the native kernels, from which the "
        f"checkpoint cannot be restored bit by bit. Give the checkpoint they were made from",
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
    return [sorted(shard, key=lambda tensor: -TYPES[tensor.dtype].itemsize) for shard in shards]


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
