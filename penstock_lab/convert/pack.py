"""Conversion of a checkpoint, or of random weights, to a directory of packed weights that loads as a memory map.

Each layer is packed as the loader packs it, then written and freed before the next one. For several ranks, their parts
are written one after the other. config.json is written last, so the directory is a model only once all other files
exist (penstock_lab/convert/rewrite.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.assembly.streaming import as_served
from penstock.config import EngineConfig, NumericsConfig
from penstock.errors import InvalidRequestError, ModelLoadError, NotSupportedError, fail, invalid, listed
from penstock.interface.plugins import import_files
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import best_level, why_missing
from penstock.kernels.ops import Ops
from penstock.kernels.tensors import Array
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import WHOLE_IN_FILES, WeightLayer
from penstock.models.config_json import load_model_config
from penstock.ranks.build import RankPlace, check_codes, split_of
from penstock.ranks.layers import row_magnitudes
from penstock.ranks.links import NoLinks
from penstock.ranks.sharding import Share, find_degrees, heads_are_together
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock.weights.hub import resolve_model
from penstock.weights.loader import (
    ANYWHERE,
    Place,
    Stored,
    check_memory,
    dtype_for,
    empty_model,
    fill_layer,
    make_factory,
    open_stored,
    plain_parameters,
    tied_heads,
    weight_layers,
)
from penstock.weights.packed import PackedInfo, PackedWriter, find_packed
from penstock.weights.rows import RoundedRows
from penstock.weights.safetensors import PACKED
from penstock.weights.sources import ParameterSource, read_parameters
from penstock_lab.convert.rewrite import Destination

Progress = Callable[[int, int], None]  # called with the number of finished layers and the total


def convert_model(
    config: EngineConfig,
    destination: Path,
    progress: Progress = lambda done, total: None,
    *,
    free_memory: Callable[[], int] | None = None,
) -> int:
    """Write the packed form of a config's model, in the config's dtype and scheme. Return the bytes of its weights.

    free_memory: returns the bytes that may be allocated; a model whose largest layer needs more is refused. None checks
        nothing.

    Raises:
        InvalidRequestError: there are no native kernels, the source is already packed, or the destination is not empty
            or has too little space.
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
    model_config = load_model_config(source, config.numerics.hf_overrides, config.numerics.rope_scaling)
    model_config = as_served(model_config, config.numerics)
    numerics = config.resolve(model_config).numerics
    if find_packed(source) is not None and numerics.load_format == "auto":
        raise invalid("src", f"{str(source)!r} holds packed weights already; give the checkpoint they were made from")
    stored = open_stored(source, model_config, numerics.load_format)
    numerics, _ = numerics.with_codings(stored.codings)
    check_codes(config, model_config, stored)
    together = heads_are_together(read_parameters(model_config), model_config)
    degrees = find_degrees(config.parallel, model_config, together=together)
    parts = [_Part(model_config, numerics, stored, Share(rank, degrees)) for rank in range(degrees.size)]
    layers = [(part, prefix, layer) for part in parts for prefix, layer in part.layers.items()]
    sizes = [layer.num_bytes for _, _, layer in layers]
    if free_memory is not None:
        check_memory({"weights of the largest layer": max(sizes)}, free_memory())
    runs = {part.place.prefix + name: found for part in parts for name, found in part.make.runs.items()}
    info = PackedInfo(numerics.dtype, numerics.scheme, degrees.name, runs)
    with Destination(destination) as directory:
        directory.require(sum(sizes))
        with directory.file(PACKED) as stream:
            writer = PackedWriter(stream, info, len(layers))
            for done, (part, prefix, layer) in enumerate(layers):
                progress(done, len(layers))
                part.fill(prefix, layer)
                writer.write(part.place.prefix + prefix, layer.state())
                layer.forget()
            size = writer.finish()
        directory.copy_companions(source)
    return size


class _Part:
    """One rank's part of a model, without values; for one process, the whole model.

    Attributes:
        place: the part.
        make: what makes its layers.
        layers: its layers by name.
    """

    def __init__(self, model: ModelConfig, numerics: NumericsConfig, stored: Stored, share: Share) -> None:
        ops = load_ops("cpu", dtype_for(model, "cpu", numerics.dtype), threads=numerics.threads or 1)
        self._whole_rows = _WholeRows(stored.source, ops)
        is_whole = share.degrees.size == 1
        self.place: Place = ANYWHERE if is_whole else RankPlace(split=split_of(model, share, self._whole_rows))
        self._source = self.place.source(stored.source)
        slices = numerics.activation_slices
        self.make = make_factory(stored, model, ops, self.place, scheme=numerics.scheme, slices=slices, max_positions=1)
        self.layers = _packable_layers(empty_model(model, self.make), self.make)

    def fill(self, prefix: str, layer: WeightLayer) -> None:
        """Load the values of the layer named `prefix`."""
        if isinstance(self.place, RankPlace) and self.place.split is not None:
            self._whole_rows.parameter = self.place.split.cuts[f"{prefix}.weight"].whole
        fill_layer(prefix, layer, self.make, self._source)


class _WholeRows(NoLinks):
    """Stands for the links of a rank whose part is only packed.

    Attributes:
        parameter: the whole weight of the layer that is being loaded.
    """

    parameter: Parameter

    def __init__(self, source: ParameterSource, ops: Ops) -> None:
        self._source = source
        self._ops = ops

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Find the largest value of each whole row of the weight, which a group of ranks would find together."""
        return [row_magnitudes(RoundedRows(self._source.rows(self.parameter), self._ops.dtype))]


def _packable_layers(model: object, make: LayerFactory) -> dict[str, WeightLayer]:
    """Find the layers of a model that keep values of their own, by name.

    Raises:
        ModelLoadError: it has torch modules with parameters.
    """
    plain = [full for full, _, _, _ in plain_parameters(model)]
    if plain:
        raise ModelLoadError(
            f"convert: {listed(plain)} cannot be packed, because torch's own layers hold them; only layers that "
            f"the factory makes have a packed form"
        )
    tied = tied_heads(model, make)
    return {name: layer for name, layer in weight_layers(model) if name not in tied}
