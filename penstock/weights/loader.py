"""The loader: a family's parameter table, a checkpoint and a backend make a model that computes.

A layer gets its parameters as sources of rows, reads as many as it packs at once, and forgets them. So beside the
packed model only some rows are in memory, as the checkpoint stores them. A tied head is packed from the embedding's
rows a second time. Packed weights are mapped instead (weights/packed_file.py). What will not fit into memory is refused
before.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from penstock.conventions import jetstream
from penstock.errors import ModelLoadError, NotSupportedError
from penstock.kernels.ops import Ops, RowSource
from penstock.layers.causal_lm import CausalLM
from penstock.layers.factory import LayerFactory
from penstock.layers.lm_head import PLAIN_HEAD, WHOLE_IN_FILES, HeadLayout
from penstock.layers.weights import WeightLayer
from penstock.models.registry import ModelVersion, find_model
from penstock.quant.scheme import Scheme, scheme_of
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, ParamTable
from penstock.validation import check_choice
from penstock.weights.layouts import parameter_rows
from penstock.weights.matching import listed, match
from penstock.weights.packed_file import PackedFile
from penstock.weights.packed_info import find_packed
from penstock.weights.safetensors import Checkpoint
from penstock.weights.sources import DummyRows, RoundedRows

REFERENCE_BYTES = 4  # the reference keeps every weight as float32
GROUP_SCALE_BITS = 16  # of an int4 group
ROTARY_BYTES = 4  # of one element of a table; only a few positions at once are computed in float64
COMPARED_ROWS = 1024  # of two tensors that have to be equal, at once


class ParameterSource(Protocol):
    """Where the values of a model's parameters come from."""

    def rows(self, parameter: Parameter) -> RowSource:
        """The whole parameter, joined, of its shape and of any float type."""


class CheckpointSource:
    """Parameters from safetensors files.

    Attributes:
        match: which tensors hold which parameter.
    """

    def __init__(self, checkpoint: Checkpoint, parameters: Mapping[str, Parameter], table: ParamTable) -> None:
        """Hold the checkpoint against the table before anything is read.

        Raises:
            ModelLoadError: a tensor is missing, of another shape, or claimed by nobody; or a tied one differs.
        """
        self._checkpoint = checkpoint
        self._parameters = parameters
        self.match = match(checkpoint.entries, parameters, table)
        for parameter in parameters.values():
            self._check_tied(parameter)

    def rows(self, parameter: Parameter) -> RowSource:
        if parameter.tied_to is not None:
            parameter = self._parameters[parameter.tied_to]
        return self.stored(parameter)

    def dtype(self, name: str) -> str:
        """Type of a tensor, by the table's name, in the spelling of safetensors."""
        return self._checkpoint.rows(self.match.stored[name]).entry.dtype

    def stored(self, parameter: Parameter) -> RowSource:
        """As the checkpoint has it, however it lies there."""
        return parameter_rows(self.match.layouts[parameter.name], self.find)

    def find(self, name: str, index: int | None) -> RowSource:
        """A tensor by the table's name, or one of those that it stacks."""
        return self._checkpoint.rows(self.match.stored[name], index)

    def _check_tied(self, parameter: Parameter) -> None:
        """A tied tensor may be stored a second time, but not with other values."""
        if parameter.tied_to is None or parameter.name not in self.match.layouts:
            return
        if not _equal(self.stored(parameter), self.rows(parameter)):
            raise ModelLoadError(
                f"tie_word_embeddings = true is not allowed: the checkpoint holds {parameter.name} with other values "
                f"than {parameter.tied_to}"
            )


class DummySource:
    """Random parameters, each a function of its name alone: for speed tests, and to try a config without weights."""

    def rows(self, parameter: Parameter) -> RowSource:
        return DummyRows(parameter.tied_to or parameter.name, parameter.shape)


