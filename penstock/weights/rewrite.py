"""Rewriting: the checkpoint of a model in another form (matching.FORMS), with every bit unchanged.

Pieces are joined or split, experts stacked or unstacked, matrices transposed, tensors renamed. A tied tensor is written
only if the checkpoint holds it too; tensors without values of the model (the table's `ignore`) are left out.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.kernels.ops import RowSource
from penstock.models.config_json import load_model_config
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.checkpoint_writer import Outgoing, Progress, write_checkpoint
from penstock.weights.destination import Destination
from penstock.weights.hub import resolve_model
from penstock.weights.matching import FORMS
from penstock.weights.packed import find_packed, read_info
from penstock.weights.rows import tensor_rows
from penstock.weights.safetensors import Checkpoint
from penstock.weights.sources import CheckpointSource, read_table


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result of rewriting a checkpoint.

    Attributes:
        num_bytes: of all tensors.
        ignored: tensors that were left out, because they hold no values of the model.
    """

    num_bytes: int
    ignored: tuple[str, ...]


def rewrite_model(
    model: str, destination: Path, form: str, max_shard_size: int, progress: Progress = lambda done, total: None
) -> Rewritten:
    """Write a model's checkpoint in one of the FORMS, with everything else that its directory needs.

    destination: a path that does not exist, or a directory that is empty except for leftovers of a killed conversion.

    Raises:
        InvalidRequestError: the source is packed, or the destination is not empty or too small.
        ModelLoadError: the checkpoint does not fit its architecture, or the form.
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
    """Return the tensors of a checkpoint in another form.

    Raises:
        ModelLoadError: pieces of different types would become one tensor.
    """
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
    """Return the type that all pieces of a parameter have."""
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
    reason = f"rounded to {info.dtype}" if info.quantization is None else f"quantised to {info.quantization}"
    raise InvalidRequestError(
        f"src: {str(directory)!r} holds packed weights, {reason} and laid out for the native kernels, from which the "
        f"checkpoint cannot be restored bit by bit. Give the checkpoint they were made from",
        param="src",
    )
