"""The loader: makes a model ready to compute from a family's parameter table, a checkpoint and a backend.

Each layer receives its parameters as RowSources, reads as many rows as it packs at once, and keeps only the packed
form. So memory holds the packed model and only a few rows in the checkpoint's type. Packed weights are mapped instead
(weights/packed.py). A model that does not fit into memory is refused before anything is allocated.

Before any layer is made, the headers say how the checkpoint codes each weight (Stored), so a layer knows what it will
keep. Coded weights are passed on as they are; all others are rounded to the model's type.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from penstock.config import EngineConfig
from penstock.errors import ModelLoadError, NotSupportedError, check_choice, check_installed, listed, unsupported
from penstock.kernels.backends import load_ops
from penstock.kernels.coding import Coding
from penstock.kernels.cpu.host import pinned_cores
from penstock.kernels.cpu.library import why_missing
from penstock.kernels.ops import Ops, RowSource
from penstock.kernels.scheme import scheme_of
from penstock.kernels.tensors import NAMES, Dtype
from penstock.kernels.triton.device import of_rank
from penstock.layers.factory import LayerFactory, Runs
from penstock.layers.lora import LoraSlots
from penstock.layers.module import CausalLM, is_torch_module, named_modules
from penstock.layers.weights import (
    PLAIN_HEAD,
    WHOLE_IN_FILES,
    Embedding,
    HeadLayout,
    Linear,
    LMHead,
    Vector,
    WeightLayer,
    adapted_products,
)
from penstock.models.registry import find_model
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock.weights.adapters import AdapterReader, MergedSource
from penstock.weights.instance import Weights
from penstock.weights.packed import find_packed, read_info, restore_packed
from penstock.weights.rows import RoundedRows
from penstock.weights.safetensors import BUFFERS, Checkpoint
from penstock.weights.sources import (
    CheckpointSource,
    DescribedSource,
    DummySource,
    ParameterSource,
    has_weights,
    open_source,
    read_parameters,
    read_table,
)

ROTARY_BYTES = 4  # per element of a table; float64 is used for only a few positions at a time


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a model is loaded: here, as a whole. Subclasses load a part, or make other layers.

    Attributes:
        free_memory: returns the bytes that the weights may take; None checks nothing.
    """

    free_memory: Callable[[], int] | None = None

    @property
    def prefix(self) -> str:
        """The prefix of this part's tensors in a file of packed weights."""
        return ""

    @property
    def is_whole(self) -> bool:
        """Tell whether this part has all layers."""
        return True

    def factory(self, whole: LayerFactory) -> LayerFactory:
        """Adapt what makes the layers of the whole model, to make this part's layers."""
        return whole

    def source(self, source: ParameterSource) -> ParameterSource:
        """Adapt the source of the whole model's parameters to this part's."""
        return source

    def trim(self, model: Any, make: LayerFactory) -> None:
        """Remove what is not in this part from a model without weights, in place."""


ANYWHERE = Place()


@dataclass(frozen=True)
class Stored:
    """How the weights of a model are stored, as far as the headers of its files say.

    Attributes:
        packed: the file of packed weights, if the model has one.
        source: the source of all other values.
        is_decoded: whether coded weights are read as floats.
    """

    packed: Path | None = None
    source: ParameterSource = field(default_factory=DummySource)
    is_decoded: bool = False

    def decoded(self) -> "Stored":
        """Return the same weights for kernels that multiply no codes: they are read as floats."""
        return replace(self, is_decoded=True)

    def runs(self, place: Place, parameters: Mapping[str, Parameter]) -> dict[str, Runs]:
        """Return how the parameters of a part are coded, by name, without those that are not coded.

        parameters: the part's own.
        """
        if self.packed is not None:
            held = read_info(self.packed).runs.items()
            found = {name.removeprefix(place.prefix): runs for name, runs in held if name.startswith(place.prefix)}
            for name, item in parameters.items():
                if sum(rows for rows, _ in found.get(name, ())) not in (0, item.shape[0]):
                    raise ModelLoadError(f"{self.packed}: {name} does not match config.json")
            return found
        if self.is_decoded:
            return {}
        own = place.source(self.source)
        return {name: runs for name, item in parameters.items() if (runs := own.runs(item))}

    @cached_property
    def codings(self) -> tuple[Coding, ...]:
        """The different codings of all weights, in the order of their names; () if none is coded."""
        found: Iterable[Coding] = ()
        if self.packed is not None:
            found = read_info(self.packed).codings
        elif isinstance(self.source, CheckpointSource | DescribedSource | MergedSource) and not self.is_decoded:
            found = self.source.codings
        return tuple(sorted(found, key=lambda coding: coding.name))


