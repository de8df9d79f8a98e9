"""Conversion: a checkpoint, or random weights, become a directory of packed weights that loads by a map.

Layer by layer: one is packed as the loader packs it, written, and forgotten. config.json is the last file: the
directory is a model when everything else is there (weights/destination.py).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from penstock.config import EngineConfig, NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError, NotSupportedError
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import best_level, why_missing
from penstock.layers.lm_head import WHOLE_IN_FILES
from penstock.models.config_json import load_model_config
from penstock.plugins.user_files import import_files
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock.weights.companions import copy_companions
from penstock.weights.destination import Destination
from penstock.weights.hub import resolve_model
from penstock.weights.loader import (
    ParameterSource,
    check_memory,
    empty_model,
    fill_layer,
    open_source,
    plain_parameters,
    read_parameters,
    stored_bytes,
    weight_layers,
)
from penstock.weights.matching import listed
from penstock.weights.packed_file import PackedWriter
from penstock.weights.packed_info import PackedInfo, find_packed
from penstock.weights.safetensors import PACKED

Progress = Callable[[int, int], None]  # called with the layers that are done, and all there are


def convert_model(
    config: EngineConfig,
    destination: Path,
    progress: Progress = lambda done, total: None,
    *,
    free_memory: Callable[[], int] | None = None,
) -> int:
    """Write the packed form of the model that a config names, in its dtype and scheme. Returns the weights' bytes.

    destination: does not exist, or is empty but for what a killed conversion has left.
    free_memory: bytes that may be taken; a model with a greater layer is refused. None checks nothing.

    Raises:
        InvalidRequestError: there are no native kernels, the source is packed already, or the destination is not empty
            or has no room.
        ModelLoadError: the checkpoint cannot be loaded, or the destination cannot be written.
    """
    if best_level() is None:
        raise InvalidRequestError(f"convert: packed weights are for the native kernels; {why_missing()}")
    if (config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple) != (1, 1):
        raise NotSupportedError(f"lm_head_pieces, pad_vocab_multiple: {WHOLE_IN_FILES}", param="lm_head_pieces")
    import_files(config.imports)
    source = resolve_model(config.model)
    model_config = replace(load_model_config(source), model_impl=config.numerics.model_impl)
    numerics = config.resolve(model_config).numerics
    if find_packed(source) is not None and numerics.load_format == "auto":
        raise InvalidRequestError(
            f"src: {str(source)!r} holds packed weights already; give the checkpoint they were made of", param="src"
        )
    packing = _Packing(model_config, numerics, open_source(source, model_config, numerics.load_format))
    packing.check_memory(free_memory)
    with Destination(destination) as directory:
        directory.require(packing.num_bytes)
        with directory.file(PACKED) as stream:
            size = packing.write(stream, progress)
        copy_companions(source, directory)
    return size


class _Packing:
    """A model's layers on their way into a file."""

    def __init__(self, model_config: ModelConfig, numerics: NumericsConfig, rows: ParameterSource) -> None:
        self._rows = rows
        self._scheme = numerics.scheme
        self._ops = load_ops("cpu", getattr(torch, numerics.dtype), threads=numerics.threads or 1)
        self._parameters: Mapping[str, Parameter] = read_parameters(model_config)
        model = empty_model(model_config, self._ops, scheme=self._scheme, max_model_len=1)
        plain = [full for full, _, _, _ in plain_parameters(model)]
        if plain:
            raise ModelLoadError(
                f"convert: {listed(plain)} cannot be packed, because torch's own layers hold them; only layers that "
                f"the factory makes have a packed form"
            )
        self._layers = dict(weight_layers(model))
        self._info = PackedInfo(
            numerics.dtype, numerics.quantization, None if self._scheme is None else self._scheme.group_size
        )

    @property
    def num_bytes(self) -> int:
        """Of all weights together, about."""
        return stored_bytes(self._parameters.values(), self._ops, self._scheme)

    def check_memory(self, free_memory: Callable[[], int] | None) -> None:
        """One layer at a time has to fit.

        Raises:
            ModelLoadError: the greatest does not.
        """
        if free_memory is not None:
            greatest = max(stored_bytes([item], self._ops, self._scheme) for item in self._parameters.values())
            check_memory({"weights of the greatest layer": greatest}, free_memory())

    def write(self, stream: BinaryIO, progress: Progress) -> int:
        """Pack every layer and write it. Returns the bytes of the file."""
        writer = PackedWriter(stream, self._info, len(self._layers))
        for done, (prefix, layer) in enumerate(self._layers.items()):
            progress(done, len(self._layers))
            fill_layer(prefix, layer, self._parameters, self._rows)
            writer.write(prefix, layer.state())
            layer.forget()
        writer.finish()
        return stream.seek(0, os.SEEK_END)
