"""Conversion: a checkpoint, or random weights, become a directory of packed weights that loads as a memory map.

Each layer is packed as the loader packs it, written and freed before the next. config.json is the last file, so the
directory is a model only when everything else is there (weights/destination.py).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.config import EngineConfig, NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError, NotSupportedError
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import best_level, why_missing
from penstock.layers.factory import LayerFactory
from penstock.layers.lm_head import WHOLE_IN_FILES
from penstock.layers.weights import WeightLayer
from penstock.models.config_json import load_model_config
from penstock.plugins.user_files import import_files
from penstock.spec.model_config import ModelConfig
from penstock.spec.unsupported import listed
from penstock.validation import fail
from penstock.weights.destination import Destination
from penstock.weights.hub import resolve_model
from penstock.weights.loader import dtype_for, empty_model, fill_layer, plain_parameters, weight_layers
from penstock.weights.memory import check_memory
from penstock.weights.packed import PackedInfo, PackedWriter, find_packed
from penstock.weights.safetensors import PACKED
from penstock.weights.sources import open_source, read_parameters

Progress = Callable[[int, int], None]  # called with the number of finished layers, and of all


def convert_model(
    config: EngineConfig,
    destination: Path,
    progress: Progress = lambda done, total: None,
    *,
    free_memory: Callable[[], int] | None = None,
) -> int:
    """Write the packed form of the model that a config names, in its dtype and scheme. Return the bytes of its weights.

    free_memory: returns the bytes that may be taken; a model whose largest layer needs more is refused. None checks
        nothing.

    Raises:
        InvalidRequestError: there are no native kernels, the source is packed already, or the destination is not empty
            or too small.
        ModelLoadError: the checkpoint cannot be loaded, or the destination cannot be written.
    """
    if best_level() is None:
        raise InvalidRequestError(f"convert: packed weights are for the native kernels; {why_missing()}")
    if (config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple) != (1, 1):
        raise NotSupportedError(f"lm_head_pieces, pad_vocab_multiple: {WHOLE_IN_FILES}", param="lm_head_pieces")
    if config.numerics.load_format == "mock":
        raise fail("load_format", "mock", "auto or dummy: without a model there is nothing to write")
    import_files(config.imports)
    source = resolve_model(config.model)
    model_config = replace(load_model_config(source), model_impl=config.numerics.model_impl)
    numerics = config.resolve(model_config).numerics
    if find_packed(source) is not None and numerics.load_format == "auto":
        raise InvalidRequestError(
            f"src: {str(source)!r} holds packed weights already; give the checkpoint they were made from", param="src"
        )
    rows = open_source(source, model_config, numerics.load_format)
    make = _factory(model_config, numerics)
    layers = _packable_layers(empty_model(model_config, make))
    sizes = [layer.num_bytes for layer in layers.values()]
    if free_memory is not None:
        check_memory({"weights of the largest layer": max(sizes)}, free_memory())
    with Destination(destination) as directory:
        directory.require(sum(sizes))
        with directory.file(PACKED) as stream:
            writer = PackedWriter(stream, PackedInfo(numerics.dtype, make.scheme), len(layers))
            for done, (prefix, layer) in enumerate(layers.items()):
                progress(done, len(layers))
                fill_layer(prefix, layer, make, rows)
                writer.write(prefix, layer.state())
                layer.forget()
            size = writer.finish()
        directory.copy_companions(source)
    return size


def _factory(model_config: ModelConfig, numerics: NumericsConfig) -> LayerFactory:
    ops = load_ops("cpu", dtype_for(model_config, "cpu", numerics.dtype), threads=numerics.threads or 1)
    return LayerFactory.single_device(ops, read_parameters(model_config), scheme=numerics.scheme, max_positions=1)


def _packable_layers(model: object) -> dict[str, WeightLayer]:
    """Return the layers of a model by name. Raise ModelLoadError if it has layers of torch's own."""
    plain = [full for full, _, _, _ in plain_parameters(model)]
    if plain:
        raise ModelLoadError(
            f"convert: {listed(plain)} cannot be packed, because torch's own layers hold them; only layers that "
            f"the factory makes have a packed form"
        )
    return dict(weight_layers(model))