def open_stored(
    directory: str | Path | Checkpoint,
    model_config: ModelConfig,
    load_format: str,
    *,
    is_complete: bool = True,
    merge_lora: str | None = None,
) -> Stored:
    """Read the headers of a model's weights.

    load_format: as in load_model; "mock" has no weights.
    is_complete: False if the directory may lack its weights. config.json then says how they are coded, as for random
        weights.
    merge_lora: directory of a LoRA adapter to merge into the values.

    Raises:
        ModelLoadError: the checkpoint, or the adapter, does not fit the architecture.
    """
    if merge_lora is not None:
        base = open_stored(directory, model_config, load_format, is_complete=is_complete)
        if base.packed is not None:
            raise unsupported("merge_lora", "packed weights cannot be changed; use the checkpoint")
        return replace(base, source=open_reader(model_config, base.source).merged(Path(merge_lora)))
    if load_format != "auto" or not (is_complete or has_weights(directory)):
        described = None if load_format == "mock" else model_config.quantization
        return (
            Stored() if described is None else Stored(source=DescribedSource(read_parameters(model_config), described))
        )
    packed = None if isinstance(directory, Checkpoint) else find_packed(Path(directory))
    return Stored(source=open_source(directory, model_config, load_format)) if packed is None else Stored(packed)


def open_reader(model_config: ModelConfig, source: ParameterSource) -> AdapterReader:
    """Make the reader of a model's LoRA adapters. source: the values of its parameters."""
    table = read_table(model_config)
    return AdapterReader(table.parameters(model_config), source, table.prefix)


def make_ops(config: EngineConfig, model_config: ModelConfig, rank: int = 0) -> Ops:
    """Make the backend of a rank of a resolved config; each has a GPU of its own, if any."""
    numerics, num_ranks = config.numerics, config.parallel.num_ranks
    threads = numerics.threads or 1
    cores = pinned_cores(numerics.cpu_affinity, threads) if numerics.kernels == "cpu" else ()
    dtype = dtype_for(model_config, numerics.kernels, numerics.dtype)
    device = of_rank(numerics.device, rank)
    return load_ops(numerics.kernels, dtype, device, threads=threads, cores=cores, num_ranks=num_ranks)


def make_model(
    config: EngineConfig, model_config: ModelConfig, weights: Weights | Stored, ops: Ops, place: Place
) -> CausalLM:
    """Load a model, or the part of it that a place holds, as a resolved config specifies.

    Raises:
        ModelLoadError: its weights cannot be served.
    """
    if not isinstance(weights, Stored):
        place_of, merged = weights, config.lora.merge_lora
        weights = open_stored(place_of, model_config, config.numerics.load_format, merge_lora=merged)
    return load_model(
        weights,
        model_config,
        ops,
        config.numerics.load_format,
        scheme=config.numerics.scheme,
        slices=config.numerics.activation_slices,
        max_model_len=config.scheduler.max_model_len,
        head=HeadLayout(config.parallel.lm_head_pieces, config.parallel.pad_vocab_multiple),
        place=place,
        lora=make_slots(config, ops),
    )


def make_slots(config: EngineConfig, ops: Ops) -> LoraSlots | None:
    """Make the slots of LoRA adapters of a resolved config; None if it has none."""
    lora, tokens = config.lora, config.scheduler.max_num_batched_tokens or 0
    return LoraSlots(ops, lora.max_loras, lora.max_lora_rank, tokens) if lora.enable_lora else None


def load_model(
    directory: str | Path | Checkpoint | Stored,
    model_config: ModelConfig,
    ops: Ops,
    load_format: str = "auto",
    *,
    max_model_len: int | None = None,
    head: HeadLayout = PLAIN_HEAD,
    place: Place = ANYWHERE,
    **numerics: Any,
) -> CausalLM:
    """Load the model of a directory, or of weights whose headers are read already, ready to compute.

    load_format: "auto" maps packed weights if the directory has them, otherwise reads safetensors; "dummy" makes random
        weights, so config.json is enough.
    max_model_len: positions of the rotary tables; None takes the model's context.
    head: how the columns of the LM head are arranged; packed weights always hold the head in one piece.
    place: which part is loaded, and into how much memory.
    numerics: `scheme`, `slices` and `lora`, as in LayerFactory. Packed weights must fit the scheme (packed.fit).

    Raises:
        ModelLoadError: the checkpoint does not fit the architecture, or the model does not fit the memory.
        InvalidRequestError: packed weights do not fit the backend, the scheme or the layout of the head.
    """
    check_choice("load_format", load_format, ("auto", "dummy"))
    stored = directory if isinstance(directory, Stored) else open_stored(directory, model_config, load_format)
    if stored.packed is not None and not head.is_plain:
        raise NotSupportedError(f"lm_head_pieces, pad_vocab_multiple: {WHOLE_IN_FILES}", param="lm_head_pieces")
    free_memory = place.free_memory
    if free_memory is not None:
        check_memory({"rotary tables of all positions": rotary_bytes(model_config, max_model_len)}, free_memory())
    make = make_factory(stored, model_config, ops, place, max_positions=max_model_len, head=head, **numerics)
    model = empty_model(model_config, make)
    heads = tied_heads(model, make)
    place.trim(model, make)
    if free_memory is not None and stored.packed is None:  # a map needs no memory
        check_memory({"weights": weight_bytes(model, make) + adapter_bytes(model)}, free_memory())
    _load_values(model, make, stored, place, heads)
    return _adapted(model, model_config, make)


