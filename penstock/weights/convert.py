"""Conversion: a checkpoint, or random weights, become a directory of packed weights that loads by a map.

Layer by layer: one is packed as the loader packs it, written, and forgotten. The directory becomes a model with its
last file, config.json, and that file gets its name when everything else is on the disk: whatever interrupts a
conversion, nobody takes the rest for a model.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import best_level
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.layers.weights import WeightLayer
from penstock.model_config import ModelConfig
from penstock.quant.scheme import Scheme
from penstock.weights.hub import resolve_model
from penstock.weights.loader import empty_model, fill_layer, open_source, read_parameters, weight_layers
from penstock.weights.packed_file import PackedWriter
from penstock.weights.packed_info import PackedInfo, find_packed
from penstock.weights.safetensors import PACKED

CONFIG = "config.json"
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template*", "*.jinja")  # fmt: skip
Progress = Callable[[int, int], None]  # what is done, and all there is
UNFINISHED = ".unfinished"  # the end of a file's name while it is written


def convert_model(config: EngineConfig, destination: Path, progress: Progress = lambda done, total: None) -> int:
    """Write the packed form of the model that a config names, in its dtype and scheme. Returns the weights' bytes.

    Raises:
        InvalidRequestError: there are no native kernels; or as `convert`.
        ModelLoadError: as `convert`.
    """
    if best_level() is None:
        raise InvalidRequestError("convert: packed weights are for the native library, which is not installed here")
    directory = resolve_model(config.model)
    model_config = ModelConfig.from_directory(directory)
    numerics = config.resolve(model_config).numerics
    ops = load_ops("cpu", getattr(torch, numerics.dtype), threads=numerics.threads or 1)
    return convert(
        directory,
        destination,
        model_config,
        ops,
        scheme=numerics.scheme,
        load_format=numerics.load_format,
        progress=progress,
    )


def convert(
    source: Path,
    destination: Path,
    model_config: ModelConfig,
    ops: Ops,
    *,
    scheme: Scheme | None,
    load_format: str = "auto",
    progress: Progress = lambda done, total: None,
) -> int:
    """Write the packed form of a model directory. Returns the bytes of its weights.

    destination: does not exist, or is empty.
    progress: called with the layers that are done, and all there are.

    Raises:
        InvalidRequestError: the destination is not empty, or the source is packed already.
        ModelLoadError: the checkpoint cannot be loaded, or the destination cannot be written.
    """
    if find_packed(source) is not None and load_format == "auto":
        raise InvalidRequestError(
            f"src: {str(source)!r} holds packed weights already; give the checkpoint they were made of", param="src"
        )
    rows = open_source(source, model_config, load_format)
    parameters = read_parameters(model_config)
    model = empty_model(model_config, ops, scheme=scheme, max_model_len=1)
    info = PackedInfo(
        dtype=str(ops.dtype).removeprefix("torch."),
        quantization=scheme.name if scheme else None,
        group_size=scheme.group_size if scheme else None,
    )
    created = _make_empty(destination)
    try:
        layers = dict(weight_layers(model))
        with (destination / (PACKED + UNFINISHED)).open("xb") as stream:
            writer = PackedWriter(stream, info, len(layers))
            for done, (prefix, layer) in enumerate(layers.items()):
                progress(done, len(layers))
                fill_layer(prefix, layer, parameters, rows)
                writer.write(prefix, _take_state(layer))
            writer.finish()
            size = stream.seek(0, os.SEEK_END)
        _name(destination / PACKED)
        _copy_companions(source, destination)
    except BaseException as error:
        _remove(destination, itself=created)
        if isinstance(error, OSError):
            raise ModelLoadError(f"{destination}: cannot be written: {error.strerror or error}") from None
        raise
    return size


def _make_empty(destination: Path) -> bool:
    """Make sure that there is a directory with nothing in it. Returns whether it was made here."""
    try:
        if destination.is_dir():
            if any(destination.iterdir()):
                raise InvalidRequestError(f"dst: {str(destination)!r} is not empty", param="dst")
            return False
        destination.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror or error
        raise InvalidRequestError(f"dst: {str(destination)!r} cannot be made: {reason}", param="dst") from None
    return True


def _take_state(layer: WeightLayer) -> dict[str, Tensor]:
    """A layer's packed weight, or its parameters; the layer forgets them."""
    if isinstance(layer, Linear):
        state = layer.packed.state()
        del layer.packed
        return state
    state = dict(layer.named_parameters(recurse=False))
    for name, value in state.items():
        setattr(layer, name, nn.Parameter(value.to("meta"), requires_grad=False))
    return {name: value.data for name, value in state.items()}


def _copy_companions(source: Path, destination: Path) -> None:
    """Tokenizer, chat template and defaults; config.json at the very end."""
    files = {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}
    for file in [*sorted(files), source / CONFIG]:
        unfinished = destination / (file.name + UNFINISHED)
        shutil.copyfile(file, unfinished)
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        _name(destination / file.name)


def _name(file: Path) -> None:
    """Give a file that is complete its name, for good."""
    file.with_name(file.name + UNFINISHED).rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(destination: Path, *, itself: bool) -> None:
    with suppress(OSError):
        for file in destination.iterdir():
            file.unlink()
        if itself:
            destination.rmdir()
