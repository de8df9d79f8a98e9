"""Sources of the values of a model's parameters: a checkpoint, or random numbers. No torch.

A checkpoint is matched with the parameter table first: which of its tensors hold each parameter, and in which of the
layouts that the table allows (weights/rows.py reads them). Nothing here knows a file format: open_checkpoint chooses
the class that does, by the files of the directory. Its entries have the names and shapes of plain tensors, and its rows
are floats or CodedRows (kernels/coding.py).
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.errors import ModelLoadError, hint, listed
from penstock.kernels.coding import CodedRows, Coding, PartRows
from penstock.kernels.ops import RowSource
from penstock.kernels.tensors import FLOAT32, NAMES, Array, empty
from penstock.layers.factory import Runs
from penstock.models.registry import find_model
from penstock.spec.gguf import is_gguf
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Layout, Parameter, ParamTable
from penstock.spec.quantization import Quantization
from penstock.spec.text_part import IMAGE_TENSORS, text_name
from penstock.weights.gguf import GGUFCheckpoint
from penstock.weights.quantized import QuantizedCheckpoint, usual_coding
from penstock.weights.rows import RoundedRows, parameter_rows, read_rows, runs_of
from penstock.weights.safetensors import FLOATS, Checkpoint, TensorEntry, find_files

# Form of a whole checkpoint -> a function that returns the layout of each parameter.
FORMS: dict[str, Callable[[Parameter], Layout]] = {
    "transformers": lambda parameter: parameter.layouts[0],
    # One tensor per parameter, under the table's name, in the layout that this name stands for.
    "merged": lambda parameter: next(item for item in parameter.layouts if list(item.sources) == [parameter.name]),
    # As many tensors as the table has names for: one per piece and per expert.
    "separate": lambda parameter: max(parameter.layouts, key=lambda item: (item.index is None, len(item.sources))),
}


@dataclass(frozen=True, slots=True)
class Match:
    """The form in which a checkpoint holds the parameters of a table."""

    layouts: dict[str, Layout]  # by parameter name; a tied parameter is listed only if it is also stored
    stored: dict[str, str]  # the table's name of a tensor -> the checkpoint's, which may lack the prefix
    ignored: tuple[str, ...]  # tensors that hold no values of the model, by the checkpoint's names


def match(
    entries: Mapping[str, TensorEntry],
    parameters: Mapping[str, Parameter],
    table: ParamTable,
    *,
    is_text_part: bool = False,
) -> Match:
    """Find every parameter, in the first of its layouts that is complete in the checkpoint.

    is_text_part: whether the checkpoint is multimodal: its names are translated, and tensors for images not used.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or belongs to no parameter.
    """
    known = {name for item in parameters.values() for layout in item.layouts for name in layout.sources}
    texts = {text_name(name) if is_text_part else name: name for name in entries}
    if len(texts) < len(entries):
        raise ModelLoadError("the checkpoint holds tensors whose names differ only in where the text part is")
    stored = {_full_name(text, texts, known, table): name for text, name in texts.items()}
    nearest = {name: _nearest(item, stored, entries) for name, item in parameters.items()}
    layouts = {name: layout for name, layout in nearest.items() if layout.sources.keys() <= stored.keys()}
    required = [layout for name, layout in nearest.items() if parameters[name].tied_to is None]
    missing = dict.fromkeys(source for layout in required for source in layout.sources if source not in stored)
    used = {source for layout in nearest.values() for source in layout.sources}
    rest = [stored_name for name, stored_name in stored.items() if name not in used]
    images = {name for name in rest if is_text_part and IMAGE_TENSORS.match(name)}
    _check_names(list(missing), [name for name in rest if name not in images and not table.ignores(name)])
    layouts = {name: _as_held(layout, stored, entries) for name, layout in layouts.items()}
    _check_shapes(layouts, stored, entries)
    return Match(layouts, stored, tuple(rest))


def _as_held(layout: Layout, stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> Layout:
    """Turn the shapes of a transposed layout if the checkpoint holds codes, which are never transposed."""
    if not layout.transposed or all(entries[stored[name]].dtype in FLOATS for name in layout.sources):
        return layout
    turned = {name: (*shape[:-2], shape[-1], shape[-2]) for name, shape in layout.sources.items()}
    return replace(layout, sources=turned, transposed=False)


def _full_name(name: str, entries: Mapping[str, str], known: set[str], table: ParamTable) -> str:
    """Complete a checkpoint's name with the table's prefix, if the name is known only with it."""
    full = table.full_name(name)
    return full if name not in known and full in known and full not in entries else name


def _nearest(parameter: Parameter, stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> Layout:
    """Choose the layout with the largest share of its tensors stored: of several, one whose shapes fit, or the first.

    So a tensor that some files transpose is transposed only if it does not fit as it is, as in Transformers.
    """

    def share(layout: Layout) -> float:
        return sum(name in stored for name in layout.sources) / len(layout.sources)

    most = max(map(share, parameter.layouts))
    found = [layout for layout in parameter.layouts if share(layout) == most]
    if len(found) == 1 or most < 1.0:
        return found[0]
    return next((item for item in found if _fits(_as_held(item, stored, entries), stored, entries)), found[0])


def _fits(layout: Layout, stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> bool:
    return all(entries[stored[name]].shape == shape for name, shape in layout.sources.items())


def _check_names(missing: list[str], unused: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"missing: {listed(missing)}{hint(missing[0], unused)}")
    if unused:
        problems.append(f"unknown: {listed(unused)}")
    if problems:
        raise ModelLoadError(f"the checkpoint does not match the architecture; tensors {'; '.join(problems)}")


def _check_shapes(layouts: Mapping[str, Layout], stored: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for layout in layouts.values():
        for name, shape in layout.sources.items():
            entry = entries[stored[name]]
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file.name}: {stored[name]} has the shape {list(entry.shape)}; the configuration requires "
                    f"{list(shape)}"
                )


EXPERT = re.compile(r"\.experts\.\d+\.")
STACKED_DIMENSIONS = 3  # of a tensor that holds the matrices of all experts
COMPARED_ROWS = 1024  # rows read at once from each of two tensors that must be equal
BFLOAT16_STEP = 2.0**-8  # relative
DUMMY_BLOCK = 2**16  # elements taken from one random stream


class ParameterSource(Protocol):
    """Supplies the values of parameters."""

    def rows(self, parameter: Parameter) -> RowSource:
        """Read the whole parameter, in its own shape, and in any float type or coded."""

    def runs(self, parameter: Parameter) -> Runs:
        """Say how the rows of a parameter are coded; () if none of them is."""


def read_table(model_config: ModelConfig) -> ParamTable:
    """Read the table of a model, which ignores layers that predict further tokens."""
    table = find_model(model_config.architecture, model_config.model_impl).read_table(model_config)
    first, count = model_config.num_hidden_layers, model_config.num_nextn_predict_layers
    ignored = (f"model.layers.{layer}.*" for layer in range(first, first + count))
    return replace(table, ignore=(*table.ignore, *ignored))


def read_parameters(model_config: ModelConfig) -> dict[str, Parameter]:
    return read_table(model_config).parameters(model_config)


def open_source(directory: str | Path | Checkpoint, model_config: ModelConfig, load_format: str) -> ParameterSource:
    """Open the source that load_format ("auto" or "dummy") names.

    Raises:
        ModelLoadError: the checkpoint does not fit the architecture.
    """
    return DummySource() if load_format == "dummy" else open_checkpoint_source(directory, model_config)


def open_checkpoint_source(directory: str | Path | Checkpoint, model_config: ModelConfig) -> "CheckpointSource":
    """Match a checkpoint with its architecture. Raise ModelLoadError if it does not fit."""
    coded = model_config.quantization
    checkpoint = directory if isinstance(directory, Checkpoint) else open_checkpoint(Path(directory), coded)
    table = read_table(model_config)
    parameters = table.parameters(model_config)
    return CheckpointSource(checkpoint, table, parameters, is_text_part=model_config.is_text_part)


def has_weights(directory: str | Path | Checkpoint) -> bool:
    """Return whether a directory has weight files."""
    try:
        return isinstance(directory, Checkpoint) or bool(find_files(Path(directory)))
    except ModelLoadError:
        return False


def open_checkpoint(directory: Path, quantization: Quantization | None) -> Checkpoint:
    """Return the tensors of a model directory, in whichever format its files have. Raises as Checkpoint does.

    quantization: as config.json describes it.
    """
    if is_gguf(directory):
        return GGUFCheckpoint(directory)
    return Checkpoint(directory) if quantization is None else QuantizedCheckpoint(directory, quantization)


class CheckpointSource:
    """Parameters from safetensors files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: ParamTable,
        parameters: Mapping[str, Parameter],
        *,
        is_text_part: bool = False,
    ) -> None:
        """Match the checkpoint with the parameters of a table. Raise ModelLoadError if they do not fit (see match)."""
        self.parameters = parameters
        if isinstance(checkpoint, QuantizedCheckpoint):
            layouts = [layout for item in parameters.values() for layout in item.layouts]
            checkpoint.drop_zero_biases({name for layout in layouts for name in layout.sources})
        self.match = match(checkpoint.entries, parameters, table, is_text_part=is_text_part)
        self._checkpoint = checkpoint
        self._check_constants(table)
        stored = {name: parameter for name, parameter in parameters.items() if name in self.match.layouts}
        self._runs = {name: runs_of(self.stored(item)) if len(item.shape) > 1 else () for name, item in stored.items()}
        self._decoded = self._unlike_experts()
        for parameter in parameters.values():
            self._check_tied(parameter)

    def _check_constants(self, table: ParamTable) -> None:
        """Raise ModelLoadError if a number that the model has as a constant is stored with another value."""
        for name in self.match.ignored:
            if (value := table.constant(name)) is None:
                continue
            rows = self._checkpoint.rows(name)
            if math.prod(rows.shape) != 1:
                raise ModelLoadError(f"{name} has the shape {list(rows.shape)}; it must be one number")
            stored = float(read_rows(rows, 0, 1).astype(FLOAT32).reshape(-1)[0])
            if not abs(stored - value) <= abs(value) * BFLOAT16_STEP:
                raise ModelLoadError(f"{name} = {stored:g} is not supported; it must be {value:g}")

    def rows(self, parameter: Parameter) -> RowSource:
        """Return the whole parameter. An expert's weight is decoded if those of other experts in the layer are coded
        differently, because one call multiplies with all of them."""
        rows = self.stored(parameter if parameter.tied_to is None else self.parameters[parameter.tied_to])
        return RoundedRows(rows, FLOAT32) if parameter.name in self._decoded else rows

    def stored(self, parameter: Parameter) -> RowSource:
        """Read the parameter from its own tensors, in whichever layout the checkpoint has."""
        return parameter_rows(self.match.layouts[parameter.name], self.find)

    def find(self, name: str, index: int | None) -> RowSource:
        """Read a tensor by the table's name, or the slice `index` of a stacked one."""
        return self._checkpoint.rows(self.match.stored[name], index)

    @property
    def codings(self) -> set[Coding]:
        """The different codings of the weights that are kept."""
        return {coding for item in self.parameters.values() for _, coding in self.runs(item) if coding is not None}

    def dtype(self, name: str, decoded: str) -> str:
        """Find the type of a tensor, given by the table's name, as safetensors spells it; `decoded` if it is coded."""
        return decoded if self._is_coded(name) else self._checkpoint.entries[self.match.stored[name]].dtype

    @property
    def is_coded(self) -> bool:
        """Whether the checkpoint codes a weight."""
        return any(self._runs.values())

    def _is_coded(self, name: str) -> bool:
        stored = self.match.stored[name]
        index = 0 if len(self._checkpoint.entries[stored].shape) == STACKED_DIMENSIONS else None
        return isinstance(self._checkpoint.rows(stored, index), CodedRows)

    def runs(self, parameter: Parameter) -> Runs:
        return () if parameter.name in self._decoded else self._runs[parameter.tied_to or parameter.name]

    def _unlike_experts(self) -> set[str]:
        """Return the weights of experts that are coded differently from those of other experts in the same layer."""
        layers: dict[str, dict[str, Runs]] = defaultdict(dict)
        for name in self.parameters:
            if EXPERT.search(name):
                layers[EXPERT.sub(".experts.*.", name)][name] = self._runs[name]
        unlike = [found for found in layers.values() if len({*found.values()}) > 1 or max(map(len, found.values())) > 1]
        return {name for found in unlike for name in found}

    def _check_tied(self, parameter: Parameter) -> None:
        """Raise ModelLoadError if a tied tensor is stored a second time with other values."""
        if parameter.tied_to is None or parameter.name not in self.match.layouts:
            return
        if not _equal(self.stored(parameter), self.rows(parameter)):
            raise ModelLoadError(
                f"tie_word_embeddings = true is not allowed: the checkpoint holds {parameter.name} with other values "
                f"than {parameter.tied_to}"
            )