def make_factory(
    stored: Stored, model_config: ModelConfig, ops: Ops, place: Place = ANYWHERE, **options: Any
) -> LayerFactory:
    """Return what makes the layers of a model's part, as its weights are stored.

    options: as in LayerFactory.single_device.
    """
    make = place.factory(LayerFactory.single_device(ops, read_parameters(model_config), **options))
    return replace(make, runs=stored.runs(place, make.parameters))


def _load_values(
    model: Any, make: LayerFactory, stored: Stored, place: Place, heads: Mapping[str, tuple[str, LMHead]]
) -> None:
    """Give every layer its values. heads: tied_heads of the whole model, of which this part may lack the head."""
    layers = dict(weight_layers(model))
    if stored.packed is not None:
        part, is_whole = place.prefix, place.is_whole
        restore_packed(stored.packed, make.ops, make.scheme, layers, part=part, is_whole=is_whole, heads=heads)
    else:
        _fill(model, make, place.source(stored.source))
        BUFFERS.clear()
    for product in adapted_products(model).values():
        product.allocate()
    for name, (_, head) in tied_heads(model, make).items():
        cast(Embedding, layers[name]).share(head.packed[0])


def _adapted(model: Any, model_config: ModelConfig, make: LayerFactory) -> CausalLM:
    """Put the model behind an adapter, if its class follows another convention."""
    convention = find_model(model_config.architecture, model_config.model_impl).find_convention()
    return cast(CausalLM, model if convention is None else convention.adapt(model, model_config, make))


def dtype_for(model_config: ModelConfig, kernels: str, name: str) -> Dtype:
    """Choose the dtype "float32" or "bfloat16" for a model's backend: torch's if the model or the kernels compute with
    torch, otherwise numpy's.

    Raises:
        InvalidRequestError: torch is needed and not installed.
    """
    entry = find_model(model_config.architecture, model_config.model_impl)
    if kernels == "cpu" and not entry.needs_torch:
        return NAMES[name]
    if kernels == "cpu":
        check_installed("model_impl", f"{model_config.architecture} ({model_config.model_impl})", "torch")
    elif kernels == "reference":
        why = why_missing()
        what = f"{why}; computing without it, slowly," if why else "reference"
        check_installed("kernels", what, "torch")
    import torch

    return getattr(torch, name)


def empty_model(model_config: ModelConfig, make: LayerFactory) -> Any:
    """Build the model with its rotary tables, but without weights.

    Raises:
        ModelLoadError: the model's parameters differ from its table in name or shape, or a parameter that must be
            quantised belongs to a torch module.
    """
    entry = find_model(model_config.architecture, model_config.model_impl)
    convention = entry.find_convention()
    build = entry.model_class if convention is None else partial(convention.build, entry.model_class)
    model = build(model_config, make)
    plain = plain_parameters(model)
    declared_names = {f"{prefix}.{name}" for prefix, layer in weight_layers(model) for name in layer.shapes}
    differing = set(make.parameters) ^ (declared_names | {name for name, _, _, _ in plain})
    if differing:
        raise ModelLoadError(f"the model and its parameter table differ in {listed(sorted(differing))}")
    for name, _, _, value in plain:
        declared = make.torch_parameter(name)
        if tuple(value.shape) != declared.shape:
            raise ModelLoadError(
                f"{name} has the shape {list(value.shape)} in the model; its parameter table requires "
                f"{list(declared.shape)}"
            )
        if scheme_of(declared.quant, make.scheme) is not None or (declared.quant and name in make.runs):
            raise ModelLoadError(
                f"{name} cannot be quantised, because torch's own layer holds it; make it with make.linear, or call "
                f"penstock.layers.swap.swap_linears(self, make) at the end of the model's __init__"
            )
    for _, module in named_modules(model):
        if is_torch_module(module):
            module.eval()
    return model


def weight_layers(model: object) -> Iterable[tuple[str, WeightLayer]]:
    """List every layer that has parameters of its own, with its full name."""
    return ((name, layer) for name, layer in named_modules(model) if isinstance(layer, WeightLayer))


