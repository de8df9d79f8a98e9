"""The loader: a family's parameter table, a checkpoint and a backend make a model that computes.

Tensor by tensor: each is read, joined with its neighbours where the table says so, handed to its layer, which packs
it, and forgotten. So beside the packed model only one layer's values are in memory, as the checkpoint stores them. A
tied head is packed from the embedding's rows a second time. What will not fit into memory is refused before.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from penstock.errors import ModelLoadError
from penstock.kernels.ops import Ops
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import WeightLayer
from penstock.model_config import ModelConfig
from penstock.models.param_table import Parameter, ParamTable
from penstock.models.registry import CausalLM, lookup
from penstock.quant.scheme import Scheme
from penstock.validation import check_choice
from penstock.weights.safetensors import Checkpoint

MAX_LISTED = 8  # names that an error lists
ELEMENT_BYTES = 4  # the reference keeps every weight as float32
ROTARY_BYTES = 20  # for one position and dimension, while the tables are computed in float64


class TensorSource(Protocol):
    """Where the value of a parameter comes from."""

    def read(self, parameter: Parameter) -> Tensor:
        """The whole parameter, joined, of its shape and of any float type."""


class CheckpointSource:
    """Parameters from safetensors files."""

    def __init__(self, checkpoint: Checkpoint, parameters: Mapping[str, Parameter], table: ParamTable) -> None:
        """Hold the checkpoint against the table before anything is read.

        Raises:
            ModelLoadError: a tensor is missing, of another shape, or claimed by nobody; or a tied one differs.
        """
        self._checkpoint = checkpoint
        self._parameters = parameters
        _check_names(checkpoint, parameters, table)
        _check_shapes(checkpoint, parameters)
        for parameter in parameters.values():
            self._check_tied(parameter)

    def read(self, parameter: Parameter) -> Tensor:
        if parameter.tied_to is not None:
            parameter = self._parameters[parameter.tied_to]
        return self._join(parameter)

    def _join(self, parameter: Parameter) -> Tensor:
        tensors = [self._checkpoint.read(name) for name in parameter.sources]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=parameter.join_axis)

    def _check_tied(self, parameter: Parameter) -> None:
        """A tied tensor may be stored a second time, but not with other values."""
        if parameter.tied_to is None or not all(name in self._checkpoint.entries for name in parameter.sources):
            return
        if not torch.equal(self._join(parameter), self.read(parameter)):
            raise ModelLoadError(
                f"tie_word_embeddings = true is not allowed: the checkpoint holds {parameter.name} with other values "
                f"than {parameter.tied_to}"
            )


class DummySource:
    """Random parameters, each a function of its name alone: for speed tests, and to try a config without weights.

    Products keep the size of what goes through them: normal with standard deviation 1 / sqrt(K). Norms are 1, biases
    small.
    """

    def read(self, parameter: Parameter) -> Tensor:
        name = parameter.tied_to or parameter.name
        if name.endswith("norm.weight"):
            return torch.ones(parameter.shape)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        scale = 0.02 if len(parameter.shape) == 1 else parameter.shape[-1] ** -0.5
        return torch.randn(parameter.shape, generator=generator).mul_(scale)


def available_bytes() -> int:
    """Memory that the machine could still give; an endless amount where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**62
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 2**62)


def load_model(
    directory: str | Path,
    model_config: ModelConfig,
    ops: Ops,
    load_format: str = "auto",
    *,
    scheme: Scheme | None = None,
    max_model_len: int | None = None,
    free_memory: Callable[[], int] = available_bytes,
) -> CausalLM:
    """The model of a directory, ready to compute.

    load_format: "auto" reads safetensors; "dummy" makes random weights, so config.json is enough.
    scheme: how weights are quantised that may be; None keeps the backend's type.
    max_model_len: positions that will be asked for; None takes the model's max_position_embeddings.
    free_memory: bytes that the weights may take; a model that needs more is refused before anything is allocated.

    Raises:
        ModelLoadError: the checkpoint does not fit the architecture, or the model the memory, and how.
    """
    check_choice("load_format", load_format, ("auto", "dummy"))
    entry = lookup(model_config.architecture)
    table = entry.read_table()
    parameters = table.parameters(model_config)
    positions = max_model_len or model_config.max_position_embeddings
    if ops.device.type == "cpu":  # what another device has is not known here
        _check_memory(parameters.values(), positions * model_config.head_dim, free_memory())
    source: TensorSource = DummySource()
    if load_format != "dummy":
        source = CheckpointSource(Checkpoint(Path(directory)), parameters, table)
    make = LayerFactory.single_device(ops, parameters, scheme=scheme, max_positions=max_model_len)
    model = entry.model_class(model_config, make)
    fill(model, parameters, source)
    return cast(CausalLM, model.eval())


def fill(model: nn.Module, parameters: Mapping[str, Parameter], source: TensorSource) -> None:
    """Give every layer of the model its values.

    Raises:
        ModelLoadError: the model and its table do not have the same parameters.
    """
    expected = set(parameters) ^ set(model.state_dict())
    if expected:
        raise ModelLoadError(f"the model and its parameter table differ in {_listed(sorted(expected))}")
    for prefix, layer in model.named_modules():
        if isinstance(layer, WeightLayer):
            names = [name for name, _ in layer.named_parameters(recurse=False)]
            layer.load({name: source.read(parameters[f"{prefix}.{name}"]) for name in names})


def _check_memory(parameters: Iterable[Parameter], rotary_elements: int, free: int) -> None:
    """A tied head counts too: it is packed a second time. The rotary tables are made before there are weights."""
    needs = {
        f"the weights need {ELEMENT_BYTES} bytes each,": ELEMENT_BYTES * sum(item.num_elements for item in parameters),
        "the rotary tables of all positions need": ROTARY_BYTES * rotary_elements,
    }
    for text, needed in needs.items():
        if needed > free:
            raise ModelLoadError(
                f"{text} {needed / 2**20:,.1f} MiB, as config.json counts them; only {free / 2**20:,.1f} MiB are free"
            )


def _check_names(checkpoint: Checkpoint, parameters: Mapping[str, Parameter], table: ParamTable) -> None:
    claimed = {name: item.tied_to for item in parameters.values() for name in item.sources}
    missing = [name for name, tied_to in claimed.items() if tied_to is None and name not in checkpoint.entries]
    unused = [name for name in checkpoint.entries if name not in claimed and not table.ignores(name)]
    problems = []
    if missing:
        near = difflib.get_close_matches(missing[0], unused, n=1)
        hint = f" (is {near[0]} meant?)" if near else ""
        problems.append(f"missing: {_listed(missing)}{hint}")
    if unused:
        problems.append(f"unknown: {_listed(unused)}")
    if problems:
        raise ModelLoadError(f"the checkpoint does not fit the architecture; tensors {'; '.join(problems)}")


def _check_shapes(checkpoint: Checkpoint, parameters: Mapping[str, Parameter]) -> None:
    for parameter in parameters.values():
        for name, shape in parameter.sources.items():
            entry = checkpoint.entries.get(name)
            if entry is not None and entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file.name}: {name} has the shape {list(entry.shape)}; config.json makes it {list(shape)}"
                )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
