"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors (or .bin), read and fitted to a
model.

PEFT names a tensor by the module of Transformers that it changes: base_model.model.NAME.lora_A.weight. The parameter
table knows which of the model's parameters holds NAME.weight, and in which arrangement, so the rows of B take the way
of the weight's own rows. The tensors say what is adapted; the config is compared with them.

Files are untrusted: their sizes and shapes are compared with the model before a value is read.
"""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InvalidRequestError, ModelLoadError, hint, one_line, shown
from penstock.kernels.coding import Coding
from penstock.kernels.ops import RowSource, TensorRows
from penstock.kernels.tensors import FLOAT32, Array
from penstock.layers.factory import Runs
from penstock.layers.lora import Adapter, AdapterPart, is_adaptable, piece_ends
from penstock.spec.config_reader import ConfigReader, read_json
from penstock.spec.param_table import Layout, Parameter
from penstock.weights.rows import RoundedRows, parameter_rows, read_rows
from penstock.weights.safetensors import ADAPTER, Checkpoint
from penstock.weights.sources import ParameterSource

CONFIG, BIN = "adapter_config.json", "adapter_model.bin"
PREFIX = "base_model.model."
MAX_RANK = 256
MAX_BYTES = 2**34  # of an adapter's files
READ_BYTES = 2**24  # of a file that are hashed at once
MAX_CHOICES = 3  # in a pattern of names: repetitions, options and groups, each of which a search may try in many ways
WHOLE = "modules_to_save is supported only if the adapter is merged (merge_lora), not for each of several adapters"
NORM_ROWS = 1024  # rows of a weight whose norms are computed at once
FORMS = {  # what follows the name of a module -> the kind of the tensor
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_B.bias": "b_bias",
    "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude", "base_layer.bias": "bias",
}  # fmt: skip
HARMLESS = (  # they describe the training, or the tensors say the same
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "init_lora_weights", "exclude_modules", "layers_pattern", "loftq_config", "eva_config",
    "corda_config", "megatron_config", "megatron_core", "ensure_weight_tying", "qalora_group_size", "fan_in_fan_out",
    "target_modules", "layers_to_transform", "modules_to_save", "runtime_config", "lora_bias", "bias", "lora_ga_config",
    "velora_config",
)  # fmt: skip
NEUTRAL: dict[str, Any] = {  # that would change what is computed
    "layer_replication": None, "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None,
    "target_parameters": None, "trainable_token_indices": None, "arrow_config": None, "monteclora_config": None,
    "kasa_config": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says about the values of the tensors."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    is_dora: bool
    rank_pattern: Mapping[re.Pattern[str], float]
    alpha_pattern: Mapping[re.Pattern[str], float]

    @classmethod
    def read(cls, file: Path) -> "AdapterConfig":
        """Read the file. Raise ModelLoadError if an option is unknown, or asks for what is not supported."""
        reader = ConfigReader(read_json(file), str(file))
        reader.choice("peft_type", ("LORA",))
        reader.neutral({name: value for name, value in NEUTRAL.items() if reader.raw(name) not in (None, [], {})})
        rank = reader.integer("r", 1, MAX_RANK, 8)
        found = cls(
            rank,
            reader.number("lora_alpha", -1e6, 1e6, 8.0),
            reader.boolean("use_rslora", False),
            reader.boolean("use_dora", False),
            _pattern(reader, "rank_pattern"),
            _pattern(reader, "alpha_pattern"),
        )
        unknown = reader.unread(HARMLESS)
        if unknown:
            message = f"{reader.where}: {one_line(unknown[0])} = {shown(reader.raw(unknown[0]))} is not supported"
            raise ModelLoadError(f"{message}: it is unknown, and it may change what the adapter computes")
        return found

    def scale_of(self, module: str, rank: int) -> float:
        """Compute the factor of B A for a module, by its name in Transformers, and its rank."""
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def rank_of(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.rank))


def _pattern(reader: ConfigReader, key: str) -> dict[re.Pattern[str], float]:
    """Read a mapping of patterns of names to numbers. A pattern matches the end of a module's name, as in PEFT."""
    section, found = reader.section(key), dict[re.Pattern[str], float]()
    for name, value in {} if section is None else section.everything().items():
        if type(value) not in (int, float) or not 0 < abs(value) <= 1e6 or len(name) > 200:
            raise reader.fail(key, "a mapping of names of modules to numbers")
        if len(re.findall(r"[*+?{(]", name)) > MAX_CHOICES or re.search(r"\)[*+{]", name):  # a search could take hours
            raise reader.fail(key, f"patterns with at most {MAX_CHOICES} of *, +, ?, {{ and (, and no group repeated")
        try:
            found[re.compile(rf"(.*\.)?({name})$")] = value
        except re.error as error:
            raise reader.fail(key, f"regular expressions: {one_line(error)}") from None
    return found