def load_model(
    directory: str | Path | Checkpoint,
    model_config: ModelConfig,
    ops: Ops,
    load_format: str = "auto",
    *,
    scheme: Scheme | None = None,
    max_model_len: int | None = None,
    head: HeadLayout = PLAIN_HEAD,
    free_memory: Callable[[], int] | None = None,
) -> CausalLM:
    """The model of a directory, or of a checkpoint that is open already (of a model object), ready to compute.

    load_format: "auto" maps packed weights where there are some, and reads safetensors; "dummy" makes random weights,
        so config.json is enough.
    scheme: how to quantise; None keeps the backend's type. What is packed already has to fit (packed_info.fit).
    max_model_len: positions that will be asked for; None takes the model's context.
    head: how the columns of the LM head are arranged; packed weights have it whole.
    free_memory: bytes that the weights may take; a model that needs more is refused before anything is allocated.
        None checks nothing.

    Raises:
        ModelLoadError: the checkpoint does not fit the architecture, or the model the memory, and how.
        InvalidRequestError: packed weights do not fit the backend, the scheme or the layout of the head.
    """
    check_choice("load_format", load_format, ("auto", "dummy"))
    packed = None
    if load_format == "auto" and not isinstance(directory, Checkpoint):
        packed = find_packed(Path(directory))
    if packed is not None and not head.is_plain:
        raise NotSupportedError(f"lm_head_pieces, pad_vocab_multiple: {WHOLE_IN_FILES}", param="lm_head_pieces")
    if free_memory is not None and ops.device.type == "cpu":  # what another device has is not known here
        weights = [] if packed is not None else read_parameters(model_config).values()  # mapped ones need no memory
        rotary = rotary_bytes(model_config, max_model_len)  # these are made before there are weights
        needs = {"weights": stored_bytes(weights, ops, scheme), "rotary tables of all positions": rotary}
        check_memory(needs, free_memory())
    source = None if packed is not None else open_source(directory, model_config, load_format)
    model = empty_model(model_config, ops, scheme=scheme, max_model_len=max_model_len, head=head)
    if packed is not None:
        PackedFile(packed, ops, scheme).restore(dict(weight_layers(model)))
    elif source is not None:
        fill(model, read_parameters(model_config), source, ops)
    make = _factory(model_config, ops, scheme, max_model_len, head)
    if _registered(model_config).convention == "jetstream":
        model = jetstream.JetStreamModel(model, jetstream.Environment(model_config, make.ops, make))
    return cast(CausalLM, model.eval())