def weight_bytes(model: object, make: LayerFactory) -> int:
    """Count the bytes that the layers of an empty model will keep, plus those of torch modules."""
    return sum(layer.num_bytes for layer in kept_layers(model, make)) + plain_bytes(model, make)


def adapter_bytes(model: object) -> int:
    """Count the bytes of the slots of LoRA adapters."""
    return sum(product.num_bytes for product in adapted_products(model).values())


def plain_bytes(model: object, make: LayerFactory) -> int:
    """Count the bytes of the parameters of torch modules."""
    plain = {id(value): int(value.numel()) for _, _, _, value in plain_parameters(model)}
    return int(make.ops.dtype.itemsize) * sum(plain.values())


def kept_layers(model: object, make: LayerFactory) -> list[WeightLayer]:
    """List the layers that keep their loaded values: all except embeddings that read their rows from the LM head."""
    tied = tied_heads(model, make)
    return [layer for name, layer in weight_layers(model) if name not in tied]


def tied_heads(model: object, make: LayerFactory) -> dict[str, tuple[str, LMHead]]:
    """Find the LM heads, with their names, from which tied embeddings can read their rows, by the embedding's name."""
    layers = dict(weight_layers(model))
    found: dict[str, tuple[str, LMHead]] = {}
    for prefix, head in layers.items():
        if isinstance(head, LMHead) and head.holds_rows:
            name = (make.parameters[f"{prefix}.weight"].tied_to or "").removesuffix(".weight")
            embedding = layers.get(name)  # different shapes: the two hold different parts
            if isinstance(embedding, Embedding) and embedding.shapes["weight"] == head.shapes["weight"]:
                found[name] = prefix, head
    return found


def plain_parameters(model: object) -> list[tuple[str, Any, str, Any]]:
    """List (full name, module, name in the module, value) for each parameter of a torch module."""
    return [
        (f"{prefix}.{name}" if prefix else name, module, name, value)
        for prefix, module in named_modules(model)
        if is_torch_module(module) and not isinstance(module, WeightLayer)
        for name, value in module.named_parameters(recurse=False)
    ]


def _fill(model: object, make: LayerFactory, source: ParameterSource) -> None:
    """Load the values of every layer. Parameters of torch modules get the backend's type; shared ones stay shared."""
    tied = tied_heads(model, make)
    for prefix, layer in weight_layers(model):
        if prefix not in tied:
            fill_layer(prefix, layer, make, source)
    filled: dict[Any, Any] = {}  # parameters of torch modules
    for full, module, name, old in plain_parameters(model):
        if old not in filled:
            dtype = old.dtype if getattr(old, "keeps_float32", False) else make.ops.dtype
            rows = RoundedRows(source.rows(make.torch_parameter(full)), dtype)
            value = make.ops.tensor(rows.read(0, rows.shape[0]))
            filled[old] = type(old)(value, requires_grad=False)
        module.register_parameter(name, filled[old])


def fill_layer(prefix: str, layer: WeightLayer, make: LayerFactory, source: ParameterSource) -> None:
    """Load the values of the layer named `prefix`. Raise ModelLoadError if its weight cannot be quantised."""
    values: dict[str, RowSource] = {}
    for name, shape in layer.shapes.items():
        rows = source.rows(make.parameters[f"{prefix}.{name}"])
        # Codes are kept, and vectors, such as a norm's weight, are rounded by their layer.
        is_kept = len(shape) == 1 or isinstance(layer, Vector) or _keeps_codes(layer)
        values[name] = rows if is_kept else RoundedRows(rows, make.ops.dtype)
    try:
        layer.load(values)
    except ValueError as error:
        names = ", ".join(name for value in values for name in make.parameters[f"{prefix}.{value}"].sources)
        raise ModelLoadError(f"{names}: {error}") from None


def _keeps_codes(layer: WeightLayer) -> bool:
    if isinstance(layer, Linear):
        return layer.spec.is_coded
    return isinstance(layer, Embedding) and layer.packing is not None


def rotary_bytes(model_config: ModelConfig, max_model_len: int | None = None) -> int:
    """Count the bytes of the tables of positions: cosines and sines of each kind of rotary embedding that the model
    has, and factors of the queries."""
    positions = max_model_len or model_config.context
    columns = sum(rope.rotary_dim(head_dim) for rope, head_dim in model_config.ropes())
    columns += model_config.query_scale is not None
    return ROTARY_BYTES * positions * columns


def check_memory(needs: Mapping[str, int], free: int) -> None:
    """Raise ModelLoadError if one of the needs (description -> bytes) exceeds `free` bytes."""
    for what, needed in needs.items():
        if needed > free:
            raise ModelLoadError(
                f"the {what} need {needed / 2**20:,.1f} MiB according to its configuration; only "
                f"{free / 2**20:,.1f} MiB are free"
            )
