"""The configuration and weights of a Transformers model object in memory, read without files.

The object is recognised by its attributes (`config`, `state_dict`), so nothing here imports Transformers. A class of a
program's own that derives from a decoder of Transformers is computed by its own modules. Names and layouts are those of
Transformers in memory, where the experts of a layer are one tensor; parameter tables list them under `or`. The weights
are read when the engine loads and may be changed or freed afterwards.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError
from penstock.kernels.tensors import UINT8, Array, Tensor, as_array
from penstock.models.config_json import parse_model_config
from penstock.models.registry import ARCHITECTURES, adopt_class
from penstock.spec.model_config import ModelConfig
from penstock.weights.safetensors import FLOATS, Checkpoint, FileRows, TensorEntry

SAMPLES = 16  # rows of each tensor that a fingerprint reads


@dataclass(frozen=True, slots=True)
class HeldRows(FileRows):
    """A tensor in memory. Its rows are copied, so that later changes by the object's owner do not reach the engine."""

    tensor: Tensor

    def read(self, start: int, stop: int) -> Array:
        return as_array(self.tensor[start:stop]).copy(order="C")

    def read_columns(self, start: int, stop: int, begin: int, end: int) -> Array:
        return as_array(self.tensor[start:stop, begin:end]).copy(order="C")


class InstanceWeights(Checkpoint):
    """The tensors of a model object, read like a checkpoint's."""

    def __init__(self, place: str, tensors: Mapping[str, Tensor]) -> None:
        """Refer to the tensors of an object, which errors call `place`. Raise ModelLoadError if one has no floats."""
        self.files = []
        self._tensors = dict(tensors)
        self.entries = {name: _entry(place, name, tensor) for name, tensor in self._tensors.items()}

    def rows(self, name: str, index: int | None = None) -> FileRows:
        """Read a tensor, or the slice `index` of a stacked one."""
        tensor, entry = self._tensors[name].detach(), self.entries[name]
        tensor = tensor if tensor.ndim else tensor[None]  # a single number is read as one row, as from a file
        return HeldRows(name, entry, tensor) if index is None else HeldRows(name, entry.slice(index), tensor[index])

    def fingerprint(self) -> str:
        """Hash names, shapes, types and some rows of each tensor."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            rows = tensor.detach()
            if rows.ndim > 1:
                rows = rows[:: max(1, len(rows) // SAMPLES)]
            digest.update(as_array(rows.contiguous()).reshape(-1).view(UINT8).tobytes())
        return digest.hexdigest()[:32]


Weights = Path | InstanceWeights  # of an engine's model: its directory, or a model object's


def _entry(place: str, name: str, tensor: Tensor) -> TensorEntry:
    if tensor.device.type == "meta":
        raise ModelLoadError(f"{place}: {name} is on the meta device and has no values")
    dtype = next((word for word, known in FLOATS.items() if str(tensor.dtype) == f"torch.{known}"), None)
    if dtype is None:
        raise ModelLoadError(f"{place}: {name} is {tensor.dtype}; supported are {', '.join(FLOATS.values())}")
    return TensorEntry(Path(place), tuple(tensor.shape), dtype, 0)


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """The configuration and the weights (parameters and buffers) of a model object."""

    config: ModelConfig
    weights: InstanceWeights

    @classmethod
    def of(cls, model: Any) -> "ModelInstance":
        """Read a model object.

        Raises:
            ModelLoadError: it is not a Transformers model, or its architecture is not supported.
        """
        name = type(model).__name__
        config = getattr(model, "config", None)
        if not callable(getattr(config, "to_dict", None)) or not callable(getattr(model, "state_dict", None)):
            raise ModelLoadError(
                f"model: an object of type {name} is not supported; give a directory, a hub name, demo, or a model "
                f"object of Transformers (with config and state_dict)"
            )
        place = f"model object {name}"
        tensors = model.state_dict()
        found = getattr(model, "generation_config", None)
        generation = (
            None if found is None else {key: value for key, value in found.to_dict().items() if value is not None}
        )
        if is_own_class(type(model)):
            name = adopt_class(type(model))
        try:
            model_config = parse_model_config(_config(model, name), generation)
        except ModelLoadError as error:
            raise ModelLoadError(f"{place}: {error}") from None
        return cls(model_config, InstanceWeights(place, tensors))


def is_own_class(model_class: type) -> bool:
    """Tell whether a class derives from one of Transformers' models, is not one itself, and has a name of its own."""
    names = [base.__name__ for base in model_class.__mro__]
    outside = not model_class.__module__.startswith("transformers.") and model_class.__name__ not in ARCHITECTURES
    return outside and "PreTrainedModel" in names


def _config(model: Any, name: str) -> dict[str, Any]:
    """Make what save_pretrained would write to config.json, with the class name and the type of the weights."""
    first = next(iter(model.parameters()), None)
    dtype = "float32" if first is None else str(first.dtype).removeprefix("torch.")
    fields = {key: value for key, value in model.config.to_dict().items() if key != "torch_dtype"}
    return fields | {"architectures": [name], "dtype": dtype}