def read_parameters(model_config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter of a model, from its family's table."""
    return _registered(model_config).read_table().parameters(model_config)


def _registered(model_config: ModelConfig) -> ModelVersion:
    return find_model(model_config.architecture, model_config.model_impl)


def open_source(directory: str | Path | Checkpoint, model_config: ModelConfig, load_format: str) -> ParameterSource:
    """Where load_format finds the parameters of a model.

    Raises:
        ModelLoadError: the checkpoint does not fit the architecture.
    """
    if load_format == "dummy":
        return DummySource()
    table = _registered(model_config).read_table()
    checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint(Path(directory))
    return CheckpointSource(checkpoint, table.parameters(model_config), table)


def empty_model(
    model_config: ModelConfig,
    ops: Ops,
    *,
    scheme: Scheme | None,
    max_model_len: int | None = None,
    head: HeadLayout = PLAIN_HEAD,
) -> nn.Module:
    """The model without weights. Its rotary tables are there.

    Raises:
        ModelLoadError: the model and its table do not have the same parameters.
    """
    make = _factory(model_config, ops, scheme, max_model_len, head)
    parameters = make.parameters
    entry = _registered(model_config)
    if entry.convention == "jetstream":
        model = jetstream.build(entry.model_class, model_config, make)
    else:
        model = entry.model_class(model_config, make)
    differing = set(parameters) ^ {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if differing:
        raise ModelLoadError(f"the model and its parameter table differ in {listed(sorted(differing))}")
    _check_plain(model, parameters, scheme)
    return model


def _factory(
    model_config: ModelConfig, ops: Ops, scheme: Scheme | None, max_model_len: int | None, head: HeadLayout
) -> LayerFactory:
    parameters = read_parameters(model_config)
    return LayerFactory.single_device(ops, parameters, scheme=scheme, max_positions=max_model_len, head=head)


def _check_plain(model: nn.Module, parameters: Mapping[str, Parameter], scheme: Scheme | None) -> None:
    """torch's own modules have the table's shapes, and nothing in them that shall be quantised.

    Raises:
        ModelLoadError: one has another shape, or would keep its type though a scheme is asked for.
    """
    for full, _, _, value in plain_parameters(model):
        declared = parameters[full]
        if tuple(value.shape) != declared.shape:
            raise ModelLoadError(
                f"{full} has the shape {list(value.shape)} in the model; its parameter table makes it "
                f"{list(declared.shape)}"
            )
        if scheme_of(declared.quant, scheme) is not None:
            raise ModelLoadError(
                f"{full} cannot be quantised, because torch's own layer holds it; make it with make.linear, or call "
                f"penstock.layers.swap.swap_linears(self, make) at the end of the model's __init__"
            )


def weight_layers(model: nn.Module) -> Iterable[tuple[str, WeightLayer]]:
    """Every layer with parameters of its own, by its full name."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, WeightLayer))


def plain_parameters(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Parameters of torch's own modules, as in a model somebody wrote by hand: full name, module, name there, value."""
    return [
        (f"{prefix}.{name}" if prefix else name, module, name, value)
        for prefix, module in model.named_modules()
        if not isinstance(module, WeightLayer)
        for name, value in module.named_parameters(recurse=False)
    ]


def fill(model: nn.Module, parameters: Mapping[str, Parameter], source: ParameterSource, ops: Ops) -> None:
    """Give every layer of the model its values."""
    for prefix, layer in weight_layers(model):
        fill_layer(prefix, layer, parameters, source)
    fill_plain(model, parameters, source, ops)


def fill_plain(model: nn.Module, parameters: Mapping[str, Parameter], source: ParameterSource, ops: Ops) -> None:
    """Give torch's own modules theirs, in the backend's type. A parameter that two of them share stays one."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for full, module, name, old in plain_parameters(model):
        if old not in filled:
            rows = RoundedRows(source.rows(parameters[full]), ops.dtype)
            value = rows.read(0, rows.shape[0]).to(ops.device)
            filled[old] = nn.Parameter(value, requires_grad=False)
        module.register_parameter(name, filled[old])


def fill_layer(prefix: str, layer: WeightLayer, parameters: Mapping[str, Parameter], source: ParameterSource) -> None:
    """Give one layer its values.

    Raises:
        ModelLoadError: its weight cannot be quantised.
    """
    values: dict[str, RowSource] = {}
    for name, declared in layer.named_parameters(recurse=False):
        rows = source.rows(parameters[f"{prefix}.{name}"])
        # What is one row a parameter, a norm for instance, its layer rounds itself.
        values[name] = RoundedRows(rows, declared.dtype) if declared.ndim > 1 else rows
    try:
        layer.load(values)
    except ValueError as error:
        names = ", ".join(name for value in values for name in parameters[f"{prefix}.{value}"].sources)
        raise ModelLoadError(f"{names}: {error}") from None


def stored_bytes(parameters: Iterable[Parameter], ops: Ops, scheme: Scheme | None) -> int:
    """What a backend keeps of the parameters, without what fills up its panels. A tied head is packed a second time."""
    return sum(-(-item.num_elements * _bits(item, ops, scheme) // 8) for item in parameters)


def rotary_bytes(model_config: ModelConfig, max_model_len: int | None = None) -> int:
    """What the tables of cosines and sines take: one for each kind of rotary embedding that the model has."""
    positions = max_model_len or model_config.context
    ropes = [rope for rope in (model_config.rope, model_config.local_rope) if rope is not None]
    return sum(ROTARY_BYTES * positions * rope.rotary_dim(model_config.head_dim) for rope in ropes)


def _bits(parameter: Parameter, ops: Ops, scheme: Scheme | None) -> int:
    """Bits that an element takes, rounded up."""
    if ops.name == "reference":
        return 8 * REFERENCE_BYTES
    scheme = scheme_of(parameter.quant, scheme)
    if scheme is None:
        return 8 * ops.dtype.itemsize
    return scheme.weight_bits + (-(-GROUP_SCALE_BITS // scheme.group_size) if scheme.group_size else 0)


def check_memory(needs: Mapping[str, int], free: int) -> None:
    """Refuse what cannot be had.

    Raises:
        ModelLoadError: one of the needs, bytes by what they are for, is more than what is free.
    """
    for what, needed in needs.items():
        if needed > free:
            raise ModelLoadError(
                f"the {what} need {needed / 2**20:,.1f} MiB, as config.json counts them; only {free / 2**20:,.1f} MiB "
                f"are free"
            )


def _equal(one: RowSource, other: RowSource) -> bool:
    """Whether all rows are the same; the shapes are."""
    pieces = ((at, min(at + COMPARED_ROWS, one.shape[0])) for at in range(0, one.shape[0], COMPARED_ROWS))
    return all(torch.equal(one.read(*piece), other.read(*piece)) for piece in pieces)
