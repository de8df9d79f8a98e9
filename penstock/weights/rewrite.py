"""Rewriting: a checkpoint in another form, every bit as it was.

Pieces are joined or cut, experts stacked or not, matrices turned, names changed. Two rules for what is no parameter of
its own: a tied tensor is written where the checkpoint holds it too, and what carries nothing (the table's `ignore`) is
left out.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.ops import RowSource
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_model
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.checkpoint_writer import Outgoing, Progress, write_checkpoint
from penstock.weights.companions import copy_companions
from penstock.weights.destination import Destination
from penstock.weights.forms import FORMS
from penstock.weights.hub import resolve_model
from penstock.weights.layouts import tensor_rows
from penstock.weights.loader import CheckpointSource
from penstock.weights.packed_info import find_packed, read_info
from penstock.weights.safetensors import Checkpoint


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of a checkpoint.

    Attributes:
        num_bytes: of all tensors.
        ignored: tensors that were left out, because they carry nothing.
    """

    num_bytes: int
    ignored: tuple[str, ...]


def rewrite_model(
    model: str, destination: Path, form: str, max_shard_size: int, progress: Progress = lambda done, total: None
) -> Rewritten:
    """Write a model's checkpoint in one of the FORMS, with everything else that its directory needs.

    destination: does not exist, or is empty but for what a killed conversion has left.

    Raises:
        InvalidRequestError: the source is packed, or the destination is not empty or has no room.
        ModelLoadError: the checkpoint does not fit its architecture, or the form.
    """
    source = resolve_model(model)
    _refuse_packed(source)
    model_config = load_model_config(source)
    table = find_model(model_config.architecture).read_table()
    parameters = table.parameters(model_config)
    checkpoint = CheckpointSource(Checkpoint(source), parameters, table)
    tensors = outgoing(parameters, checkpoint, form)
    with Destination(destination) as directory:
        directory.require(sum(tensor.num_bytes for tensor in tensors))
        num_bytes = write_checkpoint(directory, tensors, max_shard_size, progress)
        copy_companions(source, directory)
    return Rewritten(num_bytes, checkpoint.match.ignored)


def outgoing(parameters: dict[str, Parameter], source: CheckpointSource, form: str) -> list[Outgoing]:
    """The tensors of a checkpoint in that form.

    Raises:
        ModelLoadError: pieces of different types would become one tensor.
    """
    tensors: dict[str, Outgoing] = {}
    for name, held in source.match.layouts.items():
        parameter = parameters[name]
        layout = FORMS[form](parameter)
        for tensor, shape in layout.sources.items():
            rows = partial(_rows, parameter, source, layout, tensor)
            dtype = source.dtype(tensor) if layout == held else _dtype(parameter, source, held)
            before = tensors.get(tensor)
            if before is not None and before.dtype != dtype:
                raise _mixed(tensor, {before.dtype, dtype})
            parts = before.parts if before is not None else ()  # the experts before this one
            tensors[tensor] = Outgoing(tensor, dtype, shape, (*parts, rows))
    return list(tensors.values())


def _rows(parameter: Parameter, source: CheckpointSource, layout: Layout, tensor: str) -> RowSource:
    if layout == source.match.layouts[parameter.name]:
        return source.find(tensor, layout.index)  # as it is
    return tensor_rows(layout, source.stored(parameter))[tensor]


def _dtype(parameter: Parameter, source: CheckpointSource, held: Layout) -> str:
    """The one type of all pieces of a parameter."""
    types = {source.dtype(name) for name in held.sources}
    if len(types) > 1:
        raise _mixed(parameter.name, types)
    return types.pop()


def _mixed(name: str, types: set[str]) -> ModelLoadError:
    return ModelLoadError(f"convert: {name} has pieces of different types ({', '.join(sorted(types))})")


def _refuse_packed(source: Path) -> None:
    file = find_packed(source)
    if file is None:
        return
    info = read_info(file)
    reason = f"rounded to {info.dtype}" if info.quantization is None else f"quantised to {info.quantization}"
    raise InvalidRequestError(
        f"src: {str(source)!r} holds packed weights, {reason} and laid out for the native kernels; the bits of the "
        f"checkpoint cannot be had from them. Give the checkpoint they were made of",
        param="src",
    )