def _matched(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Find the value of the first pattern that matches a module's name."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def digest_of(directory: Path) -> str:
    """Hash an adapter's files: SHA-256 of the config and of the tensors.

    Raises:
        ModelLoadError: a file is missing, unreadable or larger than MAX_BYTES.
    """
    digest = hashlib.sha256()
    for file in (directory / CONFIG, _tensor_file(directory)):
        try:
            size = file.stat().st_size
            if size > MAX_BYTES:
                raise ModelLoadError(f"{file}: has {size} bytes; at most {MAX_BYTES} are allowed")
            digest.update(f"{size}\n".encode())
            with file.open("rb") as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ModelLoadError(f"{file}: cannot be read: {error}") from None
    return digest.hexdigest()


def _tensor_file(directory: Path) -> Path:
    if not os.path.isfile(directory / CONFIG):  # which is False for a name that is too long
        raise ModelLoadError(f"{directory}: no {CONFIG}, so it is not the directory of a LoRA adapter")
    for name in (ADAPTER, BIN):
        if os.path.isfile(directory / name):
            return directory / name
    raise ModelLoadError(f"{directory}: no {ADAPTER}; a LoRA adapter needs it")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module of Transformers is in the model: the layout that names it, of a parameter, and its rows."""

    parameter: Parameter
    layout: Layout
    rows: int


class AdapterReader:
    """Reads adapters for one model.

    Attributes:
        parameters: the model's, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter], source: ParameterSource, prefix: str = "") -> None:
        """source: the values of the base model, which DoRA and biases need. prefix: as in ParamTable."""
        self.parameters, self._source = parameters, source
        self._places: dict[str, _Place] = {}
        for parameter in parameters.values():
            for layout in parameter.layouts if parameter.name.endswith(".weight") else ():
                for name, shape in layout.sources.items():
                    rows = shape[-1 if layout.transposed else 0]
                    place = _Place(parameter, layout, rows)
                    self._places.setdefault(name.removesuffix(".weight"), place)
                    self._places.setdefault(name.removesuffix(".weight").removeprefix(prefix), place)

    def read(self, directory: Path, max_rank: int = MAX_RANK, *, saved: dict[str, RowSource] | None = None) -> Adapter:
        """Read an adapter: its part in each parameter that it changes. saved: gets the weights that it replaces.

        Raises:
            ModelLoadError: a file is damaged, an option is not supported, or a tensor does not fit the model; the
                message names the option or the tensor.
            InvalidRequestError: its rank is above max_rank.
        """
        config = AdapterConfig.read(directory / CONFIG)
        file = _tensor_file(directory)
        checkpoint = Checkpoint(directory, [file])
        modules = self._modules(checkpoint, saved)
        by_parameter: dict[str, dict[str, dict[str, Array]]] = {}
        layouts: dict[str, Layout] = {}
        for module, names in modules.items():
            place = self._place(module, next(iter(names.values())))
            known = layouts.setdefault(place.parameter.name, place.layout)
            if known is not place.layout:
                message = f"{file}: {module} and other tensors give {place.parameter.name} in two different ways"
                raise ModelLoadError(message)
            found = self._values(checkpoint, config, module, names, place, max_rank)
            by_parameter.setdefault(place.parameter.name, {})[module] = found
        if not by_parameter and not saved:
            raise ModelLoadError(f"{file}: it holds no matrices of LoRA")
        return {name: self._part(name, layouts[name], found) for name, found in by_parameter.items()}

    def merged(self, directory: Path) -> "MergedSource":
        """Merge an adapter into the values of the model. Raise ModelLoadError as `read` does."""
        saved: dict[str, RowSource] = {}
        adapter = self.read(directory, saved=saved)
        return MergedSource(self._source, self.parameters, adapter, saved)

    def _modules(self, checkpoint: Checkpoint, saved: dict[str, RowSource] | None) -> dict[str, dict[str, str]]:
        """Sort the tensors by module: the name of each kind of tensor. saved: gets whole weights, by parameter."""
        modules: dict[str, dict[str, str]] = {}
        for name in checkpoint.entries:
            short = name.removeprefix(PREFIX)
            form = next((form for form in FORMS if short.endswith(f".{form}")), None)
            place = self._places.get(short.removesuffix(".weight"))
            if form is None and saved is not None and place is not None and len(place.layout.sources) == 1:
                saved[place.parameter.name] = _whole(checkpoint, name, place)
            elif form is None:
                self._refuse(name, short)
            else:
                modules.setdefault(short.removesuffix(f".{form}"), {})[FORMS[form]] = name
        return modules

    def _refuse(self, name: str, short: str) -> None:
        """Raise the error for a tensor that is no matrix of LoRA."""
        if "lora_embedding" in short:
            raise ModelLoadError(f"{name}: LoRA of an embedding is not supported")
        if short.removesuffix(".weight") in self._places:
            raise ModelLoadError(
                f"{name}: modules_to_save are not supported: a whole weight is not kept for each adapter"
            )
        raise ModelLoadError(f"{name}: it is no tensor of LoRA; known are names that end in {', '.join(FORMS)}")

    def _place(self, module: str, name: str) -> _Place:
        place = self._places.get(module)
        if re.search(r"\.experts(\.|$)", module):
            raise ModelLoadError(f"{name}: {module} is a module of experts, whose LoRA is not supported")
        if place is None:
            raise ModelLoadError(f"{name}: the model has no module {module}{hint(module, list(self._places))}")
        if not is_adaptable(place.parameter):
            raise ModelLoadError(f"{name}: LoRA of {module} is not supported, only that of products inside the layers")
        return place

    def _values(
        self,
        checkpoint: Checkpoint,
        config: AdapterConfig,
        module: str,
        names: Mapping[str, str],
        place: _Place,
        max_rank: int,
    ) -> dict[str, Array]:
        """Read the tensors of a module, with B scaled, as float32. Compare their shapes with the model before."""
        if "a" not in names or "b" not in names:
            missing = "lora_A.weight" if "a" not in names else "lora_B.weight"
            raise ModelLoadError(f"{next(iter(names.values()))}: {module}.{missing} is missing")
        n, k = place.rows, place.parameter.shape[1]
        rank = next(iter(checkpoint.entries[names["a"]].shape), 0)
        shapes: dict[str, tuple[int, ...]] = {
            "a": (rank, k), "b": (n, rank), "b_bias": (n,), "magnitude": (n,), "bias": (n,),
        }  # fmt: skip
        for kind, name in names.items():
            shape = checkpoint.entries[name].shape
            if shape != shapes[kind] or not 1 <= rank <= MAX_RANK:
                wanted = [config.rank_of(module) if size == rank else size for size in shapes[kind]]
                raise ModelLoadError(f"{name}: it has the shape {list(shape)}; the model requires {wanted}")
        if rank != config.rank_of(module):
            expected = config.rank_of(module)
            raise ModelLoadError(f"{names['a']}: it has rank {rank}, but {CONFIG} says {expected}")
        if rank > max_rank:
            message = f"max_lora_rank: {names['a']} has rank {rank}, but the engine has room for rank {max_rank}"
            raise InvalidRequestError(message, param="max_lora_rank")
        if config.is_dora != ("magnitude" in names):
            raise ModelLoadError(f"{names['b']}: use_dora is {config.is_dora}, which does not fit the tensors")
        found = {kind: _read(checkpoint, name) for kind, name in names.items()}
        scale = FLOAT32.type(config.scale_of(module, rank))
        found["b"] *= scale
        if "b_bias" in found:
            found["b_bias"] *= scale
        return found

    def _part(self, name: str, layout: Layout, modules: Mapping[str, Mapping[str, Array]]) -> AdapterPart:
        """Join the modules that are one product of the model."""
        parameter, count = self.parameters[name], len(layout.sources)
        rank, k = max(found["b"].shape[1] for found in modules.values()), parameter.shape[1]
        a = np.zeros((len(piece_ends(parameter)), rank, k), FLOAT32)
        columns: dict[str, Array] = {}
        for piece, (source, shape) in enumerate(layout.sources.items()):
            rows = shape[-1 if layout.transposed else 0]
            module = source.removesuffix(".weight")
            found = next((item for key, item in modules.items() if module.endswith(key)), None)
            joined = np.zeros((rows, rank + 3), FLOAT32)  # B, magnitude, bias of B, change of the bias
            joined[:, rank] = np.nan  # no magnitude
            if found is not None:
                own = found["b"].shape[1]
                a[piece if count > 1 else slice(None), :own] = found["a"]
                joined[:, :own] = found["b"]
                for place, kind in enumerate(("magnitude", "b_bias", "bias"), start=rank):
                    if kind in found:
                        joined[:, place] = found[kind]
            columns[source] = joined
        upright = replace(layout, transposed=False)
        whole = read_rows(parameter_rows(upright, lambda tensor, _: TensorRows(columns[tensor])), 0, parameter.shape[0])
        b, magnitude = np.ascontiguousarray(whole[:, :rank]), whole[:, rank]
        offsets, factors = whole[:, rank + 1], None
        if not np.isnan(magnitude).all():
            norms = self._norms(parameter, a, b)
            factors = np.where(np.isnan(magnitude), FLOAT32.type(1), magnitude / norms).astype(FLOAT32)
            base = self._bias(name)
            offsets = offsets * factors + (0 if base is None else (1 - factors) * base)
            b = b * factors[:, None]
        offsets = offsets + self._bias_change(name, whole[:, rank + 2], modules)
        return AdapterPart(a, b, factors, offsets.astype(FLOAT32) if offsets.any() else None)

    def _bias(self, name: str) -> Array | None:
        bias = self.parameters.get(f"{name.removesuffix('.weight')}.bias")
        return None if bias is None else read_rows(self._source.rows(bias), 0, bias.shape[0]).astype(FLOAT32)

    def _bias_change(self, name: str, bias: Array, modules: Mapping[str, Mapping[str, Array]]) -> Array:
        """Compute what a bias of the base model that the adapter replaces changes."""
        if not any("bias" in found for found in modules.values()):
            return np.zeros_like(bias)
        base = self._bias(name)
        if base is None or not all("bias" in found for found in modules.values()):
            raise ModelLoadError(f"{name}: the adapter has a bias for it, and the model none, or only for a part of it")
        return bias - base

    def _norms(self, parameter: Parameter, a: Array, b: Array) -> Array:
        """Compute the norm of each row of W + B A, for DoRA."""
        rows, ends = RoundedRows(self._source.rows(parameter), FLOAT32), piece_ends(parameter)
        found = np.empty(parameter.shape[0], FLOAT32)
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
            for first in range(begin, end, NORM_ROWS):
                last = min(first + NORM_ROWS, end)
                found[first:last] = np.linalg.norm(read_rows(rows, first, last) + b[first:last] @ a[piece], axis=1)
        return found


def _whole(checkpoint: Checkpoint, name: str, place: _Place) -> RowSource:
    """Read a weight that an adapter replaces."""
    (shape,) = place.layout.sources.values()
    if checkpoint.entries[name].shape != shape:
        found = list(checkpoint.entries[name].shape)
        raise ModelLoadError(f"{name}: it has the shape {found}; the model requires {list(shape)}")
    return parameter_rows(place.layout, lambda *_: checkpoint.rows(name))


@dataclass(frozen=True, slots=True)
class MergedSource:
    """The parameters of a model with an adapter merged into them. Those that it changes are floats, even if the
    checkpoint codes them.

    Attributes:
        saved: the parameters that the adapter replaces.
    """

    source: ParameterSource
    parameters: Mapping[str, Parameter]
    adapter: Adapter
    saved: Mapping[str, RowSource]

    @property
    def codings(self) -> set[Coding]:
        """The different codings of the weights that are kept."""
        return {coding for item in self.parameters.values() for _, coding in self.runs(item) if coding is not None}

    def runs(self, parameter: Parameter) -> Runs:
        changed = parameter.name in self.adapter or parameter.name in self.saved
        return () if changed else self.source.runs(parameter)

    def rows(self, parameter: Parameter) -> RowSource:
        for name in (parameter.name, parameter.tied_to):
            if name in self.saved and name is not None:
                return self.saved[name]
        rows, weight = self.source.rows(parameter), f"{parameter.name.removesuffix('.bias')}.weight"
        if parameter.name in self.adapter:
            ends = piece_ends(self.parameters[parameter.name])
            return MergedRows(RoundedRows(rows, FLOAT32), self.adapter[parameter.name], ends)
        if parameter.name == weight or weight not in self.adapter:
            return rows
        part, bias = self.adapter[weight], read_rows(rows, 0, rows.shape[0]).astype(FLOAT32)
        factors = 1 if part.factors is None else part.factors
        return TensorRows(bias * factors + (0 if part.offsets is None else part.offsets))


@dataclass(frozen=True, slots=True)
class MergedRows:
    """The rows of a weight with those of B A added. piece_ends: of the weight."""

    source: RowSource
    part: AdapterPart
    piece_ends: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, stop: int) -> Array:
        rows = np.array(read_rows(self.source, start, stop), dtype=FLOAT32)
        if self.part.factors is not None:
            rows *= self.part.factors[start:stop, None]
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *self.piece_ends))):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                rows[first - start : last - start] += self.part.b[first:last] @ self.part.a[piece]
        return rows


def _read(checkpoint: Checkpoint, name: str) -> Array:
    """Read a tensor as float32. Raise ModelLoadError if a value is not finite."""
    rows = checkpoint.rows(name)
    found = np.array(read_rows(rows, 0, rows.shape[0]), dtype=FLOAT32)
    if not np.isfinite(found).all():
        raise ModelLoadError(f"{name}: it has values that are not finite")
    return found