def _equal(one: RowSource, other: RowSource) -> bool:
    """Compare all rows of two sources of the same shape."""
    pieces = ((start, min(start + COMPARED_ROWS, one.shape[0])) for start in range(0, one.shape[0], COMPARED_ROWS))
    return all(np.array_equal(read_rows(one, *piece), read_rows(other, *piece)) for piece in pieces)


class DummySource:
    """Random parameters that depend only on their names: for speed tests, and to try a config without weights."""

    def runs(self, parameter: Parameter) -> Runs:
        return ()

    def rows(self, parameter: Parameter) -> RowSource:
        return DummyRows(parameter.tied_to or parameter.name, parameter.shape)


@dataclass(frozen=True, slots=True)
class DescribedSource(DummySource):
    """Random parameters of a checkpoint whose config.json tells how its weights are usually coded."""

    parameters: Mapping[str, Parameter]
    quantization: Quantization

    @property
    def codings(self) -> set[Coding]:
        return {coding for item in self.parameters.values() for _, coding in self.runs(item) if coding is not None}

    def runs(self, parameter: Parameter) -> Runs:
        """Guess how a parameter is coded. Quantisers leave norms, embeddings and heads alone, and "mxfp4" all but
        experts."""
        shape, is_coded = parameter.shape, parameter.quant is True
        if self.quantization.method == "mxfp4":
            is_coded = is_coded and EXPERT.search(parameter.name) is not None
        return ((shape[0], usual_coding(self.quantization, shape[1])),) if is_coded else ()

    def rows(self, parameter: Parameter) -> RowSource:
        runs = self.runs(parameter)
        coding = runs[0][1] if runs else None
        return DummySource.rows(self, parameter) if coding is None else dummy_codes(parameter, coding)


@dataclass(frozen=True, slots=True)
class DummyRows:
    """Random values that depend only on the parameter's name and on their position in it.

    They are uniform and centred, with standard deviation 1 / sqrt(K), so that products keep the magnitude of their
    input. Norms are 1, biases small.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def seed(self) -> int:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

    def read(self, start: int, stop: int) -> Array:
        if len(self.shape) == 1 and self.name.endswith(".weight"):  # a norm, whatever its name
            return np.ones((stop - start, *self.shape[1:]), dtype=FLOAT32)
        width = math.prod(self.shape[1:])
        first, last = start * width, stop * width
        result: Array = empty((stop - start, *self.shape[1:]), FLOAT32)
        values = result.reshape(-1)
        for block in range(first // DUMMY_BLOCK, -(-last // DUMMY_BLOCK)):
            origin = block * DUMMY_BLOCK
            low, high = max(first, origin), min(last, origin + DUMMY_BLOCK)
            random = _random_bytes(self.seed, block)[low - origin : high - origin]
            np.add(random, np.float32(0.5), out=values[low - first : high - first])  # -127.5 .. 127.5 in steps of 1
        deviation = 0.02 if len(self.shape) == 1 else self.shape[-1] ** -0.5
        values *= np.float32(deviation * math.sqrt(12) / 256)
        return result


def dummy_codes(parameter: Parameter, coding: Coding) -> CodedRows:
    """Make a weight of random codes whose values are centred, with standard deviation 1 / sqrt(K)."""
    levels = np.array(coding.levels) if coding.levels else np.arange(2.0**coding.bits) - coding.zero
    codes = np.flatnonzero(np.isfinite(levels))
    scale = parameter.shape[-1] ** -0.5 / levels[codes].std()
    choices = {
        "codes": codes,
        "scales": [scale],
        "steps": [1],
        "mins": [-scale * levels[codes].mean()],
        "step_mins": [1],
        "column_scales": [scale if coding.block is None else 1],
    }
    parts: dict[str, PartRows] = {}
    for name, (shape, dtype) in coding.parts(parameter.shape).items():
        values = np.arange(shape[0]) if name == "order" else np.array(choices[name])
        seed = DummyRows(f"{parameter.name} {name}", shape).seed
        parts[name] = DummyPart(seed, shape, values.astype(NAMES[dtype]), is_random=name == "codes")
    return CodedRows(coding, parts)


@dataclass(frozen=True, slots=True)
class DummyPart:
    """An array of a coded weight: random values of those given, or these in turn."""

    seed: int
    shape: tuple[int, ...]
    values: Array
    is_random: bool

    def read(self, start: int, stop: int) -> Array:
        width = math.prod(self.shape[1:])
        places = np.arange(start * width, stop * width)
        if self.is_random:
            blocks = range(start * width // DUMMY_BLOCK, -(-stop * width // DUMMY_BLOCK))
            drawn = np.concatenate([_random_bytes(self.seed, block) for block in blocks] or [places[:0]])
            places = drawn[start * width - blocks.start * DUMMY_BLOCK :][: places.size].view(np.uint8)
        result: Array = self.values[places % len(self.values)].reshape(stop - start, *self.shape[1:])
        return result


def _random_bytes(seed: int, block: int) -> np.ndarray:
    """Draw DUMMY_BLOCK random int8 numbers."""
    words = np.random.PCG64DXSM([seed, block]).random_raw(DUMMY_BLOCK // 8)
    return words.astype("<u8", copy=False).view(np.int8)
